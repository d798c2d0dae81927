"""What a step of a Lightning trainer costs, in µs, with ``ResilienceCallback`` and without a callback.

One rank under ``resilience run``, a model of 4,225 parameters, from one ``training_step`` to the next; of many steps the lower
quartile counts, since other work on the machine only ever adds. *in turns*: how much longer a step is with the callback than
without, in trainings of 7,500 steps where it is there and not there in turns of 10, the median of 11 and the spread; *apart*: the
same between trainings of 1,500 steps in random order, after the first 1,100, the median of 21 (5 with snapshots) and their
quartiles: where the machine is noisy, or memory happens to lie otherwise, that tells little.
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
        in_one, idle, calls = (job.await_events(what, 1, 1.0)[0] for what in ("in one", "idle", "calls"))
    return [*_rows(_measured(idle), in_one, calls), *_rows(saving, {}, {})[1:]]


def _measured(told: dict[str, Any]) -> dict[str, list[float]]:
    found = {name: value for name, value in told.items() if isinstance(value, list)}
    return {name: found[name] for name in sorted(found, key=_ORDER.index)}


def _rows(apart: dict[str, list[float]], in_one: dict[str, list[float]], calls: dict[str, float]) -> list[Row]:
    rows: list[Row] = []
    for name, took in apart.items():
        row: Row = {"variant": name, "step": statistics.median(took)}
        if name in in_one:
            row |= {"in turns": statistics.median(in_one[name]), "spread": _spread(in_one[name])}
        if name != "no callback":
            more = [mine - theirs for mine, theirs in zip(took, apart["no callback"], strict=True)]
            row |= {"apart": statistics.median(more), "quartiles": _spread(statistics.quantiles(more, n=4))}
        if name in calls:
            row["calls"] = calls[name]
        rows.append(row)
    return rows


def _spread(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"
