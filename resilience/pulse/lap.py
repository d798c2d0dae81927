"""A lap of a loop: its work, and what comes between two pieces of work, as two sections that follow each other without a pause.

What is written is what leaving one section, a heartbeat and entering the other write, at one time of the clock: for loops that are
not the user's own, who can't choose to have less of it.
"""

from __future__ import annotations

from _thread import get_ident
from time import monotonic_ns

from resilience.pulse.section import Section


class Lap:
    """Two sections in turn. ``work`` may be closed by anybody at any time; what comes ``between`` is closed by the lap."""

    __slots__ = ("_between", "_owner", "_work")

    def __init__(self, work: Section, between: Section) -> None:
        self._work, self._between = work, between
        self._owner = work.owner if work.owner == between.owner else 0  # the thread that has a short way

    def over(self, step: int | None) -> None:
        """A piece of work is over, if one had begun: a heartbeat, and what comes between two begins."""
        work, between, pulse = self._work, self._between, self._work.pulse
        if work.depth and not between.depth and get_ident() == self._owner and pulse is not None:
            now = monotonic_ns()
            work.close_at(now)
            pulse.beat(step, now)
            between.open_at(now)
            return
        work.close()
        if pulse is not None:
            pulse.beat(step)
        between.enter()

    def begin(self) -> None:
        """The next piece of work begins."""
        work, between = self._work, self._between
        if between.depth == 1 and not work.depth and get_ident() == self._owner:
            now = monotonic_ns()
            between.close_at(now)
            work.open_at(now)
            return
        between.leave()
        work.enter()

    def fail(self, error: BaseException) -> None:
        """No piece of work follows: the data is at its end, or could not be had."""
        self._between.__exit__(type(error), error, error.__traceback__)
