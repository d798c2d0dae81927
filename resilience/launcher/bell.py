"""What wakes the agent's loop: it may be rung anywhere, in a signal handler too.

Hazard: no ``threading.Event``. The thread that waits for one holds its lock for moments, and that lock can't be taken twice: a
handler that interrupts it there, and sets the event, waits for itself for ever.
"""

from __future__ import annotations

import contextlib
import queue


class Bell:
    """Rung by many, heard by one."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()  # whose ``put`` may interrupt itself, and ``get``

    def ring(self) -> None:
        """Say that there is something to look at."""
        if self._rings.empty():
            self._rings.put(None)

    def wait(self, timeout: float) -> None:
        """Wait until it rings, at most so many seconds; it is quiet again then."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=timeout)
            while True:
                self._rings.get_nowait()
