"""What ``guard.bad(loss, grad_norm)`` costs a training step, in µs, beside a step without it.

One process, and two gloo ranks on this machine: with a group every call is one ``all_reduce`` of 8 bytes, whose time is mostly
that until the other rank is scheduled. *lagged* judges the step before; on a CPU that saves nothing, on a device it saves the wait
for the loss (not run on a GPU). *step*: forward, backward and update of a small model under DDP. *rollback*: back to the newest
snapshot of that model, digests checked, all ranks together. Median over 2,000 calls (20 rollbacks), rank 0.
"""

from __future__ import annotations

from benchmarks import harness
from benchmarks.harness import Row


def run() -> list[Row]:
    """Return a row per call and number of ranks."""
    rows: list[Row] = []
    for ranks in (1, 2):
        with harness.launch("resilience", "guard", [], [f"--nproc-per-node={ranks}"]) as job:
            told = job.await_events("measured", 1, 120.0)[0]
        for what in ("step", "guard.bad", "guard.bad, lagged", "rollback"):
            median, p99 = told[what]
            share = None if what in ("step", "rollback") else f"{100 * median / told['step'][0]:.1f} % of the step"
            rows.append({"ranks": ranks, "call": what, "median µs": median, "p99 µs": p99, "note": share})
    return rows
