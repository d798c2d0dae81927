"""Signals to the launcher: SIGTERM and SIGUSR1 ask for an agreed stop, a second one ends at once; SIGUSR2 is passed on.

Handlers only leave a note. Outside of training (imports, rendezvous) there is nothing to agree on, and torch's own handling
stands: the signal ends the launcher.

Hazard: Python runs no handler while the main thread is in C++, and torch's stores wait there, for minutes: for the store to be
served, for the other nodes, for a key. :class:`Prompt` is for those.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from resilience.monitor import proc

_LOG = logging.getLogger("resilience.launcher")
STOP = (signal.SIGTERM, signal.SIGUSR1)
_ENDING = (*STOP, signal.SIGHUP, signal.SIGQUIT)
_HANDLER_S = 1.0  # for the main thread to take a signal, before it is taken from it


def end_on_signals() -> None:
    """End in good order on a signal that comes before there are workers: torch sets its handlers when it starts some."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise SignalException(f"process {os.getpid()} got signal {signum}", sigval=signal.Signals(signum))

    for signum in _ENDING:
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            signal.signal(signum, end)


class Prompt:
    """Ends the launcher on a signal that its main thread can't take: ``end(signal)`` is called in a thread of ours, and ends it.

    The interpreter's handler in C is not held up: it writes the signal's number to a socket. If the main thread has not left the
    block a second later, it is in a call that knows of no signals.
    """

    def __init__(self, end: Callable[[signal.Signals], None]) -> None:
        self._end = end
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._left = threading.Event()
        self._left.set()
        self._turn = threading.Lock()  # either the main thread goes on, or we end it
        threading.Thread(target=self._listen, name="resilience-signals", daemon=True).start()

    @contextmanager
    def heed(self) -> Iterator[None]:
        """Have signals end the launcher within a second or so, whatever the block waits for. Main thread only.

        Not where processes are forked: their signals would be heard here too.
        """
        self._left = threading.Event()
        before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            with self._turn:
                self._left.set()
            signal.set_wakeup_fd(before)

    def close(self) -> None:
        """Hear no more. Nothing happens within a block: its signals still come here."""
        if self._left.is_set():
            self._mouth.close()

    def _listen(self) -> None:
        with self._ear:
            while heard := self._ear.recv(1):
                signum = signal.Signals(heard[0])
                if signum not in (*_ENDING, signal.SIGINT) or self._left.wait(_HANDLER_S):
                    continue
                with self._turn:
                    if not self._left.is_set():
                        self._end(signum)


class Signals:
    """What was asked of this launcher by signal."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._watching = False
        self.asked: signal.Signals | None = None

    def take(self) -> None:
        """Take the signals from torch, which has just started the workers and set its own handlers."""
        self._watching = True
        for signum in STOP:
            signal.signal(signum, self._on_stop)
        signal.signal(signal.SIGUSR2, self._on_usr2)
        self.passed_on: set[int] = set()

    def let_go(self) -> None:
        """Training is interrupted: from here on a signal ends the launcher; one that came meanwhile does so now."""
        self._watching = False
        self.end_if_asked()

    def end_if_asked(self) -> None:
        """End the launcher now if that was asked for."""
        if self.asked is not None:
            raise SignalException(f"process {os.getpid()} got signal {self.asked}", sigval=self.asked)

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        if not self._watching or self.asked is not None:
            raise SignalException(f"process {os.getpid()} got signal {signum}", sigval=signal.Signals(signum))
        self.asked = signal.Signals(signum)
        self._ring()

    def _on_usr2(self, signum: int, frame: FrameType | None) -> None:
        self.passed_on.add(signum)
        self._ring()

    def pass_on(self, pids: Mapping[int, int]) -> None:
        """Give SIGUSR2 to the ranks that have a handler for it: it would end the others."""
        for signum in sorted(self.passed_on):
            self.passed_on.discard(signum)
            if not forward(signum, pids):
                _LOG.warning("%s is ignored: no rank has a handler for it.", signal.Signals(signum).name)

    def end_in_vain(self, pids: Mapping[int, int]) -> None:
        """Nobody calls ``stop_requested``: SIGUSR1 goes to ranks that have a handler of their own, else the launcher ends."""
        asked = self.asked
        if asked is None:
            return  # another node was asked: it ends
        if asked == signal.SIGUSR1 and forward(asked, pids):
            self.asked = None
            return
        raise SignalException(f"process {os.getpid()} got signal {asked}", sigval=asked)


def forward(signum: int, pids: Mapping[int, int]) -> bool:
    """Send a signal to the ranks that have a handler for it; False when none has."""
    found = False
    for pid in pids.values():
        state = proc.state_of(pid)
        if state is not None and proc.catches(pid, signum):
            os.kill(pid, signum)
            found = True
    return found
