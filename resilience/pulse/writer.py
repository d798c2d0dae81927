"""The rank's side of its page: a little state kept in Python so that the hot path only ever stores.

Rule: :meth:`Pulse.beat`, entering and leaving a :class:`Section` are stores and nothing else: no lock, no
system call, no allocation that lasts. A row is written by one thread at a time, which is why that is safe.

Hazard: two threads that beat at once may lose a count. They never lose a time, and verdicts look at times.
"""

from __future__ import annotations

import itertools
import math
import threading
from _thread import get_ident
from time import monotonic_ns

from resilience.errors import PulseError, SectionError
from resilience.pulse.page import (
    EVENT_TIME,
    EXPECT,
    FINISH,
    FLAG_ADOPTED,
    MAX_ROWS,
    NAME_BYTES,
    RING,
    UNEXPECT,
    W_BEAT_AT,
    W_BEAT_TIMEOUT,
    W_BEATS,
    W_DONE,
    W_EXPECTED,
    W_FINISHING,
    W_FIRST_SIGN,
    W_FLAGS,
    W_GAPS,
    W_GAPS_WARMUP,
    W_INSIDE,
    W_PAUSE,
    W_PAUSE_WARMUP,
    W_PAUSES,
    W_RING,
    W_ROWS,
    W_STEP,
    W_WHOLE_GAPS,
    WARMUP,
    Page,
)
from resilience.pulse.section import COUNTED, NOTHING_YET, Section


class Pulse:
    """Everything one rank writes into one page."""

    __slots__ = (
        "_adopted",
        "_beats",
        "_expected",
        "_largest_gap",
        "_largest_whole",
        "_lock",
        "_spare",
        "beat_at",
        "closed_at",
        "inside",
        "largest_pause",
        "open",
        "page",
        "pauses",
        "ring",
        "rows",
        "slots",
        "words",
    )

    def __init__(self, page: Page) -> None:
        self.page = page
        self.words = page.words
        self.ring = page.words[W_RING : W_RING + RING]
        self.slots = itertools.cycle(range(RING))
        self.rows: list[Section] = []
        self._spare: dict[str, list[Section]] = {}
        self._lock = threading.RLock()  # guards the table of rows; never taken by a beat or by a known section
        self._expected: list[float | None] = []  # nested expect_heartbeats blocks, with their timeouts
        self._adopted = False
        self._beats = 0
        self.beat_at = 0
        self._largest_gap = NOTHING_YET
        self._largest_whole = NOTHING_YET
        self.open: set[Section] = set()  # open right now; a set, since threads may lose updates of a count for good
        self.closed_at = 0
        self.pauses = 0
        self.largest_pause = NOTHING_YET
        self.inside = 0

    def beat(self, step: int | None, now: int = 0) -> None:
        """Store one heartbeat, and the step if there is one. ``now``: if somebody has just looked at the clock."""
        words = self.words
        now = now or monotonic_ns()
        if step is not None:
            try:
                words[W_STEP] = step
            except (TypeError, ValueError):
                raise PulseError(
                    f"heartbeat(step={step!r}): a step is a whole number from 0 up. No heartbeat was sent."
                ) from None
        gap = now - self.beat_at
        words[W_BEAT_AT] = self.beat_at = now
        words[W_BEATS] = self._beats = self._beats + 1
        if gap > self._largest_whole:
            self._whole_gap(gap)
        if self.inside:
            gap -= self.inside
            words[W_INSIDE] = self.inside = 0
        if gap > self._largest_gap:
            self._gap(gap, now)

    def _gap(self, gap: int, now: int) -> None:
        """Keep a gap, less the sections in it, that is larger than all before; open the clock with the first beat."""
        words = self.words
        if self._beats == 1:
            self.sign(now)
            if not words[W_EXPECTED] and not words[W_DONE]:
                words[W_EXPECTED] = now
        elif self._beats <= WARMUP + 1:
            words[W_GAPS_WARMUP] = max(words[W_GAPS_WARMUP], gap)
        else:
            words[W_GAPS] = self._largest_gap = gap

    def _whole_gap(self, gap: int) -> None:
        """Keep a gap with the sections in it: for timeouts that a script calculates, which do not leave them out."""
        if self._beats > WARMUP + 1:
            self.words[W_WHOLE_GAPS] = self._largest_whole = gap

    def sign(self, now: int) -> None:
        """Give the first sign of life: from here on silence is a hang and not a stranger's business."""
        if not self._adopted:
            self._adopted = True
            self.words[W_FIRST_SIGN] = now
            self.words[W_FLAGS] |= FLAG_ADOPTED

    def expect(self, timeout: float | None) -> None:
        """Expect heartbeats from now on, until :meth:`relax` leaves the block."""
        self._expected.append(timeout)
        self._expect_now(timeout)

    def relax(self) -> None:
        """Leave an ``expect_heartbeats`` block: the one around it holds again, or none."""
        if self._expected:
            self._expected.pop()
        if self._expected:
            self._expect_now(self._expected[-1])
        else:
            self.unexpect()

    def _expect_now(self, timeout: float | None) -> None:
        now = monotonic_ns()
        self.beat_at = now
        self.words[W_EXPECTED] = now  # before the timeout, which may be shorter than the time since the last heartbeat
        self.words[W_DONE] = 0
        self.page.floats[W_BEAT_TIMEOUT] = math.nan if timeout is None else timeout
        self.sign(now)
        self._event(EXPECT, now)

    def again(self) -> None:
        """Expect heartbeats again if the rank had said that it was done."""
        if self.words[W_DONE]:
            self._expect_now(None)

    def unexpect(self) -> None:
        """Stop expecting heartbeats: the loop is over, what follows is teardown."""
        self._expected.clear()
        now = monotonic_ns()
        self.words[W_DONE] = now
        self.words[W_EXPECTED] = 0
        self._event(UNEXPECT, now)

    def finish(self) -> None:
        """Say that the script has returned: only the interpreter's own exit is left."""
        now = monotonic_ns()
        self.words[W_FINISHING] = now
        self._event(FINISH, now)

    def _event(self, kind: int, now: int) -> None:
        self.ring[next(self.slots)] = now & EVENT_TIME | kind << 8

    def pause(self, took: int) -> None:
        """Keep a pause between two sections: the number of them as far as it matters, and the largest."""
        self.pauses = pauses = min(self.pauses + 1, COUNTED)
        self.words[W_PAUSES] = pauses
        if pauses <= WARMUP:
            self.words[W_PAUSE_WARMUP] = max(self.words[W_PAUSE_WARMUP], took)
        elif took > self.largest_pause:
            self.words[W_PAUSE] = self.largest_pause = took

    def borrow(self, name: str) -> Section:
        """Return the section ``name`` for this thread: a spare row of that name, or a new one."""
        with self._lock:
            spare = self._spare.setdefault(name, [])
            row = spare.pop() if spare else self._new_row(name)
            row.owner = get_ident()
            return row

    def give_back(self, name: str, row: Section) -> None:
        """Keep a row that its thread has left for the next thread in the same section."""
        with self._lock:
            self._spare[name].append(row)

    def _new_row(self, name: str) -> Section:
        encoded = name.encode(errors="surrogatepass")
        if not 0 < len(encoded) <= NAME_BYTES or "\0" in name or not name.isprintable():
            raise SectionError(
                f"section {name!r}: a name has 1 to {NAME_BYTES} bytes. Use printable ones; the section was not opened."
            )
        index = len(self.rows)
        if index == MAX_ROWS:
            known = ", ".join(repr(self.page.name_of(row)) for row in range(4))
            raise SectionError(
                f"section {name!r} would be number {MAX_ROWS + 1}, and a rank can have {MAX_ROWS} ({known}, …). The usual "
                "mistake is a step or batch number in the name: keep the name constant and give the step to "
                "heartbeat(step). The section was not opened."
            )
        self.page.set_name(index, encoded)
        row = Section(name, self, index)
        self.rows.append(row)
        self.words[W_ROWS] = index + 1
        return row

    def close_all(self) -> None:
        """Close every open section of every thread."""
        for row in self.rows:
            row.close()
