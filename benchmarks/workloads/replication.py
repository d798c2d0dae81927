"""One rank of two nodes that trains and saves, in turn with and without copies to the other node: ``replication MEBIBYTES FOLDER``.

Everything is each rank's own, so all of it is sent. A step computes for a while, or waits for a while as one does whose work is on
an accelerator, and saves. Copies on their way are waited for between the turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import resilience
from benchmarks.workloads.voice import say
from resilience.checkpoint.receipt import Level

_TURNS = 9
_STEPS = 25
_SIZE = 384
_COPIES = 6
_WAIT_S = 120.0


class Weights:
    """A tensor, and nothing else."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.zeros(nbytes // 4)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"]


def busy() -> None:
    """Compute for some 25 ms."""
    left = torch.ones(_SIZE, _SIZE)
    for _ in range(20):
        left = left @ left
        left = left / left.max()


def waiting() -> None:
    """Wait for as long."""
    time.sleep(0.025)


def turn(checkpoint: resilience.FlashCheckpoint, step: Callable[[], None], first: int) -> list[float]:
    """Return how long each of some steps took, its save included."""
    took = []
    dist.barrier()
    for number in range(first, first + _STEPS):
        began = time.perf_counter()
        step()
        checkpoint.save(number)
        took.append(time.perf_counter() - began)
    return took


def main() -> None:
    nbytes, folder = int(float(sys.argv[1]) * (1 << 20)), Path(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    weights = Weights(nbytes)
    options: dict[str, Any] = {"disk_every": None, "slots": 4, "weights": weights}
    with (
        resilience.FlashCheckpoint(folder / "with", replicas=1, **options) as copied,
        resilience.FlashCheckpoint(folder / "without", **options) as alone,
    ):
        number = 0
        for kind, step in (("computes", busy), ("waits", waiting)):
            for index in range(_TURNS):
                checkpoint = copied if index % 2 else alone
                took = turn(checkpoint, step, number)
                number += _STEPS
                if checkpoint is copied:
                    copied.wait(level=Level.REPLICATED, timeout=_WAIT_S)
                say("turn", rank=dist.get_rank(), kind=kind, copies=checkpoint is copied, took=took)
        for _ in range(_COPIES):
            dist.barrier()
            began = time.perf_counter()
            receipt = copied.save(number, wait=_WAIT_S)
            copied.wait(level=Level.REPLICATED, timeout=_WAIT_S)
            number += 1
            say(
                "copy",
                rank=dist.get_rank(),
                seconds=time.perf_counter() - began,
                level=str(receipt.level),
                nbytes=nbytes,
            )
    say("measured", rank=dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
