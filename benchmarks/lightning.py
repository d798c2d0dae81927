"""What a step of a Lightning trainer costs, in µs, with ``ResilienceCallback`` and without a callback.

One rank under ``resilience run``, a model of 4,225 parameters, from one ``training_step`` to the next. The variants take turns,
seven times 500 steps each; *step* is the median of the seven medians, *more* the median of the differences to "no callback" in
the same turn, *spread* their smallest and largest. *a callback that does nothing*: what Lightning itself spends on calling the
hooks of one more callback. A snapshot of so small a model is mostly looking at the state of trainer, loops and callbacks; what
copying costs is in `checkpoint.md`. The aim is 20 µs more than no callback, without a snapshot.
"""

from __future__ import annotations

import statistics

from benchmarks import harness
from benchmarks.harness import Row


def run() -> list[Row]:
    """Return a row per variant."""
    with harness.launch("resilience", "lightning_steps", [], ["--nproc-per-node=1"]) as job:
        told = job.await_events("measured", 1, 900.0)[0]
    names = [name for name, value in told.items() if isinstance(value, list)]
    base = told["no callback"]
    rows: list[Row] = []
    for name in names:
        more = [mine - theirs for mine, theirs in zip(told[name], base, strict=True)]
        row: Row = {"variant": name, "step": statistics.median(told[name])}
        if name != "no callback":
            row |= {"more": statistics.median(more), "spread": f"{min(more):.0f} to {max(more):.0f}"}
        rows.append(row)
    return rows
