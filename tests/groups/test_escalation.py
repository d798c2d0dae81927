"""Time is passed in: no clock, no thread."""

from __future__ import annotations

import random

import pytest

from resilience.groups.escalation import Rules, State, due, lost, moved, over, paused, placed, refused, renewed

RULES = Rules()
WHY = "its node is gone"


def test_replacement_that_comes_in_time_moves_nobody() -> None:
    state = lost(State(), "0", "pod-1", 1000.0, WHY)
    assert not due(state, RULES, 1299.9)
    state = placed(state, "0", "pod-1")
    assert state == State()
    assert not due(state, RULES, 5000.0)


def test_words_tell_a_replacement_without_a_node_from_none_at_all() -> None:
    state = lost(State(), "0", "pod-1", 1000.0, WHY)
    (none,) = due(state, RULES, 1308.0, {"pod-7": "pod-7-abc"})
    assert f"pod-1 ({WHY}) has had no replacement for 308 s" in none.reason
    (waits,) = due(state, RULES, 1308.0, {"pod-1": "pod-1-abc"})
    assert f"pod-1 ({WHY}) has had no node for 308 s (threshold 300 s), its replacement pod-1-abc waits" in waits.reason
    assert "replacement for" not in waits.reason


def test_replacement_that_is_blocked_for_300_seconds_moves_its_whole_group() -> None:
    state = lost(State(), "0", "pod-1", 1000.0, WHY)
    assert not due(state, RULES, 1299.9)
    (decision,) = due(state, RULES, 1300.0)
    assert (decision.group, decision.move) == ("0", True)
    assert "pod-1" in decision.reason
    assert WHY in decision.reason
    assert "300 s" in decision.reason


def test_threshold_is_a_setting() -> None:
    state = lost(State(), "0", "pod-1", 0.0, WHY)
    assert not due(state, Rules(threshold_s=10), 9.0)
    assert due(state, Rules(threshold_s=10), 10.0)


def test_only_the_group_of_the_lost_member_moves() -> None:
    state = lost(State(), "1", "pod-5", 0.0, WHY)
    assert [decision.group for decision in due(state, RULES, 400.0)] == ["1"]


def test_group_moves_once_per_incident_however_long_it_waits_afterwards() -> None:
    state = lost(State(), "0", "pod-1", 0.0, WHY)
    state = moved(state, "0", ["pod-0", "pod-1"], 300.0)
    assert not due(state, RULES, 1e6)
    state = placed(state, "0", "pod-0")
    state = lost(state, "0", "pod-0", 2e6, "lost again while the group moves")
    assert not due(state, RULES, 3e6)


def test_group_that_is_whole_again_may_move_for_the_next_incident() -> None:
    state = moved(lost(State(), "0", "pod-1", 0.0, WHY), "0", ["pod-0", "pod-1"], 300.0)
    for member in ("pod-0", "pod-1"):
        state = placed(state, "0", member)
    assert state == State(moves=1)
    (decision,) = due(lost(state, "0", "pod-0", 1000.0, WHY), RULES, 1300.0)
    assert decision.move
    assert "2 of 3" in decision.reason


def test_number_of_moves_is_bounded_for_all_groups_of_a_job_together_and_that_is_said_once() -> None:
    rules = Rules(max_moves=1)
    state = moved(lost(State(), "0", "pod-1", 0.0, WHY), "0", ["pod-1"], 300.0)
    state = lost(state, "1", "pod-7", 400.0, WHY)
    (decision,) = due(state, rules, 700.0)
    assert not decision.move
    assert "may not again" in decision.reason
    assert not due(refused(state, "1"), rules, 1e6)


def test_two_groups_that_are_due_at_once_share_what_is_left() -> None:
    state = lost(lost(State(), "1", "pod-7", 5.0, WHY), "0", "pod-1", 0.0, WHY)
    decisions = due(state, Rules(max_moves=1), 400.0)
    assert [(decision.group, decision.move) for decision in decisions] == [("0", True), ("1", False)]


def test_member_that_is_reported_lost_again_does_not_restart_the_clock() -> None:
    state = lost(State(), "0", "pod-1", 0.0, WHY)
    assert lost(state, "0", "pod-1", 250.0, "its replacement is gone too") is state
    assert due(state, RULES, 300.0)


def test_job_of_which_nothing_lives_waits_for_nobody_and_its_clock_starts_anew() -> None:
    state = lost(lost(State(), "0", "pod-1", 0.0, WHY), "1", "pod-2", 0.0, WHY)
    state = paused(state, {"0"})
    assert paused(state, {"0"}) == state, "or it would be written anew in every round"
    state = lost(state, "0", "pod-1", 10_000.0, WHY)
    assert [one.group for one in due(state, RULES, 10_299.0)] == ["1"]
    assert [one.group for one in due(state, RULES, 10_300.0)] == ["1", "0"]
    moving = moved(state, "0", ["pod-1"], 10_300.0)
    assert paused(moving, {"0"}) == moving


def test_group_that_moved_and_still_misses_somebody_moves_again_after_the_threshold_within_its_bounds() -> None:
    state = moved(lost(State(), "0", "pod-1", 0.0, WHY), "0", ["pod-1", "pod-2"], 300.0)
    state = placed(state, "0", "pod-2")
    assert renewed(state, RULES, 599.0, {"0"}) == state
    assert renewed(state, RULES, 600.0, {"1"}) == state
    again = renewed(state, RULES, 600.0, {"0"})
    (decision,) = due(again, RULES, 600.0)
    assert decision.move
    assert "pod-1" in decision.reason
    assert again.moves == 1


def test_clock_of_an_incident_is_that_of_the_member_that_waits_longest() -> None:
    state = lost(lost(State(), "0", "pod-2", 200.0, WHY), "0", "pod-1", 0.0, WHY)
    assert due(state, RULES, 300.0)
    assert not due(placed(state, "0", "pod-1"), RULES, 499.0)
    assert due(placed(state, "0", "pod-1"), RULES, 500.0)


def test_state_survives_a_restart_to_the_second() -> None:
    state = lost(State(moves=2), "0", "pod-1", 123.5, WHY)
    state = moved(lost(state, "rack.b", "pod-9", 50.0, "x"), "rack.b", ["pod-8", "pod-9"], 400.0)
    again = State.from_text(state.as_text())
    assert again == state
    assert due(again, Rules(max_moves=9), 423.5) == due(state, Rules(max_moves=9), 423.5) != []


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"incidents": 3, "moves": 0}', '{"incidents": {"0": {}}, "moves": 0}']
)
def test_what_is_not_a_state_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        State.from_text(text)


def test_whatever_happens_no_incident_moves_twice_and_no_job_more_often_than_allowed() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        rules, state, now, since_whole = Rules(30.0, rng.randint(0, 4)), State(), 0.0, dict.fromkeys("012", 0)
        for _ in range(300):
            now += rng.random() * 20
            group, member = rng.choice("012"), f"pod-{rng.randrange(3)}"
            state = lost(state, group, member, now, WHY) if rng.random() < 0.4 else placed(state, group, member)
            if rng.random() < 0.02:
                state = over(state, group)
            for decision in due(state, rules, now):
                assert min(item.since for item in state.incidents[decision.group].absent.values()) <= now - 30.0
                if decision.move:
                    since_whole[decision.group] += 1
                    state = moved(state, decision.group, [f"pod-{number}" for number in range(3)], now)
                else:
                    state = refused(state, decision.group)
            for name in "012":
                if name not in state.incidents:
                    since_whole[name] = 0
                assert since_whole[name] <= 1
            state = State.from_text(state.as_text())
        assert state.moves <= rules.max_moves
