"""How much memory this process may still use: the machine's, or what its control groups leave it."""

from __future__ import annotations

from pathlib import Path

from resilience import cgroups

_NO_LIMIT = 1 << 60


def available() -> tuple[int, str]:
    """Return how much memory may still be used, and by whose limit: the machine's, or that of a control group (v1 or v2)."""
    machine = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    found = [(machine or _NO_LIMIT, "the machine")]
    for it in cgroups.limits():
        found.append((it.limit - it.used + it.inactive_file, f"the control group ({it.limit / 1e9:.2f} GB)"))
    return min(found)


def _field(path: Path, name: str) -> int:
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    return next((int(row[1]) for row in rows if row and row[0] == name), 0)
