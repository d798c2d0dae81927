"""The same bytes in few tensors and in many, saved and restored in turn: ``tensors GIGABYTES FOLDER COUNT …``.

All models look at the same memory, so that nothing but the number of tensors differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.workloads.snapshot import complete
from benchmarks.workloads.state import GIB, filled, model_of, timed
from benchmarks.workloads.voice import say
from resilience import FlashCheckpoint

_ROUNDS = 7


def main() -> None:
    """Measure and tell."""
    nbytes, folder, counts = int(float(sys.argv[1]) * GIB), Path(sys.argv[2]), [int(word) for word in sys.argv[3:]]
    flat = filled(nbytes // 4)
    models = {count: model_of(nbytes, count, flat) for count in counts}
    checkpoints = {
        count: FlashCheckpoint(folder / f"flash-{count}", disk_every=None, slots=2, model=model)
        for count, model in models.items()
    }
    for step in range(_ROUNDS):
        saves, loads = {}, {}
        for count, checkpoint in checkpoints.items():
            saves[count] = timed(lambda: checkpoint.save(step))  # noqa: B023 - called at once
            complete(checkpoint, step)
        for count, checkpoint in checkpoints.items() if step % 3 == 2 else ():
            loads[count] = timed(checkpoint.restore)
        say("round", step=step, saves=saves, loads=loads)
    say("measured")


if __name__ == "__main__":
    main()
