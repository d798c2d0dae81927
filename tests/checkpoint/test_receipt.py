"""What a receipt says, now and when its slot is gone."""

from __future__ import annotations

import pytest

from resilience.checkpoint.receipt import Level, Receipt

RISING = [Level.COPYING, Level.STAGED, Level.COMPLETE, Level.REPLICATED, Level.DURABLE]


@pytest.mark.parametrize("level", RISING)
@pytest.mark.parametrize("wanted", RISING)
def test_level_reaches_itself_and_everything_below(level: Level, wanted: Level) -> None:
    assert level.reaches(wanted) is (RISING.index(level) >= RISING.index(wanted))


@pytest.mark.parametrize("end", [Level.SKIPPED, Level.FAILED])
@pytest.mark.parametrize("level", RISING)
def test_save_that_was_skipped_or_failed_reaches_nothing_and_nothing_reaches_that(end: Level, level: Level) -> None:
    assert not end.reaches(level)
    assert not level.reaches(end)
    assert end.reaches(end)


def test_levels_are_words() -> None:
    assert [f"{level}" for level in Level] == [level.name for level in Level]
    assert Level("DURABLE") is Level.DURABLE


def test_receipt_follows_its_save() -> None:
    now = [(Level.STAGED, "")]
    receipt = Receipt(7, lambda: now[0])
    assert (receipt.step, receipt.level, receipt.reason) == (7, Level.STAGED, "")
    now[0] = (Level.COMPLETE, "")
    assert receipt.level is Level.COMPLETE
    now[0] = (Level.FAILED, "the disk is full")
    assert (receipt.level, receipt.reason) == (Level.FAILED, "the disk is full")


def test_settled_receipt_keeps_what_was_known_and_looks_no_more() -> None:
    now = [(Level.COMPLETE, "")]
    receipt = Receipt(7, lambda: now[0])
    receipt.settle()
    now.clear()  # a look would raise
    receipt.settle()
    assert (receipt.level, receipt.reason) == (Level.COMPLETE, "")
    assert repr(receipt) == "<save of step 7: COMPLETE>"


def test_ended_receipt_says_why() -> None:
    receipt = Receipt.ended(3, Level.SKIPPED, "all 3 slots are taken")
    assert (receipt.step, receipt.level, receipt.reason) == (3, Level.SKIPPED, "all 3 slots are taken")
    assert repr(receipt) == "<save of step 3: SKIPPED, all 3 slots are taken>"
