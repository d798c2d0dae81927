"""Plain data for tests: a page in any state, a clock that is told the time, a rank's testimony."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from resilience.pulse import section, writer
from resilience.pulse.page import PageView, Row, Seen
from resilience.pulse.timeouts import Samples, Timeouts

S = 1_000_000_000
START = 1_000 * S
SETTLED = Seen(100)


def at(seconds: float) -> int:
    """Return the moment ``seconds`` after the start of the process, in nanoseconds."""
    return START + round(seconds * S)


def view(**changes: Any) -> PageView:
    """Return the page of a rank that has been attached and has said nothing, with ``changes``."""
    blank = PageView(
        incarnation=0,
        pid=1,
        attached=True,
        adopted=False,
        attached_at=START,
        first_sign=0,
        beats=0,
        beat_at=0,
        expected_since=0,
        done_since=0,
        finishing_since=0,
        beat_timeout=None,
        step=None,
        gaps=Seen(),
        pauses=Seen(),
    )
    return dataclasses.replace(blank, **changes)


def row(
    name: str,
    *,
    open_since: int = 0,
    closed_at: int = 0,
    last: int = 0,
    seen: Seen = SETTLED,
    timeout: float | None = None,
) -> Row:
    """Return a section that settled long ago: open since, or closed at and open for ``last`` before that."""
    return Row(name, open_since or closed_at - last, closed_at, seen.samples, seen, timeout)


def beating(last: float, **changes: Any) -> PageView:
    """Return the page of a rank whose heartbeats have settled and whose last one came at ``last``."""
    settled: dict[str, Any] = {
        "adopted": True,
        "first_sign": at(1),
        "expected_since": at(1),
        "beats": 100,
        "beat_at": at(last),
        "gaps": Seen(96, S, S),
    }
    return view(**{**settled, **changes})


def learned(**largest: float) -> Timeouts:
    """Return timeouts that have learned: clock = largest seconds seen. ``_`` stands for ``-``, ``section_x`` for a section."""
    table = {}
    for key, seconds in largest.items():
        name = key.replace("section_", "section:") if key.startswith("section_") else key.replace("_", "-")
        table[name] = Samples(100, seconds, 0.0)
    return Timeouts(learned=table)


def witness(rank: int, **changes: Any) -> dict[str, Any]:
    """Return what a rank in the middle of lockstep training testifies."""
    return {
        "rank": rank,
        "pid": 1000 + rank,
        "state": "S",
        "adopted": True,
        "attached": True,
        "step": 7,
        "beats": 8,
        "beat_age": 12.0,
        "quiet": 12.0,
        "sections": [],
        "entries": {},
        "finishing": False,
        "events": [],
        "stack": "",
        **changes,
    }


class FakeClock:
    """A monotonic clock in nanoseconds that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> int:
        return self.now

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += round(seconds * S)


@contextmanager
def writer_time(clock: FakeClock) -> Iterator[FakeClock]:
    """Have the in-loop calls read ``clock``."""
    real = vars(writer)["monotonic_ns"]
    vars(writer)["monotonic_ns"] = vars(section)["monotonic_ns"] = clock
    try:
        yield clock
    finally:
        vars(writer)["monotonic_ns"] = vars(section)["monotonic_ns"] = real
