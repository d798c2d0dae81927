"""Which slot a rank may overwrite, and what it says when it may overwrite none."""

from __future__ import annotations

from itertools import permutations

import pytest

from resilience.checkpoint.slots import COMPLETE, PENDING, VOID, Slot, choose, why_not, writable


@pytest.mark.parametrize(
    ("slot", "newest_complete", "may"),
    [
        (Slot(), 0, True),
        (Slot(), 7, True),
        (Slot(3, PENDING), 0, False),
        (Slot(3, PENDING), 2, False),
        (Slot(3, PENDING), 3, False),
        (Slot(3, PENDING), 4, True),
        (Slot(3, COMPLETE), 2, False),
        (Slot(3, COMPLETE), 3, False),
        (Slot(3, COMPLETE), 4, True),
        (Slot(3, VOID), 0, True),
        (Slot(3, VOID), 3, True),
        (Slot(3, COMPLETE, leased=True), 4, False),
        (Slot(3, VOID, leased=True), 4, False),
        (Slot(3, PENDING, leased=True), 4, False),
    ],
)
def test_only_what_is_unsealed_or_void_or_older_than_w_and_not_leased_may_go(
    slot: Slot, newest_complete: int, may: bool
) -> None:
    assert writable(slot, newest_complete) is may
    assert (choose([slot], newest_complete) is None) is not may


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_empty_is_chosen_before_void_and_void_before_old_wherever_they_stand(order: tuple[int, ...]) -> None:
    by_preference = [Slot(), Slot(9, VOID), Slot(2, COMPLETE), Slot(3, PENDING)]
    slots = [by_preference[number] for number in order]
    for expected in by_preference:
        index = choose(slots, 5)
        assert index is not None
        assert slots[index] == expected
        slots[index] = Slot(10, PENDING)
    assert choose(slots, 5) is None


@pytest.mark.parametrize("decision", [COMPLETE, PENDING, VOID])
def test_of_two_alike_the_older_one_goes(decision: int) -> None:
    slots = [Slot(4, decision), Slot(2, decision), Slot(3, decision)]
    assert choose(slots, 9) == 1
    assert choose([Slot(4, decision), Slot(2, decision, leased=True), Slot(3, decision)], 9) == 2


def test_newest_complete_one_stays_when_everything_else_is_taken() -> None:
    assert choose([Slot(5, COMPLETE), Slot(6, PENDING)], 5) is None


def test_each_reason_is_said_in_words_and_counted() -> None:
    slots = [Slot(2, COMPLETE, leased=True), Slot(3, COMPLETE), Slot(4, PENDING), Slot(5, PENDING)]
    assert choose(slots, 3) is None
    text = why_not(slots, 3)
    assert text == (
        "all 4 slots are taken: 1 still being written to disk or sent, 2 not known to be sealed by all ranks yet, 1 the newest "
        "complete one"
    )


@pytest.mark.parametrize(
    ("slots", "newest_complete", "said", "unsaid"),
    [
        ([Slot(1, COMPLETE, leased=True), Slot(2, PENDING, leased=True)], 1, "2 still being written", "not sealed"),
        ([Slot(1, PENDING), Slot(2, PENDING)], 0, "2 not known to be sealed by all ranks yet", "disk"),
        ([Slot(1, COMPLETE), Slot(2, PENDING)], 1, "1 the newest complete one", "disk"),
        ([Slot(1, PENDING, leased=True), Slot(2, PENDING)], 0, "1 still being written", "newest complete"),
    ],
)
def test_reason_that_does_not_apply_is_not_given(
    slots: list[Slot], newest_complete: int, said: str, unsaid: str
) -> None:
    assert choose(slots, newest_complete) is None
    text = why_not(slots, newest_complete)
    assert text.startswith("all 2 slots are taken: ")
    assert said in text
    assert unsaid not in text
