"""Timeouts: given by a person, or learned from what was seen. Pure; nothing here knows a clock or a process.

The rule for a learned timeout: ``unlearned`` (30 minutes, or more if 5 × the largest seen is more) until ``learn_after``
(16) samples were seen, then the larger of
``floor`` (30 s) and ``factor`` (5) × the largest sample after warm-up. The first entries of every life of a rank are
warm-up: they are kept apart, and while a rank is in them it also gets ``factor`` × the largest warm-up ever seen, so that
a restart that compiles again is not killed for it.

Merging over ranks and nodes is a maximum, so it needs no order and no collective, and merging twice changes nothing.
A learned timeout that expired is doubled for the next cycle: a verdict that was wrong once can't repeat for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INITIAL, HEARTBEAT, OUTSIDE, EXIT, SECTION = "initial", "heartbeat", "out-of-section", "exit", "section:"
WHOLE_HEARTBEAT = "heartbeat, sections included"  # no clock: what a calculated heartbeat timeout is calculated from


@dataclass(frozen=True)
class Samples:
    """What was seen of one clock, over all ranks and cycles. Seconds."""

    count: int = 0
    largest: float = 0.0
    warmup: float = 0.0

    def merge(self, other: Samples) -> Samples:
        """Return what both together have seen. The count is the best-informed rank's, not the sum: one rank has to have
        seen a clock often enough to be trusted with it."""
        return Samples(max(self.count, other.count), max(self.largest, other.largest), max(self.warmup, other.warmup))


Learned = Mapping[str, Samples]


def merge(first: Learned, second: Learned) -> dict[str, Samples]:
    """Merge two tables of samples."""
    merged = dict(first)
    for name, samples in second.items():
        merged[name] = merged[name].merge(samples) if name in merged else samples
    return merged


@dataclass(frozen=True)
class Limit:
    """How long one clock may run, and who says so: ``argument``, ``calculated``, ``flag``, …, ``learned``, ``unlearned``."""

    seconds: float
    source: str
    warmup: bool = False  # it comes from warm-up

    @property
    def given(self) -> bool:
        """Whether a person gave it. Only such a limit ends a rank whose script never called us."""
        return self.source not in ("learned", "unlearned")


@dataclass(frozen=True)
class Timeouts:
    """Everything that decides how long silence may last."""

    given: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    learned: Learned = field(default_factory=dict)
    factor: float = 5.0
    floor: float = 30.0
    unlearned: float = 1800.0
    learn_after: int = 16

    def limit(self, name: str, argument: float | None = None, early: bool = False) -> Limit:
        """Return the limit of the clock ``name``.

        ``argument`` is a timeout given in code, which wins. ``early`` says that this life of the rank is still in its
        warm-up for this clock.
        """
        if argument is not None:
            return Limit(argument, "argument")
        if name in self.given:
            return Limit(*self.given[name])
        return self._learned_limit(self.learned.get(name), early)

    def _learned_limit(self, samples: Samples | None, early: bool) -> Limit:
        samples = samples or Samples()
        seconds = self.factor * samples.largest
        if samples.count < self.learn_after:
            return Limit(max(self.unlearned, seconds), "unlearned")
        if early and samples.warmup > samples.largest:
            return Limit(max(self.floor, self.factor * samples.warmup), "learned", warmup=True)
        return Limit(max(self.floor, seconds), "learned")

    def calculated(self, name: str) -> float | None:
        """Return the timeout that the samples of ``name`` give right now, however few they are; ``None`` without any."""
        samples = self.learned.get(WHOLE_HEARTBEAT if name == HEARTBEAT else name) or self.learned.get(name)
        if samples is None or not max(samples.largest, samples.warmup):
            return None
        return max(self.floor, self.factor * (samples.largest or samples.warmup))

    def after_alarm(self, name: str, limit: Limit) -> Learned:
        """Return the samples after ``limit`` expired on ``name``: the next cycle waits twice as long there."""
        if limit.given or math.isinf(limit.seconds):
            return self.learned
        enough = 2 * limit.seconds / self.factor
        return merge(self.learned, {name: Samples(warmup=enough) if limit.warmup else Samples(largest=enough)})


def to_json(table: Learned) -> dict[str, list[float]]:
    """Return a table of samples as plain JSON."""
    return {name: [samples.count, samples.largest, samples.warmup] for name, samples in table.items()}


def from_json(data: Any) -> dict[str, Samples]:
    """Read :func:`to_json`'s form; what is not of that form is left out, since it comes from another process."""
    table: dict[str, Samples] = {}
    if not isinstance(data, dict):
        return table
    for name, values in data.items():
        if (
            isinstance(name, str)
            and isinstance(values, list)
            and len(values) == 3
            and all(isinstance(value, (int, float)) and math.isfinite(value) and value >= 0 for value in values)
        ):
            table[name] = Samples(int(values[0]), float(values[1]), float(values[2]))
    return table
