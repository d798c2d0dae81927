"""Two ranks that save a replicated model together, until one is killed; then they restore it: ``ddp GIGABYTES FOLDER``.

Each rank stages its part; a plain copy of as many bytes stands beside it. A restore brings the whole model to every rank.
All ranks do the same at the same time, and the slowest one counts, so they wait for each other before each figure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import resilience
from benchmarks.workloads.snapshot import complete
from benchmarks.workloads.state import GIB, TENSORS, Memcpy, model_of, tensors_of, timed
from benchmarks.workloads.voice import cycle, say

_SAVES = 6
_WAIT_S = 60.0


def together(act: Callable[[], object]) -> float:
    """Return how long something takes that all ranks begin at the same time."""
    dist.barrier()
    return timed(act)


def save(checkpoint: resilience.FlashCheckpoint, memcpy: Memcpy, steps: range) -> None:
    """Save a few times, with plain copies before and after, and tell."""
    for step in steps:
        before = together(memcpy)
        took = together(lambda: checkpoint.save(step))  # noqa: B023 - called at once
        say("saved", rank=dist.get_rank(), step=step - steps.start, pair=[took, before, together(memcpy)])
        complete(checkpoint, step)
        resilience.heartbeat(step)


def restore(checkpoint: resilience.FlashCheckpoint, memcpy: Memcpy, tensors: list[torch.Tensor]) -> int:
    """Restore, with plain copies before and after, tell, and return the step to go on from."""
    wanted = tensors[-1].clone()  # every cycle begins with the same numbers
    for tensor in tensors:
        tensor.zero_()
    before = together(memcpy)
    took = together(checkpoint.restore)
    assert torch.equal(tensors[-1], wanted), "not what was saved"
    say("restored", rank=dist.get_rank(), pair=[took, before, together(memcpy)])
    return 1 + (checkpoint.latest() or 0)


def main() -> None:
    """Restore if there is something, save, and wait for the end."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=_WAIT_S))
    torch.manual_seed(1)
    inner = model_of(int(float(sys.argv[1]) * GIB), TENSORS)
    tensors = tensors_of(inner)
    model = torch.nn.parallel.DistributedDataParallel(inner)
    whole, part = Memcpy(tensors), Memcpy(tensors[dist.get_rank() :: dist.get_world_size()])
    checkpoint = resilience.FlashCheckpoint(Path(sys.argv[2]) / "ddp", disk_every=None, model=model)
    start = restore(checkpoint, whole, tensors) if cycle() else 0
    save(checkpoint, part, range(start, start + _SAVES))
    dist.barrier()
    say("ready", rank=dist.get_rank())
    time.sleep(_WAIT_S)


if __name__ == "__main__":
    main()
