"""Bytes on their way into a file: large, aligned and direct, so that the page cache is left to the data loaders.

Rule: what is written is on the disk when :meth:`Writer.finish` returns; the file's name is not, until its folder is synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from resilience.checkpoint import digest
from resilience.checkpoint.manifest import File

# What is under way at once. After each write we wait for a processor, behind the training: where all are busy, writes of 16 MiB
# take 1.2 times as long as such of 32. A data loader's read waits for the disk: up to 7 ms with 16 MiB, 14 with 32, 23 with 64.
PIECE = 32 << 20
_BLOCK = 4096


class Stopwatch:
    """Adds up the seconds that go into things, by name. Threads may share one if no two count the same thing at once."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Count the time that the block takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += time.monotonic() - began


class Writer:
    """Writes direct where the file system takes it, else through the page cache. Every wait is the kernel's."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._buffered = os.open(path, flags, 0o600)
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            self._direct = -1

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._buffered, self._direct):
            if fd >= 0:
                os.close(fd)

    def write(self, data: memoryview, at: int) -> None:
        """Write ``data`` at an offset."""
        whole = len(data) - len(data) % _BLOCK if at % _BLOCK == 0 else 0
        if self._direct >= 0 and whole:
            try:
                done = _write_all(self._direct, data[:whole], at)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                os.close(self._direct)
                self._direct, done = -1, 0
            data, at = data[done:], at + done
        self.write_buffered(data, at)

    def write_buffered(self, data: memoryview, at: int) -> None:
        """Write ``data`` at an offset through the page cache."""
        _write_all(self._buffered, data, at)

    def finish(self, total: int) -> None:
        """Have everything on the disk, and the file as long as it should be."""
        os.ftruncate(self._buffered, total)
        os.fsync(self._buffered)


def _write_all(fd: int, data: memoryview, at: int) -> int:
    done = 0
    while done < len(data):
        wrote = os.pwrite(fd, data[done : done + PIECE], at + done)
        if wrote == 0:
            raise OSError(errno.ENOSPC, "the file system takes no more")
        done += wrote
    return done


def write_file(
    path: Path,
    rank: int,
    head: bytes,
    data: memoryview,
    *,
    digests: Sequence[str] = (),
    progress: Callable[[int], None] = lambda nbytes: None,
    clock: Stopwatch | None = None,
) -> File:
    """Write a file: a header of whole blocks (or none), then data. It is on the disk when this returns. Raises ``OSError``.

    Hazard: data is read twice, by the disk and for its digests; if it changes meanwhile the file is refused when it is read.

    ``digests``: of the data's chunks, where they are known; else each piece's are computed in a thread while it is written.
    ``progress``: called with the number of bytes of data in each piece that is written.
    ``clock``: told the time for ``digest``, ``write`` and ``fsync``; of the first two only the longer one is waited for.
    """
    clock = clock or Stopwatch()
    size = digest.chunk_size(len(data))

    def digested(piece: memoryview) -> list[str]:
        with clock("digest"):
            return digest.digests(piece, size)

    if not digests and len(data) <= size:
        digests = digested(data)  # not worth a thread
    found = [*([digest.digest(head)] if head else []), *digests]
    with Writer(path) as writer, ThreadPoolExecutor(1, "resilience-digest") as beside:
        writer.write_buffered(memoryview(head), 0)  # bytes stand at odd addresses, which direct writes refuse
        for start, end in digest.chunks(len(data), size * max(1, PIECE // size)):
            pending = None if digests else beside.submit(digested, data[start:end])
            with clock("write"):
                writer.write(data[start:end], len(head) + start)
            found += pending.result() if pending is not None else []
            progress(end - start)
        with clock("fsync"):
            writer.finish(len(head) + len(data))
    return File(path.name, rank, len(head) + len(data), len(head), size, tuple(found))
