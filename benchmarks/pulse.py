"""What one heartbeat, one section (enter and exit) and one ``stop_requested()`` cost the training loop, in µs.

Measured inside rank 0 of a real one-rank job under each launcher, median over the rounds, launchers taking turns.
*batched*: back to back, a loop of calls less an empty loop. *single*: back to back, each call timed by itself, less the cost
of reading the clock. *paused*: the same with 1 ms of sleep before each call, as in a loop, so caches are cold.
p99 is over single calls; on a shared machine it is mostly the scheduler. Ours is timed as users write it, ``with
section("step")``, lookup by name included. A call that needs a wrapper of the benchmark's own (all but our heartbeat) has the
cost of calling an empty function taken off; the rows *an empty function* show what that is, and how cold is cold.
Not measured: what the calls cost other processes (see ``monitor``).
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row

_ROUNDS = 2
_WHO = {"resilience": "resilience", "python": "resilience, no launcher", "nvrx": "NVRx"}
_HOW = {"batched": "batched", "single_median": "single", "paused_median": "paused"}
_AIMS = {"heartbeat": 1.0, "section": 2.0}
_CHEAPER = 50.0
Figures = dict[str, dict[str, float]]


def run() -> list[Row]:
    """Return one row per call, manner and launcher, then the ratios."""
    kinds = [kind for kind in _WHO if kind != "nvrx" or harness.nvrx()]
    rounds: dict[str, list[Figures]] = {kind: [] for kind in kinds}
    for _ in range(_ROUNDS):
        for kind in kinds:
            rounds[kind].append(_measure(kind))
    figures = {kind: _median(found) for kind, found in rounds.items()}
    empty = [_row("an empty function", how, "", figures["resilience"]["empty"]) for how in _HOW]
    stop = [_row("stop_requested", how, "resilience", figures["resilience"]["stop_requested"]) for how in _HOW]
    return [*(row for call in _AIMS for how in _HOW for row in _rows(call, how, figures)), *stop, *empty]


def _measure(kind: str) -> Figures:
    """Run one job and return its figures in ns."""
    voice = "nvrx" if kind == "nvrx" else "resilience"
    options = ["--nproc-per-node=1", *(["--ft-rank-section-timeouts=step:1000"] if kind == "nvrx" else [])]
    with harness.launch(kind, "calls", [voice], options) as job:
        told = job.await_events("measured", 1, 90.0)[0]
    calls = [*_AIMS, *(["stop_requested"] if kind != "nvrx" else []), "empty"]
    return {call: _without_wrapper(kind, call, told) for call in calls}


def _without_wrapper(kind: str, call: str, told: dict[str, Any]) -> dict[str, float]:
    figures: dict[str, float] = told[call]
    if call == "empty" or (call == "heartbeat" and kind != "nvrx"):
        return figures
    empty: dict[str, float] = told["empty"]
    return {
        name: value if name.endswith(("clock", "p99")) else max(0.0, value - empty[name])
        for name, value in figures.items()
    }


def _median(rounds: list[Figures]) -> Figures:
    return {
        call: {name: statistics.median(figures[call][name] for figures in rounds) for name in rounds[0][call]}
        for call in rounds[0]
    }


def _row(call: str, how: str, who: str, found: dict[str, float]) -> Row:
    p99 = found[how.replace("median", "p99")] / 1000 if how != "batched" else None
    return {"call": call, "how": _HOW[how], "who": who, "median µs": found[how] / 1000, "p99 µs": p99}


def _rows(call: str, how: str, figures: dict[str, Figures]) -> list[Row]:
    """Return the rows of one call, measured in one manner, for everybody."""
    rows: list[Row] = []
    for kind, who in _WHO.items():
        if kind not in figures:
            rows.append({"call": call, "how": _HOW[how], "who": who, "note": harness.NOT_INSTALLED})
            continue
        found = figures[kind][call]
        row = _row(call, how, harness.nvrx_name() if kind == "nvrx" else who, found)
        if kind == "resilience":
            row |= {"aim": f"≤ {_AIMS[call]:g} µs", "met": found[how] / 1000 <= _AIMS[call]}
        if kind == "nvrx":
            ratio = found[how] / figures["resilience"][call][how]
            row |= {"× ours": ratio, "aim": f"≥ {_CHEAPER:g}×", "met": ratio >= _CHEAPER}
        rows.append(row)
    return rows
