"""The rank's side of its page: a little state kept in Python so that the hot path only ever stores.

Rule: :meth:`Pulse.beat`, :meth:`SectionRow.enter` and :meth:`SectionRow.leave` are stores and nothing else: no lock, no
system call, no allocation that lasts. A row is written by one thread at a time, which is why that is safe.

Hazard: two threads that beat at once may lose a count. They never lose a time, and verdicts look at times.
"""

from __future__ import annotations

import math
import threading
from time import monotonic_ns

from resilience.errors import PulseError, SectionError
from resilience.pulse.page import (
    EVENT_TIME,
    EXPECT,
    FINISH,
    FLAG_ADOPTED,
    LEAVE,
    MAX_ROWS,
    NAME_BYTES,
    R_CLOSED,
    R_EXITS,
    R_LARGEST,
    R_OPENED,
    R_TIMEOUT,
    R_WARMUP,
    RING,
    ROW_WORDS,
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
    W_TABLE,
    W_WHOLE_GAPS,
    WARMUP,
    Page,
)

_NOTHING_YET = -1  # smaller than any duration: until warm-up is over, every one takes the slow path that sorts it


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
        "events",
        "inside",
        "largest_pause",
        "open",
        "page",
        "pauses",
        "ring",
        "rows",
        "words",
    )

    def __init__(self, page: Page) -> None:
        self.page = page
        self.words = page.words
        self.ring = page.words[W_RING : W_RING + RING]
        self.events = 0
        self.rows: list[SectionRow] = []
        self._spare: dict[str, list[SectionRow]] = {}
        self._lock = threading.RLock()  # guards the table of rows; never taken by a beat or by a known section
        self._expected: list[float | None] = []  # nested expect_heartbeats blocks, with their timeouts
        self._adopted = False
        self._beats = 0
        self.beat_at = 0
        self._largest_gap = _NOTHING_YET
        self._largest_whole = _NOTHING_YET
        self.open: set[SectionRow] = set()  # open right now; a set, since threads may lose updates of a count for good
        self.closed_at = 0
        self.pauses = 0
        self.largest_pause = _NOTHING_YET
        self.inside = 0

    def beat(self, step: int | None) -> None:
        """Store one heartbeat, and the step if there is one."""
        words = self.words
        now = monotonic_ns()
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
        self.events = number = self.events + 1
        self.ring[number % RING] = now & EVENT_TIME | kind << 8

    def pause(self, took: int) -> None:
        """Keep a pause between two sections that is larger than all before."""
        if self.pauses <= WARMUP:
            self.words[W_PAUSE_WARMUP] = max(self.words[W_PAUSE_WARMUP], took)
        else:
            self.words[W_PAUSE] = self.largest_pause = took

    def borrow(self, name: str) -> SectionRow:
        """Return a row for one thread in the section ``name``: a spare one of that name, or a new one."""
        with self._lock:
            spare = self._spare.setdefault(name, [])
            return spare.pop() if spare else self._new_row(name)

    def give_back(self, name: str, row: SectionRow) -> None:
        """Keep a row that its thread has left for the next thread in the same section."""
        with self._lock:
            self._spare[name].append(row)

    def _new_row(self, name: str) -> SectionRow:
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
        row = SectionRow(self, index)
        self.rows.append(row)
        self.words[W_ROWS] = index + 1
        return row

    def close_all(self) -> None:
        """Close every open section of every thread."""
        for row in self.rows:
            row.depth = min(row.depth, 1)
            row.leave()


class SectionRow:
    """One row of the section table, written by one thread at a time."""

    __slots__ = ("_bits", "_inside", "_largest", "_opened_at", "_pulse", "_row", "_timeouts", "depth", "exits")

    def __init__(self, pulse: Pulse, index: int) -> None:
        base = W_TABLE + index * ROW_WORDS
        self._pulse = pulse
        self._row = pulse.words[base : base + ROW_WORDS]
        self._timeouts = pulse.page.floats[base : base + ROW_WORDS]
        self._timeouts[R_TIMEOUT] = math.nan
        self._bits = LEAVE << 8 | index
        self._opened_at = 0
        self._inside = 0
        self._largest = _NOTHING_YET
        self.depth = 0
        self.exits = 0

    def enter(self) -> None:
        """Open the section, or go one level deeper into it."""
        depth = self.depth
        self.depth = depth + 1
        if not depth:
            pulse = self._pulse
            self._row[R_OPENED] = self._opened_at = now = monotonic_ns()
            self._inside = pulse.inside
            if not pulse.open:
                closed_at = pulse.closed_at
                if not closed_at:
                    pulse.sign(now)
                else:
                    pulse.words[W_PAUSES] = pulse.pauses = pulse.pauses + 1
                    if now - closed_at > pulse.largest_pause:
                        pulse.pause(now - closed_at)
            pulse.open.add(self)

    def leave(self) -> bool:
        """Close what :meth:`enter` opened last. False when nothing is open (``end_all_sections`` came before)."""
        depth = self.depth
        if depth != 1:
            self.depth = max(0, depth - 1)
            return depth > 1
        self.depth = 0
        row, pulse = self._row, self._pulse
        now = monotonic_ns()
        took = now - self._opened_at
        pulse.open.discard(self)
        if self._opened_at > pulse.beat_at:
            # Before it shows as closed: a reader in between must not miss it in both places. Nested sections count once.
            inside = self._inside + took
            if inside > pulse.inside:
                pulse.words[W_INSIDE] = pulse.inside = inside
        row[R_CLOSED] = pulse.closed_at = now
        row[R_EXITS] = self.exits = self.exits + 1
        if took > self._largest:
            self._sample(took)
        pulse.events = number = pulse.events + 1
        pulse.ring[number % RING] = now & EVENT_TIME | self._bits
        return True

    def _sample(self, took: int) -> None:
        """Keep a duration that is larger than all before; those of the warm-up apart."""
        if self.exits <= WARMUP:
            self._row[R_WARMUP] = max(self._row[R_WARMUP], took)
        else:
            self._row[R_LARGEST] = self._largest = took

    def limit(self, timeout: float) -> None:
        """Give the section a timeout of its own, in seconds; it holds until another one is given."""
        self._timeouts[R_TIMEOUT] = timeout
