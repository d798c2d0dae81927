"""Which snapshot to go on from: all ranks ask, one answer is given, and again if what was found turns out to be bad.

1) ``restore``  (every rank) I want to go on from the newest, or from a given step
2) ``choice``   (saver, to all) this one: in memory, or on disk; or nothing
3) ``loaded``   (every rank) it is good, or this is wrong with it
4) ``go``       (saver, to all) everything newer is void; or back to 2) with the next one

:class:`Round` collects what ranks say; the choosing is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Key = tuple[int, int]
MEMORY, DISK = "memory", "disk"
TRIES = 2  # a snapshot that so many restarts failed from is set aside


@dataclass(frozen=True)
class Candidate:
    """A snapshot that could be gone on from."""

    key: Key
    where: str


def candidates(in_memory: Sequence[Key], on_disk: Sequence[Key]) -> list[Candidate]:
    """Return everything there is, newest first; of the same snapshot memory comes first."""
    found = [Candidate(key, MEMORY) for key in in_memory] + [Candidate(key, DISK) for key in on_disk]
    return sorted(found, key=lambda item: (item.key, item.where == MEMORY), reverse=True)


def pick(
    found: Sequence[Candidate],
    *,
    step: int | None = None,
    bad: Mapping[Candidate, str],
    failed: Mapping[Key, int],
) -> Candidate | None:
    """Pick the one to go on from: the newest that is not bad. One that restarts failed from twice is passed over, unless there
    is no other or it was asked for by its step."""
    usable = [item for item in found if item not in bad and (step is None or item.key[1] == step)]
    trusted = [item for item in usable if step is not None or failed.get(item.key, 0) < TRIES]
    return next(iter(trusted or usable), None)


@dataclass
class Round:
    """One agreement of all ranks."""

    world: int
    asked: dict[int, int | None] = field(default_factory=dict)  # by rank: the step it wants
    loaded: dict[int, str] = field(default_factory=dict)  # by rank: what was wrong, or ""
    choice: Candidate | None = None
    bad: dict[Candidate, str] = field(default_factory=dict)

    def all_asked(self) -> bool:
        """Whether everybody is here."""
        return len(self.asked) >= self.world

    def all_loaded(self) -> bool:
        """Whether everybody has tried."""
        return len(self.loaded) >= self.world

    def missing(self) -> list[int]:
        """Return the ranks that are waited for."""
        here = self.loaded if self.choice is not None else self.asked
        return [rank for rank in range(self.world) if rank not in here]
