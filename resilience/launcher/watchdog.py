"""Ends a launcher that is stuck.

A node that is cut off leaves torch's agent in a store call that never returns: its workers hold the devices for ever. The
agent says what it is about to do and how long that may take; a thread of ours acts when it takes longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOK_EVERY_S = 0.25
_LATE_S = 2.0


class Watchdog:
    """Calls ``on_stuck(sentence)`` once, in its own thread, when a deadline passes."""

    def __init__(self, on_stuck: Callable[[str], None], loop_limit: float, silence: Callable[[], float]) -> None:
        self._on_stuck = on_stuck
        self._loop_limit = loop_limit
        self._silence = silence
        self._what = "starting"
        self._deadline = float("inf")
        self._patience = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resilience-watchdog", daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Say that the agent's loop went round once more."""
        self._deadline = time.monotonic() + self._loop_limit
        self._what = "the launcher's loop has not turned"

    @contextmanager
    def phase(self, what: str, limit: float) -> Iterator[None]:
        """Say that something is done that may take up to ``limit`` seconds."""
        before = (self._what, self._deadline)
        self._what, self._deadline = what, time.monotonic() + limit
        try:
            yield
        finally:
            self._what, self._deadline = before[0], max(before[1], time.monotonic() + self._loop_limit)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(_LOOK_EVERY_S):
            late = time.monotonic() - before - _LOOK_EVERY_S
            before = time.monotonic()
            if late > _LATE_S:  # we were stopped ourselves (Ctrl-Z, a freezer): nobody had the time
                self._deadline += late
                self._patience = before + self._loop_limit
            silence = self._silence()
            if silence > self._loop_limit and before > self._patience:
                return self._on_stuck(f"the rendezvous store has not answered for {silence:.0f} s")
            if time.monotonic() > self._deadline:
                return self._on_stuck(f"{self._what} in time (it hangs in a store call)")
        return None
