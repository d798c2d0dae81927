"""A supervisor that can't do what is wanted says so in the job's status, and does not try for ever where nothing has begun."""

from __future__ import annotations

from dataclasses import replace

from resilience.integrations.ray.plan import ENDING_S, MARGIN_S, Seen, decide
from resilience.integrations.ray.state import Phase, State
from resilience.integrations.ray.stumbles import CALM_S, MOST, Stumbles, begun_anew, recovered, stumbled

from tests.integrations.ray.world import running, world


def refused(state: State, times: int) -> State:
    stumbles = Stumbles()
    for number in range(times):
        stumbles = stumbles.and_one_more(ValueError("Ray says:\nInvalid label selector 'a b'"), 1000.0 + number)
        state = stumbled(state, stumbles, 1000.0 + number)
    return state


def test_stumble_is_told_once_and_forgotten_when_it_is_over() -> None:
    state = refused(State(), 3)
    assert state.reason == "the supervisor stumbles: ValueError: Invalid label selector 'a b'; it tries again"
    assert sum("Invalid label selector" in line for line in state.lines) == 1
    assert recovered(state).reason == ""
    assert recovered(State(reason="it waits")).reason == "it waits"


def test_job_that_can_never_begin_fails_with_the_words_of_the_error() -> None:
    it = world("aa", 2)
    it.tick()
    state = refused(it.state, MOST)
    assert state.phase is Phase.ENDING
    state = decide(it.rules, state, Seen(), 2000.0)
    assert (state.phase, state.exit_code) == (Phase.FAILED, 1)
    assert state.reason.endswith("ValueError: Invalid label selector 'a b'")


def test_job_that_ray_refuses_after_it_has_its_nodes_fails_too_if_nothing_was_ever_started() -> None:
    it = world("aa", 2, None)
    it.store = False
    it.run(3)
    assert (it.state.phase, it.state.launches) == (Phase.RUNNING, 0)
    assert refused(it.state, MOST).phase is Phase.ENDING
    assert refused(it.state, MOST).outcome is Phase.FAILED


def test_stumble_while_a_job_stops_is_noted_and_leaves_the_reason_alone() -> None:
    it = running("aa", 2, None)
    it.stop = True
    it.tick()
    state = refused(it.state, 2 * MOST)
    assert (state.phase, state.reason) == (Phase.STOPPING, "a stop was asked for")
    assert "Invalid label selector" in state.lines[-1]


def test_job_that_ends_while_nobody_can_look_is_over_after_a_while_and_nothing_of_it_is_wanted() -> None:
    it = world("aa", 2)
    it.tick()
    state, now = refused(it.state, MOST), 1000.0 + MOST
    assert state.phase is Phase.ENDING
    assert any(slot.claim for slot in state.slots)
    stumbles = Stumbles("ValueError: no", 2 * MOST, now)
    assert stumbled(state, stumbles, state.since + ENDING_S).phase is Phase.ENDING
    over = stumbled(state, stumbles, state.since + ENDING_S + 1.0)
    assert (over.phase, over.exit_code, over.reason) == (Phase.FAILED, 1, state.reason)
    assert not any(slot.claim for slot in over.slots)
    assert stumbled(over, stumbles, now + 100.0) == over


def test_stop_is_heard_though_nobody_can_look_and_launchers_have_their_grace() -> None:
    it = running("aa", 2, None)
    stumbles = Stumbles("ValueError: no", 1, it.now)
    state = stumbled(it.state, stumbles, it.now, stop=True, grace_s=25.0)
    assert (state.phase, state.reason) == (Phase.STOPPING, "a stop was asked for")
    state = replace(state, grace_s=40.0)  # a launcher has promised so much
    still = stumbled(state, stumbles, it.now + 40.0 + MARGIN_S, stop=True, grace_s=25.0)
    assert still.phase is Phase.STOPPING
    over = stumbled(still, stumbles, it.now + 41.0 + MARGIN_S, stop=True, grace_s=25.0)
    assert (over.phase, over.exit_code) == (Phase.STOPPED, 79)


def test_launchers_that_a_dead_supervisor_may_not_have_asked_to_stop_have_their_whole_grace() -> None:
    it = running("aa", 2, None)
    it.stop = True
    it.tick()
    it.now += 3600  # no supervisor meanwhile
    it.state = begun_anew(it.state, it.now)
    it.run(it.rules.stop_grace_s)
    assert it.state.phase is Phase.STOPPING
    it.run(20)
    assert it.state.phase is Phase.STOPPED


def test_good_moment_between_two_stumbles_is_no_recovery() -> None:
    stumbles = Stumbles().and_one_more(ValueError("no"), 1000.0)
    assert not stumbles.over(1000.0 + CALM_S / 2)
    stumbles = stumbles.and_one_more(ValueError("no"), 1000.0 + CALM_S / 2)
    assert stumbles.number == 2
    assert not stumbles.over(1000.0 + CALM_S)
    assert stumbles.over(1000.0 + 2 * CALM_S)
    assert not Stumbles().over(1e9), "there was none"


def test_different_errors_are_not_one_that_never_ends() -> None:
    stumbles = Stumbles()
    for number in range(2 * MOST):
        stumbles = stumbles.and_one_more(ConnectionError(f"try {number}"), 1000.0)
    assert stumbles.number == 1


def test_supervisor_that_stumbles_ends_nothing_that_trains() -> None:
    it = running("aa", 2, None)
    it.state = refused(it.state, 2 * MOST)
    assert it.state.phase is Phase.RUNNING
    it.run(2)
    assert all(it.running())
