"""What becomes of a snapshot, and what a restore finds."""

from __future__ import annotations

import pytest

from resilience.checkpoint.decisions import Key, RankView, decide, restorable
from resilience.checkpoint.slots import COMPLETE, PENDING, VOID

KEY = (2, 10)
HAS = RankView(2, 11, [(2, 9), KEY])
NOT_YET = RankView(2, 10, [(2, 9)])
SKIPPED = RankView(2, 11, [(2, 9)])
FURTHER = RankView(2, 12, [(2, 9), (2, 11)])
DIED_BEFORE = RankView(2, 10, [(2, 9)], gone=True)
DIED_AFTER = RankView(2, 11, [(2, 9), KEY], gone=True)
NOT_THERE_YET = RankView(1, 90, [(1, 88)])
NEWER_WITH = RankView(3, 0, [(2, 9), KEY])
NEWER_WITHOUT = RankView(3, 0, [(2, 9)])


@pytest.mark.parametrize(
    ("views", "world", "expected"),
    [
        ([HAS], 1, COMPLETE),
        ([HAS, HAS], 2, COMPLETE),
        ([HAS, DIED_AFTER], 2, COMPLETE),
        ([HAS], 2, PENDING),  # fewer ranks than there are
        ([HAS, HAS], 3, PENDING),
        ([HAS, NOT_YET], 2, PENDING),
        ([HAS, NOT_THERE_YET], 2, PENDING),  # what it tried in an earlier generation says nothing
        ([HAS, SKIPPED], 2, VOID),
        ([HAS, FURTHER], 2, VOID),
        ([HAS, DIED_BEFORE], 2, VOID),
        ([SKIPPED], 2, VOID),  # whoever else comes, this one never will
        ([HAS, NOT_YET, SKIPPED], 3, VOID),
        ([NEWER_WITH, NEWER_WITH], 2, COMPLETE),
        ([NEWER_WITH, HAS], 2, COMPLETE),
        ([NEWER_WITH, NEWER_WITHOUT], 2, VOID),
        ([HAS, NEWER_WITHOUT], 2, VOID),
        ([NOT_YET, NEWER_WITH], 2, VOID),  # the cycle is over: nobody waits
        ([NEWER_WITH], 2, VOID),
    ],
)
def test_snapshot_is_complete_when_all_have_sealed_it_and_void_when_one_never_will(
    views: list[RankView], world: int, expected: int
) -> None:
    for some in (views, views[::-1]):
        assert decide(KEY, dict(enumerate(some)), world) == expected


def test_same_step_of_another_generation_is_another_snapshot() -> None:
    older = RankView(2, 11, [(1, 10)])
    assert decide(KEY, {0: HAS, 1: older}, 2) == VOID
    assert decide((1, 10), {0: HAS, 1: older}, 2) == VOID


def test_step_zero_is_pending_until_it_was_tried() -> None:
    assert decide((1, 0), {0: RankView(1, 1, [(1, 0)]), 1: RankView(1, 0, [])}, 2) == PENDING
    assert decide((1, 0), {0: RankView(1, 1, [(1, 0)]), 1: RankView(1, 1, [])}, 2) == VOID


def test_what_is_complete_stays_so_when_a_rank_goes_on() -> None:
    ahead = RankView(2, 13, [KEY, (2, 12)])
    assert decide(KEY, {0: HAS, 1: ahead}, 2) == COMPLETE


@pytest.mark.parametrize(
    ("seals", "world", "expected"),
    [
        ({0: [(1, 1), (1, 2)], 1: [(1, 2), (1, 3)]}, 2, [(1, 2)]),
        ({0: [(1, 9), (2, 3)], 1: [(2, 3), (1, 9)]}, 2, [(2, 3), (1, 9)]),  # newest by generation, then step
        ({0: [(1, 9), (1, 10)], 1: [(1, 9), (1, 10)]}, 2, [(1, 10), (1, 9)]),
        ({0: [(1, 5)], 1: [(2, 5)]}, 2, []),
        ({0: [(1, 5)]}, 2, []),
        ({0: [(1, 5)], 1: []}, 2, []),
        ({}, 1, []),
        ({0: [(1, 5), (1, 5)]}, 1, [(1, 5)]),
    ],
)
def test_restorable_is_what_all_ranks_have_newest_first(
    seals: dict[int, list[Key]], world: int, expected: list[Key]
) -> None:
    assert restorable(seals, world) == expected
