"""Signals to the launcher: SIGTERM and SIGUSR1 ask for an agreed stop, a second one ends at once; SIGUSR2 is passed on.

Handlers only leave a note. Outside of training (imports, rendezvous) there is nothing to agree on, and torch's own handling
stands: the signal ends the launcher.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from resilience.monitor import proc

_LOG = logging.getLogger("resilience.launcher")
STOP = (signal.SIGTERM, signal.SIGUSR1)


def end_on_signals() -> None:
    """End in good order on a signal that comes before there are workers: torch sets its handlers when it starts some."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise SignalException(f"process {os.getpid()} got signal {signum}", sigval=signal.Signals(signum))

    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            signal.signal(signum, end)


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
