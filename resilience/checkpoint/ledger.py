"""The ledger of a rank's slots: a few shared words that say what each slot holds and what was decided about it.

The rank and its saver share it; every word has one writer (R or S), as in the rank page. Words, 8 bytes each:

    0 magic                1 slots (R)             2 rank (R)               3 world (R)
    4 generation (R)       5 cycle (R)             6 W: serial of the newest COMPLETE seal (S)
    7 serial of the newest DURABLE seal (S)        8 saver's last sign of life, CLOCK_MONOTONIC ns (S)
    9 failures so far (S)  10 newest attempt: step + 1 (R)  11 serial of the last seal given (R)
    12 take a snapshot from this step + 1 on (S; 0: no wish)                 13 pid of the rank (R)
    14 ns that the last snapshot took (R)          15 so much of what is being written is on disk, per mille (S)
    16 serial of the newest REPLICATED seal (S)    17-19 unused
    20- rows of 19 words, one per slot:
        0 serial (R; 0: unsealed)     1 generation (R)      2 step (R)            3 plan (R)
        4 world (R)                   5 data bytes (R)      6 header at (R)       7 header bytes (R)
        8 values at (R)               9 values bytes (R)    10 header's digest (R) 11 values' digest (R)
        12 sealed at, ns (R)          13 checksum of the above (R)
        14 leased serial (S)          15 decision: serial * 4 + PENDING, COMPLETE or VOID (S)
        16 serial that is durable (S) 17 to be written to disk (R)
        18 serial that other nodes have copies of (S)

A seal is written last, serial at the very end, and taken back first; a reader that finds the checksum wrong finds no seal.

Hazard: the words are stores of this process; on ARM another core may see them in another order. :func:`fence` stands
wherever order matters. (Tried on x86 only.)
"""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from dataclasses import dataclass, replace

from resilience.checkpoint import slots
from resilience.checkpoint.slots import Slot

MAGIC = int.from_bytes(b"RSLLEDG3", "little")
NBYTES = mmap.PAGESIZE
MAX_SLOTS = 16
(L_MAGIC, L_SLOTS, L_RANK, L_WORLD, L_GENERATION, L_CYCLE, L_COMPLETE, L_DURABLE, L_ALIVE, L_FAILURES) = range(10)
L_ATTEMPT, L_SERIAL, L_STAGE_FROM, L_PID, L_COST, L_WRITTEN, L_REPLICATED = range(10, 17)
_ROWS = 20
_ROW = 19
(S_SERIAL, S_GENERATION, S_STEP, S_PLAN, S_WORLD, S_DATA, S_HEADER_AT, S_HEADER, S_VALUES_AT, S_VALUES) = range(10)
S_HEADER_SUM, S_VALUES_SUM, S_SEALED_AT, S_CHECK, S_LEASE, S_DECISION, S_DURABLE, S_DISK, S_REPLICATED = range(10, 19)
_SIGNED = S_CHECK  # the words that the checksum covers


def fence() -> None:
    """Order the stores (and loads) before it with those after it, for other processes too.

    Two turns of a lock: nothing before can sink below the first release, nothing after can rise above the second acquire.
    The lock is a new one: a shared one could be held by the code that a signal handler interrupts, or by a thread when the
    process forks, and whoever came next would wait for ever.
    """
    lock = threading.Lock()
    with lock:
        pass
    with lock:
        pass


@dataclass(frozen=True)
class Seal:
    """A sealed slot: what it holds, and where."""

    slot: int
    serial: int
    generation: int
    step: int
    plan: int
    world: int
    data: int
    header_at: int
    header: int
    values_at: int
    values: int
    header_sum: int
    values_sum: int
    sealed_at: int
    decision: int = slots.PENDING
    durable: int = 0  # the serial that is on disk
    on_disk: int = 0  # whether the rank wants it there
    replicated: int = 0  # the serial that other nodes have copies of

    @property
    def is_durable(self) -> bool:
        """Whether it is on disk."""
        return self.durable == self.serial

    @property
    def is_replicated(self) -> bool:
        """Whether other nodes have copies of it."""
        return self.replicated == self.serial

    @property
    def key(self) -> tuple[int, int]:
        """What the same snapshot of all ranks has in common; of two, the larger one is newer."""
        return self.generation, self.step


class Ledger:
    """A mapped ledger. The rank's and the saver's parts are apart; both may read everything."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, NBYTES)
        self.words = memoryview(self._map).cast("Q")
        if self.words[L_MAGIC] != MAGIC or not 1 <= self.words[L_SLOTS] <= MAX_SLOTS:
            raise ValueError("this is no ledger")

    @classmethod
    def create(cls, number: int, rank: int, world: int) -> Ledger:
        """Make the ledger of a rank that has none."""
        fd = os.memfd_create("resilience-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, NBYTES)
        seal_size(fd)
        with mmap.mmap(fd, NBYTES) as room, memoryview(room).cast("Q") as words:
            words[L_SLOTS], words[L_RANK], words[L_WORLD] = number, rank, world
            words[L_MAGIC] = MAGIC
        return cls(fd)

    def close(self) -> None:
        """Unmap it and close its descriptor."""
        self.words.release()
        self._map.close()
        os.close(self.fd)

    @property
    def number(self) -> int:
        """How many slots there are."""
        return self.words[L_SLOTS]

    # -- what both read ---------------------------------------------------------------------------------------------

    def seals(self) -> list[Seal]:
        """Return every valid seal, oldest first."""
        found = [seal for index in range(self.number) if (seal := self.seal_of(index)) is not None]
        return sorted(found, key=lambda seal: seal.serial)

    def seal_of(self, index: int) -> Seal | None:
        """Return the seal of a slot, or ``None`` while it has none. A slot that is being written has none."""
        base = _ROWS + index * _ROW
        row = self.words[base : base + _ROW].tolist()
        fence()
        if row[S_SERIAL] == 0 or self.words[base] != row[S_SERIAL] or row[S_CHECK] != _checksum(row):
            return None
        decided, verdict = divmod(row[S_DECISION], 4)
        verdict = verdict if decided == row[S_SERIAL] else slots.PENDING
        fields = [index, *row[:S_CHECK], verdict, row[S_DURABLE], row[S_DISK], row[S_REPLICATED]]
        return Seal(*fields)

    def rule_view(self) -> tuple[list[Slot], int]:
        """Return the slots and W as the slot rule sees them: W first, then the leases, then what is REPLICATED."""
        newest = self.words[L_COMPLETE]
        fence()
        found = []
        for index in range(self.number):
            base = _ROWS + index * _ROW
            serial = self.words[base + S_SERIAL]
            decided, verdict = divmod(self.words[base + S_DECISION], 4)
            leased = serial != 0 and self.words[base + S_LEASE] == serial
            found.append(Slot(serial, verdict if decided == serial else slots.PENDING, leased))
        fence()
        kept = self.words[L_REPLICATED]
        if kept:
            found = [replace(slot, kept=slot.serial == kept) for slot in found]
        return found, newest

    # -- the rank's part --------------------------------------------------------------------------------------------

    def begin(self, index: int) -> None:
        """Take the seal of a slot back: from here on it holds nothing."""
        self.words[_ROWS + index * _ROW + S_SERIAL] = 0
        fence()

    def seal(self, index: int, fields: tuple[int, ...], on_disk: bool) -> int:
        """Seal a slot whose bytes are in place; return the serial. ``fields``: generation … sealed_at, in the row's order."""
        serial = self.words[L_SERIAL] + 1
        base = _ROWS + index * _ROW
        row = [serial, *fields]
        for word, value in enumerate(row[1:], 1):
            self.words[base + word] = value
        self.words[base + S_CHECK] = _checksum(row)
        self.words[base + S_DISK] = int(on_disk)
        self.words[L_SERIAL] = serial
        fence()
        self.words[base + S_SERIAL] = serial
        fence()
        return serial

    # -- the saver's part -------------------------------------------------------------------------------------------

    def lease(self, seal: Seal) -> None:
        """Keep a slot from being overwritten. Only while its serial is W or newer."""
        self.words[_ROWS + seal.slot * _ROW + S_LEASE] = seal.serial
        fence()

    def is_leased(self, seal: Seal) -> bool:
        """Whether a slot is leased for this seal, by this saver or one before it."""
        return self.words[_ROWS + seal.slot * _ROW + S_LEASE] == seal.serial

    def release(self, seal: Seal) -> None:
        """Let a slot go, if it is this seal that it is leased for."""
        fence()
        if self.words[_ROWS + seal.slot * _ROW + S_LEASE] == seal.serial:
            self.words[_ROWS + seal.slot * _ROW + S_LEASE] = 0

    def decide(self, seal: Seal, decision: int) -> None:
        """Write what was decided about a seal; a COMPLETE one becomes W if it is newer."""
        self.words[_ROWS + seal.slot * _ROW + S_DECISION] = seal.serial * 4 + decision
        fence()
        if decision == slots.COMPLETE and seal.serial > self.words[L_COMPLETE]:
            self.words[L_COMPLETE] = seal.serial

    def mark_durable(self, seal: Seal) -> None:
        """Write that a snapshot is on disk, with everything it needs."""
        self.words[_ROWS + seal.slot * _ROW + S_DURABLE] = seal.serial
        self.words[L_DURABLE] = max(self.words[L_DURABLE], seal.serial)

    def mark_replicated(self, seal: Seal) -> None:
        """Write that other nodes have copies of a snapshot. From here on it is kept until there is a newer one: whoever leased it
        may let go of it now, and not before."""
        self.words[_ROWS + seal.slot * _ROW + S_REPLICATED] = seal.serial
        self.words[L_REPLICATED] = max(self.words[L_REPLICATED], seal.serial)
        fence()

    def replicated(self) -> Seal | None:
        """Return the newest seal that other nodes have copies of, if it is there."""
        kept = self.words[L_REPLICATED]
        return next((seal for seal in self.seals() if kept and seal.serial == kept), None)

    def go_back_to(self, seal: Seal | None) -> None:
        """Void every seal that is newer than ``seal`` (all, for ``None``), which is W from now on. Nobody may be saving.

        ``seal`` is COMPLETE then, even if it was voided when the job went back behind it once: otherwise it could be
        overwritten before there is another one.
        """
        kept = self.replicated()
        if kept is not None and (seal is None or kept.key > seal.key):
            self.words[L_REPLICATED] = 0
        if seal is not None:
            self.words[_ROWS + seal.slot * _ROW + S_DECISION] = seal.serial * 4 + slots.COMPLETE
            fence()
        self.words[L_COMPLETE] = seal.serial if seal is not None else 0
        for other in self.seals():
            if seal is None or other.key > seal.key:
                self.words[_ROWS + other.slot * _ROW + S_DECISION] = other.serial * 4 + slots.VOID
        fence()


def seal_size(fd: int) -> None:
    """Have nobody cut a memfd short: whoever reads it would end with SIGBUS."""
    import fcntl  # noqa: PLC0415 - Linux only

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


def _checksum(row: list[int]) -> int:
    """Return the checksum of a seal's words; never 0, so that blank words are no seal."""
    data = b"".join(word.to_bytes(8, "little") for word in row[:_SIGNED])
    return zlib.crc32(data) | 1 << 32
