"""One directory's snapshots on this node: the ledgers of all ranks, what is decided about them, what is to be written to disk.

Everything here is called by the saver's loop, in one thread; the writing itself is the clerk's (:mod:`clerk`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.checkpoint import decisions
from resilience.checkpoint.arena import Slot
from resilience.checkpoint.decisions import Key, RankView
from resilience.checkpoint.ledger import (
    L_ALIVE,
    L_ATTEMPT,
    L_COMPLETE,
    L_FAILURES,
    L_GENERATION,
    L_SERIAL,
    Ledger,
    Seal,
    fence,
)
from resilience.checkpoint.saver import restores
from resilience.checkpoint.schedule import young_daly
from resilience.checkpoint.slots import COMPLETE, PENDING, VOID
from resilience.checkpoint.storage import Directory

_LOG = logging.getLogger("resilience.saver")
_SIGNS = (L_GENERATION, L_SERIAL, L_ATTEMPT)  # one of them changes whenever a rank has done something


@dataclass
class Member:
    """One rank of this node: its memory, and whether it is there."""

    rank: int
    ledger: Ledger
    slots: list[Slot]
    cycle: int = -1
    pid: int = 0
    said_bye: bool = False
    gone: bool = False

    def seals(self) -> dict[Key, Seal]:
        """Return its sealed snapshots."""
        return {seal.key: seal for seal in self.ledger.seals()}

    def usable(self, world: int) -> dict[Key, Seal]:
        """Return its snapshots that can be combined with those of the other ranks."""
        return {key: seal for key, seal in self.seals().items() if seal.world == world and seal.decision != VOID}

    def fds(self) -> tuple[int, ...]:
        """Return the descriptors of its memory, to be handed on."""
        return (self.ledger.fd, *(slot.fd for slot in self.slots))

    def close(self) -> None:
        """Let go of its memory."""
        self.ledger.close()
        for slot in self.slots:
            slot.close()


def view(member: Member, world: int) -> RankView:
    """Read what a rank's ledger says: what it tried first, then what it sealed, so that no seal is missed. What was sealed in a
    world of another size, or is void, does not count any more."""
    generation, attempt = member.ledger.words[L_GENERATION], member.ledger.words[L_ATTEMPT]
    fence()
    return RankView(generation, attempt, list(member.usable(world)), member.gone)


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that all ranks of the node have sealed."""

    key: Key
    seals: dict[int, Seal]
    cycle: int
    world: int

    def serials(self) -> dict[int, int]:
        """Return the serial of each rank's seal."""
        return {rank: seal.serial for rank, seal in self.seals.items()}


@dataclass
class Options:
    """What the ranks ask for; the first one's words count."""

    keep: int = 3
    keep_every: int = 0
    disk_seconds: float = 0.0
    disk_auto: bool = False
    failures_s: float = 0.0  # how long the job runs between two failures, on average
    run: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class Book:
    """All ranks that save into one directory."""

    def __init__(self, path: Path, options: Options, write: Callable[[Book, Snapshot], None]) -> None:
        self.directory = Directory(path)
        self.options = options
        self.members: dict[int, Member] = {}
        self.world = 1
        self.cycle = -1
        self.generation = 0
        self.failures: list[str] = []
        self.writing: set[Key] = set()
        self.wanted: set[int] = set()  # steps that somebody waits for and that are not complete yet
        self.durable: Key | None = None
        self.digests: dict[tuple[int, int], list[str]] = {}  # by rank and serial, of the data's chunks
        self.tries = restores.read(path)
        self._write = write
        self._disk_due = (
            time.monotonic() + options.disk_seconds
        )  # the first one is due at once where its cost is unknown
        self.write_s = 0.0  # how long the last write took
        self._ordered_at = 0.0
        self._retired: list[Member] = []
        self._inherited = False
        self._signs: list[tuple[int, ...]] = []
        self._complained: set[str] = set()

    # -- who is there -----------------------------------------------------------------------------------------------

    def begin(self, cycle: int, world: int, rank: int, pid: int, generation: int) -> None:
        """Begin a cycle, if this rank's coming shows that it is a new one: what is sealed from now on never combines with what
        was sealed before. A rank that has a ``generation`` only lost the saver that it had."""
        if generation:
            self.generation = max(self.generation, generation)
            self.cycle, self.world = cycle, world
            return
        member = self.members.get(rank)
        came_again = member is not None and member.cycle == cycle and member.pid not in (0, pid)
        if cycle == self.cycle and not came_again:
            return
        self.new_generation()
        self.cycle, self.world = cycle, world
        for other in self.members.values():  # of a cycle without numbers: they will come again too
            other.cycle = min(other.cycle, cycle - 1)

    def new_generation(self) -> None:
        """Begin anew: what is sealed from now on never combines with what was sealed before."""
        known = [member.ledger.words[L_GENERATION] for member in self.members.values()]
        stored = [item.manifest.generation for item in self.directory.stored(self.complain)]
        self.generation = max([0, self.generation, *known, *stored]) + 1

    def take_over(self) -> None:
        """Go on where another saver was: the ledgers know the generation."""
        for member in self.members.values():
            self.generation = max(self.generation, member.ledger.words[L_GENERATION])

    def deposit(self, member: Member) -> None:
        """Take in a rank's memory."""
        before = self.members.get(member.rank)
        if before is not None:
            self._retired.append(before)  # the clerk may still read it
            self.digests = {key: known for key, known in self.digests.items() if key[0] != member.rank}
        self.members[member.rank] = member
        self._inherited = True

    # -- decisions --------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Decide whatever can be decided; have written what is due."""
        now = time.monotonic_ns()
        for member in self.members.values():
            member.ledger.words[L_ALIVE] = now
        signs = [(member.gone, *(member.ledger.words[word] for word in _SIGNS)) for member in self.members.values()]
        if signs == self._signs:
            return  # nobody has done anything since the last look
        self._signs = signs
        if self._inherited and len(self.members) >= self.world:
            self._inherited = False
            self._take_over_leases()
        views = {rank: view(member, self.world) for rank, member in self.members.items() if rank < self.world}
        pending = {
            seal.key for member in self.members.values() for seal in member.ledger.seals() if seal.decision == PENDING
        }
        for key in sorted(pending) if views else ():
            decision = decisions.decide(key, views, self.world)
            if decision == COMPLETE:
                self._complete(key)
            elif decision == VOID:
                self._void(key)

    def _take_over_leases(self) -> None:
        """Finish what an earlier saver began: what it had leased, or was still to write, is written; or let go."""
        for member in self.members.values():
            for seal in member.ledger.seals():
                wanted = member.ledger.is_leased(seal) or (seal.on_disk and seal.decision == COMPLETE)
                if not wanted or seal.is_durable or seal.key in self.writing:
                    continue
                snapshot = self.snapshot(seal.key)
                if snapshot is not None and all(self._is_held(rank, it) for rank, it in snapshot.seals.items()):
                    self.order(snapshot)
                else:
                    member.ledger.release(seal)

    def _is_held(self, rank: int, seal: Seal) -> bool:
        """Whether a rank can't overwrite a slot before it is leased: it is already, or holds W or newer."""
        ledger = self.members[rank].ledger
        return ledger.is_leased(seal) or seal.serial >= ledger.words[L_COMPLETE]

    def _void(self, key: Key) -> None:
        for member in self.members.values():
            seal = member.seals().get(key)
            if seal is not None:
                member.ledger.decide(seal, VOID)

    def _complete(self, key: Key) -> None:
        """All ranks have it. What is to be written is leased before anybody is told: then it can't be overwritten."""
        snapshot = self.snapshot(key)
        if snapshot is None:
            return
        if self._is_wanted(snapshot):
            self.order(snapshot)
        for rank, seal in snapshot.seals.items():
            self.members[rank].ledger.decide(seal, COMPLETE)
        if self.tries and key[0] == self.generation:
            self.forget_tries()

    def _is_wanted(self, snapshot: Snapshot) -> bool:
        if snapshot.key[1] in self.wanted or any(seal.on_disk for seal in snapshot.seals.values()):
            self.wanted.discard(snapshot.key[1])
            return True
        timed = self.options.disk_seconds or self.options.disk_auto
        if timed and time.monotonic() >= self._disk_due and not self.writing:
            self._disk_due = time.monotonic() + self._disk_interval()
            return True
        return False

    def _disk_interval(self) -> float:
        """Return how long the next one written by the clock is away."""
        if not self.options.disk_auto:
            return self.options.disk_seconds
        return max(2 * self.write_s, young_daly(self.write_s, self.options.failures_s))

    def snapshot(self, key: Key) -> Snapshot | None:
        """Return a snapshot if every rank of this node has it."""
        seals = {rank: member.usable(self.world).get(key) for rank, member in self.members.items() if rank < self.world}
        found = {rank: seal for rank, seal in seals.items() if seal is not None}
        return Snapshot(key, found, self.cycle, self.world) if found and len(found) == len(seals) else None

    def restorable(self) -> list[Key]:
        """Return the snapshots in memory that all ranks have sealed, newest first."""
        seals = {rank: list(member.usable(self.world)) for rank, member in self.members.items() if rank < self.world}
        return decisions.restorable(seals, self.world)

    def newest(self) -> Snapshot | None:
        """Return the newest snapshot that all ranks have sealed."""
        found = self.restorable()
        return self.snapshot(found[0]) if found else None

    def keep_digests(self, snapshot: Snapshot, digests: dict[int, list[str]]) -> None:
        """Keep the digests of a snapshot's data as long as it is in memory."""
        held = {(rank, seal.serial) for rank, member in self.members.items() for seal in member.ledger.seals()}
        self.digests = {key: known for key, known in self.digests.items() if key in held}
        self.digests |= {(rank, snapshot.seals[rank].serial): known for rank, known in digests.items()}

    def undigested(self, patience: float) -> Snapshot | None:
        """Return the newest snapshot, if it has no digests and has been the newest for so long that they are worth it."""
        newest = self.newest()
        if newest is None or len(self.known_digests(newest)) == len(newest.seals):
            return None
        age = time.monotonic_ns() - max(seal.sealed_at for seal in newest.seals.values())
        return newest if age > patience * 1e9 else None

    def known_digests(self, snapshot: Snapshot) -> dict[int, list[str]]:
        """Return the digests that are known already, by rank."""
        known = {rank: self.digests.get((rank, seal.serial)) for rank, seal in snapshot.seals.items()}
        return {rank: found for rank, found in known.items() if found is not None}

    # -- to disk ----------------------------------------------------------------------------------------------------

    def order(self, snapshot: Snapshot) -> None:
        """Lease a snapshot and have it written."""
        durable = all(seal.is_durable for seal in snapshot.seals.values())
        if snapshot.key in self.writing or durable:
            return
        self.writing.add(snapshot.key)
        self._ordered_at = time.monotonic()
        for rank, seal in snapshot.seals.items():
            self.members[rank].ledger.lease(seal)
        self._write(self, snapshot)

    def is_done(self) -> bool:
        """Whether all ranks have come, and taken leave."""
        return len(self.members) >= self.world and all(member.said_bye for member in self.members.values())

    def secure(self) -> None:
        """Have the newest complete snapshot on disk: a rank failed, or everybody leaves."""
        self.turn()
        newest = self.newest()
        if newest is not None:
            self.order(newest)

    def secure_step(self, step: int) -> bool:
        """Have a step written if it is the newest that all ranks have, or may become it; return whether it will be."""
        self.turn()
        newest = self.newest()
        self.wanted = {item for item in self.wanted if newest is None or item > newest.key[1]}
        if newest is not None and newest.key[1] == step:
            self.order(newest)
        elif newest is None or newest.key[1] < step:
            self.wanted.add(step)  # not sealed by all ranks yet
        return step in self.wanted or any(key[1] == step for key in self.writing)

    def written(self, snapshot: Snapshot, error: str, digests: dict[int, list[str]]) -> None:
        """Take note that a snapshot is on disk, with these digests, or why it is not."""
        self.writing.discard(snapshot.key)
        self.write_s = time.monotonic() - self._ordered_at
        if self.options.disk_auto:
            self._disk_due = self._ordered_at + self._disk_interval()
        self.keep_digests(snapshot, digests)
        for rank, seal in snapshot.seals.items():
            member = self.members.get(rank)
            if member is None or member.ledger.seal_of(seal.slot) is None:
                continue
            if not error:
                member.ledger.mark_durable(seal)
            member.ledger.release(seal)
        again = self.snapshot(snapshot.key)
        if again is not None and not error and again.serials() != snapshot.serials():
            self.order(again)  # the same step was saved once more meanwhile
        if error:
            self.fail(error)
        else:
            self.durable = max(self.durable or snapshot.key, snapshot.key)

    def fail(self, why: str) -> None:
        """Keep a failure for whoever asks, and let all ranks know that there is one."""
        self.failures.append(why)
        for member in self.members.values():
            member.ledger.words[L_FAILURES] += 1

    def go_back_to(self, key: Key | None) -> None:
        """Begin from a snapshot in memory (``None``: from disk, or afresh): whatever is newer is void."""
        for rank, member in self.members.items():
            seal = member.seals().get(key) if key is not None and rank < self.world else None
            member.ledger.go_back_to(seal)

    # -- going on ---------------------------------------------------------------------------------------------------

    def restored_from(self, key: Key) -> None:
        """Note that the job goes on from a snapshot. If that fails twice, another one is taken."""
        self.tries = {**self.tries, key: self.tries.get(key, 0) + 1}
        self._keep_tries()

    def forget_tries(self) -> None:
        """The job got further, or ended in good order: what it went on from was good."""
        if self.tries:
            self.tries = {}
            self._keep_tries()

    def _keep_tries(self) -> None:
        try:
            restores.write(self.directory.path, self.tries)
        except OSError as error:
            self.complain(f"{self.directory.path}: what the job went on from could not be noted: {error.strerror}")

    def complain(self, text: str) -> None:
        """Say something once."""
        if text not in self._complained:
            self._complained.add(text)
            _LOG.warning("%s", text)

    def close(self) -> None:
        """Let go of all memory."""
        for member in (*self.members.values(), *self._retired):
            with contextlib.suppress(OSError):
                member.close()
        self.members, self._retired = {}, []
        self.directory.close()
