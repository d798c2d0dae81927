"""Putting a state into a slot: choose, copy, seal. This is the hot path: copies and stores, no message, no lock, no waiting."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from resilience.checkpoint import cuda, digest, garbage, ownership, plan, slots
from resilience.checkpoint.arena import Slot, forget_slots
from resilience.checkpoint.ledger import (
    L_ATTEMPT,
    L_COST,
    L_CYCLE,
    L_GENERATION,
    L_PID,
    L_RANK,
    L_STAGE_FROM,
    L_WORLD,
    L_WRITTEN,
    Ledger,
    fence,
)
from resilience.checkpoint.link import Link, Place, forget_lines
from resilience.checkpoint.overlap import Later
from resilience.checkpoint.plan import Collected, Plan
from resilience.checkpoint.receipt import Level, Receipt
from resilience.checkpoint.shards import aligned
from resilience.checkpoint.watch import Watch
from resilience.pulse import attach
from resilience.pulse.page import W_BEATS, W_STEP

_LOG = logging.getLogger("resilience.checkpoint")


_QUIET_S = 10.0
_alive: weakref.WeakSet[Stager] = weakref.WeakSet()


def _in_child() -> None:
    """Let a forked child (a loader's worker) hold nothing of ours. It must not fail because of that: what is left is left."""
    ledgers = [(stager.ledger.fd, stager.ledger) for stager in _alive]
    _alive.clear()  # a child of the child has other files at these numbers
    with contextlib.suppress(Exception):
        forget_lines()
    with contextlib.suppress(Exception):
        forget_slots(ledgers)  # they stay mapped: the child may read a receipt


os.register_at_fork(after_in_child=_in_child)


@dataclass
class Draft:
    """A slot that is being written, and what its seal will say."""

    index: int
    step: int
    made: Plan
    targets: list[torch.Tensor]
    fields: tuple[int, ...]
    disk: bool
    began: int
    serial: int = 0  # once it is sealed
    wrong: str = ""  # why it never will be


class Stager:
    """The slots of this rank, and what is in them."""

    def __init__(self, place: Place, ledger: Ledger, held: list[Slot], generation: int, made: Plan) -> None:
        self.ledger = ledger
        self._place = place
        self._slots = held
        self._generation = generation
        self._plan = made
        self._targets: dict[int, tuple[int, list[torch.Tensor]]] = {}  # by slot: plan, and views into its memory
        with garbage.left_alone():  # now, so that the first save takes no longer than the others
            for index, slot in enumerate(held):
                if slot.nbytes >= made.data_bytes:
                    self._targets_in(index, slot, made)
        self._owned: tuple[Plan | None, bytes] = (None, b"")  # of a plan: whose its tensors are
        self._headers: dict[
            int, tuple[tuple[int, bytes], int]
        ] = {}  # by slot: whose header stands in it, and its digest
        self.receipts: dict[int, Receipt] = {}  # by slot
        self._skipped = 0
        self._page = attach.page_if_attached()
        self._served = ledger.words[L_STAGE_FROM]
        self._quiet_until = 0.0
        for slot in held if cuda.is_used() else ():
            cuda.pin(slot.map)
        words = ledger.words
        words[L_RANK], words[L_WORLD], words[L_CYCLE], words[L_PID] = place.rank, place.world, place.cycle, os.getpid()
        self.begin(generation)
        _alive.add(self)

    def begin(self, generation: int) -> None:
        """Begin a generation: nothing was tried in it yet."""
        self._generation = generation
        self.ledger.words[L_ATTEMPT] = 0
        fence()
        self.ledger.words[L_GENERATION] = generation
        fence()

    def deposit(self, link: Link) -> None:
        """Give the memory to a saver that does not have it."""
        link.deposit(self.ledger, self._slots)

    def choose(self, step: int, patience: float, rest: Callable[[], None]) -> int | Receipt:
        """Return the slot to write, or the receipt of a save that can't be made within ``patience`` seconds."""
        deadline = time.monotonic() + patience if patience else 0.0
        while True:
            view, newest = self.ledger.rule_view()
            index = slots.choose(view, newest)
            if index is not None:
                return index
            if not deadline or time.monotonic() > deadline:
                break
            rest()
        reason = slots.why_not(view, newest)
        self._tell_of_skip(step, reason)
        return Receipt.ended(step, Level.SKIPPED, reason)

    def _tell_of_skip(self, step: int, reason: str) -> None:
        """Say that a step is not saved; not every time."""
        self._skipped += 1
        if time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + _QUIET_S
        count = f" ({self._skipped} so far)" if self._skipped > 1 else ""
        _LOG.warning("step %s is not saved%s (rank %s): %s.", step, count, self._place.rank, reason)

    @garbage.left_alone()
    def stage(
        self, index: int, step: int, state: Collected, values: bytes, later: Later | None = None, *, disk: bool
    ) -> Receipt:
        """Copy a state into a slot and seal it; with ``later`` only what can't wait is copied before this returns."""
        draft = self._draft(index, step, state, values, disk)
        sources = draft.made.sources(state)
        if later is None:
            copy(draft.targets, sources)
            serial = self._seal(draft)
            receipt = Receipt(step, lambda: self._standing(index, serial))
        else:
            receipt = Receipt(step, lambda: self._standing_of(draft))
            self._copy_later(draft, state, sources, later)
        self.receipts[index] = receipt
        return receipt

    def _draft(self, index: int, step: int, state: Collected, values: bytes, disk: bool) -> Draft:
        """Take a slot for a state: its header and values are in place, its tensors are not."""
        began = time.monotonic_ns()
        made = self._plan_for(state)
        old = self.receipts.pop(index, None)
        if old is not None:
            old.settle()
        header_at = aligned(made.data_bytes)
        owned = self._owned_of(made)
        values_at = header_at + len(made.header) + len(owned)
        self.ledger.begin(index)
        slot = self._room(index, values_at + len(values), made, owned)
        slot.map[values_at : values_at + len(values)] = values
        where = (made.data_bytes, header_at, len(made.header), values_at, len(values))
        sums = (self._headers[index][1], digest.short(values))
        fields = (self._generation, step, made.id, self._place.world, *where, *sums)
        return Draft(index, step, made, self._targets_in(index, slot, made), fields, disk, began)

    def _seal(self, draft: Draft) -> int:
        now = time.monotonic_ns()
        serial = self.ledger.seal(draft.index, (*draft.fields, now), draft.disk)
        took = now - draft.began
        self.ledger.words[L_COST] = took
        if _LOG.isEnabledFor(logging.DEBUG):
            nbytes = draft.made.data_bytes
            _LOG.debug(
                "step %s: %s bytes staged in %.2f ms (%.2f GB/s).",
                draft.step,
                nbytes,
                took / 1e6,
                nbytes / max(took, 1),
            )
        return serial

    def _copy_later(self, draft: Draft, state: Collected, sources: list[torch.Tensor], later: Later) -> None:
        """Copy what may change at any time; have the rest copied behind the training, and the slot sealed then."""
        late = [id(state.tensors[part.index]) in later.tensors for part in draft.made.parts]
        behind = [number for number, waits in enumerate(late) if waits]
        at_once = [number for number, waits in enumerate(late) if not waits]
        copy([draft.targets[number] for number in at_once], [sources[number] for number in at_once])
        names = [draft.made.pieces[number].name for number in behind]
        targets, sources = [draft.targets[number] for number in behind], [sources[number] for number in behind]
        if later.verify:
            copy(targets, sources)
        watch = Watch(names, sources, draft.step, later.verify)
        copying = cuda.after_this(sources) if cuda.is_used() else copy

        def finish() -> None:
            try:
                if not later.verify:
                    copying(targets, sources)
                name = watch.written(targets)
                if name:
                    draft.wrong = f"{name} was written to while it was copied, outside of an optimizer's step"
                else:
                    draft.serial = self._seal(draft)
            except Exception as error:
                draft.wrong = f"{type(error).__name__}: {error}"
                raise
            finally:
                later.done(draft.step, draft.wrong)

        later.behind.do(finish)

    def _standing_of(self, draft: Draft) -> tuple[Level, str]:
        if draft.wrong:
            return Level.FAILED, draft.wrong
        return self._standing(draft.index, draft.serial) if draft.serial else (Level.COPYING, "")

    def receipt_of(self, step: int) -> Receipt | None:
        """Return the receipt of a step that is in a slot."""
        found = [receipt for receipt in self.receipts.values() if receipt.step == step]
        return found[-1] if found else None

    def mapped(self, fd: int) -> mmap.mmap | None:
        """Return our mapping of the slot that a descriptor stands for, if it is one of ours: a new one costs page faults."""
        found = os.fstat(fd)
        for slot in self._slots:
            if os.path.samestat(os.fstat(slot.fd), found) and slot.nbytes == found.st_size:
                return slot.map
        return None

    def written(self) -> float:
        """Return how much of what is being written to disk is."""
        return self.ledger.words[L_WRITTEN] / 1000

    def is_armed(self, step: int) -> bool:
        """Whether it is time for a snapshot, by the saver's clock: once for every time that it says so."""
        armed = self.ledger.words[L_STAGE_FROM]
        return 0 < armed <= step + 1 and armed != self._served

    def serve(self) -> None:
        """A snapshot is being taken, or was tried: the wish for one is served."""
        self._served = self.ledger.words[L_STAGE_FROM]

    def tried(self, step: int) -> None:
        """Say that this rank is through with a step, whatever came of it: whoever waits for its seal need not. The launcher is
        told how far it is too, where no heartbeat does."""
        self.ledger.words[L_ATTEMPT] = step + 1
        page = self._page
        if page is not None and not page.words[W_BEATS]:
            page.words[W_STEP] = step

    def close(self) -> None:
        """Let go of the memory; the saver has it."""
        _alive.discard(self)
        for receipt in self.receipts.values():
            receipt.settle()
        self._targets.clear()
        for slot in self._slots if cuda.is_used() else ():
            cuda.unpin(slot.map)
        self.ledger.close()
        for slot in self._slots:
            slot.close()

    def _plan_for(self, state: Collected) -> Plan:
        if not self._plan.fits(state):
            self._plan = plan.make_plan(state, self._place.local_rank, self._place.local_world)
        return self._plan

    def _owned_of(self, made: Plan) -> bytes:
        """Return which bytes are this rank's alone, as the slot says it to the saver."""
        if self._owned[0] is not made:
            spans = [
                (piece.start, piece.start + piece.nbytes)
                for piece, part in zip(made.pieces, made.parts, strict=True)
                if made.owners[part.index] != plan.SHARED
            ]
            self._owned = made, ownership.pack(spans)
        return self._owned[1]

    def _room(self, index: int, nbytes: int, made: Plan, owned: bytes) -> Slot:
        """Return the slot, large enough, with the plan's header in place."""
        slot = self._slots[index]
        if slot.nbytes < nbytes:
            self._targets.pop(index, None)
            was_planned = self._headers.pop(index, None) is not None
            if cuda.is_used():
                cuda.unpin(slot.map)
            slot.grow(nbytes)
            if cuda.is_used():
                cuda.pin(slot.map)
            gigabytes = slot.nbytes / 1e9
            level = logging.WARNING if was_planned else logging.INFO
            _LOG.log(
                level, "the state has grown: slot %s has %.2f GB now (rank %s).", index, gigabytes, self._place.rank
            )
        if self._headers.get(index, (None,))[0] != (made.id, owned):
            at = aligned(made.data_bytes)
            slot.map[at : at + len(made.header) + len(owned)] = made.header + owned
            slot.map[made.data_bytes : at] = bytes(at - made.data_bytes)
            self._headers[index] = (made.id, owned), digest.short(made.header)
        return slot

    def _targets_in(self, index: int, slot: Slot, made: Plan) -> list[torch.Tensor]:
        known = self._targets.get(index)
        if known is None or known[0] != made.id:
            known = self._targets[index] = (made.id, made.targets(torch.frombuffer(slot.map, dtype=torch.uint8)))
        return known[1]

    def _standing(self, index: int, serial: int) -> tuple[Level, str]:
        seal = self.ledger.seal_of(index)
        if seal is None or seal.serial != serial:
            return Level.FAILED, "its slot was taken"
        if seal.is_durable:
            return Level.DURABLE, ""
        if seal.decision == slots.VOID:
            return Level.FAILED, "another rank did not save this step"
        if seal.is_replicated:
            return Level.REPLICATED, ""
        return (Level.COMPLETE if seal.decision == slots.COMPLETE else Level.STAGED), ""


def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy all tensors in one call; returns when the bytes are there."""
    if targets:
        with torch.no_grad():
            (cuda.copy if cuda.is_used() else torch._foreach_copy_)(targets, sources)
