"""The kill ladder: which signal is due now. Pure; the monitor sends what it says.

Rungs: SIGCONT where the rank is stopped (a stopped process neither testifies nor ends), the first signal, and after its
grace SIGKILL. Each rung has its own clock and comes once; SIGKILL is repeated, since a process can be stopped again.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

_S = 1_000_000_000
_KILL_AGAIN_NS = _S


@dataclass(frozen=True)
class Ladder:
    """Where a rank stands on the ladder. ``asked_ns`` 0: the first signal is still to be sent."""

    first: int
    grace_ns: int
    asked_ns: int = 0
    killed_ns: int = 0

    def due(self, now_ns: int) -> tuple[int | None, Ladder]:
        """Return the signal to send now, if any, and the ladder after it."""
        if not self.asked_ns:
            killed = now_ns if self.first == signal.SIGKILL else 0
            return self.first, replace(self, asked_ns=now_ns, killed_ns=killed)
        last = self.killed_ns
        if (not last and now_ns - self.asked_ns >= self.grace_ns) or (last and now_ns - last >= _KILL_AGAIN_NS):
            return signal.SIGKILL, replace(self, killed_ns=now_ns)
        return None, self

    def next_ns(self) -> int:
        """Return when the next rung is due."""
        if not self.asked_ns:
            return 0
        return self.killed_ns + _KILL_AGAIN_NS if self.killed_ns else self.asked_ns + self.grace_ns
