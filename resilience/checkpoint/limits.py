"""How much memory this process may still use: the machine's, or what its control groups leave it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_NO_LIMIT = 1 << 60


def available() -> tuple[int, str]:
    """Return how much memory may still be used, and by whose limit: the machine's, or that of a control group (v1 or v2)."""
    machine = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    found = [(machine or _NO_LIMIT, "the machine")]
    for group in _groups():
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None and limit < _NO_LIMIT:
                cache = _field(group / "memory.stat", cache_name)  # the kernel takes that back when it has to
                found.append((limit - used + cache, f"the control group ({limit / 1e9:.2f} GB)"))
    return min(found)


def _groups() -> Iterable[Path]:
    """Yield this process's memory control groups, from its own up to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root = _V1
        elif number == "0" and (_V2 / "cgroup.controllers").exists():
            root = _V2
        else:
            continue
        folder = root / path.lstrip("/")
        folder = folder if folder.is_dir() else root
        while folder != root.parent:
            yield folder
            folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int:
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    return next((int(row[1]) for row in rows if row and row[0] == name), 0)
