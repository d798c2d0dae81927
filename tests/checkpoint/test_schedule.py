"""How often to save."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from resilience.checkpoint.schedule import Every, surplus, young_daly
from resilience.errors import ConfigError


@pytest.mark.parametrize(
    ("cost", "mean_time", "expected"),
    [
        # Daly 2006, equation 37, worked out by hand: sqrt(2CM) * (1 + sqrt(C/2M)/3 + C/2M/9) - C
        (2.0, 1.0e4, 200 * (1 + 0.01 / 3 + 0.0001 / 9) - 2),
        (8.0, 100.0, 40 * (1 + 0.2 / 3 + 0.04 / 9) - 8),
        (50.0, 100.0, 100 * (1 + 0.5 / 3 + 0.25 / 9) - 50),
        (200.0, 100.0, 100.0),
        (500.0, 100.0, 100.0),
    ],
)
def test_interval_is_that_of_young_and_daly(cost: float, mean_time: float, expected: float) -> None:
    assert young_daly(cost, mean_time) == pytest.approx(expected)


@pytest.mark.parametrize(("cost", "mean_time"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, -1.0)])
def test_interval_of_nothing_is_none(cost: float, mean_time: float) -> None:
    assert young_daly(cost, mean_time) == 0.0


def test_interval_loses_less_time_than_its_neighbours() -> None:
    """The expected time for an hour of work, with failures at random, by Daly's model."""
    cost, mean_time, work = 5.0, 600.0, 3600.0

    def expected(interval: float) -> float:
        return mean_time * math.expm1((interval + cost) / mean_time) * work / interval

    best = young_daly(cost, mean_time)
    assert expected(best) < min(expected(best * 0.9), expected(best * 1.1))


def test_interval_has_no_jump_where_the_formula_ends() -> None:
    assert young_daly(199.9, 100.0) == pytest.approx(100.0, rel=0.15)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Every()),
        (1, Every(steps=1)),
        (500, Every(steps=500)),
        (timedelta(minutes=5), Every(seconds=300.0)),
        (timedelta(milliseconds=1), Every(seconds=0.001)),
        ("auto", Every(auto=True)),
    ],
)
def test_interval_is_read_in_each_of_its_forms(value: Any, expected: Every) -> None:
    assert Every.of("disk_every", value) == expected


@pytest.mark.parametrize(
    "value", [0, -1, True, False, 1.5, "Auto", "5", "", timedelta(0), timedelta(seconds=-1), [], math.nan]
)
def test_interval_that_can_not_be_meant_raises_and_is_named(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"disk_every=.*number of steps, a timedelta"):
        Every.of("disk_every", value)


def test_every_third_step_is_due_when_three_are_done_and_never_means_never() -> None:
    assert [step for step in range(9) if Every(steps=3).has(step)] == [2, 5, 8]
    for never in (Every(), Every(seconds=1.0), Every(auto=True)):
        assert not any(never.has(step) for step in range(8))


@pytest.mark.parametrize(
    ("steps", "keep", "keep_every", "gone"),
    [
        ([3, 2, 1], 2, 0, [2]),
        ([3, 3, 2, 1], 2, 0, [1, 3]),  # the older copy goes, and not the step before it
        ([3, 3, 3], 2, 0, [1, 2]),
        ([3, 2, 2, 1], 1, 0, [1, 2, 3]),
        ([3, 2, 1], 0, 0, [1, 2]),  # never the last one
        ([4, 3, 3, 2], 1, 2, [3]),  # what stays for good stays in all its copies
        ([10, 50, 40], 2, 0, [2]),  # newest first, whatever the numbers: training went back
        ([], 2, 0, []),
    ],
)
def test_steps_are_kept_and_not_copies_of_one(steps: list[int], keep: int, keep_every: int, gone: list[int]) -> None:
    assert surplus(steps, keep, keep_every) == gone
