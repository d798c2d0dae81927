"""How far a node has come: ``progress/<node>`` in the run's directory, for whoever starts the job again.

Reports of failures have the steps of all ranks in them; a launcher that is killed writes none. And a cycle that has begun leaves
no report until it fails, and no logs where torch keeps them.

1) (launcher) :class:`Keeper` while it runs: a thread of its own, so that a file system that hangs holds nobody up
2) (anybody, any time) ``read``: the highest step that nodes told of; ``begun``: the newest cycle that they have come together for,
   by what they told, kept of their ranks' output, or reported

Rule: two numbers of fixed width, a line each, are written in place, in one piece, at most once a second. Reading trusts nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

_LOG = logging.getLogger("resilience.launcher")
FOLDER = "progress"
_EVERY_S = 1.0
_LEAVE_S = 2.0
_WIDTH = 20


class Keeper:
    """Keeps the highest step and cycle that are returned. ``close`` keeps the last ones, and waits not long for it."""

    def __init__(
        self, run_dir: Path, node: str, step: Callable[[], int | None], cycle: Callable[[], int] = lambda: -1
    ) -> None:
        self._path = run_dir / FOLDER / quote(node, safe="")
        self._step = step
        self._cycle = cycle
        self._kept = (-1, -1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resilience-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop keeping it."""
        self._stop.set()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        said = False
        while True:
            last = self._stop.wait(_EVERY_S)
            step = self._step()
            now = (max(self._kept[0], -1 if step is None else step), max(self._kept[1], self._cycle()))
            if now != self._kept:
                try:
                    write(self._path, *now)
                    self._kept = now
                except OSError as error:  # a full disk must not end the job
                    if not said:
                        _LOG.warning("how far this node is can't be written to %s: %s.", self._path, error.strerror)
                    said = True
            if last:
                return


def write(path: Path, step: int, cycle: int = -1) -> None:
    """Write a step and a cycle in place. Raises ``OSError``."""
    path.parent.mkdir(0o755, exist_ok=True)  # whatever the umask
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, f"{step:<{_WIDTH}}\n{cycle:<{_WIDTH}}\n".encode())
    finally:
        os.close(fd)  # other hosts see it from here on


def read(run_dir: Path) -> int:
    """Return the highest step that nodes told of; -1 where none has."""
    return _highest(run_dir, line=0)


def begun(run_dir: Path) -> int:
    """Return the newest cycle that nodes have come together for, as far as can be seen; -1 where none has. Raises ``OSError``."""
    logs = (path.name.removeprefix("cycle_") for path in (run_dir / "logs").glob("cycle_*"))
    reports = (path.stem for path in (run_dir / "cycles").glob("*.json"))
    return max(_highest(run_dir, line=1), *(int(text) for text in (*logs, *reports) if text.isdecimal()), -1)


def _highest(run_dir: Path, line: int) -> int:
    found = -1
    try:
        for path in (run_dir / FOLDER).iterdir():
            found = max(found, _read(path, line))
    except OSError:
        return found
    return found


def _read(path: Path, line: int) -> int:
    try:
        lines = path.read_text(encoding="ascii").split("\n")
    except (OSError, ValueError):
        return -1
    text = lines[line].strip() if line < len(lines) else ""
    return int(text) if text.isdecimal() and len(text) <= _WIDTH else -1
