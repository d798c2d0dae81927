"""Is this rank hung? A pure function of its page, its timeouts and the time.

Every way to be silent has a clock (section 2 of the promises): before the first sign of life, between heartbeats, inside
each open section, between sections, after the loop. All that run are judged; the one whose deadline passed first is the
verdict. Nothing here reads a clock or a process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from resilience.pulse.page import PageView, Row, Seen
from resilience.pulse.timeouts import (
    EXIT,
    HEARTBEAT,
    INITIAL,
    OUTSIDE,
    SECTION,
    WHOLE_HEARTBEAT,
    Limit,
    Samples,
    Timeouts,
)

FINE, WARN, HANG = "fine", "warn", "hang"
_S = 1_000_000_000


@dataclass(frozen=True)
class Clock:
    """One clock that runs right now."""

    name: str
    since_ns: int
    limit: Limit

    @property
    def deadline_ns(self) -> float:
        """When it expires (infinite for no timeout)."""
        return self.since_ns + self.limit.seconds * _S


@dataclass(frozen=True)
class Life:
    """What the page does not say about this life of a rank.

    ``started_ns``: when its process started. ``resumed_ns``: when the monitor itself last came back from being stopped
    (a frozen container, a suspended machine); no clock counts from before that. ``adopted``: whether any rank of the
    job ever called us, in this cycle or an earlier one.
    """

    started_ns: int
    resumed_ns: int = 0
    adopted: bool = False


@dataclass(frozen=True)
class Verdict:
    """What is to be thought of a rank, and when to look again at the latest."""

    kind: str
    clock: Clock | None
    next_ns: float

    def message(self, now_ns: int) -> str:
        """Say it in a sentence."""
        if self.clock is None:
            return "no clock runs"
        age = (now_ns - self.clock.since_ns) / _S
        limit = f"(timeout {self.clock.limit.seconds:.4g} s, {self.clock.limit.source})"
        name = self.clock.name
        if name.startswith(SECTION):
            return f"in section {name[len(SECTION) :]!r} for {age:.1f} s {limit}"
        words = {
            INITIAL: "no heartbeat or section since the process started",
            HEARTBEAT: "no heartbeat",
            OUTSIDE: "outside any section",
            EXIT: "not ended after its loop was done",
        }
        return f"{words[name]} for {age:.1f} s {limit}"


def verdict(view: PageView, timeouts: Timeouts, now_ns: int, life: Life) -> Verdict:
    """Judge a rank.

    A script that never calls us is warned about and not ended, unless the timeout was given by a person.
    """
    running = [
        Clock(clock.name, max(clock.since_ns, life.resumed_ns), clock.limit)
        for clock in clocks(view, timeouts, life.started_ns)
    ]
    expired = [clock for clock in running if clock.deadline_ns <= now_ns]
    if not expired:
        return Verdict(FINE, None, min((clock.deadline_ns for clock in running), default=math.inf))
    first = min(expired, key=lambda clock: clock.deadline_ns)
    stranger = first.name == INITIAL and not first.limit.given and not life.adopted and not view.adopted
    return Verdict(WARN if stranger else HANG, first, math.inf if stranger else now_ns)


def clocks(view: PageView, timeouts: Timeouts, started_ns: int) -> Iterator[Clock]:
    """Yield every clock that runs."""
    if view.finishing_since:
        # Another thread may train on while the main one has returned: its signs of life count.
        signs = [view.beat_at, *(max(row.opened_at, row.closed_at) for row in view.rows)]
        yield Clock(EXIT, max(view.finishing_since, *signs), timeouts.limit(EXIT))
        return
    if not view.first_sign:
        yield Clock(INITIAL, started_ns, timeouts.limit(INITIAL))
        return
    opened = [
        Clock(SECTION + row.name, row.open_since, timeouts.limit(SECTION + row.name, row.timeout, _early(row.seen)))
        for row in view.open_rows()
    ]
    yield from opened
    if view.expected_since:
        yield _heartbeat_clock(view, timeouts, opened)
    if not opened:
        yield from _between(view, timeouts)


def _early(seen: Seen) -> bool:
    return seen.samples == 0


def _heartbeat_clock(view: PageView, timeouts: Timeouts, opened: list[Clock]) -> Clock:
    """Return the clock of the heartbeats.

    A limit that a person gave is kept to the letter. A learned one does not count time that is spent in sections entered
    since the last heartbeat, because those have a clock of their own: otherwise the first
    evaluation of a run, long and without heartbeats, would be a hang.
    """
    since = max(view.beat_at, view.expected_since)
    limit = timeouts.limit(HEARTBEAT, view.beat_timeout, _early(view.gaps))
    if limit.given:
        return Clock(HEARTBEAT, since, limit)
    closed_at = max((row.closed_at for row in view.rows), default=0)
    credit = max(0, min(view.inside, closed_at - since))
    deadline = since + credit + limit.seconds * _S
    latest = max([deadline, *(clock.deadline_ns for clock in opened if clock.since_ns > since)])
    return Clock(HEARTBEAT, since, replace(limit, seconds=(latest - since) / _S))


def _between(view: PageView, timeouts: Timeouts) -> Iterator[Clock]:
    """Yield the clock that runs while no section is open. Heartbeats are signs of life too, unless a limit was given."""
    closed_at = max((row.closed_at for row in view.rows), default=0)
    limit = timeouts.limit(OUTSIDE, None, _early(view.pauses))
    if closed_at and limit.given:
        yield Clock(OUTSIDE, closed_at, limit)
    elif closed_at and not view.done_since:
        yield Clock(OUTSIDE, max(closed_at, view.beat_at), limit)
    if view.done_since:
        # The rank said that its loop is over: a last evaluation or save is not a pause between two sections.
        yield Clock(EXIT, max(view.done_since, closed_at, view.beat_at), timeouts.limit(EXIT))


def learned_from(view: PageView, started_ns: int) -> dict[str, Samples]:
    """Return what this life of the rank adds to the samples."""
    table: dict[str, Samples] = {}
    if view.first_sign:
        table[INITIAL] = Samples(1, (view.first_sign - started_ns) / _S)
    if view.whole_gap:
        table[WHOLE_HEARTBEAT] = Samples(view.gaps.samples, view.whole_gap / _S)
    life = (max(view.beat_at, view.first_sign, *(row.closed_at for row in view.rows), 0) - started_ns) / _S
    for name, seen in [(HEARTBEAT, view.gaps), (OUTSIDE, view.pauses), *_section_samples(view.rows)]:
        if seen.samples or seen.warmup:
            fresh = Samples(seen.samples, min(seen.largest / _S, life), min(seen.warmup / _S, life))
            table[name] = table[name].merge(fresh) if name in table else fresh
    return table


def _section_samples(rows: tuple[Row, ...]) -> list[tuple[str, Seen]]:
    return [(SECTION + row.name, row.seen) for row in rows]
