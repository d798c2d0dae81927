"""Checkpoints in a directory of a file system, local or shared.

    DIRECTORY/step-00000100/rank-00000.safetensors   tensors       written first, fsynced
                            rank-00000.values        all else      written first, fsynced
                            manifest.json            written last, renamed into place: the commit
    DIRECTORY/.lock                                  held while a job writes here

A directory without a valid manifest is no checkpoint. What is being written stands in ``.partial-…`` and is swept by the next job.
How bytes get into a file: :mod:`writing`. What is called what: :mod:`names`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilience.checkpoint import files, manifest
from resilience.checkpoint.manifest import File, Manifest, ManifestError
from resilience.checkpoint.schedule import surplus
from resilience.checkpoint.stores.claims import in_use
from resilience.checkpoint.stores.names import ASIDE, PARTIAL, STEP, number_of
from resilience.checkpoint.writing import write_file
from resilience.errors import CheckpointError

if TYPE_CHECKING:
    from resilience.checkpoint.stores import Kept


@dataclass(frozen=True)
class Stored:
    """A checkpoint that is in the directory."""

    path: Path
    manifest: Manifest


class Directory:
    """A directory of checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        self._mark: Path | None = None
        self._run: str | None = None  # by whom it was claimed
        self._at_work = threading.Lock()

    # -- one job at a time ------------------------------------------------------------------------------------------

    def claim(self, run: str) -> None:
        """Make it ours until :meth:`close`, or raise :class:`DirectoryInUse`. Sweeps what an earlier job left half done."""
        if self._lock >= 0:
            return
        try:
            make_folder(self.path)
            fd = files.open_lock(self.path / ".lock")
        except OSError as error:
            raise CheckpointError(
                f"{self.path} can't be used for checkpoints: {error.strerror} ({socket.gethostname()}). Nothing was written. "
                "Give a directory that can be written to."
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 4096, 0).decode("utf-8", "replace")
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise in_use(self.path, holder) from None
        self._lock, self._run = fd, run
        self._sign({"run": run})
        self._sweep("")

    def _sweep(self, kind: str) -> None:
        for path in self.path.glob(f"{PARTIAL}{kind}*"):
            files.remove(path)

    def hold(self) -> None:
        """Make the folder, and the claim, anew if somebody has removed them. Raises :class:`DirectoryInUse` if another job came."""
        if self._run is None:
            make_folder(self.path)
        elif not self._is_held():
            self._let_go()
            self.claim(self._run)

    def _is_held(self) -> bool:
        try:
            return self._lock >= 0 and os.path.samestat(os.fstat(self._lock), (self.path / ".lock").lstat())
        except FileNotFoundError:
            return False

    def _let_go(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _sign(self, more: dict[str, object]) -> None:
        signed = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **more}).encode()
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, signed, 0)

    def mark(self) -> str:
        """Leave a file by which other nodes know that they have the same directory; return its name."""
        self._unmark()
        self._mark = self.path / f"{PARTIAL}here-{secrets.token_hex(8)}"
        self._mark.touch()
        return self._mark.name

    def sees(self, mark: str) -> bool:
        """Whether what :meth:`mark` left on another node is here."""
        return (self.path / mark).exists()

    def _unmark(self) -> None:
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.unlink()

    def say_leaving(self, leaving: bool = True) -> None:
        """Let whoever comes next know that it is worth waiting for us, or that it is not."""
        if self._lock >= 0:
            self._sign({"run": self._run, "leaving": leaving})

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep it ours until the block ends: another thread's :meth:`close` waits."""
        with self._at_work:
            yield

    def close(self) -> None:
        """Let others write here, as soon as nobody is :meth:`at_work`."""
        with self._at_work:
            self._unmark()
            self._run = None
            self._let_go()

    # -- reading ----------------------------------------------------------------------------------------------------

    def stored(self, complain: Callable[[str], None] = lambda text: None) -> list[Stored]:
        """Return the checkpoints that are whole as far as names and sizes go, newest first; ``complain`` of the others."""
        found = []
        for path in self.path.iterdir() if self.path.is_dir() else []:
            if not STEP.match(path.name):
                continue
            try:
                if (path / ASIDE).exists():
                    why = files.read_small(path / ASIDE, 1 << 20).decode(errors="replace")
                    raise ManifestError(f"it was set aside: {why[:1000]}")
                found.append(Stored(path, read_manifest(path)))
            except (ManifestError, OSError) as error:
                complain(f"{path}: {error}. It is left out.")
        return sorted(found, key=lambda item: (item.manifest.key, number_of(item.path.name)), reverse=True)

    def read(self, checkpoint: str, name: str, start: int, end: int) -> bytes:
        """Return some bytes of a file of a checkpoint."""
        with files.opened(self.path / checkpoint / name) as (file, _):
            file.seek(start)
            return file.read(end - start)

    def recall(self, name: str) -> bytes:
        """Return a small file that :meth:`note` left."""
        return files.read_small(self.path / name, 1 << 20)

    def note(self, name: str, text: str) -> None:
        """Keep a small file beside the checkpoints."""
        files.write_small(self.path / name, text)

    def free_bytes(self) -> int:
        """Return how much may still be written."""
        return free_bytes(self.path)

    # -- writing ----------------------------------------------------------------------------------------------------

    def partial(self, folder: str) -> Path:
        """Return a folder to write parts of a checkpoint into; several nodes may use it at the same time."""
        self.hold()
        path = self.path / f"{PARTIAL}{folder}"
        path.mkdir(exist_ok=True)
        return path

    def write(self, folder: str, name: str, rank: int, head: bytes, data: memoryview, **how: Any) -> File:
        """Write a file into a folder, see :func:`writing.write_file`."""
        return write_file(self.path / f"{PARTIAL}{folder}" / name, rank, head, data, **how)

    def settle(self, folder: str) -> None:
        """Have the names of what was written into a folder on the disk."""
        sync(self.path / f"{PARTIAL}{folder}")

    def commit(self, folder: str, contents: Manifest) -> None:
        """Make a checkpoint of a folder in which every file is on the disk: manifest first, then its name."""
        path = self.path / f"{PARTIAL}{folder}"
        write_manifest(path, contents)
        sync(path)
        path.rename(self._free_name(contents.step))
        sync(self.path)

    def discard(self, folder: str) -> None:
        """Remove what was written into a folder that will not become a checkpoint."""
        files.remove(self.path / f"{PARTIAL}{folder}")

    def _free_name(self, step: int) -> Path:
        """Return a name that comes after those that a step has already: of two saves of one step that says which is newer."""
        taken = [number_of(path.name) for path in self.path.glob(f"step-{step:08d}*") if STEP.match(path.name)]
        return self.path / f"step-{step:08d}{f'.{max(taken) + 1}' if taken else ''}"

    def set_aside(self, item: Kept, why: str) -> None:
        """Have a checkpoint no longer count. It stays, for whoever wants to look."""
        folder = self.path / item.path.name
        files.write_small(folder / ASIDE, why)
        sync(folder)

    def prune(self, keep: int, keep_every: int = 0) -> list[Stored]:
        """Remove all but the newest ``keep`` steps (and every ``keep_every``-th); return what is gone.

        The name goes first: what is half removed is no checkpoint any more, and is swept by the next call or the next job. Of a
        checkpoint that stands elsewhere, behind a link, only the link goes.
        """
        self._sweep("gone-")
        whole = self.stored()
        gone = [whole[place] for place in surplus([item.manifest.step for item in whole], keep, keep_every)]
        for item in gone:
            # A name of its own: one of the same step may have been impossible to remove.
            leaving = self.path / f"{PARTIAL}gone-{item.path.name}-{secrets.token_hex(4)}"
            item.path.rename(leaving)
            sync(self.path)
            files.remove(leaving)
        return gone


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest and look whether every file is there, in full. Raises ``ManifestError`` or ``OSError``."""
    try:
        found = Manifest.from_bytes(files.read_small(path / manifest.NAME, manifest.MAX_NBYTES))
    except FileNotFoundError:
        raise ManifestError("there is no manifest: it was never finished") from None
    for file in (*found.shards, *found.values):
        try:
            there = (path / file.name).stat()
        except FileNotFoundError:
            raise ManifestError(f"{file.name} is missing") from None
        if not stat.S_ISREG(there.st_mode):
            raise ManifestError(f"{file.name} is no regular file")
        if there.st_size != file.nbytes:
            raise ManifestError(f"{file.name} has {there.st_size} bytes, not {file.nbytes}")
    return found


def write_manifest(folder: Path, contents: Manifest) -> None:
    """Write the manifest under a temporary name and rename it: the commit of a folder that is complete."""
    temporary = folder / f".{manifest.NAME}"
    write_file(temporary, 0, b"", memoryview(contents.as_bytes()))
    temporary.rename(folder / manifest.NAME)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and have their names on the disk: what is durable inside must be found."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync(folder: Path) -> None:
    """Have a directory's entries on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems have no such thing for directories
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """Return how much may still be written below a folder."""
    there = folder
    while not there.exists():
        there = there.parent
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize
