"""A rank's line to its saver, for what is rare: coming, restoring, leaving. Every call has a deadline; saving never uses it.

Rule: an answer belongs to the question before it. Whoever stops waiting for one (a deadline, Ctrl-C, a signal handler that raises)
hangs up, and the next question goes over a new line.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from dataclasses import dataclass
from typing import Any, NoReturn

from resilience import config
from resilience.checkpoint import hire
from resilience.checkpoint.arena import Slot
from resilience.checkpoint.ledger import Ledger
from resilience.checkpoint.stores.claims import DirectoryInUse, patiently
from resilience.errors import CheckpointError, LinkError
from resilience.pulse import attach, channel

_ANSWER_S = 30.0
_MOVING_S = 60.0  # for a node that was that of rank 0, or of a launcher held for lost, to let go of the directory
_NAMELESS = ("", "none")  # torchrun calls all runs "none" that have no name
_lines: weakref.WeakSet[Link] = weakref.WeakSet()


@dataclass(frozen=True)
class Place:
    """Who this rank is."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    cycle: int
    run: str

    @property
    def alone(self) -> bool:
        """Whether all ranks of the job are on this node."""
        return self.local_world == self.world

    @classmethod
    def here(cls) -> Place:
        """Read it from the environment, as torchrun and ours set it; a single process without one is rank 0 of 1."""
        env = config.rank_environment()
        cycle = env.cycle if env.socket is not None else env.restarts
        return cls(env.rank or 0, env.world, env.local_rank, env.local_world, cycle, env.run)

    @classmethod
    def single(cls) -> Place:
        """Be rank 0 of 1, in a job of whatever size."""
        here = cls.here()
        return cls(0, 1, 0, 1, here.cycle, here.run)


class Link:
    """The line. ``wake`` is the descriptor that makes the saver look."""

    def __init__(self, directory: str, place: Place, options: dict[str, Any]) -> None:
        self._directory = directory
        self._place = place
        self._options = options
        self._sock: socket.socket | None = None
        self._turn = threading.RLock()  # a thread may look for a new saver while the script asks the old one
        self._broken = False  # hung up in the middle of a question, not for good
        self._slots = 0
        self.wake = -1
        self.generation = 0
        self.chair: dict[str, Any] = {}  # where the savers of several nodes meet, if this rank told its own
        _lines.add(self)

    def come(self, slots: int) -> tuple[Ledger, list[Slot]] | None:
        """Say hello; return this rank's memory if the saver has it from an earlier life. Raises for what the saver refuses."""
        with self._turn:
            self._slots = slots
            return patiently(lambda: self._come_twice(slots), hire.DEADLINE_S, self._patience_with)

    def _patience_with(self, run: str) -> float:
        """Return how long to wait for a run that has the directory: a node of this job may have it, that is not ours any more."""
        ours = run == self._place.run and run not in _NAMELESS
        return _MOVING_S if ours or not self._place.alone else 0.0

    def _come_twice(self, slots: int) -> tuple[Ledger, list[Slot]] | None:
        try:
            return self._come(slots)
        except LinkError:  # one that was just about to end
            return self._come(slots)

    def _come(self, slots: int) -> tuple[Ledger, list[Slot]] | None:
        self.close()
        try:
            self._sock = channel.connect(self._address(), _ANSWER_S)
        except OSError as error:
            raise LinkError(f"the saver can't be reached: {error}") from error
        place = self._place
        answer, fds = self.ask(
            {
                "op": "hello",
                "directory": self._directory,
                "rank": place.rank,
                "cycle": [place.cycle, place.world, place.rank - place.local_rank, place.local_world],
                "pid": os.getpid(),
                "slots": slots,
                "generation": self.generation,
                "options": self._options,
            }
        )
        self.generation, self.wake = self.generation or answer["generation"], fds[0]
        os.set_blocking(self.wake, False)
        if self.chair and not answer["seated"]:  # one that took another's place
            self.ask({"op": "chair" if place.rank == 0 else "attend", **self.chair, "known": self.chair})
        return (Ledger(fds[1]), [Slot(fd) for fd in fds[2:]]) if answer["known"] else None

    def _address(self) -> str:
        answer = attach.ask({"op": "saver"}, _ANSWER_S)
        if answer is not None:
            if "error" in answer:
                raise LinkError(f"the launcher has no saver: {answer['error']}")
            return str(answer["path"])
        return hire.find_or_start(self._place.run, self._directory)

    def announce(self, nbytes: int, left: int) -> tuple[int, int, int]:
        """Say how much memory this rank is about to take, and how much it finds; see :class:`saver.rooms.Rooms`. The last number
        is what the saver has given up for it meanwhile."""
        answer, _ = self.ask({"op": "room", "need": nbytes, "left": left})
        return int(answer["left"]), int(answer["others"]), int(answer["freed"])

    def deposit(self, ledger: Ledger, slots: list[Slot]) -> None:
        """Have the saver (and through it the launcher) hold this rank's memory."""
        self.ask({"op": "deposit"}, (ledger.fd, *(slot.fd for slot in slots)))

    def ask(
        self, message: dict[str, Any], fds: tuple[int, ...] = (), timeout: float = _ANSWER_S
    ) -> tuple[dict[str, Any], list[int]]:
        """Ask and wait for the answer. Raises :class:`LinkError` when none comes, ``CheckpointError`` when it is a refusal."""
        with self._turn:
            return self._ask(message, fds, timeout)

    def _ask(self, message: dict[str, Any], fds: tuple[int, ...], timeout: float) -> tuple[dict[str, Any], list[int]]:
        if self._broken:
            self._come_back()
        if self._sock is None:
            raise LinkError("the saver is gone")
        self._sock.settimeout(timeout)
        try:
            channel.send(self._sock, message, fds)
            received = channel.receive(self._sock)
        except OSError as error:
            self._break_off()
            how = f"did not answer within {timeout:g} s" if isinstance(error, TimeoutError) else f"ended ({error})"
            raise LinkError(f"the saver {how}") from error
        except BaseException:
            self._break_off()
            raise
        if received is None:
            self._break_off()
            raise LinkError("the saver ended in the middle of a request")
        if "error" in received[0]:
            _refused(received[0])
        return received

    def _break_off(self) -> None:
        """Hang up: an answer that comes late must not be taken for that to the next question."""
        self.close()
        self._broken = True

    def _come_back(self) -> None:
        """Take up a line that broke off. Raises :class:`LinkError` if the saver there has not got this rank's memory."""
        known = self.come(self._slots)
        if known is None:
            self._break_off()
            raise LinkError("the saver is gone, and another one has nothing of this rank")
        known[0].close()  # we have it mapped already
        for slot in known[1]:
            slot.close()

    def leave(self) -> None:
        """Say that the script failed, and hang up. Waits for nobody."""
        with self._turn, contextlib.suppress(OSError):
            if self._sock is not None:
                self._sock.settimeout(1.0)
                channel.send(self._sock, {"op": "left"})
        self.close()

    def nudge(self) -> None:
        """Make the saver look now. Never waits: if it can't be told it looks by itself, a little later."""
        with contextlib.suppress(OSError, ValueError):  # -1 while a thread looks for another saver: a ValueError
            os.eventfd_write(self.wake, 1)

    def close(self) -> None:
        """Hang up."""
        self._broken = False
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        wake, self.wake = self.wake, -1  # first: another thread's nudge must not go to whoever gets the number next
        if wake >= 0:
            os.close(wake)

    def forget(self) -> None:
        """Hang up in a forked child: only its copies of the descriptors go, the parent goes on talking."""
        self._turn = threading.RLock()  # the other one may be held by a thread that the child has not got
        self.close()


def forget_lines() -> None:
    """Let a forked child hold no line of its parent's."""
    for link in list(_lines):
        with contextlib.suppress(OSError):
            link.forget()


def _refused(answer: dict[str, Any]) -> NoReturn:
    if answer.get("leaving") is None:
        raise CheckpointError(str(answer["error"]))
    raise DirectoryInUse(str(answer["error"]), leaving=bool(answer["leaving"]), run=str(answer.get("run", "")))
