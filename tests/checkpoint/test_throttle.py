"""The bandwidth of copies, in simulated time: what was asked for is neither exceeded nor left unused."""

from __future__ import annotations

import random

import pytest

from resilience.checkpoint.saver import pace
from resilience.checkpoint.saver.throttle import Bucket, Courtesy


def test_without_a_limit_nothing_waits() -> None:
    assert Bucket(0.0, 5.0).take(1 << 40, 5.0) == 0.0


def test_first_bytes_go_at_once_and_the_debt_is_waited_for() -> None:
    bucket = Bucket(1000.0, 0.0)
    assert bucket.take(100, 0.0) == 0.0
    assert bucket.take(500, 0.0) == pytest.approx(0.5)
    assert bucket.take(500, 0.5) == pytest.approx(0.5)


def test_pause_is_not_saved_up_for_later() -> None:
    bucket = Bucket(1000.0, 0.0)
    assert bucket.take(1100, 1000.0) == pytest.approx(1.0)


def test_clock_that_stands_still_or_goes_back_gives_nothing_away() -> None:
    bucket = Bucket(1000.0, 10.0)
    bucket.take(100, 10.0)
    assert bucket.take(1000, 3.0) == pytest.approx(1.0)
    assert bucket.take(0, 10.0) == pytest.approx(1.0)


def test_processors_that_are_short_are_left_to_others_most_of_the_time() -> None:
    courtesy = Courtesy(processors=8)
    assert courtesy.pause(0.01) == pytest.approx(0.09), "a tenth of one, until it is known better"
    courtesy.look(100.0, 1000.0)
    courtesy.look(150.0, 1100.0)
    assert courtesy.pause(0.01) == 0.0, "half of them were idle"
    courtesy.look(150.0, 1100.0)
    assert courtesy.pause(0.01) == 0.0, "no time has passed"
    courtesy.look(160.0, 1200.0)
    assert courtesy.pause(0.01) == pytest.approx(0.09)
    assert Courtesy(processors=96).pause(1.0) == 0.0, "one of so many is a small share"


def test_processors_are_counted() -> None:
    idle, total = pace.processors()
    assert 0 <= idle <= total
    assert total > 0
    made = pace.Pace()
    made.begin()
    assert 0 <= made.courtesy() < 10


@pytest.mark.parametrize("seed", range(50))
def test_over_any_stretch_of_time_the_rate_is_kept_and_used(seed: int) -> None:
    rng = random.Random(seed)
    rate = 10 ** rng.uniform(6, 10)
    now, sent = 0.0, list[tuple[float, int]]()
    bucket = Bucket(rate, now)
    for _ in range(400):
        nbytes = rng.randint(1, 1 << 20)
        now += bucket.take(nbytes, now)
        sent.append((now, nbytes))
        now += rng.choice([0.0, 0.0, 0.0, nbytes / rate / 3])  # the network takes some time too, less than it may
    for first in range(0, 400, 37):
        start = sent[first][0]
        for last in range(first + 1, 400, 41):
            total = sum(nbytes for _, nbytes in sent[first + 1 : last + 1])
            assert total <= rate * (sent[last][0] - start + 0.1) * 1.001 + 1
    assert sum(nbytes for _, nbytes in sent) >= 0.9 * rate * (now - 0.1)
