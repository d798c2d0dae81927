"""What copies of snapshots in the memory of another node cost the training, and how fast they are made.

Two launchers on this machine, one rank each, everything each rank's own, so that all of it goes over loopback TCP: what a network
would limit is not limited here, and both nodes share the processors. Turns of 25 steps with and without copies follow each other in
the same processes; a step ends when its save has returned. *×*: median step of a turn with copies beside those before and after it
without; *noise ×*: one without beside its neighbours without. *computes*: every processor is busy with the steps, so whatever the
savers do is taken from them; *waits*: the processors are idle, as they mostly are where the work is on an accelerator. *copy*: from
``save`` until the receipt says REPLICATED, digests checked on both sides, both nodes at once.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import Event, Job, Row

_SIZES = (16, 64)  # MiB
_TIMEOUT_S = 240.0
_AIM = 1.05


def run() -> list[Row]:
    """Return all rows."""
    rows: list[Row] = []
    for size in _SIZES:
        told = _measure(size)
        for kind in ("computes", "waits"):
            rows.append(_steps(told, kind, size))
        rows.append(_copies(told, size))
    return rows


def _measure(size: int) -> list[Event]:
    folder = Path(tempfile.mkdtemp(prefix="bench-replication-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = ["-m", "benchmarks.workloads.replication", str(size), str(folder)]
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    options += ["--rdzv-id=bench", "--local-addr=127.0.0.1", "--ft-run-dir={folder}/run"]
    try:
        with ExitStack() as stack:
            jobs = []
            for number in range(2):
                conf = f"--rdzv-conf=is_host={'true' if number == 0 else 'false'}"
                command = [sys.executable, "-m", "resilience", "run", *options, conf, *script]
                jobs.append(stack.enter_context(Job(command)))
            for job in jobs:
                job.await_events("measured", 1, _TIMEOUT_S)
            return [told for job in jobs for event in ("turn", "copy") for told in job.events(event)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _steps(told: list[Event], kind: str, size: int) -> Row:
    """Return the row of steps with copies beside such without; the slower rank of each turn counts."""
    turns = [item for item in told if item["event"] == "turn" and item["kind"] == kind]
    by_rank = [[item for item in turns if item["rank"] == rank] for rank in (0, 1)]
    medians = [max(statistics.median(item["took"]) for item in both) for both in zip(*by_rank, strict=True)]
    copies = [bool(item["copies"]) for item in by_rank[0]]
    with_copies, noise = [], []
    for index in range(1, len(medians) - 1):
        beside = (medians[index - 1] + medians[index + 1]) / 2
        if copies[index]:
            with_copies.append(medians[index] / beside)
    without = [median for median, copied in zip(medians, copies, strict=True) if not copied]
    for index in range(1, len(without) - 1):
        noise.append(without[index] * 2 / (without[index - 1] + without[index + 1]))
    ratio = statistics.median(with_copies)
    return {
        "what": f"a step that {kind}",
        "size": f"{size} MiB",
        "median s": statistics.median(median for median, copied in zip(medians, copies, strict=True) if copied),
        "against": "without copies",
        "×": ratio,
        "worst ×": max(with_copies),
        "noise ×": f"{min(noise):.3g} to {max(noise):.3g}",
        "aim": f"≤ {_AIM:g}×, or noise",
        "met": ratio <= max(_AIM, *noise),
    }


def _copies(told: list[Event], size: int) -> Row:
    copies = [item for item in told if item["event"] == "copy" and item["level"] == "REPLICATED"]
    if not copies:
        return {"what": "copy", "size": f"{size} MiB", "note": "none was made"}
    seconds = statistics.median(item["seconds"] for item in copies)
    return {"what": "copy", "size": f"{size} MiB", "median s": seconds, "GB/s": copies[0]["nbytes"] / seconds / 1e9}
