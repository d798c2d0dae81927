"""How the launcher of each node ended: ``ends/<node>.json`` in the run's directory, for whoever starts the job again.

A scheduler that starts one launcher per node often hands on a single exit code for all of them (Slurm's ``srun`` the highest).
Where one node left with 201 and the others trained to the end, that is 201.

1) (launcher) ``reserve`` at its start: a file of blanks, as long as it will ever be
2) (launcher) ``write`` as its last act, over what was reserved: a disk that is full by then takes it all the same
3) (anybody, any time) ``read``: those that have ended so far. A launcher that was killed leaves what it reserved, or nothing

Rule: one JSON text and blanks up to the file's length, so that a write that is torn leaves no JSON. Reading trusts nothing: what is
not one of ours is left out, and so is what was reserved.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from resilience.failover.error_monitor import NodeFault, from_message

FOLDER = "ends"
_ROOM = 16384  # bytes: a fault's message has 4096 at most, and JSON in JSON may be twice as long


@dataclass(frozen=True)
class NodeEnd:
    """How the launcher of one node ended, in its own words; ``fault`` is what is wrong with the node, where something is."""

    node: str
    code: int
    fault: NodeFault | None = None


def reserve(run_dir: Path, node: str) -> None:
    """Make sure of the room for a word at the end; what an earlier launcher of this node left does not count any more.

    Raises ``OSError``.
    """
    _write_anew(_path(run_dir, node), b" " * _ROOM)


def write(run_dir: Path, end: NodeEnd) -> None:
    """Leave word, in the room that was reserved if it is there. Raises ``OSError``."""
    path, text = _path(run_dir, end.node), _text(end)
    if not _write_over(path, text):
        _write_anew(path, text)


def _path(run_dir: Path, node: str) -> Path:
    return run_dir / FOLDER / f"{quote(node, safe='')}.json"


def _text(end: NodeEnd) -> bytes:
    told = {"node": end.node, "code": end.code, "fault": end.fault.as_message() if end.fault is not None else None}
    return json.dumps(told).encode()


def _write_over(path: Path, text: bytes) -> bool:
    """Write in place, in one piece; return False where there is no file that is long enough. Needs no new space on the disk."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        fits = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and len(text) <= found.st_size <= _ROOM
        return fits and os.write(fd, text.ljust(found.st_size)) >= len(text)
    finally:
        os.close(fd)  # other hosts see it from here on


def _write_anew(path: Path, text: bytes) -> None:
    path.parent.mkdir(0o755, exist_ok=True)  # whatever the umask: what is in it is acted on
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read(run_dir: Path) -> tuple[NodeEnd, ...]:
    """Return how launchers ended so far, by node."""
    try:
        paths = sorted((run_dir / FOLDER).glob("*.json"))
    except OSError:
        return ()
    return tuple(end for path in paths if (end := _read(path)) is not None)


def _read(path: Path) -> NodeEnd | None:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or type(told.get("code")) is not int or not isinstance(told.get("node"), str):
        return None
    return NodeEnd(told["node"], told["code"], from_message(str(told.get("fault"))))
