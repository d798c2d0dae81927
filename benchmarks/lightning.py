"""What a step of a Lightning trainer costs, in µs, with ``ResilienceCallback`` and without a callback.

One rank under ``resilience run``, a model of 4,225 parameters, from one ``training_step`` to the next. The variants take turns in
random order, 63 times 300 steps each (9 with snapshots, afterwards, beside as many without a callback); of each turn the lower
quartile counts, since other work on the machine only ever adds.
*step* is the median of the turns, *more* the median of the differences to "no callback" in the same turn, *spread* their quartiles.
*calls*: the lower quartile of what passes in our calls between two batches, with a clock around them. *a callback that does
nothing*: what Lightning itself spends on calling the hooks of one more callback. A snapshot of so small a model is mostly looking
at the state of trainer, loops and callbacks; what copying costs is in `checkpoint.md`. The aim is 20 µs more than no callback,
without a snapshot.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row

_ORDER = [
    "no callback",
    "a callback that does nothing",
    "ResilienceCallback(snapshots=False)",
    "ResilienceCallback, no snapshot due",
    "ResilienceCallback, a snapshot in every step",
    "the same, mode='blocking'",
]


def run() -> list[Row]:
    """Return a row per variant."""
    with harness.launch("resilience", "lightning_steps", [], ["--nproc-per-node=1"]) as job:
        saving = _measured(job.await_events("saving", 1, 900.0)[0])
        idle, calls = (job.await_events(what, 1, 1.0)[0] for what in ("idle", "calls"))
    return [*_rows(_measured(idle), calls), *_rows(saving, calls)[1:]]


def _measured(told: dict[str, Any]) -> dict[str, list[float]]:
    found = {name: value for name, value in told.items() if isinstance(value, list)}
    return {name: found[name] for name in sorted(found, key=_ORDER.index)}


def _rows(measured: dict[str, list[float]], calls: dict[str, float]) -> list[Row]:
    rows: list[Row] = []
    for name, took in measured.items():
        row: Row = {"variant": name, "step": statistics.median(took)}
        if name != "no callback":
            more = [mine - theirs for mine, theirs in zip(took, measured["no callback"], strict=True)]
            low, middle, high = statistics.quantiles(more, n=4)
            row |= {"more": middle, "spread": f"{low:.0f} to {high:.0f}"}
        if name in calls:
            row["calls"] = calls[name]
        rows.append(row)
    return rows
