"""The rank's side of its page: counters kept in Python so that the hot path only ever stores.

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
    DONE,
    ENTER,
    EXPECT,
    FLAG_ADOPTED,
    LEAVE,
    MAX_ROWS,
    NAME_BYTES,
    R_CLOSED,
    R_ENTRIES,
    R_LARGEST,
    R_LAST,
    R_OPEN,
    R_SAMPLES,
    R_TIMEOUT,
    R_WARMUP,
    RING,
    ROW_WORDS,
    UNEXPECT,
    W_ATTACHED,
    W_BEAT_AT,
    W_BEAT_TIMEOUT,
    W_BEATS,
    W_DONE,
    W_EVENTS,
    W_EXPECTED,
    W_FINISHING,
    W_FIRST_SIGN,
    W_FLAGS,
    W_GAPS,
    W_OUTSIDE,
    W_RING,
    W_ROWS,
    W_STEP,
    W_TABLE,
    Page,
)

WARMUP = 3  # the first gaps and durations of every life are compilation, allocation and cold caches, not the rhythm
_ENTER_BITS, _LEAVE_BITS = ENTER << 8, LEAVE << 8


class Pulse:
    """Everything one rank writes into one page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.origin = page.words[W_ATTACHED]
        self.rows: list[SectionRow] = []
        self._spare: dict[str, list[SectionRow]] = {}
        self._lock = threading.RLock()  # guards the table of rows; never taken by a beat or by a known section
        self._expected: list[float | None] = []  # nested expect_heartbeats blocks, with their timeouts
        self._adopted = False
        self._beats = 0
        self._beat_at = 0
        self._largest_gap = 0
        self.closed_at = 0
        self.pauses = -WARMUP
        self.largest_pause = 0

    def beat(self, step: int | None) -> None:
        """Store one heartbeat, and the step if there is one."""
        words = self.page.words
        now = monotonic_ns()
        if step is not None:
            try:
                words[W_STEP] = step
            except (TypeError, ValueError):
                raise PulseError(
                    f"heartbeat(step={step!r}): a step is a whole number from 0 up. No heartbeat was sent."
                ) from None
        self._beats = beats = self._beats + 1
        gap = now - self._beat_at
        self._beat_at = now
        words[W_BEAT_AT] = now
        words[W_BEATS] = beats
        if beats <= WARMUP + 1:
            self._early_beat(beats, gap, now)
        else:
            words[W_GAPS] = beats - WARMUP - 1
            if gap > self._largest_gap:
                self._largest_gap = words[W_GAPS + 1] = gap

    def _early_beat(self, beats: int, gap: int, now: int) -> None:
        """Open the clock with the first beat; keep the gaps of the warm-up apart."""
        words = self.page.words
        if beats == 1:
            self.sign(now)
            if not words[W_EXPECTED] and not words[W_DONE]:
                words[W_EXPECTED] = now
        elif gap > words[W_GAPS + 2]:
            words[W_GAPS + 2] = gap

    def sign(self, now: int) -> None:
        """Give the first sign of life: from here on silence is a hang and not a stranger's business."""
        if not self._adopted:
            self._adopted = True
            self.page.words[W_FIRST_SIGN] = now
            self.page.words[W_FLAGS] |= FLAG_ADOPTED

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
        self.page.floats[W_BEAT_TIMEOUT] = math.nan if timeout is None else timeout
        self._beat_at = now
        self.page.words[W_EXPECTED] = now
        self.page.words[W_DONE] = 0
        self.sign(now)
        self._event(EXPECT, now)

    def unexpect(self) -> None:
        """Stop expecting heartbeats: the loop is over, what follows is teardown."""
        self._expected.clear()
        now = monotonic_ns()
        self.page.words[W_DONE] = now
        self.page.words[W_EXPECTED] = 0
        self._event(UNEXPECT, now)

    def finish(self) -> None:
        """Say that the script has returned: only the interpreter's own exit is left."""
        now = monotonic_ns()
        self.page.words[W_FINISHING] = now
        self._event(DONE, now)

    def _event(self, kind: int, now: int) -> None:
        words = self.page.words
        number = words[W_EVENTS]
        words[W_RING + number % RING] = (now - self.origin) // 1000 << 16 | kind << 8
        words[W_EVENTS] = number + 1

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
        encoded = name.encode()
        if not 0 < len(encoded) <= NAME_BYTES or "\0" in name:
            raise SectionError(f"section {name!r}: a name has 1 to {NAME_BYTES} bytes. The section was not opened.")
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
        self.page.words[W_ROWS] = index + 1
        return row

    def close_all(self) -> None:
        """Close every open section of every thread."""
        for row in self.rows:
            del row.starts[1:]
            row.leave()


class SectionRow:
    """One row of the section table, written by one thread at a time."""

    __slots__ = ("base", "entries", "floats", "index", "largest", "pulse", "samples", "starts", "words")

    def __init__(self, pulse: Pulse, index: int) -> None:
        self.pulse = pulse
        self.index = index
        self.base = W_TABLE + index * ROW_WORDS
        self.words = pulse.page.words
        self.floats = pulse.page.floats
        self.starts: list[int] = []
        self.entries = 0
        self.samples = -WARMUP
        self.largest = 0
        self.floats[self.base + R_TIMEOUT] = math.nan

    def enter(self) -> None:
        """Open the section, or go one level deeper into it."""
        now = monotonic_ns()
        starts = self.starts
        if not starts:
            words, base, pulse = self.words, self.base, self.pulse
            words[base + R_OPEN] = now
            self.entries = entries = self.entries + 1
            words[base + R_ENTRIES] = entries
            closed_at = pulse.closed_at
            if closed_at:
                pulse.pauses = pauses = pulse.pauses + 1
                if pauses > 0:
                    words[W_OUTSIDE] = pauses
                    if now - closed_at > pulse.largest_pause:
                        pulse.largest_pause = words[W_OUTSIDE + 1] = now - closed_at
                elif now - closed_at > words[W_OUTSIDE + 2]:
                    words[W_OUTSIDE + 2] = now - closed_at
            else:
                pulse.sign(now)
            number = words[W_EVENTS]
            words[W_RING + number % RING] = (now - pulse.origin) // 1000 << 16 | _ENTER_BITS | self.index
            words[W_EVENTS] = number + 1
        starts.append(now)

    def leave(self) -> bool:
        """Close what :meth:`enter` opened last. False when nothing is open (``end_all_sections`` came before)."""
        now = monotonic_ns()
        starts = self.starts
        if not starts:
            return False
        start = starts.pop()
        if not starts:
            words, base, pulse = self.words, self.base, self.pulse
            words[base + R_CLOSED] = (
                now  # before the section shows as closed, so that one of the two clocks always runs
            )
            words[base + R_OPEN] = 0
            took = now - start
            words[base + R_LAST] = took
            self.samples = samples = self.samples + 1
            if samples > 0:
                words[base + R_SAMPLES] = samples
                if took > self.largest:
                    self.largest = words[base + R_LARGEST] = took
            elif took > words[base + R_WARMUP]:
                words[base + R_WARMUP] = took
            pulse.closed_at = now
            number = words[W_EVENTS]
            words[W_RING + number % RING] = (now - pulse.origin) // 1000 << 16 | _LEAVE_BITS | self.index
            words[W_EVENTS] = number + 1
        return True

    def limit(self, timeout: float) -> None:
        """Give the section a timeout of its own, in seconds; it holds until another one is given."""
        self.floats[self.base + R_TIMEOUT] = timeout
