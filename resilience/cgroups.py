"""Memory limits of this process's control groups, version 1 and 2: those of its own group and of every group above it.

Slurm, systemd and container runtimes set a limit on any level. Which group is ours is in ``/proc/self/cgroup``, where its folder is
in ``/proc/self/mountinfo``: a container may see a hierarchy from its own group down, or by the host's paths.

Rule: what can't be read is no limit. Nothing here raises.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60
_VERSIONS = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),  # of all groups below; version 2 always counts these
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Limit:
    """What a group may use, and uses, in bytes. Pages of files are in ``used``; the kernel takes back the inactive ones first."""

    limit: int
    used: int
    inactive_file: int = 0
    active_file: int = 0


def limits(proc: Path = Path("/proc")) -> list[Limit]:
    """Return the limits that hold for this process, from its own group's up."""
    found = []
    for folder in folders(_text(proc / "self" / "cgroup"), _text(proc / "self" / "mountinfo")):
        for limit_name, used_name, prefix in _VERSIONS:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None and limit < _NO_LIMIT:
                rows = (line.split() for line in _text(folder / "memory.stat").splitlines())
                stat = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
                files = (stat.get(f"{prefix}{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
                found.append(Limit(limit, used, *files))
    return found


def folders(cgroup: str, mountinfo: str) -> list[Path]:
    """Return the folders of a process's memory groups, from its own up, by the texts of ``/proc/<pid>/…``. Pure."""
    found: list[Path] = []
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        memory = "memory" in controllers.split(",")
        if not memory and (number != "0" or controllers):
            continue
        for root, mount in _mounts(mountinfo, "cgroup" if memory else "cgroup2"):
            found += [folder for folder in _upwards(path, root, mount) if folder not in found]
            break
    return found


def _mounts(mountinfo: str, kind: str) -> Iterator[tuple[str, str]]:
    """Yield (folder within the hierarchy, where it is seen) of the mounts that count memory."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, how = before.split(), after.split()
        if len(fields) < 5 or len(how) < 3 or how[0] != kind:
            continue
        if kind == "cgroup2" or "memory" in how[2].split(","):
            yield _plain(fields[3]), _plain(fields[4])


def _upwards(path: str, root: str, mount: str) -> Iterator[Path]:
    """Yield the folder of a group and of those above it, as far as they are mounted. A group beyond the mount has none."""
    below = os.path.relpath(path, root) if root.startswith("/") and path.startswith("/") else ".."
    top = Path(mount)
    folder = top if below.split("/")[0] == ".." or "/.." in path else top / below
    while folder != top:
        yield folder
        folder = folder.parent
    yield top


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None
