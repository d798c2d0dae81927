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
