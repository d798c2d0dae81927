"""Checks of the host itself, cheap enough for every start: disk, memory, shared memory.

Runs in a check process: a file system that hangs is a fault of the node, and never of the launcher. A shortage that would end
training within minutes is a fault; one that may be meant is a warning.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from resilience import cgroups

_MIB = 1 << 20
LEAST_DISK_MIB = 64  # of the run's directory: reports and logs
LEAST_MEMORY_MIB = 256
LEAST_SHM_MIB = 16  # /dev/shm: torch's data loaders
_PROBE = os.urandom(1 << 16)
_PRESSED = 0.05


@dataclass
class Findings:
    """What was found: figures by name, what is wrong, what is only worth a word."""

    figures: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def look(folder: str, *, proc: Path = Path("/proc"), shm: str = "/dev/shm") -> Findings:
    """Look at the host. ``folder`` is the run's directory; one that is yet to be made is looked at where it would be."""
    found = Findings()
    _disk(found, folder)
    _memory(found, proc)
    _shared_memory(found, shm)
    return found


def _disk(found: Findings, folder: str) -> None:
    start = time.perf_counter()
    place = Path(folder)
    place = next((it for it in (place, *place.parents) if it.exists()), place)
    folder, path = str(place), place / f".nodecheck-{os.getpid()}"
    try:
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize / _MIB
        found.figures["disk_free_mib"] = free
        if free < LEAST_DISK_MIB:
            found.faults.append(f"{folder} has {free:.0f} MiB left, {LEAST_DISK_MIB} MiB are the least")
            return
        with path.open("w+b") as file:
            path.unlink()  # at once: a check that is killed leaves nothing behind
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            if file.read() != _PROBE:
                found.faults.append(f"what was written to {folder} is not what is read from it")
    except OSError as error:
        found.faults.append(f"{folder} can't be written: {error.strerror or error}")
    found.figures["disk_write_ms"] = 1e3 * (time.perf_counter() - start)


def _memory(found: Findings, proc: Path) -> None:
    rows = (line.split() for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
    known = {row[0].rstrip(":"): int(row[1]) / 1024 for row in rows if len(row) > 1}
    total, free = known.get("MemTotal", 0.0), known.get("MemAvailable", known.get("MemFree", 0.0))
    limits = [it for it in cgroups.limits(proc) if it.limit / _MIB < total]
    for it in limits:
        held = it.used - min(it.used, it.inactive_file + it.active_file)  # the kernel gives back what only caches files
        total, free = min(total, it.limit / _MIB), min(free, (it.limit - held) / _MIB)
    found.figures |= {"memory_mib": total, "memory_free_mib": free}
    if free < LEAST_MEMORY_MIB:
        found.faults.append(f"{free:.0f} MiB of memory are left, {LEAST_MEMORY_MIB} MiB are the least")
    elif free < _PRESSED * total:
        found.warnings.append(f"{free:.0f} of {total:.0f} MiB of memory are left")


def _shared_memory(found: Findings, shm: str) -> None:
    """Snapshots are in memfds, the data loaders' batches in /dev/shm."""
    try:
        fd = os.memfd_create("resilience-nodecheck")
        try:
            os.ftruncate(fd, _MIB)
            with mmap.mmap(fd, _MIB) as memory:
                memory[: len(_PROBE)] = _PROBE
                if memory[: len(_PROBE)] != _PROBE:
                    found.faults.append("shared memory does not keep what is written to it")
        finally:
            os.close(fd)
    except OSError as error:
        found.faults.append(f"there is no shared memory (memfd): {error.strerror or error}")
    try:
        room = os.statvfs(shm)
    except OSError:
        found.warnings.append(f"there is no {shm}; data loaders with worker processes need it")
        return
    free = room.f_bavail * room.f_frsize / _MIB
    found.figures["shm_free_mib"] = free
    if free < LEAST_SHM_MIB:
        found.warnings.append(f"{shm} has {free:.0f} MiB left; data loaders with worker processes need more")
