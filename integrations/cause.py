"""Who ended a run, and what it said, in a sentence: from the reports in its directory (``cycles/<n>.json``), for all schedulers.

Rule: a report tells why a job ended only if that was what followed. One after which it was restarted tells of what was survived.

Hazard: anybody may have put anything there. Only files are read, none of which is a link, a pipe or endless.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_LONGEST = 400  # characters; the whole is in the report
_LARGEST = 32 * 2**20  # bytes of a report; of thousands of ranks it is a few
GOES_ON = ("restart", "wait", "")


def of_run(run_dir: Path) -> str:
    """Return who ended the run in a directory that all nodes share, and where more is to be read; empty where no report tells."""
    report = newest(run_dir / "cycles")
    told = of_report(report, host_of(report))
    return f"{told}; reports and logs: {run_dir}" if told else ""


def host_of(report: Mapping[str, Any]) -> str:
    """Return the node of a report's culprit, as launchers call it; empty where it names none."""
    culprit = report.get("culprit")
    return str(culprit.get("host") or "") if isinstance(culprit, dict) else ""


def elsewhere(report: Mapping[str, Any], node: str) -> str:
    """Return the node of a report's culprit, as launchers call it, where that is another one than ``node``."""
    host = host_of(report)
    return host if node and host and host != node and not host.endswith(f" ({node})") else ""


def folder_of(log: object) -> str:
    """Return the run folder that a rank's log is in (``logs/cycle_0/rank_0/stderr.log``); empty if it is elsewhere."""
    path = Path(str(log or ""))
    return str(path.parents[3]) if len(path.parents) > 3 and path.parents[2].name == "logs" else ""


def of_report(report: Mapping[str, Any], node: str) -> str:
    """Return the rank that ended the run, on ``node`` if that is to be said, and what became of it; empty if the run went on."""
    culprit = report.get("culprit")
    if not isinstance(culprit, dict) or report.get("action", "") in GOES_ON:
        return ""
    message = short(str(culprit.get("message") or ""))
    log = culprit.get("log")
    last = short(next((line for line in reversed(log if isinstance(log, list) else []) if str(line).strip()), ""))
    if culprit.get("kind") == "exit" and last and last not in message:
        message = f"{message}, after {last!r}"
    rank = culprit.get("rank")  # a check fails before there are ranks
    who = " on ".join(filter(None, ("" if rank is None else f"rank {rank}", node)))
    return (f"{who}: {message}" if who else message) if message else ""


def newest(folder: Path, since: float = 0.0) -> dict[str, Any]:
    """Return the newest report that was written since then; an empty one where there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        known = [(path.lstat(), path) for path in folder.glob("*.json")]
        written = [(it.st_mtime, path) for it, path in known if stat.S_ISREG(it.st_mode)]
        latest = max((it for it in written if it[0] >= since - 1.0), default=None)
        found = json.loads(read(latest[1])) if latest is not None else {}
        return found if isinstance(found, dict) else {}
    return {}


def read(path: Path) -> str:
    """Return what a file holds. Raises ``OSError`` for what is no file or too large, and never waits for a writer."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, encoding="utf-8") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
            raise OSError(f"{path} is no file, or larger than {_LARGEST} bytes")
        return file.read(_LARGEST)


def short(text: object) -> str:
    """Return a text as one line that is not too long."""
    line = " ".join(str(text).split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
