"""How late a hang is found, with a section's timeout of 1 s and default check intervals.

The rank notes the time just before it enters the section, then sleeps in it. *found* is when ``cycles/<n>.json`` is there: the
verdict, the stacks of all ranks and the report, all done. *ended* is when the rank's process is gone (seen on its pidfd; ours
after SIGTERM, NVRx's after SIGKILL, which are the defaults). Both less the timeout; the benchmark looks every 2 ms.
One job, one hang per cycle; the hang starts at another point of the monitor's rhythm each time. NVRx writes no report, its
verdict and its signal are one, so *ended* is the moment it found the hang.
"""

from __future__ import annotations

import os
import select
import statistics
import time
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Job, JobError, Row

_TIMEOUT_S = 1.0
_LATE_S = 0.3
_REPEATS = {"resilience": 8, "nvrx": 4}
_CHECK_INTERVAL_S = {"resilience": 0.2, "nvrx": 5.0}


def run() -> list[Row]:
    """Return how late hangs were found and ended, median and worst."""
    found, ended = _hangs("resilience")
    rows = [
        _row("found (report on disk)", "resilience", found, aim=True),
        _row("ended (process gone)", "resilience", ended, aim=False),
    ]
    if not harness.nvrx():
        return [*rows, {"what": "found and ended", "who": "NVRx", "note": harness.NOT_INSTALLED}]
    _, theirs = _hangs("nvrx")
    row = _row("found and ended", harness.nvrx_name(), theirs, aim=False)
    row["× ours"] = statistics.median(theirs) / statistics.median(ended)
    return [*rows, row]


def _row(what: str, who: str, late: list[float], aim: bool) -> Row:
    row: Row = {
        "what": what,
        "who": who,
        "median s late": statistics.median(late),
        "worst s late": max(late),
        "hangs": len(late),
    }
    if aim:
        row |= {"aim": f"≤ {_LATE_S:g} s", "met": max(late) <= _LATE_S}
    return row


def _hangs(kind: str) -> tuple[list[float], list[float]]:
    """Return how late each hang of one job was found and ended, in seconds."""
    repeats = _REPEATS[kind]
    options = ["--nproc-per-node=1", f"--max-restarts={repeats - 1}"]
    if kind == "nvrx":
        options.append(f"--ft-rank-section-timeouts=hang:{_TIMEOUT_S}")
    found, ended = [], []
    arguments = [kind, str(_TIMEOUT_S), str(_CHECK_INTERVAL_S[kind])]
    with harness.launch(kind, "hang", arguments, options) as job:
        for cycle in range(repeats):
            told = job.await_events("entered", cycle + 1, 40.0)[cycle]
            due_ns = told["entered"] + _TIMEOUT_S * 1e9
            report_ns, end_ns = _watch(job, int(told["pid"]), job.folder / "run" / "cycles" / f"{cycle}.json", kind)
            found.append((report_ns - due_ns) / 1e9)
            ended.append((end_ns - due_ns) / 1e9)
    return found, ended


def _watch(job: Job, pid: int, report: Path, kind: str) -> tuple[int, int]:
    """Return when the report was there (for NVRx: never) and when the process was gone."""
    deadline = time.monotonic() + 30.0
    report_ns = 0
    pidfd = os.pidfd_open(pid)
    try:
        while time.monotonic() < deadline:
            gone = bool(select.select([pidfd], [], [], 0.002)[0])
            if not report_ns and report.exists():
                report_ns = time.monotonic_ns()
            if gone and (report_ns or kind == "nvrx"):
                return report_ns, time.monotonic_ns()
    finally:
        os.close(pidfd)
    raise JobError(f"the hang was not found within 30 s\n{job.tail()}")
