"""Directories of a run: the one that stays (reports and logs) and the private one that does not (the socket).

Rule: what lasts is in the run's directory; the scratch directory is removed by the launcher, by the monitors when the
launcher was killed, and by the next launcher of this user when both were.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from resilience import config
from resilience.errors import ConfigError

KEPT_RUNS = 50
_MAX_PARENT_BYTES = 70
_JUST_MADE_S = 60.0
_TRIES, _AGAIN_S = 5, 0.05
_STILL_WRITTEN_S = 24 * 3600.0
_DISK_AT_FAULT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


class DiskFault(ConfigError):  # noqa: N818 - reads as what it is
    """A directory can't be made because its disk is full, read-only or broken: another node may do better with the same flags."""


def make_run_dir(wanted: str | None, run_id: str) -> Path:
    """Make the directory of this run, the given one or a new one below the user's state folder."""
    if wanted is not None:
        path = Path(wanted).expanduser().absolute()
    else:
        name = "".join(char if char.isalnum() or char in "-_." else "-" for char in run_id)[:40]
        path = _state_folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if wanted is not None:
            _set_aside(path, run_id)
    except OSError as error:
        raise _refusal(error)(
            f"the run's directory {path} can't be made: {error.strerror}. Nothing was started. Give another with --ft-run-dir."
        ) from error
    if wanted is None:
        _prune(path.parent)
    return path


def drop_unused(path: Path) -> None:
    """Take away a run's directory that nothing was written to: of a job that was refused there is nothing to read."""
    with contextlib.suppress(OSError):  # something was, or is by another launcher
        path.rmdir()


def _refusal(error: OSError) -> type[ConfigError]:
    return DiskFault if error.errno in _DISK_AT_FAULT else ConfigError


def _set_aside(path: Path, run_id: str) -> None:
    """Move what another job left in a directory that is used again into ``earlier/``: no report is ever overwritten by it.

    Launchers of one job share its id, and so a directory on a shared file system. They come here at the same time: what one of them
    has moved, or written since, is left alone by the others.
    """
    mark = path / "job"
    found, written_at = _read_mark(mark)
    if found == run_id:
        return
    if found:
        earlier = path / "earlier" / time.strftime("%Y%m%d-%H%M%S", time.localtime(written_at))
        earlier.mkdir(parents=True, exist_ok=True)
        for name in ("cycles", "ends", "logs", "progress"):
            if _read_mark(mark)[0] != run_id:
                _move(path / name, earlier / name)
    _write_mark(mark, run_id)


def _move(path: Path, to: Path) -> None:
    try:
        path.rename(to)
    except OSError as error:  # there was none; or another launcher was quicker, and what is there now is new
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def _read_mark(mark: Path) -> tuple[str, float]:
    """Return whose directory it is, and since when; empty where nobody's, or where it is just being written."""
    try:
        with mark.open(encoding="utf-8", errors="replace") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return "", 0.0


def _write_mark(mark: Path, run_id: str) -> None:
    """Write it so that nobody ever reads a part of it."""
    partial = mark.with_name(f".job.{secrets.token_hex(8)}")
    try:
        partial.write_text(run_id, encoding="utf-8")
        partial.replace(mark)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _state_folder() -> Path:
    try:
        base = config.environment().get("XDG_STATE_HOME") or str(Path("~").expanduser() / ".local" / "state")
        folder = Path(base) / "resilience" / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: a user without a home, as in many containers
        pass
    return Path(tempfile.gettempdir()) / f"resilience-runs-{os.getuid()}"


def _prune(folder: Path) -> None:
    """Remove the oldest runs below the state folder, unless they are still written to; one given by the user is never touched."""
    runs = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=lambda entry: entry.name)
    for old in runs[:-KEPT_RUNS]:
        with contextlib.suppress(OSError):  # another launcher may be at it too
            if time.time() - max((path.lstat().st_mtime for path in old.rglob("*")), default=0.0) > _STILL_WRITTEN_S:
                shutil.rmtree(old, ignore_errors=True)


class Scratch:
    """The private directory for the socket, held by a lock that dies with the launcher.

    A lock and not a pid: a container shares /tmp with others and not their process numbers.
    """

    def __init__(self) -> None:
        parent = _scratch_parent()
        prefix = f"resilience-{os.getuid()}-"
        for stale in parent.glob(prefix + "*"):
            _sweep(stale)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = _lock(self.path / "owner.new", create=True)
            (self.path / "owner.new").rename(self.path / "owner")  # locked before anybody can find it
        except OSError as error:
            raise _refusal(error)(
                f"the folder for the launcher's socket can't be made in {parent}: {error.strerror}. Nothing was started."
            ) from error

    def remove(self) -> None:
        """Take it away. Somebody who is ending too may put something into it, or take it out, meanwhile."""
        for _ in range(_TRIES):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
            time.sleep(_AGAIN_S)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _sweep(path: Path) -> None:
    """Remove a scratch directory whose launcher is gone."""
    try:
        just_made = time.time() - path.stat().st_mtime < _JUST_MADE_S
    except OSError:
        return  # another launcher sweeps too
    try:
        lock = _lock(path / "owner", create=False)
    except FileNotFoundError:
        if not just_made:
            shutil.rmtree(path, ignore_errors=True)
        return
    except OSError:
        return
    if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _lock(path: Path, create: bool) -> int | None:
    """Return a locked descriptor, or ``None`` when another process holds the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _scratch_parent() -> Path:
    """Return the first folder that can be written and whose name leaves room: a socket's path has at most 107 bytes."""
    with contextlib.suppress(FileNotFoundError):  # nothing that tempfile knows is writable
        tempfile.gettempdir()
    wanted = [config.environment().get("XDG_RUNTIME_DIR"), tempfile.tempdir, "/tmp", "/dev/shm"]
    for folder in wanted:
        if folder and len(os.fsencode(folder)) <= _MAX_PARENT_BYTES and os.access(folder, os.W_OK):
            return Path(folder)
    raise ConfigError(
        f"no folder for the launcher's socket: of {', '.join(filter(None, wanted))} none is writable with a path of at most "
        f"{_MAX_PARENT_BYTES} bytes. Nothing was started. Set TMPDIR to a short writable path."
    )
