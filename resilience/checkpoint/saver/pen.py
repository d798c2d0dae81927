"""What is being written to disk of one directory's snapshots on this node: leased until the chair has said what became of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilience.checkpoint.decisions import Key
from resilience.checkpoint.saver.member import Snapshot
from resilience.checkpoint.saver.roll import Roll

Message = dict[str, Any]


class Pen:
    """Orders, and what came of them. ``write`` has the clerk write a snapshot into a folder, ``say`` tells the chair."""

    def __init__(self, roll: Roll, write: Callable[[Snapshot, str], None], say: Callable[..., None]) -> None:
        self.writing: dict[str, Snapshot] = {}  # by folder
        self._results: dict[str, Message] = {}  # by folder: what became of it, until the chair has answered
        self._roll, self._write, self._say = roll, write, say

    def order(self, key: Key, folder: str) -> None:
        """Lease a snapshot and have it written."""
        snapshot = self._roll.snapshot(key)
        if folder in self.writing:
            return  # the chair asks again because it did not hear: it will
        if snapshot is None or not self._roll.holds(snapshot):
            self.report(folder, {"op": "failed", "why": f"step {key[1]} is no longer in memory"})
            return
        self.writing[folder] = snapshot
        for rank, seal in snapshot.seals.items():
            self._roll.members[rank].ledger.lease(seal)
        self._write(snapshot, folder)

    def report(self, folder: str, result: Message) -> None:
        """Tell the chair what became of this node's part of a snapshot."""
        self._results[folder] = {**result, "folder": folder}
        self._say(**self._results[folder])

    def say_again(self) -> None:
        """The line to the chair is a new one: it may not have heard."""
        for message in self._results.values():
            self._say(**message)

    def ended(self, folder: str, durable: bool, busy: set[tuple[int, int]]) -> Snapshot | None:
        """Take note that a snapshot is on disk, or that it never will be; return it as it is now, if it is on disk and was saved
        once more meanwhile. ``busy``: seals, by rank and serial, that stay leased for others."""
        snapshot = self.writing.pop(folder, None)
        self._results.pop(folder, None)
        if snapshot is None:
            return None
        busy = busy | {(rank, seal.serial) for other in self.writing.values() for rank, seal in other.seals.items()}
        for rank, seal in snapshot.seals.items():
            member = self._roll.members.get(rank)
            if member is None or member.ledger.seal_of(seal.slot) is None:
                continue
            if durable:
                member.ledger.mark_durable(seal)
            if (rank, seal.serial) not in busy:
                member.ledger.release(seal)
        again = self._roll.snapshot(snapshot.key)
        return again if durable and again is not None and again.serials() != snapshot.serials() else None
