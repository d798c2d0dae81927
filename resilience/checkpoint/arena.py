"""Snapshot memory that outlives the training process: memfds, held by rank, saver and launcher, so that any two may die.

They are bound neither by the size of /dev/shm nor by its mount options, and are gone when their last holder is. A slot can grow
(a changed structure), never shrink. It is faulted in when it is made and populated again by every process that maps it: the first
copy through fresh pages is 20 to 40 times slower, through a fresh mapping still 5 times.

Hazard: never open a slot through ``multiprocessing.shared_memory``; before Python 3.13 its tracker unlinks the segment when the
first attaching process exits (cpython #82300).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

from resilience.checkpoint.ledger import seal_size
from resilience.checkpoint.shards import aligned

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap yet
_HUGE = 2 << 20


class Slot:
    """The memory of one slot, as this process maps it."""

    def __init__(self, fd: int, *, writable: bool = True) -> None:
        self.fd = fd
        self._writable = writable
        self.nbytes = os.fstat(fd).st_size
        self.map = self._mapped(self.nbytes)

    @classmethod
    def create(cls, nbytes: int) -> Slot:
        """Make a slot of at least ``nbytes``, with every page in place. Raises ``OSError`` when there is no memory for it."""
        fd = os.memfd_create("resilience-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(aligned(nbytes), mmap.PAGESIZE))
            seal_size(fd)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def grow(self, nbytes: int) -> None:
        """Make room for ``nbytes``, and a quarter more. Everything that was taken from ``map`` before is stale.

        Raises ``OSError`` when there is no memory for it; then nothing has changed.
        """
        wanted = max(aligned(nbytes + nbytes // 4), self.nbytes)
        os.ftruncate(self.fd, wanted)
        self.map, self.nbytes = self._mapped(wanted), wanted

    def refresh(self) -> None:
        """Map it anew if somebody has let it grow."""
        nbytes = os.fstat(self.fd).st_size
        if nbytes != self.nbytes:
            self.map, self.nbytes = self._mapped(nbytes), nbytes

    def close(self) -> None:
        """Let go of it. The mapping goes when nothing looks into it any more."""
        with contextlib.suppress(BufferError):
            self.map.close()
        os.close(self.fd)

    def _mapped(self, nbytes: int) -> mmap.mmap:
        found = self._advised(nbytes, 0)
        if not self._writable:
            return found
        try:
            found.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return self._advised(nbytes, mmap.MAP_POPULATE)  # an older kernel
        return found

    def _advised(self, nbytes: int, flags: int) -> mmap.mmap:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if self._writable else 0)
        found = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED | flags, access)
        with contextlib.suppress(OSError):
            found.madvise(mmap.MADV_DONTFORK)  # loader workers must not keep it
        if nbytes >= _HUGE:
            with contextlib.suppress(OSError):
                found.madvise(mmap.MADV_HUGEPAGE)
        return found


def make_slots(number: int, nbytes: int) -> list[Slot]:
    """Make so many slots, or none. Raises ``OSError`` when there is no memory for them."""
    made: list[Slot] = []
    try:
        while len(made) < number:
            made.append(Slot.create(nbytes))
    except BaseException:
        for slot in made:
            slot.close()
        raise
    return made
