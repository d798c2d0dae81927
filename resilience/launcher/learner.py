"""What the ranks of this node, and of the others, have taught about timeouts. Pure bookkeeping, no clock, no socket."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from resilience.config import Settings
from resilience.pulse.timeouts import (
    EXIT,
    HEARTBEAT,
    INITIAL,
    OUTSIDE,
    SECTION,
    WHOLE_HEARTBEAT,
    Learned,
    Limit,
    Samples,
    Timeouts,
    merge,
    to_json,
)

_MAX_NAMES = 512


class Learner:
    """Holds given and learned timeouts for the whole life of the launcher: restarts of ranks do not lose them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._given = given_timeouts(settings)
        self._calculated: dict[str, float] = {}
        self._lives: set[tuple[int, int]] = set()
        self.learned: Learned = {}
        self.adopted = False

    def see(self, life: tuple[int, int], table: Mapping[str, Samples]) -> bool:
        """Take in what one life of a rank has seen so far; True when something changed."""
        fresh = dict(table)
        if INITIAL in fresh:
            self._lives.add(life)
            fresh[INITIAL] = Samples(len(self._lives), fresh[INITIAL].largest)
        return self.merge(fresh)

    def merge(self, table: Learned) -> bool:
        """Take in what another node or an earlier run has seen; True when something changed."""
        self.adopted = self.adopted or INITIAL in table
        merged = merge(self.learned, table)
        if len(merged) > _MAX_NAMES:  # names with numbers in them; what is known already stays
            known = self.learned or dict(list(merged.items())[:_MAX_NAMES])
            merged = {name: samples for name, samples in merged.items() if name in known}
        changed = merged != self.learned
        self.learned = merged
        return changed

    def calculate(self, limits: Mapping[str, float]) -> None:
        """Set timeouts that a script calculated; they take the place of configured ones, as it asked for."""
        self._calculated.update(
            {name: float(value) for name, value in limits.items() if math.isfinite(value) and value > 0}
        )

    def alarm(self, clock: str, limit: Limit) -> None:
        """Note that a limit expired; a learned one is doubled."""
        self.learned = self.timeouts().after_alarm(clock, limit)

    def timeouts(self) -> Timeouts:
        """Return everything that decides how long silence may last."""
        config = self._settings.timeouts
        given = {**self._given, **{name: (value, "calculated") for name, value in self._calculated.items()}}
        return Timeouts(
            given=given,
            learned=self.learned,
            factor=config.safety_factor,
            floor=config.learned_timeout_floor,
            unlearned=config.unlearned_timeout,
            learn_after=config.learn_after,
        )

    def message(self) -> dict[str, Any]:
        """Return the timeouts in the form that a monitor reads."""
        now = self.timeouts()
        return {
            "given": {name: [_finite(value), source] for name, (value, source) in now.given.items()},
            "learned": to_json(now.learned),
            "factor": now.factor,
            "floor": now.floor,
            "unlearned": _finite(now.unlearned),
            "learn_after": now.learn_after,
            "adopted": self.adopted,
        }

    def answer(self) -> dict[str, Any]:
        """Return the timeouts in the form that a rank's client reads."""
        now = self.timeouts()
        names = {INITIAL, HEARTBEAT, OUTSIDE, EXIT, *now.given, *now.learned} - {WHOLE_HEARTBEAT}
        calculated = {name: now.calculated(name) for name in now.learned if name != WHOLE_HEARTBEAT}
        return {
            "limits": {name: _finite(now.limit(name).seconds) for name in sorted(names)},
            "calculated": {name: value for name, value in calculated.items() if value is not None},
            "learned": to_json(now.learned),
        }


def given_timeouts(settings: Settings) -> dict[str, tuple[float, str]]:
    """Return the timeouts that a person gave, by clock."""
    config = settings.timeouts
    named = {
        INITIAL: ("initial_rank_heartbeat_timeout", config.initial_rank_heartbeat_timeout),
        HEARTBEAT: ("rank_heartbeat_timeout", config.rank_heartbeat_timeout),
        OUTSIDE: ("rank_out_of_section_timeout", config.rank_out_of_section_timeout),
        EXIT: ("rank_exit_timeout", config.rank_exit_timeout),
    }
    given = {
        clock: (value, settings.sources.get(name, "default"))
        for clock, (name, value) in named.items()
        if value is not None
    }
    source = settings.sources.get("rank_section_timeouts", "default")
    return given | {SECTION + name: (value, source) for name, value in config.rank_section_timeouts.items()}


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds
