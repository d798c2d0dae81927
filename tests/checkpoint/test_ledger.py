"""The ledger: a seal is there in full or not at all, and what was decided about one never counts for another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resilience.checkpoint import ledger as layout
from resilience.checkpoint import slots
from resilience.checkpoint.ledger import Ledger, Seal
from resilience.checkpoint.slots import COMPLETE, PENDING, VOID, Slot

ROW = 16  # words before the first slot's row, and words of a row


def fields(step: int, generation: int = 1) -> tuple[int, ...]:
    """What a rank seals: each word differs, and all follow from the step."""
    return (generation, step, *(step * 1000 + number for number in range(10)))


def mixed(seal: Seal) -> bool:
    """Whether a seal's words are not those of one step."""
    values = (
        seal.plan,
        seal.world,
        seal.data,
        seal.header_at,
        seal.header,
        seal.values_at,
        seal.values,
        seal.header_sum,
        seal.values_sum,
        seal.sealed_at,
    )
    return (seal.generation, seal.step, *values) != fields(seal.step)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger.create(3, rank=1, world=4)
    yield made
    made.close()


@pytest.fixture
def other(ledger: Ledger) -> Iterator[Ledger]:
    """The same ledger, as another process maps it."""
    made = Ledger(os.dup(ledger.fd))
    yield made
    made.close()


def sealed(ledger: Ledger, index: int, step: int, generation: int = 1) -> Seal:
    ledger.begin(index)
    ledger.seal(index, fields(step, generation), on_disk=False)
    seal = ledger.seal_of(index)
    assert seal is not None
    return seal


# -- seals --------------------------------------------------------------------------------------------------------------


def test_fresh_ledger_has_no_seals_and_all_slots_may_be_written(ledger: Ledger) -> None:
    assert ledger.number == 3
    assert (ledger.words[layout.L_RANK], ledger.words[layout.L_WORLD]) == (1, 4)
    assert ledger.seals() == []
    assert ledger.rule_view() == ([Slot(), Slot(), Slot()], 0)


def test_seal_is_read_as_it_was_given_through_another_mapping(ledger: Ledger, other: Ledger) -> None:
    serial = ledger.seal(2, (5, 7, 11, 4, 100, 4096, 200, 8192, 300, 17, 18, 12345), on_disk=True)
    expected = Seal(2, serial, 5, 7, 11, 4, 100, 4096, 200, 8192, 300, 17, 18, 12345, PENDING, 0, 1)
    assert other.seal_of(2) == expected
    assert other.seals() == [expected]
    assert expected.key == (5, 7)
    assert not expected.is_durable


def test_seal_that_is_taken_back_is_none_and_its_serial_is_not_given_again(ledger: Ledger, other: Ledger) -> None:
    first = sealed(ledger, 0, step=1)
    ledger.begin(0)
    assert other.seal_of(0) is None
    assert other.rule_view()[0][0] == Slot()
    assert sealed(ledger, 0, step=1).serial == first.serial + 1


def test_seals_are_given_oldest_first_whatever_their_slots_and_steps(ledger: Ledger) -> None:
    for index, step in ((2, 9), (0, 4), (1, 6)):
        sealed(ledger, index, step)
    assert [(seal.slot, seal.step) for seal in ledger.seals()] == [(2, 9), (0, 4), (1, 6)]


def test_ledger_that_is_mapped_again_goes_on_counting(ledger: Ledger, other: Ledger) -> None:
    sealed(ledger, 0, step=1)
    assert sealed(other, 1, step=2).serial == 2


class Watched:
    """The words of a ledger; something is called after every single store."""

    def __init__(self, words: memoryview[int], stored: Callable[[], None]) -> None:
        self._words, self._stored = words, stored

    def __getitem__(self, index: Any) -> Any:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value
        self._stored()

    def release(self) -> None:
        self._words.release()


@pytest.mark.parametrize("before", [None, 3])
def test_half_written_seal_is_no_seal_after_any_of_its_stores(
    ledger: Ledger, other: Ledger, before: int | None
) -> None:
    if before is not None:
        sealed(ledger, 1, step=before)
    seen: list[Seal | None] = []
    watched = Watched(ledger.words, lambda: seen.append(other.seal_of(1)))
    ledger.words = watched  # type: ignore[assignment]
    ledger.begin(1)
    ledger.seal(1, fields(8), on_disk=True)
    assert len(seen) >= 13
    assert seen[:-1] == [None] * (len(seen) - 1)
    assert seen[-1] is not None
    assert seen[-1].step == 8
    assert not mixed(seen[-1])


@pytest.mark.parametrize("word", range(layout.S_CHECK + 1))
def test_any_flipped_bit_in_what_is_signed_makes_it_no_seal(ledger: Ledger, word: int) -> None:
    sealed(ledger, 1, step=8)
    at = layout._ROWS + layout._ROW + word
    for bit in range(64):
        ledger.words[at] ^= 1 << bit
        assert ledger.seal_of(1) is None, f"bit {bit}"
        ledger.words[at] ^= 1 << bit
    assert ledger.seal_of(1) is not None


def test_blank_row_with_a_serial_is_no_seal(ledger: Ledger) -> None:
    ledger.words[ROW] = 1
    assert ledger.seal_of(0) is None


@pytest.mark.parametrize("word", [layout.L_MAGIC, layout.L_SLOTS])
def test_memory_that_is_no_ledger_is_refused(ledger: Ledger, word: int) -> None:
    ledger.words[word] = 99
    with pytest.raises(ValueError, match="no ledger"):
        Ledger(ledger.fd)


def test_ledger_can_not_be_cut_short(ledger: Ledger) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(ledger.fd, 0)


# -- decisions ----------------------------------------------------------------------------------------------------------


def test_what_was_decided_about_a_seal_does_not_count_for_the_next_one_in_its_slot(ledger: Ledger) -> None:
    old = sealed(ledger, 0, step=1)
    ledger.lease(old)
    ledger.decide(old, VOID)
    ledger.mark_durable(old)
    seal = ledger.seal_of(0)
    assert seal is not None
    assert (seal.decision, seal.is_durable) == (VOID, True)
    assert ledger.rule_view()[0][0] == Slot(old.serial, VOID, leased=True)
    new = sealed(ledger, 0, step=2)
    assert (new.decision, new.is_durable) == (PENDING, False)
    assert ledger.rule_view()[0][0] == Slot(new.serial, PENDING, leased=False)


def test_decision_about_a_seal_that_was_overwritten_says_nothing_about_the_new_one(ledger: Ledger) -> None:
    old = sealed(ledger, 0, step=1)
    new = sealed(ledger, 0, step=2)
    ledger.decide(old, VOID)
    assert ledger.seal_of(0) == new
    assert slots.choose(ledger.rule_view()[0][:1], 0) is None


def test_w_moves_with_complete_ones_and_never_backwards(ledger: Ledger) -> None:
    first, second, third = (sealed(ledger, index, step=index) for index in range(3))
    ledger.decide(second, COMPLETE)
    assert ledger.rule_view()[1] == second.serial
    ledger.decide(first, COMPLETE)
    ledger.decide(third, VOID)
    assert ledger.rule_view()[1] == second.serial
    assert [seal.decision for seal in ledger.seals()] == [COMPLETE, COMPLETE, VOID]


def test_lease_keeps_a_slot_and_its_release_lets_it_go(ledger: Ledger) -> None:
    first, second, _ = (sealed(ledger, index, step=index) for index in range(3))
    ledger.lease(first)
    ledger.decide(second, COMPLETE)
    assert slots.choose(*ledger.rule_view()) is None
    ledger.release(first)
    assert slots.choose(*ledger.rule_view()) == first.slot


def test_release_of_an_old_seal_does_not_let_go_of_the_lease_of_a_new_one(ledger: Ledger) -> None:
    old = sealed(ledger, 0, step=1)
    new = sealed(ledger, 0, step=2)
    ledger.lease(new)
    ledger.release(old)
    assert ledger.rule_view()[0][0].leased


def test_durable_counts_up_only(ledger: Ledger) -> None:
    first, second = sealed(ledger, 0, step=1), sealed(ledger, 1, step=2)
    ledger.mark_durable(second)
    ledger.mark_durable(first)
    assert ledger.words[layout.L_DURABLE] == second.serial
    assert all(seal.is_durable for seal in ledger.seals())


# -- going back -----------------------------------------------------------------------------------------------------------


def test_going_back_voids_what_is_newer_and_makes_the_chosen_one_w(ledger: Ledger) -> None:
    first, second, third = (sealed(ledger, index, step=index) for index in range(3))
    for seal in (first, second, third):
        ledger.decide(seal, COMPLETE)
    ledger.go_back_to(second)
    assert [seal.decision for seal in ledger.seals()] == [COMPLETE, COMPLETE, VOID]
    view, newest = ledger.rule_view()
    assert newest == second.serial
    assert [slots.writable(slot, newest) for slot in view] == [True, False, True]


def test_going_back_to_nothing_voids_everything(ledger: Ledger) -> None:
    for index in range(3):
        ledger.decide(sealed(ledger, index, step=index), COMPLETE)
    ledger.go_back_to(None)
    view, newest = ledger.rule_view()
    assert newest == 0
    assert [slot.decision for slot in view] == [VOID] * 3


def test_earlier_step_of_a_later_generation_is_newer(ledger: Ledger) -> None:
    old, new = sealed(ledger, 0, step=50), sealed(ledger, 1, step=3, generation=2)
    ledger.go_back_to(new)
    assert [seal.decision for seal in ledger.seals()] == [PENDING, COMPLETE]
    ledger.go_back_to(old)
    assert [seal.decision for seal in ledger.seals()] == [COMPLETE, VOID]


@pytest.mark.parametrize("was", [PENDING, COMPLETE, VOID])
def test_what_was_gone_back_to_is_kept_until_there_is_another_even_if_it_was_void(ledger: Ledger, was: int) -> None:
    older, chosen = sealed(ledger, 0, step=1), sealed(ledger, 1, step=2)
    if was == VOID:
        ledger.go_back_to(older)
    elif was == COMPLETE:
        ledger.decide(chosen, COMPLETE)
    ledger.go_back_to(chosen)
    view, newest = ledger.rule_view()
    assert not slots.writable(view[chosen.slot], newest)
    assert slots.writable(view[older.slot], newest)


# -- two processes --------------------------------------------------------------------------------------------------------

_HAMMER = """
import sys
from resilience.checkpoint.ledger import Ledger
ledger = Ledger(int(sys.argv[1]))
for step in range(int(sys.argv[2])):
    ledger.begin(step % 3)
    ledger.seal(step % 3, (1, step, *(step * 1000 + number for number in range(10))), on_disk=False)
"""


@pytest.mark.spawns
def test_reader_never_sees_words_of_two_seals_together_while_another_process_seals(ledger: Ledger) -> None:
    command = [sys.executable, "-c", _HAMMER, str(ledger.fd), "60000"]
    writer = subprocess.Popen(command, pass_fds=(ledger.fd,), cwd=Path(layout.__file__).parents[2])
    seen: set[int] = set()
    unsealed = 0
    try:
        while writer.poll() is None:
            for index in range(3):
                seal = ledger.seal_of(index)
                if seal is None:
                    unsealed += 1
                    continue
                assert not mixed(seal), seal
                assert seal.serial == seal.step + 1
                assert seal.step % 3 == index
                seen.add(seal.step)
        assert writer.returncode == 0
    finally:
        writer.kill()
        writer.wait()
    assert [seal.step for seal in ledger.seals()] == [59997, 59998, 59999]
    assert len(seen) > 50, "the two did not run at the same time: nothing was shown"
    assert unsealed > 50
