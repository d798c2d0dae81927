"""What became of a save, in words.

COPYING     the bytes are on their way into memory (only with ``mode="overlap"``)
STAGED      in this rank's memory, sealed
COMPLETE    in the memory of all ranks: survives the death of processes
REPLICATED  in the memory of other nodes too: survives the loss of a node
DURABLE     on disk, with its manifest: survives everything
SKIPPED     not taken, and why
FAILED      tried, and why it did not work
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """Where a save stands."""

    COPYING = "COPYING"
    STAGED = "STAGED"
    COMPLETE = "COMPLETE"
    REPLICATED = "REPLICATED"
    DURABLE = "DURABLE"
    SKIPPED = "SKIPPED"
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value

    def reaches(self, wanted: Level) -> bool:
        """Whether a save that stands here has come as far as ``wanted``. SKIPPED and FAILED lead nowhere, and come of nothing."""
        order = (Level.COPYING, Level.STAGED, Level.COMPLETE, Level.REPLICATED, Level.DURABLE)
        if self not in order or wanted not in order:
            return self is wanted
        return order.index(self) >= order.index(wanted)


class Receipt:
    """A save, and where it stands now. Reading ``level`` looks into shared memory and waits for nothing."""

    def __init__(self, step: int, look: Callable[[], tuple[Level, str]]) -> None:
        self.step = step
        self._look = look
        self._final: tuple[Level, str] | None = None

    @classmethod
    def ended(cls, step: int, level: Level, reason: str) -> Receipt:
        """Return a receipt of something that will not change any more."""
        receipt = cls(step, lambda: (level, reason))
        receipt.settle()
        return receipt

    def settle(self) -> None:
        """Keep what is known now for good: the slot is about to be used for something else."""
        if self._final is None:
            self._final = self._look()

    @property
    def is_settled(self) -> bool:
        """Whether it stays where it stands: it was skipped, failed, or another save has its slot."""
        return self._final is not None or self.level in (Level.SKIPPED, Level.FAILED)

    @property
    def level(self) -> Level:
        """Where the save stands."""
        return (self._final or self._look())[0]

    @property
    def reason(self) -> str:
        """Why it was skipped or failed; empty otherwise."""
        return (self._final or self._look())[1]

    def __repr__(self) -> str:
        level, reason = self._final or self._look()
        return f"<save of step {self.step}: {level}{f', {reason}' if reason else ''}>"


@dataclass
class Saves:
    """What became of the saves so far."""

    newest: Receipt | None = None
    kept: Receipt | None = None  # the newest that was not skipped
    owed: bool = False  # one that was due on disk was skipped
    in_vain: bool = False  # the newest found no slot
