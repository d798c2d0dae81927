from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest

from resilience.pulse.timeouts import HEARTBEAT, Limit, Samples, Timeouts, from_json, merge, to_json

STEP = "section:step"


def knowing(count: int, largest: float, warmup: float = 0.0) -> Timeouts:
    return Timeouts(learned={STEP: Samples(count, largest, warmup)})


def test_nothing_seen_means_thirty_minutes() -> None:
    assert Timeouts().limit(STEP) == Limit(1800.0, "unlearned")


@pytest.mark.parametrize("count", [0, 1, 15])
def test_fewer_than_sixteen_samples_mean_thirty_minutes(count: int) -> None:
    assert knowing(count, 0.1).limit(STEP) == Limit(1800.0, "unlearned")


@pytest.mark.parametrize(
    ("largest", "seconds"), [(0.0, 30.0), (0.011, 30.0), (6.0, 30.0), (6.001, 30.005), (60.0, 300.0), (1000.0, 5000.0)]
)
def test_from_sixteen_on_it_is_the_larger_of_thirty_seconds_and_five_times_the_largest(
    largest: float, seconds: float
) -> None:
    limit = knowing(16, largest).limit(STEP)
    assert limit.seconds == pytest.approx(seconds)
    assert limit.source == "learned"


def test_warm_up_counts_while_a_rank_is_in_it_and_not_after() -> None:
    timeouts = knowing(16, 1.0, warmup=120.0)
    assert timeouts.limit(STEP, early=True).seconds == 600.0
    assert timeouts.limit(STEP).seconds == 30.0


def test_short_warm_up_does_not_shorten_anything() -> None:
    assert knowing(16, 60.0, warmup=1.0).limit(STEP, early=True).seconds == 300.0


def test_every_number_of_the_rule_is_adjustable() -> None:
    rule = Timeouts({}, {STEP: Samples(4, 10.0, 0.0)}, factor=2.0, floor=1.0, unlearned=60.0, learn_after=4)
    assert rule.limit(STEP).seconds == 20.0
    assert rule.limit("section:other").seconds == 60.0


def test_timeout_given_in_code_wins_over_one_given_at_start_and_that_over_learned() -> None:
    timeouts = Timeouts(given={STEP: (90.0, "flag")}, learned={STEP: Samples(100, 60.0)})
    assert timeouts.limit(STEP, argument=7.0) == Limit(7.0, "argument")
    assert timeouts.limit(STEP) == Limit(90.0, "flag")
    assert timeouts.limit(STEP, early=True) == Limit(90.0, "flag")


def test_given_timeout_may_lie_below_the_floor() -> None:
    assert Timeouts(given={STEP: (0.5, "flag")}).limit(STEP).seconds == 0.5


def test_given_no_timeout_stays_none_whatever_was_learned() -> None:
    timeouts = Timeouts(given={STEP: (math.inf, "file ft.yaml")}, learned={STEP: Samples(100, 1.0)})
    assert math.isinf(timeouts.limit(STEP).seconds)
    assert timeouts.limit(STEP).given


@pytest.mark.parametrize(("source", "given"), [("argument", True), ("flag", True), ("calculated", True)])
def test_only_what_a_person_said_counts_as_given(source: str, given: bool) -> None:
    assert Limit(1.0, source).given is given


def test_learned_and_unlearned_are_not_given() -> None:
    assert not Limit(1.0, "learned").given
    assert not Limit(1.0, "unlearned").given


# -- merging ----------------------------------------------------------------------------------------------------------


def random_table(seed: int) -> dict[str, Samples]:
    rng = random.Random(seed)
    names = rng.sample([HEARTBEAT, STEP, "section:load", "initial"], rng.randint(0, 4))
    return {name: Samples(rng.randint(0, 30), rng.uniform(0, 90), rng.uniform(0, 900)) for name in names}


@pytest.mark.parametrize("seed", range(20))
def test_merging_needs_no_order_and_twice_changes_nothing(seed: int) -> None:
    a, b, c = (random_table(3 * seed + i) for i in range(3))
    assert merge(a, b) == merge(b, a)
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(a, a) == a
    assert merge(merge(a, b), b) == merge(a, b)
    for order in itertools.permutations([a, b, c]):
        merged: dict[str, Samples] = {}
        for table in order:
            merged = merge(merged, table)
        assert merged == merge(merge(a, b), c)


def test_merging_takes_the_largest_of_any_rank_and_changes_neither_table() -> None:
    fast, slow = {STEP: Samples(20, 1.0, 5.0)}, {STEP: Samples(4, 40.0, 2.0)}
    assert merge(fast, slow) == {STEP: Samples(20, 40.0, 5.0)}
    assert fast == {STEP: Samples(20, 1.0, 5.0)}


def test_many_ranks_with_few_samples_each_are_not_trusted_together() -> None:
    merged: dict[str, Samples] = {}
    for _ in range(1000):
        merged = merge(merged, {STEP: Samples(2, 1.0)})
    assert Timeouts(learned=merged).limit(STEP).source == "unlearned"


# -- after an alarm ---------------------------------------------------------------------------------------------------


def after(timeouts: Timeouts, early: bool = False) -> Timeouts:
    return Timeouts(learned=timeouts.after_alarm(STEP, timeouts.limit(STEP, early=early)))


@pytest.mark.parametrize("largest", [0.1, 6.0, 60.0])
def test_learned_timeout_that_expired_is_doubled(largest: float) -> None:
    before = knowing(16, largest)
    assert after(before).limit(STEP).seconds == pytest.approx(2 * before.limit(STEP).seconds)


def test_unlearned_timeout_that_expired_is_doubled_too() -> None:
    # Otherwise a section of 40 minutes is ended at minute 30 of every cycle, for ever.
    assert after(knowing(3, 0.0)).limit(STEP).seconds == pytest.approx(3600.0)
    assert after(Timeouts()).limit(STEP).seconds == pytest.approx(3600.0)


def test_alarm_during_warm_up_makes_the_next_warm_up_longer_and_not_the_steps_after_it() -> None:
    before = knowing(16, 1.0, warmup=120.0)
    later = after(before, early=True)
    assert later.limit(STEP, early=True).seconds == pytest.approx(1200.0)
    assert later.limit(STEP).seconds == pytest.approx(30.0)


def test_given_timeout_that_expired_teaches_nothing() -> None:
    timeouts = Timeouts(given={STEP: (9.0, "flag")}, learned={STEP: Samples(20, 1.0)})
    assert timeouts.after_alarm(STEP, timeouts.limit(STEP)) == timeouts.learned
    assert timeouts.after_alarm(STEP, Limit(math.inf, "unlearned")) == timeouts.learned


def test_alarm_of_one_clock_leaves_the_others_alone() -> None:
    table = {STEP: Samples(20, 1.0), "section:load": Samples(20, 2.0)}
    timeouts = Timeouts(learned=table)
    assert timeouts.after_alarm(STEP, timeouts.limit(STEP))["section:load"] == table["section:load"]


def test_same_alarm_told_by_several_ranks_doubles_once() -> None:
    timeouts = knowing(20, 1.0)
    limit = timeouts.limit(STEP)
    once = Timeouts(learned=timeouts.after_alarm(STEP, limit))
    assert once.after_alarm(STEP, limit) == once.learned


# -- calculated -------------------------------------------------------------------------------------------------------


def test_calculated_timeout_has_the_floor_and_needs_a_sample() -> None:
    assert Timeouts().calculated(STEP) is None
    assert knowing(0, 0.0).calculated(STEP) is None
    assert knowing(1, 0.002).calculated(STEP) == 30.0
    assert knowing(2, 20.0).calculated(STEP) == 100.0
    assert knowing(0, 0.0, warmup=20.0).calculated(STEP) == 100.0


# -- across processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_table_survives_the_way_through_json(seed: int) -> None:
    table = random_table(seed)
    assert from_json(json.loads(json.dumps(to_json(table)))) == table


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        7,
        "text",
        [],
        {"a": None},
        {"a": 3},
        {"a": [1, 2]},
        {"a": [1, 2, 3, 4]},
        {"a": [1, "2", 3]},
        {"a": [1, math.nan, 3]},
        {"a": [1, 2, math.inf]},
        {"a": [-1, 2, 3]},
        {"a": {"0": 1}},
        {3: [1, 2, 3]},
    ],
)
def test_nonsense_from_another_process_is_left_out(nonsense: Any) -> None:
    assert from_json(nonsense) == {}


def test_nonsense_beside_sense_does_not_take_the_sense_away() -> None:
    assert from_json({"good": [1, 2, 3], "bad": [1]}) == {"good": Samples(1, 2.0, 3.0)}
