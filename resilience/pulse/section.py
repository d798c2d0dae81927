"""A section: one row of the table in the page, and the context manager that writes it.

Rule: entering and leaving are stores and nothing else: no lock, no system call, no allocation that lasts. A row is written
by one thread at a time, which is why that is safe; entered from another thread a section passes on to that thread's own row.
"""

from __future__ import annotations

import contextlib
import math
from _thread import get_ident
from collections.abc import Callable
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from resilience.errors import SectionError
from resilience.pulse.page import (
    EVENT_TIME,
    LEAVE,
    R_CLOSED,
    R_EXITS,
    R_LARGEST,
    R_OPENED,
    R_TIMEOUT,
    R_WARMUP,
    ROW_WORDS,
    W_INSIDE,
    W_TABLE,
    WARMUP,
)

if TYPE_CHECKING:
    from resilience.pulse.writer import Pulse

F = TypeVar("F", bound=Callable[..., Any])
COUNTED = 1000  # pauses are counted this far; no timeout needs more samples
NOTHING_YET = -1  # smaller than any duration: until warm-up is over, every one takes the slow path that sorts it


class Section:
    """A named part of the training code, for one thread; entered from another thread it passes on to that one's own row."""

    __slots__ = (
        "_bits",
        "_elsewhere",
        "_inside",
        "_largest",
        "_opened_at",
        "_row",
        "_timeout",
        "_timeouts",
        "depth",
        "exits",
        "name",
        "owner",
        "pulse",
    )

    def __init__(self, name: str, pulse: Pulse | None = None, index: int = 0) -> None:
        """Make the row ``index`` of a page, or without a pulse a section that does nothing."""
        self.name = name
        self.owner = 0  # no thread: whoever enters it takes the way for others, which ends there without a pulse
        self.depth = 0
        self.exits = 0
        self.pulse = pulse
        self._elsewhere: dict[int, Section] = {}
        if pulse is None:
            return
        base = W_TABLE + index * ROW_WORDS
        self._row = pulse.words[base : base + ROW_WORDS]
        self._timeouts = pulse.page.floats[base : base + ROW_WORDS]
        self._timeouts[R_TIMEOUT] = math.nan
        self._timeout: float | None = None
        self._bits = LEAVE << 8 | index
        self._opened_at = 0
        self._inside = 0
        self._largest = NOTHING_YET

    def __enter__(self) -> Section:
        """Open the section, or go one level deeper into it."""
        if get_ident() != self.owner:
            return self._enter_elsewhere()
        if self.depth:
            self.depth += 1
        else:
            pulse: Pulse = self.pulse  # type: ignore[assignment]  # an owner has one
            self.depth = 1
            self._row[R_OPENED] = self._opened_at = now = monotonic_ns()
            self._inside = pulse.inside
            if not pulse.open:
                closed_at = pulse.closed_at
                if not closed_at:
                    pulse.sign(now)
                elif now - closed_at > pulse.largest_pause or pulse.pauses < COUNTED:
                    pulse.pause(now - closed_at)
            pulse.open.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close what was opened last; nothing to do when ``end_all_sections`` came before."""
        if get_ident() != self.owner:
            return self._leave_elsewhere(value)
        depth = self.depth
        if value is not None and depth:
            leave_mark(value, self.name, self._opened_at)
        if depth == 1:
            self.close_at(monotonic_ns())
        elif depth:
            self.depth = depth - 1
        return None

    def close_at(self, now: int) -> None:
        """Close the section, which is open, at whatever depth."""
        row, opened_at = self._row, self._opened_at
        pulse: Pulse = self.pulse  # type: ignore[assignment]  # it was opened
        took = now - opened_at
        self.depth = 0
        pulse.open.discard(self)
        if opened_at > pulse.beat_at:
            # Before it shows as closed: a reader in between must not miss it in both places. Nested sections count once.
            inside = self._inside + took
            if inside > pulse.inside:
                pulse.words[W_INSIDE] = pulse.inside = inside
        row[R_CLOSED] = pulse.closed_at = now
        row[R_EXITS] = self.exits = self.exits + 1
        if took > self._largest:
            self._sample(took)
        pulse.ring[next(pulse.slots)] = now & EVENT_TIME | self._bits

    def close(self) -> None:
        """Close the section at whatever depth, from whatever thread."""
        if self.depth:
            self.close_at(monotonic_ns())

    def over(self, step: int | None) -> None:
        """Close the section, if it is open, and send a heartbeat, at one time of the clock: for loops that are not the user's own,
        who can't choose to have less of it."""
        pulse, now = self.pulse, monotonic_ns()
        if self.depth:
            self.close_at(now)
        if pulse is not None:
            pulse.beat(step, now)

    def enter(self) -> None:
        """Open the section in this thread."""
        self.__enter__()

    def _sample(self, took: int) -> None:
        """Keep a duration that is larger than all before; those of the warm-up apart."""
        if self.exits <= WARMUP:
            self._row[R_WARMUP] = max(self._row[R_WARMUP], took)
        else:
            self._row[R_LARGEST] = self._largest = took

    def leave(self) -> bool:
        """Close what was opened last in this thread; False when it is not open here."""
        mine = self if get_ident() == self.owner else self._elsewhere.get(get_ident())
        was_open = self.pulse is None or (mine is not None and mine.depth > 0)
        self.__exit__(None, None, None)
        return was_open

    def limit(self, timeout: float) -> None:
        """Give the section a timeout of its own, in seconds, in whatever thread it is open; it holds until another one."""
        if self.pulse is None:
            return
        self._timeout = timeout
        for row in (self, *list(self._elsewhere.values())):
            row._timeouts[R_TIMEOUT] = timeout

    def detach(self) -> None:
        """Become a no-op: this is a forked child, and the page is its parent's."""
        self.pulse = None
        self.owner = self.depth = 0
        self._elsewhere.clear()

    def _enter_elsewhere(self) -> Section:
        """Open this thread's own row: a row has one writer."""
        pulse = self.pulse
        if pulse is None:
            return self
        row = self._elsewhere.get(get_ident())
        if row is None:
            try:
                row = self._elsewhere[get_ident()] = pulse.borrow(self.name)
            except SectionError:  # more threads than rows: the name is fine, this thread goes in unwatched
                return self
            if self._timeout is not None:
                row.limit(self._timeout)
        return row.__enter__()

    def _leave_elsewhere(self, value: BaseException | None = None) -> None:
        row = self._elsewhere.get(get_ident())
        if row is not None and self.pulse is not None:
            row.__exit__(None, value, None)
            if not row.depth:
                del self._elsewhere[get_ident()]
                self.pulse.give_back(self.name, row)

    def __call__(self, function: F) -> F:
        """Wrap a function (plain or async) so that each call runs inside the section."""
        from resilience.pulse.client import within  # noqa: PLC0415 - looked up by name at each call, as ``section`` does

        return within(self.name, function)


_MARK = "__resilience_sections__"


def leave_mark(error: BaseException, name: str, opened_ns: int) -> None:
    """Note on an exception that it left a section: when it is recorded, the section is closed already."""
    with contextlib.suppress(Exception):  # an exception may refuse attributes; it goes on as it is
        marks = error.__dict__.setdefault(_MARK, {})
        marks.pop(name, None)  # of one that is raised again and again the last passage counts
        marks[name] = opened_ns


def marks_of(error: BaseException) -> list[tuple[str, int]]:
    """Return the sections that an exception left, innermost first, with when they were opened."""
    return list(error.__dict__.get(_MARK, {}).items())
