from __future__ import annotations

import json
from typing import Any

import pytest

from resilience.failover.history import History, Past


def failed(cycle: int, step: int | None = None, node: str = "a") -> Past:
    return Past(cycle, "exception", "ValueError|x|", node=node, rank=3, exit_code=1, step=step, message="ValueError: x")


def job(*steps: int | None, node: str = "a") -> History:
    """Return the history of a job that failed at ``steps`` and was restarted every time."""
    history = History()
    for cycle, step in enumerate(steps):
        history = history.after(failed(cycle, step, node), restarted=True)
    return history


def test_job_that_has_not_failed_has_no_past() -> None:
    fresh = History()
    assert (fresh.last, fresh.total, fresh.counted(None), fresh.on_node("a", 5)) == (None, 0, 0, 0)


def test_last_failure_is_the_one_before_this_one() -> None:
    last = job(1, 2, 3).last
    assert last == failed(2, 3)


@pytest.mark.parametrize(
    ("steps", "now", "counted"),
    [
        ((10, 10), 10, 2),
        ((10, 10), 9, 2),
        ((10, 10), 11, 0),
        ((10, 10), None, 2),
        ((10, 20), 20, 1),  # the second failure was progress: only the restart after it counts
        ((10, 20, 15), 20, 2),
        ((10, 20, 15), 21, 0),
        ((0,), 0, 1),
        ((None, None), None, 2),
        ((None, None), 0, 0),  # the first step ever told is further than none
        ((None, 5, 5), 5, 2),
    ],
)
def test_restarts_count_since_the_job_got_furthest(
    steps: tuple[int | None, ...], now: int | None, counted: int
) -> None:
    history = job(*steps)
    assert (history.counted(now), history.on_node("a", now)) == (counted, counted)
    assert history.total == len(steps), "what was done is not forgotten"


def test_step_that_a_cycle_fell_back_to_does_not_lower_what_was_reached() -> None:
    history = job(100, 3, None)
    assert history.best_step == 100
    assert not history.is_progress(99)
    assert history.is_progress(101)


def test_first_step_that_is_ever_told_is_progress() -> None:
    assert job(None).is_progress(0)


def test_unknown_step_is_never_progress() -> None:
    assert not job(None).is_progress(None)
    assert not job(5).is_progress(None)


def test_restarts_are_counted_by_the_node_that_caused_them() -> None:
    history = job(10, 10, node="a").after(failed(2, 10, "b"), restarted=True)
    assert (history.on_node("a", 10), history.on_node("b", 10), history.on_node("c", 10)) == (2, 1, 0)
    assert history.counted(10) == 3


def test_progress_clears_the_nodes_too_but_for_the_one_that_failed_now() -> None:
    history = job(10, 10, node="a").after(failed(2, 11, "b"), restarted=True)
    assert (history.on_node("a", 11), history.on_node("b", 11), history.counted(11)) == (0, 1, 1)


def test_failure_that_ended_the_job_is_remembered_and_not_counted() -> None:
    history = job(10).after(failed(1, 10), restarted=False)
    assert (history.total, history.counted(10), len(history.past)) == (1, 1, 2)


def test_restart_that_costs_nothing_is_in_the_total_only() -> None:
    history = job(10).after(failed(1, 10), restarted=True, counts=False)
    assert (history.total, history.counted(10), history.on_node("a", 10)) == (2, 1, 1)


def test_progress_of_a_restart_that_costs_nothing_renews_the_budget_all_the_same() -> None:
    history = job(10, 10).after(failed(2, 11), restarted=True, counts=False)
    assert (history.counted(11), history.on_node("a", 11)) == (0, 0)


def test_history_that_a_failure_is_added_to_stays_as_it_was() -> None:
    before = job(10)
    text = json.dumps(before.as_json())
    before.after(failed(1, 20, "b"), restarted=True)
    assert json.dumps(before.as_json()) == text


def test_long_history_keeps_its_counts_and_its_newest_failures_only() -> None:
    history = job(*[7] * 500)
    assert (history.total, history.counted(7)) == (500, 500)
    assert len(history.past) < 100, "it travels with every rendezvous"
    assert history.past[-1].cycle == 499
    assert [item.cycle for item in history.past] == list(range(500 - len(history.past), 500))


@pytest.mark.parametrize("history", [History(), job(None), job(10, 20, 15), job(*[3] * 40)])
def test_history_survives_the_way_to_another_node(history: History) -> None:
    assert History.from_json(json.loads(json.dumps(history.as_json()))) == history


def test_history_of_another_node_goes_on_like_ones_own() -> None:
    here = job(10, 10)
    there = History.from_json(json.loads(json.dumps(here.as_json())))
    for step in (10, 12, 12):
        now: Any = failed(9, step, "b")
        here, there = here.after(now, restarted=True), there.after(now, restarted=True)
        assert here == there


def test_replaced_node_that_knows_nothing_does_not_make_the_others_forget() -> None:
    long = job(10, 10, 10)
    assert History.newest([History(), long, History()]) == long
    assert History.newest([long, History()]).counted(10) == 3


def test_node_that_missed_the_last_failure_is_told_of_it() -> None:
    before = job(10)
    now = before.after(failed(1, 10), restarted=True)
    assert History.newest([before, now, before]) == now


def test_failure_that_was_not_followed_by_a_restart_is_news_too() -> None:
    before = job(10)
    now = before.after(failed(1, 10), restarted=False)
    assert History.newest([before, now]) == History.newest([now, before]) == now


def test_failure_without_a_restart_is_news_after_many_failures_too() -> None:
    before = job(*range(100))
    now = before.after(failed(100, 50), restarted=False)
    assert History.newest([before, now]) == History.newest([now, before]) == now


def test_nobody_remembers_anything_at_the_first_start() -> None:
    assert History.newest([]) == History.newest([History(), History()]) == History()
