"""How often to save. Pure.

An interval is a number of steps, a time, or ``"auto"``: then it follows from what a save costs and how often jobs fail, by the rule
of Young and Daly, which makes the time lost to saving and the time lost to repeating steps equally small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from resilience.errors import ConfigError

Interval = int | timedelta | str | None


def young_daly(cost_s: float, mean_time_between_failures_s: float) -> float:
    """Return the interval between saves, in seconds, that loses the least time in all."""
    if cost_s <= 0 or mean_time_between_failures_s <= 0:
        return 0.0
    if cost_s >= 2 * mean_time_between_failures_s:  # Daly's bound: a save takes longer than training lasts
        return mean_time_between_failures_s
    ratio = cost_s / (2 * mean_time_between_failures_s)
    best = math.sqrt(2 * cost_s * mean_time_between_failures_s)
    return best * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclass(frozen=True)
class Every:
    """An interval in one of its three forms; all of them absent: never."""

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False

    @classmethod
    def of(cls, name: str, value: Interval) -> Every:
        """Read what the user gave. Raises :class:`ConfigError`."""
        if value is None:
            return cls()
        if isinstance(value, timedelta) and value > timedelta(0):
            return cls(seconds=value.total_seconds())
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(steps=value)
        if value == "auto":
            return cls(auto=True)
        raise ConfigError(f'{name}={value!r}: give a number of steps, a timedelta, "auto", or None for never.')

    def has(self, step: int) -> bool:
        """Whether so many more steps are done with this one; steps are counted from 0."""
        return self.steps > 0 and (step + 1) % self.steps == 0


class DiskClock:
    """When the next snapshot is to be written, where that is a matter of time: every so many seconds, or by Young and Daly."""

    def __init__(self, seconds: float, auto: bool, failures_s: float, now: float) -> None:
        self._seconds = seconds
        self._auto = auto
        self._failures_s = failures_s  # how long the job runs between two failures, on average
        self._due = now + seconds  # the first one is due at once where its cost is unknown
        self._write_s = 0.0

    def take(self, now: float) -> bool:
        """Whether one is due. Then the next one is due an interval later."""
        if not (self._seconds or self._auto) or now < self._due:
            return False
        self._due = now + self._interval()
        return True

    def wrote(self, began: float, now: float) -> None:
        """Learn what a write took."""
        self._write_s = now - began
        if self._auto:
            self._due = began + self._interval()

    def _interval(self) -> float:
        if not self._auto:
            return self._seconds
        return max(2 * self._write_s, young_daly(self._write_s, self._failures_s))
