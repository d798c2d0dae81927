"""The rank page: a few KiB of shared memory that one rank writes and its monitor reads.

Rule: everything that a verdict depends on is one aligned 8-byte word with a meaning of its own. Such a store is atomic on
every platform that torch runs on, so no reader can see half of one, and no two words have to agree: a reader that catches
the rank between two stores sees a clock that is a few hundred nanoseconds older, nothing worse.

Hazard: write through ``memoryview.cast("Q")`` only. ``struct`` may clear the words first, or copy byte by byte, and readers
would see that.

Layout, in words of 8 bytes (native byte order; rank and monitor are on one machine):

    0       magic                    12      heartbeat timeout given in code (float; NaN: not given)
    1       incarnation (cycle)      13      step (NO_STEP: not told)
    2       pid                      14, 15  gaps between heartbeats less the sections in them: largest, during warm-up
    3       flags                    16-18   pauses between sections: number, largest, largest during warm-up
    4       attached at              19-21   first sign of life at · time in sections since the last heartbeat ·
                                             largest gap between heartbeats with the sections in it
    5       rows in use              32-95   ring of the last 64 events: time, kind and row in one word
    6       (free)                   96-     64 rows of 16 words, one per section and thread in it:
    7       finishing since                  opened at · closed at · times closed · largest · largest during warm-up ·
    8       heartbeats                       timeout given · (free) · (free) · name (64 bytes, NUL padded)
    9       last heartbeat at        22-25   stop: calls · asked for by signal · waiting at · taken at
                                     26-29   written by the launcher: stop armed · decided · the rank is being ended ·
                                             stop confirmed to the other nodes
                                     30      an exception was recorded at this time and is still on its way (0: none)
    10      heartbeats expected since (0: not expected)
    11      done since (0: not done)

A section is open when it was opened after it was last closed: entering and leaving are one store each.

Times are CLOCK_MONOTONIC in nanoseconds, 0 for "never". The page lives in a memfd: it is bound neither by the size of
/dev/shm nor by whether it is writable, and it is gone when its last holder is.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass

MAGIC = int.from_bytes(b"RSLPAGE1", "little")
NO_STEP = (1 << 64) - 1

W_MAGIC, W_INCARNATION, W_PID, W_FLAGS, W_ATTACHED, W_ROWS, _, W_FINISHING = range(8)
W_BEATS, W_BEAT_AT, W_EXPECTED, W_DONE, W_BEAT_TIMEOUT, W_STEP = range(8, 14)
W_GAPS, W_GAPS_WARMUP, W_PAUSES, W_PAUSE, W_PAUSE_WARMUP, W_FIRST_SIGN, W_INSIDE, W_WHOLE_GAPS = range(14, 22)
W_STOP_CALLS, W_STOP_ASKED, W_STOP_WAITING, W_STOP_TAKEN = range(22, 26)
W_STOP_ARMED, W_STOP_DECIDED, W_ENDING, W_STOP_CONFIRMED = range(26, 30)  # the only words that the launcher writes
W_IN_FLIGHT = 30
W_RING = 32
RING = 64
W_TABLE = W_RING + RING
ROW_WORDS = 16
MAX_ROWS = 64
NAME_BYTES = 64
R_OPENED, R_CLOSED, R_EXITS, R_LARGEST, R_WARMUP, R_TIMEOUT = range(6)
R_NAME = 8
WARMUP = 3  # the first gaps and durations of every life are compilation, allocation and cold caches, not the rhythm
PAGE_BYTES = -(-(W_TABLE + MAX_ROWS * ROW_WORDS) * 8 // mmap.PAGESIZE) * mmap.PAGESIZE

FLAG_ATTACHED = 1  # the trampoline ran
FLAG_ADOPTED = 2  # the script called us at least once

EVENT_TIME = 0xFFFF_FFFF_FFFF_0000  # an event is its time with kind and row in the low 16 bits, so it is good to 66 µs
LEAVE, EXPECT, UNEXPECT, FINISH = range(1, 5)  # what is open shows in the table, so entering leaves no event
EVENT_NAMES = {LEAVE: "leave", EXPECT: "expect heartbeats", UNEXPECT: "heartbeats end", FINISH: "script returned"}


@dataclass(frozen=True)
class Seen:
    """What was measured of one clock: how many samples after warm-up, and the largest, in nanoseconds."""

    samples: int = 0
    largest: int = 0
    warmup: int = 0


@dataclass(frozen=True)
class Row:
    """One section as the monitor sees it. Several threads in one section have a row each, with the same name."""

    name: str
    opened_at: int
    closed_at: int
    exits: int
    seen: Seen
    timeout: float | None = None  # seconds, given in code

    @property
    def open_since(self) -> int:
        """When it was opened, or 0 while it is closed."""
        return self.opened_at if self.opened_at > self.closed_at else 0

    @property
    def last(self) -> int:
        """How long it was open last, while it is closed."""
        return 0 if self.open_since else self.closed_at - self.opened_at

    @property
    def entries(self) -> int:
        """How often it was entered."""
        return self.exits + bool(self.open_since)


@dataclass(frozen=True)
class PageView:
    """A reading of a page. Plain data: everything a verdict needs besides the clock."""

    incarnation: int
    pid: int
    attached: bool
    adopted: bool
    attached_at: int
    first_sign: int
    beats: int
    beat_at: int
    expected_since: int
    done_since: int
    finishing_since: int
    beat_timeout: float | None
    step: int | None
    gaps: Seen
    pauses: Seen
    inside: int = 0  # time in sections since the last heartbeat
    whole_gap: int = 0  # the largest gap between heartbeats, with the sections in it
    rows: tuple[Row, ...] = ()
    in_flight: int = 0  # when an exception was recorded that has not been caught since
    stop_calls: int = 0

    def open_rows(self) -> list[Row]:
        """Return the open sections, outermost (oldest) first."""
        return sorted((row for row in self.rows if row.open_since), key=lambda row: row.open_since)


class Page:
    """A mapped page. The writer uses ``words`` and ``floats`` directly; readers call :meth:`read`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd  # -1: memory of this process alone
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self.words = memoryview(self._map).cast("Q")
        self.floats = memoryview(self._map).cast("d")

    @classmethod
    def create(cls, incarnation: int) -> Page:
        """Make a fresh page in a memfd of its own. Each life of a rank gets a new one, so a stale process can't write it."""
        import fcntl  # noqa: PLC0415 - Linux only, and only the launcher makes pages

        fd = os.memfd_create("resilience-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, PAGE_BYTES)
        # A rank that cut it short would end everybody who reads it with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd)._blank(incarnation)

    @classmethod
    def private(cls) -> Page:
        """Make a page that only this process sees, for a rank without a launcher. Works on every platform."""
        return cls(-1)._blank(0)

    def _blank(self, incarnation: int) -> Page:
        self.words[W_INCARNATION] = incarnation
        self.words[W_STEP] = NO_STEP
        self.floats[W_BEAT_TIMEOUT] = math.nan
        self.words[W_MAGIC] = MAGIC
        return self

    def name_of(self, row: int) -> str:
        """Return the name in a row of the section table."""
        start = (W_TABLE + row * ROW_WORDS + R_NAME) * 8
        return self._map[start : start + NAME_BYTES].rstrip(b"\0").decode("utf-8", "replace")

    def set_name(self, row: int, name: bytes) -> None:
        """Write a row's name. To be done before the row is counted in ``W_ROWS``."""
        start = (W_TABLE + row * ROW_WORDS + R_NAME) * 8
        self._map[start : start + NAME_BYTES] = name.ljust(NAME_BYTES, b"\0")

    def raw(self) -> bytes:
        """Return the part of the page that is in use, to see whether anything has changed."""
        return self._map[: (W_TABLE + min(self.words[W_ROWS], MAX_ROWS) * ROW_WORDS) * 8]

    def read(self) -> PageView:
        """Read the page. Never blocks and never fails, whatever the writer is doing."""
        words, floats = self.words, self.floats
        flags, step, beats = words[W_FLAGS], words[W_STEP], words[W_BEATS]
        rows = tuple(self._row(index) for index in range(min(words[W_ROWS], MAX_ROWS)))
        return PageView(
            incarnation=words[W_INCARNATION],
            pid=words[W_PID],
            attached=bool(flags & FLAG_ATTACHED),
            adopted=bool(flags & FLAG_ADOPTED),
            attached_at=words[W_ATTACHED],
            first_sign=words[W_FIRST_SIGN],
            beats=beats,
            beat_at=words[W_BEAT_AT],
            expected_since=words[W_EXPECTED],
            done_since=words[W_DONE],
            finishing_since=words[W_FINISHING],
            beat_timeout=_given(floats[W_BEAT_TIMEOUT]),
            step=None if step == NO_STEP else step,
            gaps=Seen(_after_warmup(beats - 1), words[W_GAPS], words[W_GAPS_WARMUP]),
            pauses=Seen(_after_warmup(words[W_PAUSES]), words[W_PAUSE], words[W_PAUSE_WARMUP]),
            inside=words[W_INSIDE],
            whole_gap=words[W_WHOLE_GAPS],
            rows=rows,
            in_flight=words[W_IN_FLIGHT],
            stop_calls=words[W_STOP_CALLS],
        )

    def _row(self, index: int) -> Row:
        base = W_TABLE + index * ROW_WORDS
        opened_at, closed_at, exits, largest, warmup = self.words[base : base + R_TIMEOUT].tolist()
        seen = Seen(_after_warmup(exits), largest, warmup)
        return Row(self.name_of(index), opened_at, closed_at, exits, seen, _given(self.floats[base + R_TIMEOUT]))

    def last_events(self) -> list[tuple[float, str, str]]:
        """Return the events still in the ring, oldest first: (seconds since attach, what, section)."""
        rows, attached = min(self.words[W_ROWS], MAX_ROWS), self.words[W_ATTACHED]
        events = []
        for word in sorted(self.words[W_RING : W_RING + RING].tolist()):
            kind, row = (word >> 8) & 0xFF, word & 0xFF
            if kind in EVENT_NAMES:
                name = self.name_of(row) if kind == LEAVE and row < rows else ""
                events.append((max(0, (word & EVENT_TIME) - attached) / 1e9, EVENT_NAMES[kind], name))
        return events

    def close(self) -> None:
        """Unmap the page and close its descriptor."""
        self.words.release()
        self.floats.release()
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)


def _after_warmup(count: int) -> int:
    return max(0, count - WARMUP)


def _given(value: float) -> float | None:
    return None if math.isnan(value) else value
