"""The slot rule: which snapshot a rank may overwrite. Pure.

A rank has a few slots. Each seal gets the next *serial* of its rank, so of two seals the one with the smaller serial is older,
whatever their steps are (a job may go back to an earlier step). W is the serial of the newest COMPLETE seal that the rank was
told of. A slot may be overwritten only if it is unsealed, VOID, or older than W, and not leased. So the newest COMPLETE step
is always in every rank's slots. Where other nodes have copies of snapshots the newest of those, REPLICATED, is kept too: it is the
one that all can go back to when a node is lost.

The saver keeps its side of it: it leases a slot only while its serial is W or newer, and says so *before* it moves W on. A
rank that reads W first and the leases after it therefore never misses one. What is sent to other nodes is leased; it is said to be
REPLICATED *before* the lease ends, and the rank reads that last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PENDING, COMPLETE, VOID = 0, 1, 2


@dataclass(frozen=True)
class Slot:
    """One slot as the rule sees it. ``serial`` 0: unsealed."""

    serial: int = 0
    decision: int = PENDING
    leased: bool = False
    kept: bool = False  # the newest REPLICATED one


def writable(slot: Slot, newest_complete: int) -> bool:
    """Whether a rank that was told of ``newest_complete`` may overwrite a slot."""
    if slot.leased or slot.kept:
        return False
    return slot.serial == 0 or slot.decision == VOID or slot.serial < newest_complete


def choose(slots: Sequence[Slot], newest_complete: int) -> int | None:
    """Return the slot to write next: an empty one, else the oldest VOID one, else the oldest that may go; ``None`` if none may."""
    free = [
        (slot.serial != 0, slot.decision != VOID, slot.serial, index)
        for index, slot in enumerate(slots)
        if writable(slot, newest_complete)
    ]
    return min(free)[-1] if free else None


def why_not(slots: Sequence[Slot], newest_complete: int) -> str:
    """Say why no slot may be overwritten."""
    leased = sum(slot.leased for slot in slots)
    pending = sum(not slot.leased and slot.decision == PENDING and slot.serial > newest_complete for slot in slots)
    parts = []
    if leased:
        parts.append(f"{leased} still being written to disk or sent")
    if pending:
        parts.append(f"{pending} not known to be sealed by all ranks yet")
    kept = sum(not slot.leased and slot.kept and slot.serial != newest_complete for slot in slots)
    if kept:
        parts.append(f"{kept} the newest that other nodes have copies of")
    held = len(slots) - leased - pending - kept
    if held:
        parts.append(f"{held} the newest complete one")
    return f"all {len(slots)} slots are taken: " + ", ".join(parts)
