"""Directories of a run: the one that stays (reports and logs) and the private one that does not (the socket).

Rule: what lasts is in the run's directory; the scratch directory is removed by the launcher, by the monitors when the
launcher was killed, and by the next launcher of this user when both were.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from resilience import config
from resilience.errors import ConfigError
from resilience.monitor import proc

KEPT_RUNS = 50
_MAX_PARENT_BYTES = 70


def make_run_dir(wanted: str | None, run_id: str) -> Path:
    """Make the directory of this run, the given one or a new one below the user's state folder."""
    if wanted is not None:
        path = Path(wanted).expanduser().absolute()
    else:
        name = "".join(char if char.isalnum() or char in "-_." else "-" for char in run_id)[:40]
        path = _state_folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"the run's directory {path} can't be made: {error.strerror}. Nothing was started. Give another with --ft-run-dir."
        ) from error
    if wanted is None:
        _prune(path.parent)
    return path


def _state_folder() -> Path:
    base = config.environment().get("XDG_STATE_HOME") or str(Path("~").expanduser() / ".local" / "state")
    folder = Path(base) / "resilience" / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.gettempdir()) / f"resilience-runs-{os.getuid()}"


def _prune(folder: Path) -> None:
    """Remove the oldest runs below the state folder; a directory given by the user is never touched."""
    runs = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=lambda entry: entry.name)
    for old in runs[:-KEPT_RUNS]:
        shutil.rmtree(old, ignore_errors=True)


def make_scratch() -> Path:
    """Make the private directory for the socket, and remove those whose launcher is gone."""
    parent = _scratch_parent()
    prefix = f"resilience-{os.getuid()}-"
    for stale in parent.glob(prefix + "*"):
        if not _owned_by_live_launcher(stale):
            shutil.rmtree(stale, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    (path / "owner").write_text(f"{os.getpid()} {_started(os.getpid())}")
    return path


def _scratch_parent() -> Path:
    """Return the first folder that can be written and whose name leaves room: a socket's path has at most 107 bytes."""
    wanted = [config.environment().get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp", "/dev/shm"]
    for folder in wanted:
        if folder and len(os.fsencode(folder)) <= _MAX_PARENT_BYTES and os.access(folder, os.W_OK):
            return Path(folder)
    raise ConfigError(
        f"no folder for the launcher's socket: of {', '.join(filter(None, wanted))} none is writable with a path of at most "
        f"{_MAX_PARENT_BYTES} bytes. Nothing was started. Set TMPDIR to a short writable path."
    )


def _owned_by_live_launcher(path: Path) -> bool:
    try:
        pid, started = (path / "owner").read_text().split()
    except (OSError, ValueError):
        return time.time() - path.stat().st_mtime < 60 if path.exists() else True  # one that is just being made
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """Return when a live process started; nothing for one that is gone, or dead and not reaped."""
    state = proc.state_of(pid)
    return "" if state is None or state.state == "Z" else str(state.started_ticks)
