"""One directory's snapshots on this node: the ledgers of its ranks, what the chair has decided about them, what is being written.

Everything here is called by the saver's loop, in one thread; the writing itself is the clerk's (:mod:`clerk`), and what concerns
all nodes is the chair's (:mod:`chair`), who is asked through the council even if there is one node only.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable
from typing import Any

from resilience.checkpoint import decisions
from resilience.checkpoint.decisions import Key
from resilience.checkpoint.ledger import L_ALIVE, L_ATTEMPT, L_FAILURES, L_GENERATION, L_SERIAL
from resilience.checkpoint.saver import clerk
from resilience.checkpoint.saver.chair import GONE_S, Message
from resilience.checkpoint.saver.copies import Copies, Later, Links
from resilience.checkpoint.saver.council import Council
from resilience.checkpoint.saver.member import Member, Snapshot
from resilience.checkpoint.saver.pen import Pen
from resilience.checkpoint.saver.restores import Tries
from resilience.checkpoint.saver.roll import Cycle, Roll
from resilience.checkpoint.saver.wire import own_address
from resilience.checkpoint.saver.wishes import Options
from resilience.checkpoint.slots import COMPLETE, VOID
from resilience.checkpoint.stores import Storage

_LOG = logging.getLogger("resilience.saver")
_NO_CHAIR = "the saver of rank 0's node was lost while the ranks were restoring"
_CUT_S = 5.0
_PATIENCE_NS = 30_000_000_000  # until a rank that does not save is named
_SIGNS = (L_GENERATION, L_SERIAL, L_ATTEMPT)  # one of them changes whenever a rank has done something


class Book:
    """All ranks of this node that save into one directory."""

    def __init__(
        self,
        directory: Storage,
        options: Options,
        selector: selectors.BaseSelector,
        *,
        write: Callable[[Book, Snapshot, str], None],
        serve: Callable[[Book, Message], None],
        later: Later,
    ) -> None:
        self.directory = directory
        self.options = options
        self.roll = Roll()
        self.generation = 0
        self.begun = False  # the chair has begun the cycle
        self._again = False  # the cycle goes on, only the saver or the line is a new one
        self.done = False  # the chair needs us no longer
        self.failures: list[str] = []
        self.farthest: Key = (0, -1)  # the newest that was COMPLETE in this job, here or elsewhere by now
        self.tries = Tries(directory, self.complain)
        self.council = Council(selector, 0, self._hear)
        self.council.rejoin = self._join
        self.council.cut = lambda: serve(self, {"op": "refused", "why": _NO_CHAIR})
        self._chair = options.chair()
        self.pen = Pen(self.roll, lambda snapshot, folder: write(self, snapshot, folder), self.council.say)
        self._serve = serve  # what concerns ranks or disk more than ledgers
        self._reported: dict[Key, dict[int, int]] = {}  # serials of what the chair was told of
        self._asked: list[Message] = []  # to be said again if the line is cut
        self._tried = 0
        self._last: Key = (0, -1)  # that was tried to have on disk at the end
        self._signs: list[tuple[int, ...]] = []
        self._next_look = 0
        self._complained: set[str] = set()
        links = Links(self.roll, self.council.say, self.complain, later, lambda: [*self.writing.values()])
        self.copies = Copies(options, links)

    @property
    def writing(self) -> dict[str, Snapshot]:
        """What is being written to disk, by folder."""
        return self.pen.writing

    @property
    def cycle(self) -> Cycle:
        """Which ranks of the job live here."""
        return self.roll.cycle

    # -- who is there -----------------------------------------------------------------------------------------------

    def begin(self, cycle: Cycle, rank: int, pid: int, generation: int) -> None:
        """Begin a cycle, if this rank's coming shows that it is a new one: what is sealed from now on never combines with what
        was sealed before. A rank that has a ``generation`` only lost the saver that it had."""
        if generation:
            self.generation = max(self.generation, generation)
            if cycle != self.cycle:
                self._assemble(cycle, again=True)
            return
        member = self.roll.members.get(rank)
        came_again = member is not None and member.cycle == cycle.number and member.pid not in (0, pid)
        if cycle == self.cycle and not came_again:
            return
        known = max(self.generation, self.roll.generation())
        self.generation = max(known, clerk.newest_generation(self.directory, known, self.complain))
        self._assemble(cycle, again=False)
        self.tries.begin()
        for other in self.roll.members.values():  # of a cycle without numbers: they will come again too
            other.cycle = min(other.cycle, cycle.number - 1)
        if cycle.alone:
            self._join()
            self.council.turn()

    def _assemble(self, cycle: Cycle, *, again: bool) -> None:
        self.begun, self.done, self._again = False, False, again
        self.roll.begin(cycle)
        self.council.node = cycle.first
        self._reported, self._asked, self._signs = {}, [], []
        if cycle.first == 0:
            self._chair.new_round(cycle.world, cycle.number)
        else:
            self.directory.close()  # another node is the chair now: it waits for that
        if cycle.alone:
            self.council.preside(self._chair)

    def preside(self, host: str, port: int, secret: str) -> dict[str, Any]:
        """Be the chair of several nodes; return where the others find it."""
        self._chair.new_round(self.cycle.world, self.cycle.number)
        found = self.council.preside(self._chair, host, port, secret)
        self.copies.open(self.cycle.first, host, found["secret"])
        self._join()
        return found

    def attend(self, host: str, port: int, secret: str) -> None:
        """Join the chair of several nodes."""
        here = own_address((host, port)) if self.options.replicas else ""
        self.copies.open(self.cycle.first, here, secret)
        self.council.attend(host, port, secret)

    def _join(self) -> None:
        """Tell the chair who and what is here, and once more what it may not have heard."""
        held = self.roll.held()
        self.council.say(
            op="join",
            node=self.cycle.first,
            ranks=self.cycle.local,
            generation=self.generation,
            again=self._again,
            newest=self.roll.newest_complete(),
            held=[(*snapshot.key, snapshot.edition()) for snapshot in held],
            leased=[snapshot.key for snapshot in held if self.roll.is_unfinished(snapshot)],
            **self.copies.joining(),
        )
        self._reported, self._signs, self._tried = {}, [], 0
        self.pen.say_again()
        for message in self._asked:
            self.council.say(**message)
        self.copies.say_again()

    def take_over(self, cycle: Cycle, member: Member) -> None:
        """Take in memory that another saver had, and go on where that was: the ledgers know the generation."""
        if cycle.number >= self.cycle.number and cycle != self.cycle:
            self._assemble(cycle, again=True)
        self.generation = max(self.generation, member.ledger.words[L_GENERATION])
        self.deposit(member)

    def deposit(self, member: Member) -> None:
        """Take in a rank's memory."""
        self.roll.add(member)
        if self.council.seated and self.roll.all_here():
            self._join()  # now it is known what is here

    # -- decisions --------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Tell the chair whatever is new here, and hear what it says."""
        now = time.monotonic_ns()
        members = self.roll.members.values()
        for member in members:
            member.ledger.words[L_ALIVE] = now
        signs = [
            (member.gone or member.said_bye, *(member.ledger.words[word] for word in _SIGNS)) for member in members
        ]
        if signs != self._signs and self.begun:
            self._signs = signs
            self._report()
        self.council.turn()
        if now > self._next_look:
            self._next_look = now + _PATIENCE_NS // 6
            self._name_stragglers(now)
        if not self.writing and not self.copies.is_reading:
            self.let_go()

    def let_go(self) -> int:
        """Let go of the memory of ranks that do not live here any more; return how much it was."""
        ranks, nbytes = self.roll.let_go()
        if ranks:
            self._serve(self, {"op": "forget", "ranks": ranks})
        return nbytes

    def make_room(self) -> int:
        """Let go of what another number of ranks left, before it is known whether anybody wants it; return how much it was."""
        if self.writing or self.copies.is_reading:
            return 0
        self.roll.retire_others()
        return self.let_go()

    def _name_stragglers(self, now: int) -> None:
        ranks = self.roll.stragglers(now - _PATIENCE_NS) if self.begun else []
        if ranks:
            who = ", ".join(map(str, ranks))
            self.complain(
                f"rank {who} does not save what other ranks have: nothing is complete, and soon their saves will be skipped. All "
                "ranks call save() at the same steps, not one of them alone (if rank == 0)."
            )

    def _report(self) -> None:
        views = self.roll.views()
        for key in self.roll.pending():
            verdict = decisions.decide(key, views, self.cycle.local)
            if verdict == VOID:
                self.roll.void(key)
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
        snapshot = self.roll.snapshot(key)
        if snapshot is not None and self._reported.get(key) != snapshot.serials():
            self._reported = {old: known for old, known in self._reported.items() if old >= (key[0] - 1, 0)}
            self._reported[key] = snapshot.serials()
            self._say_sealed(snapshot, any(seal.on_disk for seal in snapshot.seals.values()))

    def _say_sealed(self, snapshot: Snapshot, want: bool, anew: bool = False) -> None:
        self.council.say(op="sealed", key=snapshot.key, edition=snapshot.edition(), want=want, anew=anew)

    def _complete(self, key: Key, folder: str, send: bool) -> None:
        """All ranks have it. What is to be written or sent is leased before anybody is told: then it can't be overwritten."""
        if folder:
            self.pen.order(key, folder)
        if send:
            self.copies.send(key)
        self.farthest = max(self.farthest, key)
        self.roll.complete(key, self._reported.get(key))
        self.roll.retire_others()
        if key[0] == self.generation:
            self._went_well()

    def _went_well(self) -> None:
        """The job got further, or ended in good order. The chair's node keeps the book of that."""
        if self.cycle.first == 0:
            self.tries.forget()

    def _hear(self, message: Message) -> None:
        """Do what the chair says."""
        op, key = message["op"], tuple(message.get("key") or ())
        if op == "begin":
            self.generation, self.begun, self._again = int(message["generation"]), True, True
        elif op == "decided" and message["verdict"] == COMPLETE:
            self._complete(key, message["folder"], bool(message.get("send")))
        elif op == "decided":
            self.roll.void(key)
        elif op == "write":
            self.pen.order(key, message["folder"])
        elif op in ("durable", "failed", "dropped"):
            self._written(message["folder"], op, str(message.get("why", "")))
        elif op in ("peers", "send", "replicated", "unsent"):
            self.copies.hear(message)
        elif op == "aloud":
            self.complain(str(message["text"]))
        elif op == "when":
            self.council.say(op="at", **self.roll.pace())
        elif op == "arm":
            self.roll.arm(int(message["step"]))
        elif op == "done":
            self.done = True
            self.directory.say_leaving()
            if all(member.said_bye for member in self.roll.locals().values()):
                self._went_well()  # otherwise the job is over because one died
        else:
            self._serve(self, message)

    # -- to disk ----------------------------------------------------------------------------------------------------

    def _written(self, folder: str, became: str, why: str) -> None:
        """Take note that a snapshot is on disk, or why it is not, or that no chair knows of it any more."""
        if became == "failed":
            self.fail(why)
        again = self.pen.ended(folder, became == "durable", self.copies.busy())
        if again is not None:
            self._say_sealed(again, want=True, anew=True)

    def secure(self) -> None:
        """Have the newest complete snapshot on disk: a rank failed, or everybody leaves."""
        self.turn()
        self.council.say(op="secure")
        self.council.turn()

    def secure_step(self, step: int) -> bool:
        """Have a step written if it is the newest that the ranks here have sealed; return whether it will be."""
        self.turn()
        seals = [seal for member in self.roll.locals().values() for seal in member.usable(self.cycle.world).values()]
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

    def reopen(self) -> None:
        """A rank has come: whoever said that we are about to end was wrong."""
        if self.done:
            self.done = False
            self.directory.say_leaving(False)

    def missing(self) -> int:
        """Return how many ranks are yet to come, as far as is known here."""
        return self.council.chair.missing() if self.council.chair is not None else 0

    def leave(self) -> None:
        """Have the newest complete snapshot on disk: this saver is about to end."""
        self.directory.say_leaving()
        self.turn()
        self._say_once(op="leave")
        self.council.turn()

    def leave_later(self) -> bool:
        """Have what became complete since :meth:`leave` on disk too: ranks may outlive the launcher for a moment. Return whether
        there is any; each is tried once."""
        newest = self.roll.newest()
        if newest is None or newest.key <= self._last or not newest.is_complete or newest.is_durable:
            return False
        self._last = newest.key
        self.leave()
        return True

    def is_settled(self) -> bool:
        """Whether nothing is left to be done for anybody."""
        gone = self.council.cut_for()
        if gone > GONE_S:
            return True  # without the chair nothing of what is being written becomes a checkpoint
        return not self.writing and (self.done or not self.begun or gone > _CUT_S)

    def is_done(self) -> bool:
        """Whether all ranks of this node have come, and taken leave or died."""
        return self.roll.all_here() and all(item.said_bye or item.gone for item in self.roll.locals().values())

    def fail(self, why: str) -> None:
        """Keep a failure for whoever asks, and let all ranks know that there is one."""
        _LOG.error("%s", why)
        self.failures.append(why)
        for member in self.roll.members.values():
            member.ledger.words[L_FAILURES] += 1

    def go_back_to(self, key: Key | None, generation: int) -> None:
        """Begin from a snapshot in memory (``None``: from disk, or afresh): whatever is newer is void."""
        self.generation = generation
        self._reported, self._asked = {}, []
        self.roll.go_back_to(key)
        self.copies.go_back_to(key)

    def complain(self, text: str) -> None:
        """Say something once."""
        if text not in self._complained:
            self._complained.add(text)
            _LOG.warning("%s", text)

    def close(self) -> None:
        """Let go of all memory."""
        self.council.close()
        self.copies.close()
        self.roll.retire(list(self.roll.members))
        self.roll.let_go()
        self.directory.close()
