"""What a step of a Lightning trainer costs, in µs, with ``ResilienceCallback`` and without a callback.

One rank under ``resilience run``, a model of 4,225 parameters, from one ``training_step`` to the next. The variants take turns in
random order, 21 times 300 steps each; of each turn the lower quartile counts, since other work on the machine only ever adds.
*step* is the median of the turns, *more* the median of the differences to "no callback" in the same turn, *spread* their quartiles.
*in turns*: how much longer the steps are that have our calls, in trainings where they are made in every other turn of 20 steps:
what differs from one training to the next, such as the layout of memory, is not in it. *calls*: the lower quartile of what passes
in our calls between two batches, with a clock around them. *a callback that does nothing*: what Lightning itself spends on calling
the hooks of one more callback. A snapshot of so small a model is mostly looking at the state of trainer, loops and callbacks; what
copying costs is in `checkpoint.md`. The aim is 20 µs more than no callback, without a snapshot.
"""

from __future__ import annotations

import statistics

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
        told = job.await_events("measured", 1, 900.0)[0]
        timed, turns = (job.await_events(what, 1, 1.0)[0] for what in ("timed", "turns"))
    names = sorted((name for name, value in told.items() if isinstance(value, list)), key=_ORDER.index)
    base = told["no callback"]
    rows: list[Row] = []
    for name in names:
        more = [mine - theirs for mine, theirs in zip(told[name], base, strict=True)]
        row: Row = {"variant": name, "step": statistics.median(told[name])}
        if name != "no callback":
            low, middle, high = statistics.quantiles(more, n=4)
            row |= {"more": middle, "spread": f"{low:.0f} to {high:.0f}"}
        if name in turns:
            row["in turns"] = statistics.median(turns[name])
        if name in timed:
            row["calls"] = timed[name]
        rows.append(row)
    return rows
