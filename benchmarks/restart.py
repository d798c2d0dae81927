"""How long until training begins, and begins again after a rank was killed, in seconds.

Two ranks with torch and a real gloo group, the same script under each launcher, launchers taking turns. *launch*: from
starting the command until both ranks did their first step. *restart*: from SIGKILL of rank 1 until both ranks did the first step
of the next cycle; *of which*: until the first line of the new rank processes. All with the default polling interval of 0.1 s.
Under ``resilience`` and NVRx the script also says its heartbeats. Ratios are of medians in the same run.

torchrun 2.13 keeps one store for the workers of all cycles, and its restarts with gloo fail on the dead ranks' keys; for the
times it runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which avoids that. How often each gets through with its own defaults is
counted in the last rows (first step of the next cycle within 20 s, with one restart allowed).
Not measured: several nodes, state to restore, CUDA.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from dataclasses import dataclass

from benchmarks import harness
from benchmarks.harness import Job, JobError, Row

_REPEATS = 5
_COUNTED = 3
_GIVE_UP_S = 20.0
_UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class Times:
    """One job that was launched, hurt and came back (or not: then the last two are ``None``)."""

    launch: float
    restart: float | None
    until_started: float | None


def run() -> list[Row]:
    """Return launch and restart times of every launcher, then how many restarts succeeded."""
    kinds = ["torchrun", "resilience", *(["nvrx"] if harness.nvrx() else [])]
    runs: dict[str, list[Times]] = {kind: [] for kind in [*kinds, "default"]}
    for repeat in range(_REPEATS):
        turn = repeat % len(kinds)
        for kind in kinds[turn:] + kinds[:turn]:
            runs[kind].append(_hurt(kind, _UNSHARED if kind == "torchrun" else {}))
        if repeat < _COUNTED:
            runs["default"].append(_hurt("torchrun", {}))
    default = runs.pop("default")
    rows = [row for what in ("launch", "restart", "until_started") for row in _rows(what, runs)]
    return [*rows, *(_count(_name(kind), runs[kind]) for kind in kinds[1:]), _count("torchrun", default)]


def _name(kind: str) -> str:
    return {"torchrun": "torchrun, unshared store", "nvrx": harness.nvrx_name()}.get(kind, kind)


def _rows(what: str, runs: dict[str, list[Times]]) -> list[Row]:
    """Return one row per launcher."""
    words = {"until_started": "  of which until processes run"}
    rows: list[Row] = []
    medians: dict[str, float] = {}
    for kind, times in runs.items():
        seconds = [value for value in (getattr(item, what) for item in times) if value is not None]
        row: Row = {"what": words.get(what, what), "who": _name(kind)}
        if seconds:
            medians[kind] = statistics.median(seconds)
            row |= {"median s": medians[kind], "worst s": max(seconds), "× torchrun": _ratio(medians, kind)}
        if kind == "resilience" and what == "restart" and seconds:
            row |= {"aim": "≤ torchrun", "met": medians[kind] <= medians["torchrun"]}
        if kind == "nvrx" and what == "restart" and seconds:
            row |= {"aim": "slower than ours", "met": medians[kind] > medians["resilience"]}
        rows.append(row)
    if "nvrx" not in runs:
        rows.append({"what": words.get(what, what), "who": "NVRx", "note": harness.NOT_INSTALLED})
    return rows


def _ratio(medians: dict[str, float], kind: str) -> float | None:
    return medians[kind] / medians["torchrun"] if "torchrun" in medians else None


def _count(who: str, times: list[Times]) -> Row:
    came_back = sum(item.restart is not None for item in times)
    return {"what": "restarts that succeeded, defaults", "who": who, "note": f"{came_back} of {len(times)}"}


def _hurt(kind: str, env: dict[str, str]) -> Times:
    """Launch a job, kill rank 1 after the first step, wait for the first step of the next cycle."""
    voice = "plain" if kind == "torchrun" else kind
    with harness.launch(kind, "train", [voice], ["--nproc-per-node=2", "--max-restarts=1"], **env) as job:
        first = job.await_events("step", 2, 60.0)
        launch = (max(told["at"] for told in first) - job.started_ns) / 1e9
        victim = next(int(told["pid"]) for told in first if told["rank"] == 1)
        time.sleep(0.3)  # a few steps, so that nothing of the start is still going on
        killed_ns = time.monotonic_ns()
        os.kill(victim, signal.SIGKILL)
        return _after(job, launch, killed_ns)


def _after(job: Job, launch: float, killed_ns: int) -> Times:
    try:
        steps = job.await_events("step", 2, _GIVE_UP_S, lambda told: told["cycle"] == 1)
    except JobError:
        return Times(launch, None, None)
    started = [told["at"] for told in job.events("started") if told["cycle"] == 1]
    job.process.wait(30.0)
    return Times(launch, (max(told["at"] for told in steps) - killed_ns) / 1e9, (max(started) - killed_ns) / 1e9)
