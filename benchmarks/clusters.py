"""What the benchmarks of jobs on clusters share: a script that tells its steps, and how long until there are new ones.

Two ranks, each on a node of its own; what they tell is in FOLDER/events. See ``workloads/cluster_train.py``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.workloads.voice import EVENTS

GIVE_UP_S = 120.0
REPEATS = 3
SCRIPT = str(Path(__file__).parent / "workloads" / "cluster_train.py")
_MEETING = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=x", "--rdzv-conf=is_host=false")


def environment(folder: Path) -> dict[str, str]:
    """Return what ranks need to tell their steps."""
    return {EVENTS: str(folder / "events"), "PYTHONPATH": str(harness.ROOT)}


def steps(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that were made so far."""
    path = folder / "events"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def first_step(folder: Path) -> int:
    """Return when the last of the two ranks did its first step."""

    def firsts() -> list[int]:
        told = steps(folder)
        return [min(it["at"] for it in told if it["rank"] == rank) for rank in {it["rank"] for it in told}]

    return _await(firsts)


def until_further(folder: Path, strike: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> float:
    """Return the seconds from a blow until both ranks, in another life, did a step that neither had done before."""
    time.sleep(1.0)  # a few steps
    old = {it["pid"] for it in steps(folder)}
    struck = time.monotonic_ns()
    strike()

    def there() -> list[int]:
        meanwhile()
        told = steps(folder)  # ranks go on for a moment after their node is gone
        furthest = max(it["step"] for it in told if it["pid"] in old)
        return [it["at"] for it in told if it["pid"] not in old and it["step"] == furthest + 1]

    return (_await(there) - struck) / 1e9


def _await(times: Callable[[], list[int]]) -> int:
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        found = times()
        if len(found) >= 2:
            return max(found)
        time.sleep(0.02)
    raise harness.JobError(f"no further step within {GIVE_UP_S:.0f} s")


def by_hand(folder: Path) -> float:
    """Start a store and two launchers, and return the seconds until both ranks did their first step."""
    folder.mkdir()
    env = {**os.environ, **environment(folder)}
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
    begun = time.monotonic_ns()
    with ExitStack() as stack:
        command = [sys.executable, "-m", "resilience", "store", "--host=127.0.0.1", "--port=0"]
        store = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **quiet))  # type: ignore[call-overload]
        stack.callback(store.kill)
        endpoint = store.stdout.readline().split("serving ")[1].split(". ")[0]
        options = [*_MEETING, f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1"]
        for number in range(2):
            where = f"--ft-run-dir={folder}/{number}"
            line = [sys.executable, "-m", "resilience.run", *options, where, SCRIPT, str(folder)]
            started = stack.enter_context(subprocess.Popen(line, stdout=subprocess.DEVNULL, **quiet))  # type: ignore[call-overload]
            stack.callback(started.terminate)
        seconds = (first_step(folder) - begun) / 1e9
        (folder / "finish").touch()
        return seconds


def rows(who: str, found: Mapping[str, Sequence[float]], more: Mapping[str, Row]) -> list[Row]:
    """Return the table: ``by hand``, ``start``, then everything that was done to the job, with ``more`` cells for some."""
    hand = statistics.median(found["by hand"])
    made: list[Row] = [
        {"what": "start", "who": "launchers by hand", "median s": hand, "worst s": max(found["by hand"])}
    ]
    for what in [name for name in found if name != "by hand"]:
        median = statistics.median(found[what])
        row: Row = {"what": what, "who": who, "median s": median, "worst s": max(found[what])}
        made.append(row | ({"× by hand": median / hand} if what == "start" else more.get(what, {})))
    return made
