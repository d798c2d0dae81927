"""The saver's loop: hears ranks and launcher, keeps the books, has the clerk write, and ends when there is nothing left to do.

1) ``hello``    (rank) who it is and where it saves; gets its generation, and its memory if the saver has it already
2) ``room``     (rank) how much memory it is about to take; ``deposit``: that memory; the saver passes it on to the launcher, which
                keeps it too
3) ``chair``, ``attend``, ``begun``  (rank) how savers of several nodes meet, see :mod:`assembly`; ``restore``, ``loaded``
                (rank) see :mod:`restoring`
4) ``failures`` (rank) what went wrong in the background since it last asked
5) ``bye``      (rank) it is done; everything complete is to be durable; ``left``: the same, and it failed; nobody answers that
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
from dataclasses import astuple, replace
from typing import Any

from resilience.checkpoint import stores
from resilience.checkpoint.arena import Slot
from resilience.checkpoint.ledger import L_CYCLE, L_PID, Ledger
from resilience.checkpoint.saver import clerk
from resilience.checkpoint.saver.book import Book
from resilience.checkpoint.saver.desk import Desk
from resilience.checkpoint.saver.member import Member, Snapshot
from resilience.checkpoint.saver.roll import Cycle
from resilience.checkpoint.saver.wishes import Options
from resilience.errors import CheckpointError
from resilience.pulse import channel

_LOG = logging.getLogger("resilience.saver")
_TURN_S = 0.05
_QUIET_S = 0.5
_SETTLED_S = 1.0
_TELL_S = 5.0  # at the end: for ranks that wait to hear why their last save failed
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
        self._watched: dict[int, tuple[int, list[tuple[Book, int]]]] = {}  # by pid: pidfd; books and ranks
        self._leaving_since = 0.0
        self._settled_since = 0.0  # nothing is left to be done since then
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
            self._desk.reception.look_after()
            self._digest_while_idle()
        self.close()

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._watched:
            self._idle_since = now
        done = bool(self.books) and all(book.done for book in self.books.values())
        if not self._leaving_since and self._launcher is None and done:
            self.leave()  # all ranks took leave, and may live on without us
        if not self._leaving_since and self._launcher is None and not self._watched:
            linger = _LINGER_S if self._failed_ranks or not self.books else 0.0
            if now - self._idle_since >= linger:
                self.leave()
        if not self._leaving_since:
            return False
        if all(book.is_settled() for book in self.books.values()):
            more = [book.leave_later() for book in self.books.values()]
            if any(more):
                return False
            self._settled_since = self._settled_since or now
            return not self._desk.has_untold() or now - self._settled_since > _TELL_S
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
                book.leave()

    def close(self) -> None:
        """Let go of everything; of the path first, since whoever finds nobody there starts another saver."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # noqa: PTH108
        self._clerk.close()
        self._desk.close()
        for book in self.books.values():
            book.close()

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
            snapshot = undigested(book)
            if snapshot is not None:
                self._digesting = True
                slots = slots_of(book, snapshot)
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
            again = book.roll.snapshot(snapshot.key)
            if again is not None and again.serials() == snapshot.serials():
                book.roll.digests.keep(snapshot, found, book.roll.members)

        self._later(keep)

    def end_soon(self) -> None:
        """Make durable what is complete and end; for a signal handler."""
        self._later(self.leave)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def watch(self, pid: int, book: Book, rank: int) -> None:
        """Know when a rank ends."""
        if pid not in self._watched:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                self._rank_gone(book, rank, pid)
                return
            self._watched[pid] = (pidfd, [])
            self.selector.register(pidfd, selectors.EVENT_READ, lambda _: self._pid_ended(pid))
        if (book, rank) not in self._watched[pid][1]:
            self._watched[pid][1].append((book, rank))

    def watches(self, pid: int) -> bool:
        """Whether a rank is still there."""
        return pid in self._watched

    def left(self, pid: int, book: Book, rank: int) -> None:
        """A rank's script failed, and its process may live on: as if that had ended."""
        if pid in self._watched and (book, rank) in self._watched[pid][1]:
            self._watched[pid][1].remove((book, rank))
            if not self._watched[pid][1]:
                self._unwatch(pid)
        self._rank_gone(book, rank, pid)

    def _unwatch(self, pid: int) -> list[tuple[Book, int]]:
        pidfd, places = self._watched.pop(pid)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        return places

    def _pid_ended(self, pid: int) -> None:
        for book, rank in self._unwatch(pid):
            self._rank_gone(book, rank, pid)

    def _rank_gone(self, book: Book, rank: int, pid: int) -> None:
        member = book.roll.members.get(rank)
        if member is not None and member.pid == pid:
            member.gone = True
            self._failed_ranks = self._failed_ranks or not member.said_bye
        self._desk.reception.forget(book, rank)
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
        elif op == "round":
            self._take_seat(str(message["directory"]), message["chair"])
        elif op == "secure":
            for book in self.books.values():
                book.secure()
        elif op == "quit":
            self.leave()

    def take_over(self, message: dict[str, Any], fds: list[int]) -> None:
        """Take in memory that an earlier saver of this node had."""
        cycle = Cycle(*message["cycle"])
        book = self.book(message["directory"], message["options"], claim=cycle.first == 0)
        member = Member(int(message["rank"]), Ledger(fds[0]), [Slot(fd) for fd in fds[1:]])
        member.cycle, member.pid = member.ledger.words[L_CYCLE], member.ledger.words[L_PID]
        book.take_over(replace(cycle, number=member.cycle), member)
        if member.pid:
            self.watch(member.pid, book, member.rank)

    def _take_seat(self, directory: str, chair: dict[str, Any]) -> None:
        """Sit in the council of the nodes where an earlier saver sat."""
        book = self.books.get(directory)
        if book is None or book.cycle.alone:
            return
        try:
            if book.cycle.first == 0:
                book.preside(**chair)
            else:
                book.attend(**chair)
        except (OSError, CheckpointError) as error:
            _LOG.error("the other nodes can't be reached any more, nothing is saved until a restart: %s", error)

    def keep_round(self, book: Book, chair: dict[str, Any]) -> None:
        """Have the launcher know where the nodes meet, for a saver that takes our place."""
        if self._launcher is not None:
            with contextlib.suppress(OSError):
                channel.send(self._launcher, {"op": "round", "directory": str(book.directory.path), "chair": chair})

    def pass_on(self, book: Book, member: Member, options: dict[str, Any]) -> None:
        """Have the launcher hold a rank's memory too."""
        if self._launcher is not None:
            message = {
                "op": "deposit",
                "directory": str(book.directory.path),
                "rank": member.rank,
                "cycle": list(astuple(book.cycle)),
                "options": options,
            }
            with contextlib.suppress(OSError):
                channel.send(self._launcher, message, member.fds())

    def _forget(self, book: Book, ranks: list[int]) -> None:
        """Have the launcher let go of ranks' memory too: they live elsewhere now."""
        if self._launcher is not None:
            with contextlib.suppress(OSError):
                directory = str(book.directory.path)
                channel.send(self._launcher, {"op": "forget", "directory": directory, "ranks": ranks})

    # -- books ------------------------------------------------------------------------------------------------------

    def book(self, directory: str, options: dict[str, Any], *, claim: bool) -> Book:
        """Return the book of a directory; the first rank's options count. ``claim``: it is that of the chair, who commits."""
        found = self.books.get(directory)
        if found is None:
            found = Book(
                stores.opened(stores.where(directory)),
                Options(**options),
                self.selector,
                write=self._write,
                serve=self._serve,
                later=self._later,
            )
        if claim:
            found.directory.claim(found.options.run)
        self.books[directory] = found
        return found

    def _write(self, book: Book, snapshot: Snapshot, folder: str) -> None:
        """Have the clerk write this node's part of a snapshot."""
        slots, known = slots_of(book, snapshot), book.roll.digests.known(snapshot)
        show = book.roll.show_written
        part = clerk.Part(book.directory, folder, snapshot.key, snapshot.seals, slots, known, show)

        def written(result: clerk.Written) -> None:
            def note() -> None:
                book.roll.digests.keep(snapshot, result.digests(), book.roll.members)
                book.pen.report(folder, result.message())

            self._later(note)

        self._clerk.write(part, written)

    def _serve(self, book: Book, message: dict[str, Any]) -> None:
        """Do what the chair says, where it takes more than a ledger."""
        if message["op"] == "commit":
            self._commit(book, message)
        elif message["op"] == "forget":
            self._forget(book, message["ranks"])
        elif message["op"] == "discard":
            self._clerk.do(lambda: book.directory.discard(message["folder"]))
        else:
            self._desk.reception.hear(book, message)

    def _commit(self, book: Book, message: dict[str, Any]) -> None:
        options = book.options

        def commit() -> None:
            with book.directory.at_work():  # whoever hears that it is done may close the directory
                if book.cycle.first != 0:
                    return  # another node is the chair by now, and knows nothing of it
                why = clerk.commit(book.directory, message["folder"], message["write"], options.facts)
                self._later(lambda: book.ask({"op": "committed", "folder": message["folder"], "why": why}))
                if not why:
                    clerk.prune(book.directory, options.keep, options.keep_every)

        self._clerk.do(commit)


def slots_of(book: Book, snapshot: Snapshot) -> dict[int, Slot]:
    """Return the slots that hold a snapshot, by rank."""
    return {rank: book.roll.members[rank].slots[seal.slot] for rank, seal in snapshot.seals.items()}


def undigested(book: Book) -> Snapshot | None:
    """Return the newest snapshot, if it has no digests and has been the newest for so long that they are worth it."""
    newest = book.roll.newest()
    if newest is None or len(book.roll.digests.known(newest)) == len(newest.seals):
        return None
    age = time.monotonic_ns() - max(seal.sealed_at for seal in newest.seals.values())
    return newest if age > _SETTLED_S * 1e9 else None


def ignore_signals_of_the_job() -> None:
    """Ctrl-C and hang-ups are the job's; what is complete is made durable all the same."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
