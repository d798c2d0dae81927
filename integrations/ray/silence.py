"""Whether a job's supervisor hangs: Ray restarts one that died, and notices nothing of one that is stopped or stuck: pure.

The supervisor leaves a sign of life in the cluster's store each few seconds. Whoever waits for the job looks whether it changes;
where nobody does, the actors of its nodes do, once they have not been asked for long.

Rule: only what this program has watched counts, by its own clock, and only while Ray holds the actor for alive. Each time it is
found to hang it gets twice as long: a supervisor that is only slow must not be ended again and again.
"""

from __future__ import annotations

from collections.abc import Callable

SIGN_EVERY_S = 5.0
SHOWN_S = 60.0  # a status tells of silence that is longer
_PATIENCE_S = 60.0


class Silence:
    """One program's watch over one supervisor."""

    def __init__(self, now: float) -> None:
        self._sign: float | None = None
        self._since = now
        self.patience_s = _PATIENCE_S

    def hangs(self, sign: float | None, now: float, alive: Callable[[], bool]) -> bool:
        """Return whether it hangs, once each time. ``sign``: its newest; ``None``: it never gave one. ``alive`` asks Ray."""
        if sign is None or sign != self._sign:
            self._sign, self._since = sign, now
            return False
        if now - self._since < self.patience_s:
            return False
        self._since = now
        if not alive():
            return False
        self.patience_s *= 2
        return True
