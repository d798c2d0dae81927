from __future__ import annotations

import itertools
import math

import pytest

from tests.simulation.traces import PLANS, Action, Beat, Enter, Leave, Plan, Simulation, Wait, steady

STEPS = 2000
SEEDS = range(3)


def settled(plan: Plan, seed: int = 0, steps: int = 1000) -> Simulation:
    """Return a job that has trained for a while without an alarm and is now between two lives."""
    job = Simulation()
    assert job.live(plan.actions(seed, steps)).verdict is None
    return job


def limit(job: Simulation, name: str) -> float:
    return job.learner.timeouts().limit(name).seconds


# -- no false alarm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PLANS)
def test_long_run_has_no_false_alarm(name: str, seed: int) -> None:
    end = Simulation().live(PLANS[name].actions(seed, STEPS))
    assert end.verdict is None
    assert end.steps == STEPS - 1


@pytest.mark.parametrize("name", PLANS)
def test_lives_after_restarts_have_no_false_alarm(name: str) -> None:
    job = Simulation()
    for life in range(4):
        assert job.live(PLANS[name].actions(100 + life, 250)).verdict is None


def test_setup_section_and_then_hours_of_heartbeats_are_no_hang() -> None:
    def script() -> list[Action]:
        setup: list[Action] = [Enter("setup"), Wait(60.0, "setup", 0), Leave("setup")]
        return setup + list(Plan(steady, step_section=False).actions(0, 5000))

    assert Simulation().live(iter(script())).verdict is None


def test_two_evaluations_in_a_row_in_one_section_are_no_hang() -> None:
    def script() -> list[Action]:
        twice: list[Action] = [Enter("evaluate"), Wait(60.0, "evaluate", 100), Leave("evaluate")] * 2
        plan = Plan(steady, step_section=False)
        return [*plan.actions(0, 100), *twice, *plan.actions(1, 100)]

    assert Simulation().live(iter(script())).verdict is None


# -- how soon a hang is found -----------------------------------------------------------------------------------------


def test_hang_before_enough_was_seen_is_found_in_thirty_minutes() -> None:
    for plan in (Plan(steady), Plan(steady, step_section=False), Plan(steady, beats=False)):
        for step in (0, 1, 5, 15):
            end = Simulation().live(plan.actions(0, 100), hang=("step", step))
            assert end.hung
            assert end.found_s <= 1800.0


@pytest.mark.parametrize("step", [25, 500])
@pytest.mark.parametrize("place", ["step", "between"])
def test_hang_of_steady_training_is_found_in_thirty_seconds(place: str, step: int) -> None:
    for plan in (Plan(steady), Plan(steady, step_section=False), Plan(steady, beats=False)):
        end = Simulation().live(plan.actions(0, 600), hang=(place, step))
        assert end.hung
        assert end.found_s <= 30.0


def test_sixteen_samples_after_warm_up_are_enough_and_fifteen_are_not() -> None:
    # Three of warm-up, then sixteen: the twentieth step (number 19) is the first that is judged by what was learned.
    assert Simulation().live(Plan(steady).actions(0, 50), hang=("step", 18)).found_s > 1000
    assert Simulation().live(Plan(steady).actions(0, 50), hang=("step", 19)).found_s <= 30.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PLANS)
def test_hang_in_a_step_is_found_within_five_times_the_largest_or_the_floor(name: str, seed: int) -> None:
    job = settled(PLANS[name], seed, steps=500)
    clocks = ("section:step", "heartbeat", "out-of-section")
    end = job.live(PLANS[name].actions(seed + 100, 300), hang=("step", 250))
    samples = [job.learner.learned[clock] for clock in clocks if clock in job.learner.learned]
    assert end.hung
    assert end.verdict is not None
    assert end.verdict.clock is not None
    assert end.found_s <= max(30.0, 5 * max(item.largest for item in samples))
    if PLANS[name].step_section:
        assert end.verdict.clock.name == "section:step"


def test_hang_in_a_rare_evaluation_has_the_long_timeout_until_it_was_seen_often() -> None:
    plan = PLANS["evaluation and saving, in sections"]
    early = Simulation().live(plan.actions(0, 3000), hang=("evaluate", 300))
    assert early.verdict is not None
    assert early.verdict.clock is not None
    assert (early.verdict.clock.name, early.verdict.clock.limit.source) == ("section:evaluate", "unlearned")
    late = Simulation().live(plan.actions(0, 4200), hang=("evaluate", 3950))
    assert late.verdict is not None
    assert late.verdict.clock is not None
    assert late.verdict.clock.limit.source == "learned"
    assert late.found_s <= 5 * 1.2 * 240.0


def test_hang_in_the_first_step_after_a_restart_is_found_by_what_warm_up_took() -> None:
    job = settled(PLANS["slow warm-up, sections"])
    end = job.live(PLANS["slow warm-up, sections"].actions(1, 100), hang=("step", 0))
    assert end.found_s <= 5 * 1.25 * 240.0


# -- wrong verdicts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stall", [31.0, 45.0, 100.0, 200.0, 1000.0])
@pytest.mark.parametrize("sections", [True, False])
def test_wrong_verdict_does_not_repeat_for_ever(stall: float, sections: bool) -> None:
    """A stall that comes in every life is learned after as many wrong verdicts as doublings are needed."""
    plan = Plan(lambda rng, step: stall if step == 50 else 1.0, step_section=sections)
    job = Simulation()
    alarms = 0
    while job.live(plan.actions(0, 100)).verdict is not None:
        alarms += 1
        assert alarms < 20
    assert alarms == math.ceil(math.log2(stall / 30.0))


def test_section_that_is_longer_than_thirty_minutes_is_not_ended_in_every_cycle() -> None:
    plan = Plan(steady, evaluate_every=50, evaluate_s=4000.0)
    job = Simulation()
    alarms = 0
    while job.live(plan.actions(0, 100)).verdict is not None and alarms < 10:
        alarms += 1
    assert 1 <= alarms <= 3


def test_hang_after_a_wrong_verdict_is_still_found() -> None:
    job = Simulation()
    plan = Plan(lambda rng, step: 100.0 if step == 50 else 1.0)
    while job.live(plan.actions(0, 100)).verdict is not None:
        pass
    end = job.live(Plan(steady).actions(1, 100), hang=("step", 70))
    assert end.hung
    assert end.found_s <= 5 * 100.0 + 0.001


def test_hang_that_is_real_and_comes_again_is_found_every_time() -> None:
    job = settled(Plan(steady))
    found = [job.live(Plan(steady).actions(0, 100), hang=("step", 50)).found_s for _ in range(6)]
    assert found[0] == pytest.approx(30.0)
    for earlier, later in itertools.pairwise(found):
        assert later <= 2.001 * earlier


# -- a bad start ------------------------------------------------------------------------------------------------------


def test_bad_start_does_not_poison_what_follows() -> None:
    job = Simulation()
    job.live(Plan(lambda rng, step: 1500.0).actions(0, 3))  # cold storage; then the node died
    job.live(Plan(steady).actions(1, 100))
    assert limit(job, "section:step") == 30.0
    assert job.live(Plan(steady).actions(2, 100), hang=("step", 50)).found_s <= 30.0


def test_hang_in_the_warm_up_of_a_restart_does_not_poison_what_follows() -> None:
    job = settled(PLANS["slow warm-up, sections"])
    assert job.live(PLANS["slow warm-up, sections"].actions(1, 100), hang=("step", 1)).hung
    assert job.live(PLANS["slow warm-up, sections"].actions(2, 100)).verdict is None
    assert limit(job, "section:step") == pytest.approx(30.0)


def test_fast_life_does_not_shorten_what_a_slow_one_taught() -> None:
    job = settled(Plan(lambda rng, step: 20.0))
    before = limit(job, "section:step")
    job.live(Plan(lambda rng, step: 0.01).actions(0, 1000))
    assert limit(job, "section:step") == before == pytest.approx(100.0)


# -- the honest limit -------------------------------------------------------------------------------------------------


def test_long_evaluation_that_is_not_marked_is_a_wrong_verdict_once_and_then_learned() -> None:
    plan = Plan(steady, step_section=False, evaluate_every=100, evaluate_s=45.0, marked=False)
    job = Simulation()
    first = job.live(plan.actions(0, 300))
    assert first.verdict is not None
    assert first.verdict.clock is not None
    assert first.verdict.clock.name == "heartbeat"
    assert job.live(plan.actions(0, 300)).verdict is None


def test_simulation_can_fail_a_step_beyond_the_rule_is_an_alarm() -> None:
    plan = Plan(lambda rng, step: 31.0 if step == 500 else 1.0)
    end = Simulation().live(plan.actions(0, 1000))
    assert end.verdict is not None
    assert end.steps == 500


def test_beats_alone_are_told_to_the_page() -> None:
    job = Simulation()
    job.live(iter([Beat(step) for step in range(30)]))
    assert job.learner.learned["heartbeat"].count == 26
