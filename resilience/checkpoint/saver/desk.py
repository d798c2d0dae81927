"""The saver's desk: what ranks say over their connections, and what they are answered."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilience.checkpoint.arena import Slot
from resilience.checkpoint.ledger import Ledger
from resilience.checkpoint.saver.book import Book
from resilience.checkpoint.saver.member import Member
from resilience.checkpoint.saver.reception import Reception
from resilience.checkpoint.saver.roll import Cycle
from resilience.checkpoint.saver.rooms import Rooms
from resilience.checkpoint.stores.claims import DirectoryInUse
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


class Desk:
    """Listens for ranks."""

    def __init__(self, saver: Saver, server: socket.socket) -> None:
        self._saver = saver
        self._server = server
        self._callers: list[Caller] = []
        self.reception = Reception()
        self._rooms = Rooms()
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
            refusal = {"leaving": getattr(error, "leaving", None), "run": getattr(error, "run", "")}
            self._tell(caller, {"error": text, **refusal})

    def _hang_up(self, caller: Caller) -> None:
        self._saver.selector.unregister(caller.sock)
        caller.sock.close()
        self._callers.remove(caller)
        self._rooms.through(id(caller))

    def _tell(self, caller: Caller, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(OSError):
            channel.send(caller.sock, message, fds)

    def _answer(self, caller: Caller, message: dict[str, Any], fds: list[int]) -> None:
        op = str(message.get("op"))
        if op == "hello":
            self._hello(caller, message)
            return
        book = caller.book
        if book is None:
            raise ValueError("say hello first")
        if op == "deposit":
            self._deposit(caller, book, fds)
        elif op == "restore":
            self.reception.ask(book, caller.rank, message, lambda *words: self._tell(caller, *words))
        elif op == "loaded":
            self.reception.loaded(book, caller.rank, message)
        elif op == "left":
            self._saver.left(caller.pid, book, caller.rank)
        else:
            self._tell(caller, self._reply(caller, book, op, message))

    def _reply(self, caller: Caller, book: Book, op: str, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to what can be answered at once."""
        if op == "room":
            need, now = int(message["need"]), int(message["left"])
            left, others = self._rooms.announce(id(caller), need, now)
            freed = book.make_room() if need > now or need + others > left else 0
            return {"left": left + freed, "others": others, "freed": self._rooms.freed(freed)}
        if op == "failures":
            news = book.failures[caller.heard_failures :]
            caller.heard_failures = len(book.failures)
            return {"failures": [text[:2000] for text in news[-8:]], "more": max(0, len(news) - 8)}
        if op == "secure":
            return {"coming": book.secure_step(int(message["step"]))}
        if op in ("chair", "attend", "begun"):
            return self._assemble(book, op, message)
        if op == "bye":
            book.roll.members[caller.rank].said_bye = True
            if book.is_done():
                book.say_bye()
        elif op != "here":
            raise ValueError(f"unknown request {op!r}")
        return {"ok": True}

    # -- coming -----------------------------------------------------------------------------------------------------

    def _hello(self, caller: Caller, message: dict[str, Any]) -> None:
        rank, cycle = int(message["rank"]), Cycle(*map(int, message["cycle"]))
        caller.rank, caller.pid, caller.cycle = rank, int(message["pid"]), cycle.number
        caller.options = message["options"]
        self._refuse_second_job(str(message["directory"]), rank, cycle.world, caller.pid)
        book = caller.book = self._saver.book(str(message["directory"]), caller.options, claim=cycle.first == 0)
        book.begin(cycle, rank, caller.pid, int(message["generation"]))
        self._saver.watch(caller.pid, book, rank)
        caller.heard_failures = 0 if message["generation"] else len(book.failures)  # it lost the saver that it had
        member = book.roll.members.get(rank)
        usable = member is not None and member.ledger.number == int(message["slots"])
        begun = book.generation if book.begun else 0
        answer = {"generation": begun, "known": usable, "seated": book.council.seated}
        self._tell(caller, answer, (self._saver.wake, *(member.fds() if member is not None and usable else ())))
        if member is not None and usable:
            self._joined(caller, member)

    def _refuse_second_job(self, directory: str, rank: int, world: int, pid: int) -> None:
        book = self._saver.books.get(directory)
        if book is None:
            return
        here = [it for it in book.roll.members.values() if it.pid not in (0, pid) and self._saver.watches(it.pid)]
        others = [it for it in here if it.rank == rank or book.cycle.world != world]
        if others:
            raise DirectoryInUse(
                f"{directory}: another job writes its checkpoints here (rank {others[0].rank} has pid {others[0].pid}). Nothing "
                "was written. Give each job a directory of its own, or end the other one."
            )

    def has_untold(self) -> bool:
        """Whether a rank that is still here has not heard of a failure yet."""
        return any(
            caller.book is not None and caller.heard_failures < len(caller.book.failures) for caller in self._callers
        )

    def _deposit(self, caller: Caller, book: Book, fds: list[int]) -> None:
        member = Member(caller.rank, Ledger(fds[0]), [Slot(fd) for fd in fds[1:]])
        book.deposit(member)
        self._rooms.through(id(caller))
        self._joined(caller, member)
        self._saver.pass_on(book, member, caller.options)
        self._tell(caller, {"ok": True})

    def _assemble(self, book: Book, op: str, message: dict[str, Any]) -> dict[str, Any]:
        """Meet the savers of other nodes: as the chair, or where the chair is; see :mod:`assembly`."""
        if op == "begun":
            return {"generation": book.generation if book.begun else 0, "missing": book.missing()}
        known = message.get("known")
        if op == "chair":
            before = known or {"port": 0, "secret": ""}
            chair = book.preside(str(message["host"]), int(before["port"]), str(before["secret"]))
            self._saver.keep_round(book, chair)
            return {**chair, "mark": book.directory.mark()}
        chair = {"host": str(message["host"]), "port": int(message["port"]), "secret": str(message["secret"])}
        if known is None and not book.directory.sees(str(message["mark"])):
            raise CheckpointError(
                f"{book.directory.path} on {socket.gethostname()} is not the directory that the node of rank 0 ({chair['host']}) "
                "writes to: a node that takes this one's place would find nothing of it. Nothing was set up. Give a directory that "
                "all nodes share, or an object store (s3://…)."
            )
        if known is None:
            _LOG.info(
                "%s is shared: %s and %s have the same.", book.directory.path, chair["host"], socket.gethostname()
            )
        book.attend(**chair)
        self._saver.keep_round(book, chair)
        return {"ok": True}

    def _joined(self, caller: Caller, member: Member) -> None:
        assert caller.book is not None
        member.pid, member.cycle, member.said_bye, member.gone = caller.pid, caller.cycle, False, False
        caller.book.reopen()
