"""The saver's desk: what ranks say over their connections, and what they are answered."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilience.checkpoint.arena import Slot
from resilience.checkpoint.ledger import Ledger
from resilience.checkpoint.saver import clerk, restoring
from resilience.checkpoint.saver.book import Book, Member
from resilience.checkpoint.saver.restoring import DISK, MEMORY, Candidate, Round
from resilience.checkpoint.storage import DirectoryInUse, Stored
from resilience.errors import CheckpointError
from resilience.pulse import channel

if TYPE_CHECKING:
    from resilience.checkpoint.saver.process import Saver

_LOG = logging.getLogger("resilience.saver")


@dataclass
class Caller:
    """A rank's connection."""

    sock: socket.socket
    book: Book | None = None
    rank: int = -1
    options: dict[str, Any] = field(default_factory=dict)
    pid: int = 0
    cycle: int = 0
    heard_failures: int = 0


@dataclass
class Meeting:
    """Ranks of one book that agree on what to go on from."""

    round: Round
    deadline: float
    callers: dict[int, Caller] = field(default_factory=dict)
    fresh: bool = True  # all ranks would begin afresh if there is nothing


class Desk:
    """Listens for ranks."""

    def __init__(self, saver: Saver, server: socket.socket) -> None:
        self._saver = saver
        self._server = server
        self._callers: list[Caller] = []
        self._meetings: dict[int, Meeting] = {}  # by id of the book
        saver.selector.register(server, selectors.EVENT_READ, lambda _: self._accept())

    def close(self) -> None:
        """Hang up on everybody."""
        for caller in self._callers:
            caller.sock.close()
        self._server.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        connection.settimeout(5.0)  # a rank that does not take its answer must not stop the saver
        caller = Caller(connection)
        self._callers.append(caller)
        self._saver.selector.register(connection, selectors.EVENT_READ, lambda _: self._hear(caller))

    def _hear(self, caller: Caller) -> None:
        try:
            received = channel.receive(caller.sock)
        except OSError:
            received = None
        if received is None:
            self._hang_up(caller)
            return
        message, fds = received
        try:
            self._answer(caller, message, fds)
        except (CheckpointError, OSError, ValueError, KeyError, TypeError) as error:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
            text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            self._tell(caller, {"error": text, "leaving": getattr(error, "leaving", None)})

    def _hang_up(self, caller: Caller) -> None:
        self._saver.selector.unregister(caller.sock)
        caller.sock.close()
        self._callers.remove(caller)

    def _tell(self, caller: Caller, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(OSError):
            channel.send(caller.sock, message, fds)

    def _answer(self, caller: Caller, message: dict[str, Any], fds: list[int]) -> None:
        op = message.get("op")
        if op == "hello":
            self._hello(caller, message)
            return
        if caller.book is None:
            raise ValueError("say hello first")
        if op == "deposit":
            self._deposit(caller, fds)
        elif op == "restore":
            self._restore(caller, message)
        elif op == "loaded":
            self._loaded(caller, str(message.get("wrong", "")))
        elif op == "failures":
            news = caller.book.failures[caller.heard_failures :]
            caller.heard_failures = len(caller.book.failures)
            self._tell(caller, {"failures": [text[:2000] for text in news[-8:]], "more": max(0, len(news) - 8)})
        elif op == "here":
            self._tell(caller, {"ok": True})
        elif op == "secure":
            self._tell(caller, {"coming": caller.book.secure_step(int(message["step"]))})
        elif op == "bye":
            caller.book.members[caller.rank].said_bye = True
            if all(member.said_bye or member.gone for member in caller.book.members.values()):
                caller.book.forget_tries()
                caller.book.secure()
            self._tell(caller, {"ok": True})
        else:
            raise ValueError(f"unknown request {op!r}")

    # -- coming -----------------------------------------------------------------------------------------------------

    def _hello(self, caller: Caller, message: dict[str, Any]) -> None:
        rank, world, cycle = int(message["rank"]), int(message["world"]), int(message["cycle"])
        caller.rank, caller.pid, caller.cycle = rank, int(message["pid"]), cycle
        caller.options = message["options"]
        self._refuse_second_job(str(message["directory"]), rank, caller.pid)
        book = caller.book = self._saver.book(str(message["directory"]), caller.options)
        book.begin(cycle, world, rank, caller.pid, int(message["generation"]))
        self._saver.watch(caller.pid, book, rank)
        caller.heard_failures = len(book.failures)
        member = book.members.get(rank)
        usable = member is not None and member.ledger.number == int(message["slots"])
        answer = {"generation": book.generation, "known": usable}
        self._tell(caller, answer, (self._saver.wake, *(member.fds() if member is not None and usable else ())))
        if member is not None and usable:
            self._joined(caller, member)

    def _refuse_second_job(self, directory: str, rank: int, pid: int) -> None:
        book = self._saver.books.get(directory)
        member = book.members.get(rank) if book is not None else None
        if member is not None and member.pid not in (0, pid) and self._saver.watches(member.pid):
            raise DirectoryInUse(
                f"{directory}: another job writes its checkpoints here (rank {rank} has pid {member.pid}). Nothing was written. "
                "Give each job a directory of its own, or end the other one."
            )

    def _deposit(self, caller: Caller, fds: list[int]) -> None:
        assert caller.book is not None
        member = Member(caller.rank, Ledger(fds[0]), [Slot(fd) for fd in fds[1:]])
        caller.book.deposit(member)
        self._joined(caller, member)
        self._saver.pass_on(caller.book, member, caller.options)
        self._tell(caller, {"ok": True})

    def _joined(self, caller: Caller, member: Member) -> None:
        assert caller.book is not None
        member.pid, member.cycle, member.said_bye, member.gone = caller.pid, caller.cycle, False, False

    # -- restoring --------------------------------------------------------------------------------------------------

    def _restore(self, caller: Caller, message: dict[str, Any]) -> None:
        book = caller.book
        assert book is not None
        meeting = self._meetings.get(id(book))
        if meeting is None:
            meeting = Meeting(Round(book.world), time.monotonic() + float(message["timeout"]))
            self._meetings[id(book)] = meeting
        step = message.get("step")
        meeting.round.asked[caller.rank] = None if step is None else int(step)
        meeting.fresh = meeting.fresh and bool(message.get("fresh"))
        meeting.callers[caller.rank] = caller
        if meeting.round.all_asked():
            self._choose(book, meeting)

    def _choose(self, book: Book, meeting: Meeting) -> None:
        book.turn()
        wanted = set(meeting.round.asked.values())
        if len(wanted) > 1:
            self._end(book, meeting, {"error": f"ranks ask for different steps: {meeting.round.asked}"})
            return
        in_memory = book.restorable()
        stored = {item.manifest.key: item for item in reversed(book.directory.stored(book.complain))}
        for item in stored.values():
            if item.manifest.world != book.world:
                meeting.round.bad[Candidate(item.manifest.key, DISK)] = (
                    f"step {item.manifest.step} was saved by {item.manifest.world} ranks, and here are {book.world}: other world "
                    "sizes are not supported yet"
                )
        (step,) = wanted
        found = restoring.candidates(in_memory, list(stored))
        choice = restoring.pick(found, step=step, bad=meeting.round.bad, failed=book.tries)
        self._set_aside(book, found, choice, stored)
        meeting.round.choice, meeting.round.loaded = choice, {}
        if choice is None:
            if meeting.fresh and step is None and not meeting.round.bad:
                book.go_back_to(None)
                book.new_generation()
            problems = list(meeting.round.bad.values())
            self._end(book, meeting, {"found": None, "problems": problems, "generation": book.generation})
            return
        for rank, caller in meeting.callers.items():
            message, fds = self._describe(
                book, choice, rank, str(stored[choice.key].path) if choice.where == DISK else ""
            )
            self._tell(caller, message, fds)

    def _set_aside(
        self, book: Book, found: list[Candidate], choice: Candidate | None, stored: dict[Any, Stored]
    ) -> None:
        """Have a checkpoint that restarts failed from no longer count, and say so."""
        for item in found:
            newer = choice is not None and item.key > choice.key
            if newer and book.tries.get(item.key, 0) >= restoring.TRIES:
                book.complain(
                    f"step {item.key[1]} is set aside: the job went on from it and failed, twice, without progress."
                )
                if item.where == DISK:
                    book.directory.set_aside(stored[item.key], "two restarts failed from it")

    def _describe(self, book: Book, choice: Candidate, rank: int, path: str) -> tuple[dict[str, Any], tuple[int, ...]]:
        base = {"found": choice.where, "generation": choice.key[0], "step": choice.key[1]}
        if choice.where == DISK:
            return {**base, "path": path}, ()
        peers, fds = [], []
        for other, member in sorted(book.members.items()):
            seal = member.seals()[choice.key]
            slot = member.slots[seal.slot]
            peers.append({"rank": other, "data": seal.data, "header": [seal.header_at, seal.header]})
            if other == rank:
                known = book.digests.get((rank, seal.serial)) or clerk.digests_of(slot, seal)
                book.digests[rank, seal.serial] = known
                base |= {"values": [seal.values_at, seal.values], "digests": known}
            fds.append(slot.fd)
        return {**base, "peers": peers}, tuple(fds)

    def _loaded(self, caller: Caller, wrong: str) -> None:
        book = caller.book
        assert book is not None
        meeting = self._meetings.get(id(book))
        if meeting is None or meeting.round.choice is None:
            raise ValueError("nothing is being restored")
        meeting.round.loaded[caller.rank] = wrong
        if not meeting.round.all_loaded():
            return
        choice = meeting.round.choice
        bad = {rank: text for rank, text in meeting.round.loaded.items() if text}
        if bad:
            rank, text = min(bad.items())
            meeting.round.bad[choice] = f"rank {rank}: {text}"
            book.complain(f"step {choice.key[1]} ({choice.where}) can't be used: rank {rank}: {text}")
            self._choose(book, meeting)
            return
        book.go_back_to(choice.key if choice.where == MEMORY else None)
        book.restored_from(choice.key)
        _LOG.info("the job goes on from step %s (%s).", choice.key[1], choice.where)
        book.new_generation()
        self._end(book, meeting, {"go": True, "generation": book.generation})

    def _end(self, book: Book, meeting: Meeting, message: dict[str, Any]) -> None:
        self._meetings.pop(id(book), None)
        for caller in meeting.callers.values():
            self._tell(caller, message)

    def look_after(self) -> None:
        """End agreements that take too long, naming who is missing."""
        for book in self._saver.books.values():
            meeting = self._meetings.get(id(book))
            if meeting is not None and time.monotonic() > meeting.deadline:
                missing = ", ".join(map(str, meeting.round.missing()))
                self._end(book, meeting, {"error": f"rank {missing} did not come to restore() in time"})

    def forget(self, book: Book, rank: int) -> None:
        """A rank is gone: whoever waits for it to restore need not."""
        meeting = self._meetings.get(id(book))
        if meeting is not None and (rank in meeting.callers):
            meeting.callers.pop(rank)
            self._end(book, meeting, {"error": f"rank {rank} ended while the ranks were restoring"})
