"""What the node check adds to a start and to a restart, in seconds; and what is in it.

One node, two ranks with torch and a real gloo group, the check of the host's processors (``--accelerator=cpu``), with and without
``--network-check`` in turns. *launch*: from starting the command until both ranks did their first step. *restart*: from SIGKILL of
rank 1 until both ranks did the first step of the next cycle. The check's own process imports torch: at launch that begins with the
launcher's own setting up, at a restart with the rendezvous. *tasks*: what the launcher says the check at launch took, once its
process knew its devices; what is left of its import is in it.
*three nodes*: the same for three launchers on this machine that meet in a store, until each of them made its
first step; they share its cores. Ratios are of medians in the same run. Not measured: devices, real networks.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import statistics
import time
from contextlib import ExitStack

from benchmarks import harness
from benchmarks.harness import Job, Row

_REPEATS = 5
_FLEETS = 3
_CHECK = ("--network-check", "--accelerator=cpu")


def run() -> list[Row]:
    """Return the times without and with the check."""
    launch: dict[bool, list[float]] = {False: [], True: []}
    restart: dict[bool, list[float]] = {False: [], True: []}
    tasks: list[float] = []
    for repeat in range(_REPEATS):
        for checked in (True, False) if repeat % 2 else (False, True):
            begun, again, took = _hurt(checked)
            launch[checked].append(begun)
            restart[checked].append(again)
            tasks += took
    fleets: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(_FLEETS):
        for checked in (True, False) if repeat % 2 else (False, True):
            fleets[checked].append(_fleet(checked))
    rows = [
        row
        for what, times in (("launch", launch), ("restart", restart), ("three nodes", fleets))
        for row in _rows(what, times)
    ]
    return [*rows, {"what": "tasks", "who": "the check", "median s": statistics.median(tasks), "worst s": max(tasks)}]


def _rows(what: str, times: dict[bool, list[float]]) -> list[Row]:
    plain, checked = (statistics.median(times[kind]) for kind in (False, True))
    return [
        {"what": what, "who": "without", "median s": plain, "worst s": max(times[False])},
        {
            "what": what,
            "who": "with the check",
            "median s": checked,
            "worst s": max(times[True]),
            "× without": checked / plain,
            "added s": checked - plain,
        },
    ]


def _hurt(checked: bool) -> tuple[float, float, list[float]]:
    """Launch, kill a rank, wait for the next cycle; return both times, and what the checks said they took."""
    options = ["--nproc-per-node=2", "--max-restarts=1", *(_CHECK if checked else ())]
    with harness.launch("resilience", "train", ["resilience"], options) as job:
        first = job.await_events("step", 2, 90.0, lambda told: told["cycle"] == 0)
        begun = (max(told["at"] for told in first) - job.started_ns) / 1e9
        victim = next(int(told["pid"]) for told in first if told["rank"] == 1)
        time.sleep(0.3)  # a few steps, so that nothing of the start is still going on
        killed_ns = time.monotonic_ns()
        os.kill(victim, signal.SIGKILL)
        steps = job.await_events("step", 2, 60.0, lambda told: told["cycle"] == 1)
        again = (max(told["at"] for told in steps) - killed_ns) / 1e9
        took = re.findall(r"node check \(([\d.]+) s\)", job.log.read_text(errors="replace"))
        return begun, again, [float(text) for text in took[:1]]


def _fleet(checked: bool) -> float:
    """Return how long three launchers take until each has made its first step."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = ["--nnodes=3", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench", "--nproc-per-node=1"]
    with ExitStack() as stack:
        jobs: list[Job] = []
        for number in range(3):
            conf = f"--rdzv-conf=is_host={'true' if number == 0 else 'false'}"
            words = [*options, conf, f"--ft-node-name=n{number}", *(_CHECK if checked else ())]
            jobs.append(stack.enter_context(harness.launch("resilience", "train", ["resilience"], words)))
        ends = [job.await_events("step", 1, 120.0)[0]["at"] for job in jobs]
        return float(max(ends) - jobs[0].started_ns) / 1e9
