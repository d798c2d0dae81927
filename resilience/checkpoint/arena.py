"""Snapshot memory that outlives the training process: memfds, held by rank, saver and launcher, so that any two may die.

They are bound neither by the size of /dev/shm nor by its mount options, and are gone when their last holder is. A slot can grow
(a changed structure), never shrink. It is faulted in when it is made and populated again by every process that maps it: the first
copy through fresh pages is 20 to 40 times slower, through a fresh mapping still 5 times.

Hazard: a forked child has the objects and the descriptors, not the mappings (MADV_DONTFORK), and soon other memory at their
addresses. :func:`forget_slots` is what it has to call.

Hazard: never open a slot through ``multiprocessing.shared_memory``; before Python 3.13 its tracker unlinks the segment when the
first attaching process exits (cpython #82300).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterable

from resilience.checkpoint.ledger import seal_size
from resilience.checkpoint.shards import aligned

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap yet
_HUGE = 2 << 20
_File = tuple[int, int]  # device and inode
# Whatever still lives, closed or not.
_mapped: weakref.WeakKeyDictionary[mmap.mmap, _File] = weakref.WeakKeyDictionary()


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
        _mapped[found] = _file(self.fd)
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


def forget_slots(others: Iterable[tuple[int, object]] = ()) -> None:
    """Let go of all slots in a forked child, and of ``others``: descriptors, and what maps them.

    Every descriptor of them is closed, the copy that each map keeps included. The maps themselves stay, unused and for good: one
    that went would unmap whatever of the child's is at its address by then, and close whatever has the number of its copy.
    """
    kept: list[object] = [*_mapped]
    files = set(_mapped.values())
    _mapped.clear()
    for fd, holder in others:
        kept.append(holder)
        with contextlib.suppress(OSError):
            files.add(_file(fd))
    for holder in kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))  # a list would let them go when the interpreter ends
    if files:
        _close_all(files)


def _close_all(files: set[_File]) -> None:
    """Close every descriptor of these files that this process has."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - in every loader worker: no object per descriptor
        with contextlib.suppress(OSError):  # that of the listing itself
            if _file(int(name)) in files:
                os.close(int(name))


def _file(fd: int) -> _File:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
