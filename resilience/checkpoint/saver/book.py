"""One directory's snapshots on this node: the ledgers of its ranks, what the chair has decided about them, what is being written.

Everything here is called by the saver's loop, in one thread; the writing itself is the clerk's (:mod:`clerk`), and what concerns
all nodes is the chair's (:mod:`chair`), who is asked through the council even if there is one node only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.checkpoint import decisions
from resilience.checkpoint.decisions import Key
from resilience.checkpoint.ledger import L_ALIVE, L_ATTEMPT, L_FAILURES, L_GENERATION, L_SERIAL
from resilience.checkpoint.saver import restores
from resilience.checkpoint.saver.chair import Chair, Message
from resilience.checkpoint.saver.council import Council
from resilience.checkpoint.saver.digests import Digests
from resilience.checkpoint.saver.member import Member, Snapshot, view
from resilience.checkpoint.schedule import DiskClock
from resilience.checkpoint.slots import COMPLETE, PENDING, VOID
from resilience.checkpoint.storage import Directory

_LOG = logging.getLogger("resilience.saver")
_NO_CHAIR = "the saver of rank 0's node was lost while the ranks were restoring"
_CUT_S = 5.0
_SIGNS = (L_GENERATION, L_SERIAL, L_ATTEMPT)  # one of them changes whenever a rank has done something


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

    def clock(self) -> DiskClock:
        """Return what says when a snapshot is to be written."""
        return DiskClock(self.disk_seconds, self.disk_auto, self.failures_s, time.monotonic())


@dataclass(frozen=True)
class Cycle:
    """Which ranks of which job live on this node now."""

    number: int
    world: int
    first: int  # rank
    local: int  # ranks on this node

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.first, self.first + self.local)

    @property
    def alone(self) -> bool:
        """Whether there is no other node."""
        return self.local == self.world


class Book:
    """All ranks of this node that save into one directory."""

    def __init__(
        self,
        path: Path,
        options: Options,
        selector: selectors.BaseSelector,
        write: Callable[[Book, Snapshot, str], None],
        serve: Callable[[Book, Message], None],
    ) -> None:
        self.directory = Directory(path)
        self.options = options
        self.members: dict[int, Member] = {}
        self.cycle = Cycle(-1, 1, 0, 1)
        self.generation = 0
        self.begun = False  # the chair has begun the cycle
        self._again = False  # the cycle goes on, only the saver or the line is a new one
        self.done = False  # the chair needs us no longer
        self.failures: list[str] = []
        self.writing: dict[str, Snapshot] = {}  # by folder
        self.digests = Digests()
        self.tries = restores.read(path)
        self.council = Council(selector, 0, self._hear)
        self.council.rejoin = self._join
        self.council.cut = lambda: serve(self, {"op": "refused", "why": _NO_CHAIR})
        self._chair = Chair(options.clock(), f"{os.getpid()}-")
        self._write = write
        self._serve = serve  # what concerns ranks or disk more than ledgers
        self._reported: dict[Key, dict[int, int]] = {}  # serials of what the chair was told of
        self._results: dict[str, Message] = {}  # by folder: what became of it, until the chair has answered
        self._asked: list[Message] = []  # to be said again if the line is cut
        self._retired: list[Member] = []
        self._tried = 0
        self._signs: list[tuple[int, ...]] = []
        self._complained: set[str] = set()

    # -- who is there -----------------------------------------------------------------------------------------------

    def begin(self, cycle: Cycle, rank: int, pid: int, generation: int) -> None:
        """Begin a cycle, if this rank's coming shows that it is a new one: what is sealed from now on never combines with what
        was sealed before. A rank that has a ``generation`` only lost the saver that it had."""
        if generation:
            self.generation = max(self.generation, generation)
            if cycle != self.cycle:
                self._assemble(cycle, again=True)
            return
        member = self.members.get(rank)
        came_again = member is not None and member.cycle == cycle.number and member.pid not in (0, pid)
        if cycle == self.cycle and not came_again:
            return
        self.generation = self.newest_generation()
        self._assemble(cycle, again=False)
        for other in self.members.values():  # of a cycle without numbers: they will come again too
            other.cycle = min(other.cycle, cycle.number - 1)
        if cycle.alone:
            self._join()
            self.council.turn()

    def _assemble(self, cycle: Cycle, *, again: bool) -> None:
        self.cycle, self.begun, self.done, self._again = cycle, False, False, again
        self.council.node = cycle.first
        self._reported, self._asked, self._signs = {}, [], []
        self._retire([rank for rank in self.members if rank not in cycle.ranks])
        if cycle.first == 0:
            self._chair.new_round(cycle.world, cycle.number)
        if cycle.alone:
            self.council.preside(self._chair)

    def preside(self, host: str, port: int, secret: str) -> dict[str, Any]:
        """Be the chair of several nodes; return where the others find it."""
        self._chair.new_round(self.cycle.world, self.cycle.number)
        found = self.council.preside(self._chair, host, port, secret)
        self._join()
        return found

    def attend(self, host: str, port: int, secret: str) -> None:
        """Join the chair of several nodes."""
        self.council.attend(host, port, secret)

    def _join(self) -> None:
        """Tell the chair who and what is here, and once more what it may not have heard."""
        held = [snapshot.key for snapshot in self._held()]
        leased = [snapshot.key for snapshot in self._held() if self._is_unfinished(snapshot)]
        self.council.say(
            op="join",
            node=self.cycle.first,
            ranks=self.cycle.local,
            generation=self.generation,
            again=self._again,
            newest=max((key for member in self.locals().values() for key in member.complete()), default=(0, -1)),
            held=held,
            leased=leased,
        )
        self._reported, self._signs, self._tried = {}, [], 0
        for message in (*self._results.values(), *self._asked):
            self.council.say(**message)

    def newest_generation(self) -> int:
        """Return the newest generation that anything here, or on disk, belongs to."""
        known = [member.ledger.words[L_GENERATION] for member in self.members.values()]
        stored = [item.manifest.generation for item in self.directory.stored(self.complain)]
        return max([0, self.generation, *known, *stored])

    def take_over(self, cycle: Cycle, member: Member) -> None:
        """Take in memory that another saver had, and go on where that was: the ledgers know the generation."""
        if cycle.number >= self.cycle.number and cycle != self.cycle:
            self._assemble(cycle, again=True)
        self.generation = max(self.generation, member.ledger.words[L_GENERATION])
        self.deposit(member)

    def deposit(self, member: Member) -> None:
        """Take in a rank's memory."""
        if member.rank in self.members:
            self._retire([member.rank])
        self.members[member.rank] = member
        if self.council.seated and len(self.locals()) == self.cycle.local:
            self._join()  # now it is known what is here

    def _retire(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._retired.append(self.members.pop(rank))  # the clerk may still read it
            self.digests.forget(rank)

    def locals(self) -> dict[int, Member]:
        """Return the ranks of this node that have come."""
        return {rank: self.members[rank] for rank in self.cycle.ranks if rank in self.members}

    # -- what is in memory ------------------------------------------------------------------------------------------

    def snapshot(self, key: Key) -> Snapshot | None:
        """Return a snapshot if every rank of this node has it."""
        found = {rank: member.usable(self.cycle.world).get(key) for rank, member in self.locals().items()}
        seals = {rank: seal for rank, seal in found.items() if seal is not None}
        return Snapshot(key, seals) if len(seals) == self.cycle.local else None

    def restorable(self) -> list[Key]:
        """Return the snapshots in memory that all ranks of this node have sealed, newest first."""
        seals = {rank: list(member.usable(self.cycle.world)) for rank, member in self.locals().items()}
        return decisions.restorable(seals, self.cycle.local)

    def newest(self) -> Snapshot | None:
        """Return the newest snapshot that all ranks of this node have sealed."""
        found = self.restorable()
        return self.snapshot(found[0]) if found else None

    def _held(self) -> list[Snapshot]:
        """Return the snapshots that no rank can overwrite before they are leased."""
        found = [self.snapshot(key) for key in self.restorable()]
        return [item for item in found if item is not None and self._holds(item)]

    def _holds(self, snapshot: Snapshot) -> bool:
        return all(self.members[rank].holds(seal) for rank, seal in snapshot.seals.items())

    def _is_unfinished(self, snapshot: Snapshot) -> bool:
        """Whether an earlier saver was writing it, or was still to."""
        return any(
            not seal.is_durable
            and (self.members[rank].ledger.is_leased(seal) or (seal.on_disk and seal.decision == COMPLETE))
            for rank, seal in snapshot.seals.items()
        )

    # -- decisions --------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Tell the chair whatever is new here, and hear what it says."""
        now = time.monotonic_ns()
        for member in self.members.values():
            member.ledger.words[L_ALIVE] = now
        signs = [(member.gone, *(member.ledger.words[word] for word in _SIGNS)) for member in self.members.values()]
        if signs != self._signs and self.begun:
            self._signs = signs
            self._report()
        self.council.turn()
        if self._retired and not self.writing:
            self._let_go()

    def _report(self) -> None:
        views = {rank: view(member, self.cycle.world) for rank, member in self.locals().items()}
        pending = {
            seal.key for member in self.locals().values() for seal in member.ledger.seals() if seal.decision == PENDING
        }
        for key in sorted(pending):
            verdict = decisions.decide(key, views, self.cycle.local)
            if verdict == VOID:
                self._void(key)
                self.council.say(op="void", key=key)
            elif verdict == COMPLETE:
                self._report_sealed(key)
        self._report_tried([view.attempt if view.generation == self.generation else 0 for view in views.values()])

    def _report_tried(self, attempts: list[int]) -> None:
        """Let the chair know of a step that all ranks here tried and did not seal: another node may hold it, and wait for us."""
        tried = min(attempts) if len(attempts) == self.cycle.local else 0
        if tried != self._tried and tried and (self.generation, tried - 1) not in self._reported:
            self.council.say(op="tried", step=tried)
        self._tried = tried

    def _report_sealed(self, key: Key) -> None:
        snapshot = self.snapshot(key)
        if snapshot is not None and self._reported.get(key) != snapshot.serials():
            self._reported = {old: known for old, known in self._reported.items() if old >= (key[0] - 1, 0)}
            self._reported[key] = snapshot.serials()
            self.council.say(op="sealed", key=key, want=any(seal.on_disk for seal in snapshot.seals.values()))

    def _void(self, key: Key) -> None:
        for member in self.locals().values():
            seal = member.seals().get(key)
            if seal is not None and seal.decision == PENDING:
                member.ledger.decide(seal, VOID)

    def _complete(self, key: Key, folder: str) -> None:
        """All ranks have it. What is to be written is leased before anybody is told: then it can't be overwritten."""
        if folder:
            self._order(key, folder)
        snapshot = self.snapshot(key)
        for rank, seal in snapshot.seals.items() if snapshot is not None else ():
            self.members[rank].ledger.decide(seal, COMPLETE)
        if key[0] == self.generation:
            self.forget_tries()

    def _hear(self, message: Message) -> None:
        """Do what the chair says."""
        op, key = message["op"], tuple(message.get("key") or ())
        if op == "begin":
            self.generation, self.begun, self._again = int(message["generation"]), True, True
        elif op == "decided" and message["verdict"] == COMPLETE:
            self._complete(key, message["folder"])
        elif op == "decided":
            self._void(key)
        elif op == "write":
            self._order(key, message["folder"])
        elif op in ("durable", "failed"):
            self._written(message["folder"], str(message.get("why", "")))
        elif op == "done":
            self.done = True
            self.forget_tries()
        else:
            self._serve(self, message)

    # -- to disk ----------------------------------------------------------------------------------------------------

    def _order(self, key: Key, folder: str) -> None:
        """Lease a snapshot and have it written."""
        snapshot = self.snapshot(key)
        if folder in self.writing:
            return  # the chair asks again because it did not hear: it will
        if snapshot is None or not self._holds(snapshot):
            self.report_written(folder, {"op": "failed", "why": f"step {key[1]} is no longer in memory"})
            return
        self.writing[folder] = snapshot
        for rank, seal in snapshot.seals.items():
            self.members[rank].ledger.lease(seal)
        self._write(self, snapshot, folder)

    def report_written(self, folder: str, result: Message) -> None:
        """Tell the chair what became of this node's part of a snapshot."""
        self._results[folder] = {**result, "folder": folder}
        self.council.say(**self._results[folder])

    def _written(self, folder: str, why: str) -> None:
        """Take note that a snapshot is on disk, or why it is not."""
        snapshot = self.writing.pop(folder, None)
        self._results.pop(folder, None)
        if why:
            self.fail(why)
        if snapshot is None:
            return
        for rank, seal in snapshot.seals.items():
            member = self.members.get(rank)
            if member is None or member.ledger.seal_of(seal.slot) is None:
                continue
            if not why:
                member.ledger.mark_durable(seal)
            member.ledger.release(seal)
        again = self.snapshot(snapshot.key)
        if again is not None and not why and again.serials() != snapshot.serials():
            self.council.say(op="sealed", key=snapshot.key, want=True)  # saved once more meanwhile

    def secure(self) -> None:
        """Have the newest complete snapshot on disk: a rank failed, or everybody leaves."""
        self.turn()
        self.council.say(op="secure")
        self.council.turn()

    def secure_step(self, step: int) -> bool:
        """Have a step written if it is the newest that the ranks here have sealed; return whether it will be."""
        self.turn()
        seals = [seal for member in self.locals().values() for seal in member.usable(self.cycle.world).values()]
        newest = max((seal.key for seal in seals), default=(0, -1))
        if newest[1] <= step:
            self._say_once(op="want", step=step)
            self.council.turn()
            return True
        coming = {seal.key for seal in seals if seal.on_disk} | {snapshot.key for snapshot in self.writing.values()}
        return any(key[1] == step for key in coming)

    def _say_once(self, **message: Any) -> None:
        """Say something that is still meant when the line was cut."""
        self._asked = [*(other for other in self._asked if other["op"] != message["op"]), message]
        self.council.say(**message)

    def say_bye(self) -> None:
        """Tell the chair that the ranks of this node are done; what they sealed comes first."""
        self.turn()
        self._say_once(op="bye")
        self.council.turn()

    def ask(self, message: Message) -> None:
        """Ask the chair what to go on from, or tell it what became of it."""
        self.turn()
        self.council.say(**message)
        self.council.turn()

    def missing(self) -> int:
        """Return how many ranks are yet to come, as far as is known here."""
        return self.council.chair.missing() if self.council.chair is not None else 0

    def leave(self) -> None:
        """Have the newest complete snapshot on disk: this saver is about to end."""
        self.directory.say_leaving()
        self.turn()
        if self.council.chair is not None:
            self.council.chair.leave(time.monotonic())
        else:
            self._say_once(op="bye")
        self.council.turn()

    def is_settled(self) -> bool:
        """Whether nothing is left to be done for anybody."""
        return not self.writing and (self.done or not self.begun or self.council.cut_for() > _CUT_S)

    def is_done(self) -> bool:
        """Whether all ranks of this node have come, and taken leave or died."""
        here = self.locals().values()
        return len(here) == self.cycle.local and all(member.said_bye or member.gone for member in here)

    def fail(self, why: str) -> None:
        """Keep a failure for whoever asks, and let all ranks know that there is one."""
        _LOG.error("%s", why)
        self.failures.append(why)
        for member in self.members.values():
            member.ledger.words[L_FAILURES] += 1

    def go_back_to(self, key: Key | None, generation: int) -> None:
        """Begin from a snapshot in memory (``None``: from disk, or afresh): whatever is newer is void."""
        self.generation = generation
        self._reported, self._asked = {}, []
        for member in self.locals().values():
            member.ledger.go_back_to(member.seals().get(key) if key is not None else None)

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
        if self.cycle.first != 0:
            return  # the chair's node keeps them
        try:
            restores.write(self.directory.path, self.tries)
        except OSError as error:
            self.complain(f"{self.directory.path}: what the job went on from could not be noted: {error.strerror}")

    def complain(self, text: str) -> None:
        """Say something once."""
        if text not in self._complained:
            self._complained.add(text)
            _LOG.warning("%s", text)

    def _let_go(self) -> None:
        for member in self._retired:
            with contextlib.suppress(OSError):
                member.close()
        self._retired = []

    def close(self) -> None:
        """Let go of all memory."""
        self.council.close()
        self._retire(list(self.members))
        self._let_go()
        self.directory.close()
