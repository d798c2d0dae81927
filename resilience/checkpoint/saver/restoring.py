"""Which snapshot to go on from: all ranks ask, one answer is given, and again if what was found turns out to be bad.

1) ``restore``  (every rank) I want to go on from the newest, from a given step, or from one further back
2) ``choice``   (chair, to all) this one: in memory, or on disk; or nothing
3) ``loaded``   (every rank) it is good, or this is wrong with it
4) ``go``       (chair, to all) everything newer is void; or back to 2) with the next one; or ``refused``, if it is good and does
                not fit: an older one would not be what anybody wants

:class:`Round` collects what the ranks of one node say, :class:`Agreement` what all nodes say. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from resilience.checkpoint.saver.reach import Need, inherited, reachable

Key = tuple[int, int]
CHAIR = 0  # its node
MEMORY, DISK = "memory", "disk"
_MOST = 16
TRIES = 2  # a snapshot that so many restarts failed from is set aside


@dataclass(frozen=True)
class Candidate:
    """A snapshot that could be gone on from."""

    key: Key
    where: str
    name: str = ""  # of its folder on disk: a step may be there twice
    inherited: bool = False  # in memory, and another number of ranks made it


def candidates(
    in_memory: Sequence[Key], on_disk: Sequence[Candidate], inherited: Mapping[Key, bool] = MappingProxyType({})
) -> list[Candidate]:
    """Return everything there is, newest first; of the same snapshot memory comes first, then disk in the order given. What was
    ``inherited`` comes after the disk unless it has all that the disk has (True)."""
    worth = dict.fromkeys(in_memory, 3.0)
    found = [Candidate(key, MEMORY) for key in in_memory] + list(on_disk)
    found += [Candidate(key, MEMORY, inherited=True) for key in inherited if key not in worth]
    worth |= {key: 2.0 if exact else 0.5 for key, exact in inherited.items() if key not in worth}
    return sorted(found, key=lambda it: (it.key, worth[it.key] if it.where == MEMORY else 1.0), reverse=True)


class Back(NamedTuple):
    """How far back to go: at least so many steps from the newest, and to one below ``before``."""

    steps: int = 0
    before: int | None = None

    def reach(self, found: Sequence[Candidate], newest: Key) -> list[Candidate]:
        """Return what is far enough back, given what there is and the newest that training has passed."""
        most = newest[1] - self.steps if self.before is None else min(newest[1] - self.steps, self.before - 1)
        return [item for item in found if item.key <= newest and item.key[1] <= most]


def in_words(wish: int | tuple[int, int | None] | None) -> str:
    """Say what a rank asked for: the newest (``None``), a step, or how far back to go."""
    if wish is None or isinstance(wish, int):
        return "the newest" if wish is None else f"step {wish}"
    steps, before = wish
    return f"{steps} steps back" + (f" and before step {before}" if before is not None else "")


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
    aside = suspect(failed)
    trusted = [item for item in usable if step is not None or item.key != aside]
    return next(iter(trusted or usable), None)


def suspect(failed: Mapping[Key, int]) -> Key | None:
    """Return the snapshot that is set aside because restarts failed from it: the newest. If they fail from the one before it too,
    it is not the snapshots that are to blame, and going back further would only lose more."""
    return max((key for key, number in failed.items() if number >= TRIES), default=None)


def set_aside(found: Sequence[Candidate], choice: Candidate, failed: Mapping[Key, int]) -> list[Key]:
    """Return the snapshots that are passed over because restarts failed from them."""
    aside = suspect(failed)
    return sorted({item.key for item in found if item.key > choice.key and item.key == aside})


@dataclass
class Round:
    """One agreement, as far as the ranks of a node go."""

    ranks: Sequence[int]
    asked: dict[int, Any] = field(default_factory=dict)  # by rank: what it wants, a step or how far back
    loaded: dict[int, str] = field(default_factory=dict)  # by rank: what was wrong, or ""
    misfits: set[int] = field(default_factory=set)  # ranks that it does not fit, good as it may be
    choosing: bool = True  # it is not yet known what to load

    def all_asked(self) -> bool:
        """Whether everybody is here."""
        return all(rank in self.asked for rank in self.ranks)

    def all_loaded(self) -> bool:
        """Whether everybody has tried."""
        return all(rank in self.loaded for rank in self.ranks)

    def missing(self) -> list[int]:
        """Return the ranks that are waited for."""
        here = self.asked if self.choosing else self.loaded
        return [rank for rank in self.ranks if rank not in here]

    def wrong(self) -> str:
        """Return what is wrong with what was loaded, by the word of the first rank that says so."""
        bad = {rank: text for rank, text in self.loaded.items() if text and (rank in self.misfits or not self.misfits)}
        return f"rank {min(bad)}: {bad[min(bad)]}" if bad else ""


@dataclass
class Agreement:
    """One agreement of all nodes, as their chair keeps it."""

    asks: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by node
    loaded: dict[int, str] = field(default_factory=dict)  # by node: what was wrong, or ""
    misfits: set[int] = field(default_factory=set)  # nodes with ranks that it does not fit
    bad: dict[Candidate, str] = field(default_factory=dict)
    choice: Candidate | None = None
    there: list[Candidate] = field(default_factory=list)  # what was to be chosen from, newest first
    deadline: float = 0.0
    reachable: Mapping[Key, Mapping[int, Need]] = field(default_factory=dict)  # in memory: what each node has to fetch

    def ask(self, node: int, message: Mapping[str, Any], now: float) -> None:
        """A node asks; the first one's patience counts."""
        if not self.asks:
            self.deadline = now + float(message["timeout"])
        self.asks[node] = message

    def late(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that are waited for."""
        here = self.asks if self.choice is None else self.loaded
        return [node for node in nodes if node not in here]

    def differ(self) -> list[str]:
        """Return the steps that are asked for, if they are not the same."""
        wanted = {
            in_words(ask["step"] if ask.get("back") is None else tuple(ask["back"])) for ask in self.asks.values()
        }
        return sorted(wanted) if len(wanted) > 1 else []

    @property
    def back(self) -> Back | None:
        """How far back everybody wants to go; ``None``: to the newest there is, or to a step."""
        told = self.asks[CHAIR].get("back")
        return None if told is None else Back(*told)

    def choose(self, newest: Key) -> list[Key]:
        """Choose the next one to try; return what is passed over because restarts failed from it. ``newest``: what training is
        known to have passed, beside what is in memory."""
        self.reachable = reachable(self.asks)
        chair = self.asks[CHAIR]  # its node alone looks at the disk
        on_disk = [Candidate(key_of(item[:2]), DISK, str(item[2])) for item in chair["disk"]]
        failed = {(generation, step): count for generation, step, count in chair["tries"]}
        found = self.there = candidates(sorted(self.reachable), on_disk, inherited(self.asks))
        if self.back is not None:
            found = self.back.reach(found, max([newest, *self.reachable]))
        self.loaded = {}
        self.choice = pick(found, step=chair["step"], bad=self.bad, failed=failed)
        return set_aside(found, self.choice, failed) if self.choice is not None else []

    def left_behind(self) -> list[Key]:
        """Return what is on disk and newer than what was chosen, when that was to go back: nobody is to come upon it again."""
        assert self.choice is not None
        key = self.choice.key
        return sorted(
            {item.key for item in self.there if item.where == DISK and item.key > key and self.back is not None}
        )

    def fetch(self) -> list[tuple[int, Need]]:
        """Return what nodes have to fetch from others to have what was chosen."""
        if self.choice is None or self.choice.where != MEMORY or self.choice.inherited:
            return []
        return list(self.reachable[self.choice.key].items())

    def misfit(self) -> str:
        """Say that what was chosen does not fit a rank, if so. Damage goes before it: what is damaged may not fit for that."""
        damaged = any(text for node, text in self.loaded.items() if node not in self.misfits)
        assert self.choice is not None
        if damaged or not self.misfits:
            return ""
        return f"step {self.choice.key[1]} ({self.choice.where}) does not fit {self.loaded[min(self.misfits)]}"

    def spoil(self, wrong: str) -> str:
        """What was chosen is bad; return that in words."""
        assert self.choice is not None
        self.bad[self.choice] = f"step {self.choice.key[1]} ({self.choice.where}) can't be used: {wrong}"
        return self.bad[self.choice]

    def problems(self) -> list[str]:
        """Return what is wrong with whatever is there; a message holds only so much."""
        found = [*self.bad.values(), *self.asks[CHAIR]["left_out"]]
        more = [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
        return [*(text[:2000] for text in found[:_MOST]), *more]

    def allows_fresh_start(self) -> bool:
        """Whether everybody would begin afresh where there is nothing. What is there and can't be used is not nothing."""
        return not self.problems() and all(ask["fresh"] and ask["step"] is None for ask in self.asks.values())


def key_of(item: Iterable[int]) -> Key:
    """Return a key that came as a list."""
    generation, step = item
    return int(generation), int(step)
