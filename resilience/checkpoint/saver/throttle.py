"""How fast bytes may go out: a bucket of tokens that fills at a steady rate, and courtesy where processors are short.

Pure: times and counters are passed in. Courtesy is needed because priorities are not enough: where the kernel shares time out by
sessions, as many do, niceness counts within one only, and every rank has one of its own.
"""

from __future__ import annotations

_BURST_S = 0.1  # what may go at once after a pause: so much of a second's worth
_SPARE = 0.3  # of all processors: if less is idle whatever we do is taken from somebody
_SHARE = 0.0125  # of all processors, for sending while they are short; who receives needs about as much again


class Bucket:
    """Lets ``rate`` bytes per second through, 0: as many as there are."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._tokens = rate * _BURST_S
        self._at = now

    def take(self, nbytes: int, now: float) -> float:
        """Take so many bytes; return how long to wait, in seconds, before they go.

        More than is in the bucket may be taken: then it is in debt, and whoever comes next waits for that too.
        """
        if not self.rate:
            return 0.0
        self._tokens = min(self._tokens + max(0.0, now - self._at) * self.rate, self.rate * _BURST_S)
        self._at = max(self._at, now)
        self._tokens -= nbytes
        return max(0.0, -self._tokens / self.rate)


class Courtesy:
    """Uses a small share of the processors while there are none to spare, and otherwise as much as there is."""

    def __init__(self, processors: int) -> None:
        self._back_off = max(0.0, 1 / (_SHARE * processors) - 1)
        self.short = True  # of processors; until it is known otherwise
        self._before: tuple[float, float] | None = None

    def look(self, idle: float, total: float) -> None:
        """Take in how long the processors have been idle, and how long there have been any, in all and up to now."""
        if self._before is not None and total > self._before[1]:
            self.short = (idle - self._before[0]) / (total - self._before[1]) < _SPARE
        self._before = idle, total

    def pause(self, ran_s: float) -> float:
        """Return how long to pause, in seconds, after having run so long."""
        return self._back_off * ran_s if self.short else 0.0
