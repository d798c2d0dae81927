"""``stop_requested()``: all ranks leave the loop at the same step, when somebody wants the job to stop.

A rank counts its calls: that is the step, since all ranks call it once per step. SIGTERM and SIGUSR1 only leave a mark in the
page; the launchers choose a step S that no rank has reached and write it to all pages (armed), then that all have agreed
(decided). A rank that comes to an armed S before the decision waits for it: :data:`PATIENCE_S`, and once its launcher has told
the others that it has not passed S, :data:`CONFIRMED_S`, since they may have decided already.

Rule: without a request a call is two loads and a store.

Hazard: the launcher ends ranks with SIGTERM too. It says so in the page first (``W_ENDING``), and the handler then stands aside.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from resilience.pulse.page import (
    W_ENDING,
    W_STOP_ARMED,
    W_STOP_ASKED,
    W_STOP_CALLS,
    W_STOP_CONFIRMED,
    W_STOP_DECIDED,
    W_STOP_TAKEN,
    W_STOP_WAITING,
    Page,
)

PATIENCE_S = 2.0
CONFIRMED_S = 10.0
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Stop:
    """A rank's side of an agreed stop. ``alone``: there is nobody to agree with, a signal is enough. ``deaf``: there are others
    and no launcher to agree through: signals are left to whoever had them."""

    def __init__(self, page: Page, alone: bool, deaf: bool = False) -> None:
        self._deaf = deaf
        self._words = page.words
        self._alone = alone
        self._calls = 0
        self._before: dict[int, Any] = {}

    def requested(self) -> bool:
        """Whether this is the step to stop at."""
        words = self._words
        words[W_STOP_CALLS] = self._calls = calls = self._calls + 1
        if calls == 1:
            self.listen()
        armed = words[W_STOP_ARMED]
        if not armed:
            return self._alone and bool(words[W_STOP_ASKED])
        return calls >= armed and self._decided(calls)

    def _decided(self, calls: int) -> bool:
        """Wait for the decision on a step that is armed; a later step may be chosen instead."""
        words = self._words
        words[W_STOP_WAITING] = calls
        since = time.monotonic()
        while True:
            decided = words[W_STOP_DECIDED]
            if decided and calls >= decided:
                words[W_STOP_TAKEN] = calls
                return True
            patience = CONFIRMED_S if words[W_STOP_CONFIRMED] == words[W_STOP_ARMED] else PATIENCE_S
            if words[W_STOP_ARMED] > calls or time.monotonic() - since > patience:
                words[W_STOP_WAITING] = 0  # on we go: to its launcher it is past this step
                return False
            time.sleep(0.001)

    def listen(self) -> None:
        """Take SIGTERM and SIGUSR1 from now on; handlers that were there are called as well. Somebody may have taken them since."""
        if self._deaf or threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            before = signal.getsignal(signum)
            if before is not None and before != self._on_signal:  # set by C code: left alone
                self._before[signum] = before
                signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        before: Callable[[int, FrameType | None], Any] | Any = self._before.get(signum, signal.SIG_DFL)
        if self._words[W_ENDING]:
            signal.signal(signum, before)
            os.kill(os.getpid(), signum)
            return
        self._words[W_STOP_ASKED] = signum
        if callable(before):
            before(signum, frame)

    def forget(self) -> None:
        """In a forked child: the handlers are the parent's affair."""
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._on_signal:
                signal.signal(signum, before)
        self._before = {}
