"""Opening, writing and removing what lies in a checkpoint directory, whoever has put it there.

Rule: nobody waits for a pipe, reads a device, or writes through a link. A directory may have been unpacked from an archive, or
belong to somebody else: a name in it can lead to any file of this user's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from resilience.errors import CheckpointError


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file to be read; give it and its size. Raises ``OSError`` for what is no regular file. Links are followed: large
    files may have been moved elsewhere."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield file, found.st_size


def read_small(path: Path, limit: int) -> bytes:
    """Return the contents of a file that can't be large. Raises ``OSError`` for one that is, and for what is no file: nobody takes
    memory for a hole."""
    with opened(path) as (file, nbytes):
        if nbytes > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit / 1e6:.3g} MB", str(path))
        return file.read(limit)


def write_small(path: Path, text: str) -> None:
    """Write a small file anew, whole or not at all. Raises ``OSError``. A link in its place is replaced, never followed."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)  # of a job that was killed
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(fd, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def open_lock(path: Path) -> int:
    """Open a lock file, or make it. Raises ``CheckpointError`` for a link or what is no file, ``OSError`` for all else."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    except OSError:
        if not path.is_symlink() and (path.is_file() or not path.exists()):
            raise
    what = "a symbolic link" if path.is_symlink() else "no regular file"
    raise CheckpointError(
        f"{path} is {what}, which this program never makes ({socket.gethostname()}). Nothing was written. Remove it if you trust "
        "what lies beside it, or give another directory."
    )


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, a file, or a link; never what a link leads to. What can't be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
