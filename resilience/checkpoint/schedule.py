"""How often to save, and how long to keep it. Pure.

An interval is a number of steps, a time, or ``"auto"``: then it follows from what a save costs and how often jobs fail, by the rule
of Young and Daly, which makes the time lost to saving and the time lost to repeating steps equally small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def __str__(self) -> str:
        if self.auto:
            return "as often as it pays"
        return f"every {self.seconds:g} s" if self.seconds else f"every {self.steps} steps"

    def has(self, step: int) -> bool:
        """Whether so many more steps are done with this one; steps are counted from 0."""
        return self.steps > 0 and (step + 1) % self.steps == 0


def surplus(steps: Sequence[int], keep: int, keep_every: int) -> list[int]:
    """Return which checkpoints need not stay, as places in ``steps``, which are newest first.

    Steps are counted, not checkpoints: one that was written twice, since its first write was told as failed after it had its name,
    must not cost the step before it its place. Of such a pair the older one goes. The newest of all always stays.
    """
    for_good = Every(steps=keep_every)
    staying = set(list(dict.fromkeys(steps))[: max(1, keep)])
    gone = []
    for place, step in enumerate(steps):
        if step not in staying and not for_good.has(step):
            gone.append(place)
        staying.discard(step)
    return gone


@dataclass(frozen=True)
class Intervals:
    """How often a snapshot is taken, and how often one is written to disk."""

    memory: Every
    disk: Every

    @classmethod
    def of(cls, memory: Interval, disk: Interval) -> Intervals:
        """Read what the user gave. Raises :class:`ConfigError`."""
        if memory is None:
            raise ConfigError('memory_every=None: give a number of steps, a timedelta or "auto".')
        return cls(Every.of("memory_every", memory), Every.of("disk_every", disk))


class Clock:
    """When the next snapshot is due, where that is a matter of time: every so many seconds, or by Young and Daly."""

    def __init__(self, every: Every, failures_s: float, now: float) -> None:
        self._every = every
        self._failures_s = failures_s  # how long the job runs between two failures, on average
        self._due = now + every.seconds  # the first one is due at once where its cost is unknown
        self._cost_s = 0.0

    def take(self, now: float) -> bool:
        """Whether one is due. Then the next one is due an interval later."""
        if not (self._every.seconds or self._every.auto) or now < self._due:
            return False
        self._due = now + self._interval()
        return True

    def learn(self, cost_s: float, began: float) -> None:
        """Learn what one costs; it was begun at a time."""
        self._cost_s = cost_s
        if self._every.auto:
            self._due = began + self._interval()

    def _interval(self) -> float:
        if not self._every.auto:
            return self._every.seconds
        return max(2 * self._cost_s, young_daly(self._cost_s, self._failures_s))
