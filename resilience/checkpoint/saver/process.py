"""The saver's loop: hears ranks and launcher, keeps the books, has the clerk write, and ends when there is nothing left to do.

1) ``hello``    (rank) who it is and where it saves; gets its generation, and its memory if the saver has it already
2) ``deposit``  (rank) its memory, where the saver had none; the saver passes it on to the launcher, which keeps it too
3) ``restore``, ``loaded``  (rank) see :mod:`restoring`
4) ``failures`` (rank) what went wrong in the background since it last asked
5) ``bye``      (rank) it is done; everything complete is to be durable
6) ``secure``   (launcher) a cycle ended: everything complete is to be durable
7) ``quit``     (launcher) the same, and then the saver ends; so it does when the launcher dies, or without one the last rank

A rank is watched by its pidfd; one that dies without ``bye`` counts as a failure. Saving itself sends nothing here: the ledgers say
it all, and a wake-up (an eventfd) only makes the saver look sooner.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilience.checkpoint.arena import Slot
from resilience.checkpoint.ledger import L_CYCLE, L_PID, Ledger
from resilience.checkpoint.saver import clerk
from resilience.checkpoint.saver.book import Book, Member, Options, Snapshot
from resilience.checkpoint.saver.desk import Desk
from resilience.pulse import channel

_LOG = logging.getLogger("resilience.saver")
_TURN_S = 0.05
_QUIET_S = 0.5
_SETTLED_S = 1.0
_LINGER_S = 10.0  # without a launcher: a rank that died may be started again by somebody else


class Saver:
    """All books of a node, and the end of it."""

    def __init__(self, path: str, launcher: socket.socket | None, deadline: float) -> None:
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.books: dict[str, Book] = {}
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._clerk = clerk.Clerk()
        self._done: collections.deque[Callable[[], None]] = collections.deque()
        self._launcher = launcher
        self._deadline = deadline
        self._watched: dict[int, tuple[int, Book, int]] = {}  # by pid: pidfd, book, rank
        self._leaving_since = 0.0
        self._idle_since = time.monotonic()
        self._failed_ranks = False
        self._digesting = False
        self.selector.register(self.wake, selectors.EVENT_READ, lambda _: self._hear_wake())
        if launcher is not None:
            launcher.setblocking(True)
            self.selector.register(launcher, selectors.EVENT_READ, lambda _: self._hear_launcher())
        self._desk = Desk(self, channel.listen(path))

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Loop until there is nothing left to do."""
        while not self._is_over():
            for key, _ in self.selector.select(_TURN_S if self._watched or self._leaving_since else _QUIET_S):
                key.data(key.fileobj)
            while self._done:
                self._done.popleft()()
            for book in self.books.values():
                book.turn()
            self._desk.look_after()
            self._digest_while_idle()
        self.close()

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._watched:
            self._idle_since = now
        done = bool(self.books) and all(book.is_done() for book in self.books.values())
        if not self._leaving_since and self._launcher is None and done:
            self.leave()  # all ranks took leave, and may live on without us
        if not self._leaving_since and self._launcher is None and not self._watched:
            linger = _LINGER_S if self._failed_ranks or not self.books else 0.0
            if now - self._idle_since >= linger:
                self.leave()
        if not self._leaving_since:
            return False
        if all(not book.writing for book in self.books.values()):
            return True
        late = now - self._leaving_since > self._deadline
        if late:
            _LOG.error(
                "what is complete could not be made durable within %g s; the saver ends without it.", self._deadline
            )
        return late

    def leave(self) -> None:
        """Make durable what is complete; then the loop ends."""
        if not self._leaving_since:
            self._leaving_since = time.monotonic()
            for book in self.books.values():
                book.directory.say_leaving()
                book.secure()

    def close(self) -> None:
        """Let go of everything."""
        self._desk.close()
        for book in self.books.values():
            book.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # noqa: PTH108

    def _hear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)

    def _later(self, act: Callable[[], None]) -> None:
        """Have something done by the loop. Called by other threads."""
        self._done.append(act)
        with contextlib.suppress(OSError):
            os.eventfd_write(self.wake, 1)

    def _digest_while_idle(self) -> None:
        """Compute the digests of what would be restored, while nothing else is to be done."""
        if self._digesting or any(book.writing for book in self.books.values()):
            return
        for book in self.books.values():
            snapshot = book.undigested(_SETTLED_S)
            if snapshot is not None:
                self._digesting = True
                slots = {rank: book.members[rank].slots[seal.slot] for rank, seal in snapshot.seals.items()}
                self._clerk.do(lambda book=book, snapshot=snapshot, slots=slots: self._digest(book, snapshot, slots))  # type: ignore[misc]
                return

    def _digest(self, book: Book, snapshot: Snapshot, slots: dict[int, Slot]) -> None:
        try:
            found = {rank: clerk.digests_of(slots[rank], seal) for rank, seal in snapshot.seals.items()}
        except (OSError, ValueError) as error:
            _LOG.warning("the digests of step %s could not be computed: %s", snapshot.key[1], error)
            found = {}

        def keep() -> None:
            self._digesting = False
            again = book.snapshot(snapshot.key)
            if again is not None and again.serials() == snapshot.serials():
                book.keep_digests(snapshot, found)

        self._later(keep)

    def end_soon(self) -> None:
        """Make durable what is complete and end; for a signal handler."""
        self._later(self.leave)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def watch(self, pid: int, book: Book, rank: int) -> None:
        """Know when a rank ends."""
        if pid in self._watched:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            self._rank_gone(book, rank, pid)
            return
        self._watched[pid] = (pidfd, book, rank)
        self.selector.register(pidfd, selectors.EVENT_READ, lambda _: self._pid_ended(pid))

    def watches(self, pid: int) -> bool:
        """Whether a rank is still there."""
        return pid in self._watched

    def _pid_ended(self, pid: int) -> None:
        pidfd, book, rank = self._watched.pop(pid)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        self._rank_gone(book, rank, pid)

    def _rank_gone(self, book: Book, rank: int, pid: int) -> None:
        member = book.members.get(rank)
        if member is not None and member.pid == pid:
            member.gone = True
            self._failed_ranks = self._failed_ranks or not member.said_bye
        self._desk.forget(book, rank)
        book.secure()

    # -- the launcher -----------------------------------------------------------------------------------------------

    def _hear_launcher(self) -> None:
        assert self._launcher is not None
        try:
            received = channel.receive(self._launcher)
        except OSError:
            received = None
        if received is None:
            self.selector.unregister(self._launcher)
            self._launcher.close()
            self._launcher = None
            self.leave()
            return
        message, fds = received
        op = message.get("op")
        if op == "vault":
            self.take_over(message, fds)
        elif op == "secure":
            for book in self.books.values():
                book.secure()
        elif op == "quit":
            self.leave()

    def take_over(self, message: dict[str, Any], fds: list[int]) -> None:
        """Take in memory that an earlier saver of this node had."""
        book = self.book(message["directory"], message["options"])
        member = Member(int(message["rank"]), Ledger(fds[0]), [Slot(fd) for fd in fds[1:]])
        member.cycle, member.pid = member.ledger.words[L_CYCLE], member.ledger.words[L_PID]
        book.deposit(member)
        book.world = max(book.world, int(message["world"]))
        book.cycle = max(book.cycle, member.cycle)
        book.take_over()
        if member.pid:
            self.watch(member.pid, book, member.rank)

    def pass_on(self, book: Book, member: Member, options: dict[str, Any]) -> None:
        """Have the launcher hold a rank's memory too."""
        if self._launcher is not None:
            message = {
                "op": "deposit",
                "directory": str(book.directory.path),
                "rank": member.rank,
                "world": book.world,
                "options": options,
            }
            with contextlib.suppress(OSError):
                channel.send(self._launcher, message, member.fds())

    # -- books ------------------------------------------------------------------------------------------------------

    def book(self, directory: str, options: dict[str, Any]) -> Book:
        """Return the book of a directory; the first rank's options count."""
        found = self.books.get(directory)
        if found is None:
            found = Book(Path(directory), Options(**options), self._write)
            found.directory.claim(found.options.run)
            self.books[directory] = found
        return found

    def _write(self, book: Book, snapshot: Snapshot) -> None:
        slots = {rank: book.members[rank].slots[seal.slot] for rank, seal in snapshot.seals.items()}

        def done(error: str, digests: dict[int, list[str]]) -> None:
            if error:
                _LOG.error("%s", error)
            self._later(lambda: book.written(snapshot, error, digests))

        self._clerk.write(
            clerk.Job(
                book.directory,
                snapshot.key,
                snapshot.cycle,
                snapshot.world,
                snapshot.seals,
                slots,
                book.known_digests(snapshot),
                book.options.keep,
                book.options.keep_every,
                book.options.facts,
                done,
            )
        )


def ignore_signals_of_the_job() -> None:
    """Ctrl-C and hang-ups are the job's; what is complete is made durable all the same."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
