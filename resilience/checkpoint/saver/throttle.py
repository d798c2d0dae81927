"""How fast bytes may go out: a bucket of tokens that fills at a steady rate. Pure: the time is passed in."""

from __future__ import annotations

_BURST_S = 0.1  # what may go at once after a pause: so much of a second's worth


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
