"""What a monitor costs the node: memory of one, and processor time of sixteen that watch idle ranks.

Memory is read from ``smaps_rollup`` of the monitor of a one-rank job while the rank says ten heartbeats per second. PSS counts
shared pages in parts (the interpreter is shared with launcher and rank; NVRx's monitor is a fork of its launcher and shares
torch with it), USS only what is the monitor's own, RSS everything in full.
Processor time is utime + stime of the sixteen monitors of one launcher over the stated window, as a percentage of one core;
their ranks said one heartbeat and sleep. NVRx is compared with one monitor only: its ranks must import torch, and sixteen would
measure the machine. Its monitor looks every 5 s by default, ours every 0.2 s.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Job, Row

_MONITORS = 16
_WINDOW_S = 20.0
_ONE_WINDOW_S = 6.0
_PSS_MB = 12.0
_CPU_PERCENT = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")


def run() -> list[Row]:
    """Return the rows of one monitor under each launcher, then those of sixteen of ours."""
    rows = _one("resilience", "resilience", [])
    if harness.nvrx():
        rows += _one("nvrx", harness.nvrx_name(), [])
    else:
        rows.append({"what": "one monitor", "who": "NVRx", "note": harness.NOT_INSTALLED})
    return rows + _many()


def _one(kind: str, who: str, options: list[str]) -> list[Row]:
    """Measure the only monitor of a one-rank job."""
    with harness.launch(kind, "idle", [kind, "10"], ["--nproc-per-node=1", *options]) as job:
        rank = int(job.await_events("idle", 1, 60.0)[0]["pid"])
        time.sleep(2.0)
        (monitor,) = _monitors(kind, job, [rank])
        before = _run_ns(monitor)
        time.sleep(_ONE_WINDOW_S)
        percent = (_run_ns(monitor) - before) / 1e9 / _ONE_WINDOW_S * 100
        memory = _memory_mb(monitor)
    ours = kind == "resilience"
    rows: list[Row] = []
    for name in ("Pss", "Uss", "Rss"):
        row: Row = {"what": f"one monitor, {name.upper()}", "who": who, "value": memory[name], "unit": "MB"}
        if ours and name == "Pss":
            row |= {"aim": f"≤ {_PSS_MB:g} MB", "met": memory[name] <= _PSS_MB}
        rows.append(row)
    window = f"rank beats 10 times a second, {_ONE_WINDOW_S:g} s"
    rows.append({"what": "one monitor, CPU", "who": who, "value": percent, "unit": "% of a core", "note": window})
    return rows


def _many() -> list[Row]:
    """Measure sixteen monitors of ours together."""
    with harness.launch("resilience", "idle", ["resilience"], [f"--nproc-per-node={_MONITORS}"]) as job:
        ranks = [int(told["pid"]) for told in job.await_events("idle", _MONITORS, 60.0)]
        time.sleep(3.0)
        monitors = _monitors("resilience", job, ranks)
        assert len(monitors) == _MONITORS, monitors
        watched = [*monitors, job.process.pid]
        start, before = time.monotonic(), [_ticks(pid) for pid in watched]
        time.sleep(_WINDOW_S)
        spent = [_ticks(pid) - ticks for pid, ticks in zip(watched, before, strict=True)]
        seconds = time.monotonic() - start
        pss = sum(_memory_mb(pid)["Pss"] for pid in monitors)
    percent = [ticks / _TICKS / seconds * 100 for ticks in spent]
    all_of_them, window = f"{_MONITORS} monitors", f"idle ranks, {seconds:.0f} s"
    idle: Row = {"who": "resilience", "unit": "% of a core", "note": window}
    total = sum(percent[:-1])
    return [
        {
            "what": f"{all_of_them}, CPU",
            **idle,
            "value": total,
            "aim": f"≤ {_CPU_PERCENT:g} %",
            "met": total <= _CPU_PERCENT,
        },
        {"what": "their launcher, CPU", **idle, "value": percent[-1]},
        {"what": f"{all_of_them}, mean PSS", "who": "resilience", "value": pss / _MONITORS, "unit": "MB"},
    ]


def _monitors(kind: str, job: Job, ranks: list[int]) -> list[int]:
    """Return the monitors of a job: ours by their command, NVRx's as the launcher's forked children."""
    found = []
    for pid in job.pids():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        mark = "resilience/monitor/__main__" if kind == "resilience" else "ft_launcher"
        if parent == job.process.pid and pid not in ranks and mark in command:
            found.append(pid)
    return found


def _memory_mb(pid: int) -> dict[str, float]:
    """Return PSS, USS and RSS in MB (10^6 bytes)."""
    kib: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        kib[name] = int(value.split()[0])
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    return {name: size * 1024 / 1e6 for name, size in (("Pss", kib["Pss"]), ("Uss", private), ("Rss", kib["Rss"]))}


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _run_ns(pid: int) -> int:
    """Return the time on a processor in ns: for one monitor the ticks of ``stat`` are too coarse. Main thread only."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
