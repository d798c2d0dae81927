"""Was it the OOM killer? The kernel counts its kills per control group; who died by SIGKILL while the count rose was one.

Read from the rank's own group, version 1 and 2: it is counted there whatever limit was hit, its own, a parent's or the
machine's. The kernel's log, where we may read it, says it by name.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_V2 = Path("/sys/fs/cgroup")
_V1 = Path("/sys/fs/cgroup/memory")
_KILLED = re.compile(r"Killed process (\d+) ")


class OomWatch:
    """The counts at the start of a cycle, to be compared with those at its end."""

    def __init__(self) -> None:
        self._group: Path | None = None
        self._before: int | None = None
        self._kmsg = -1

    def begin(self, pid: int) -> None:
        """Note the counts, before the workers have had time to do anything. ``pid``: one of them; they share a group."""
        self.close()
        self._group = group_of(_read(Path(f"/proc/{pid}/cgroup")))
        self._before = kills_in(self._group)
        with contextlib.suppress(OSError):  # not ours to read in most containers
            self._kmsg = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._kmsg, 0, os.SEEK_END)

    def verdict(self, killed: list[int]) -> dict[int, str]:
        """Return which of the processes that died by SIGKILL (in that order) the OOM killer ended, each with a sentence."""
        log = self._in_the_log()
        named = [pid for pid in killed if pid in log]
        after = kills_in(self._group)
        number = after - self._before if after is not None and self._before is not None else 0
        counted = killed[:number] if number > 0 else []
        limit = self._limit()
        return {
            pid: f"out of memory: ended by the kernel's OOM killer{limit}"
            for pid in killed
            if pid in named or (pid in counted and not named)
        }

    def _limit(self) -> str:
        if self._group is None:
            return ""
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(self._group / name).strip()
            if text.isdigit() and int(text) < 1 << 60:
                return f" (the limit of its control group is {int(text) / (1 << 30):.2f} GiB)"
        return ""

    def _in_the_log(self) -> set[int]:
        found: set[int] = set()
        while self._kmsg >= 0:
            try:
                text = os.read(self._kmsg, 8192).decode("utf-8", "replace")
            except BrokenPipeError:  # older lines were overwritten; the next read goes on with what is there
                continue
            except OSError:  # BlockingIOError: read to the end
                break
            if not text:
                break
            found |= {int(pid) for pid in _KILLED.findall(text)}
        return found

    def close(self) -> None:
        """Let go of the kernel's log."""
        if self._kmsg >= 0:
            os.close(self._kmsg)
            self._kmsg = -1


def group_of(text: str) -> Path | None:
    """Return the folder of the memory control group that ``/proc/<pid>/cgroup`` names."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return _existing(_V1, path)
        if number == "0" and not controllers and (_V2 / "cgroup.controllers").exists():
            return _existing(_V2, path)
    return None


def _existing(root: Path, path: str) -> Path:
    """Return the folder; in a container the path is the host's, and the root is what we see of it."""
    full = root / path.lstrip("/")
    return full if full.is_dir() else root


def kills_in(group: Path | None) -> int | None:
    """Return how many processes of a group the OOM killer has ended, if that is known."""
    for name in ("memory.events", "memory.oom_control"):
        for line in _read(group / name).splitlines() if group is not None else []:
            word, _, count = line.partition(" ")
            if word == "oom_kill" and count.strip().isdigit():
                return int(count)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
