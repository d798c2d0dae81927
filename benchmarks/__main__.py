"""``python -m benchmarks [NAME …]``: run them, print them, keep them in ``benchmarks/results``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from benchmarks import (
    checkpoint,
    guard,
    hang,
    harness,
    lightning,
    monitor,
    nodecheck,
    pulse,
    ray,
    replication,
    restart,
    slurm,
)

BENCHMARKS: dict[str, tuple[Callable[[], list[harness.Row]], str]] = {
    "pulse": (pulse.run, pulse.__doc__ or ""),
    "monitor": (monitor.run, monitor.__doc__ or ""),
    "hang": (hang.run, hang.__doc__ or ""),
    "restart": (restart.run, restart.__doc__ or ""),
    "checkpoint": (checkpoint.run, checkpoint.__doc__ or ""),
    "guard": (guard.run, guard.__doc__ or ""),
    "lightning": (lightning.run, lightning.__doc__ or ""),
    "nodecheck": (nodecheck.run, nodecheck.__doc__ or ""),
    "ray": (ray.run, ray.__doc__ or ""),
    "replication": (replication.run, replication.__doc__ or ""),
    "slurm": (slurm.run, slurm.__doc__ or ""),
}


def main(names: list[str]) -> int:
    """Run the benchmarks that are named, or all; return the exit code."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.stderr.write(f"benchmarks: unknown {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}\n")
        return 2
    for name in names or list(BENCHMARKS):
        function, doc = BENCHMARKS[name]
        facts, start = harness.machine(), time.monotonic()
        rows = function()
        harness.publish(name, doc, rows, facts, time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
