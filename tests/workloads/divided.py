"""Training of a model that is divided by hand: each group of ranks has a part of its own, with the same names and shapes.

    divided.py DIRECTORY STEPS [FAULT RANK STEP]

$GROUP: so many ranks are a group, which DDP keeps equal; 0: no DDP at all. FAULT: see ``blows.py``. What a rank has goes to
$PROGRESS: ``restored_<rank>`` after restoring, ``saved_<rank>`` before each save. $ANY_WORLD: another number may go on.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from blows import PROGRESS, strike  # type: ignore[import-not-found]
from torch import nn

import resilience

GROUP = int(os.environ["GROUP"])


def part_of(rank: int) -> nn.Module:
    """Return the part of the model that this rank's group has."""
    if not GROUP:
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    torch.manual_seed(rank // GROUP)
    groups = [dist.new_group(range(first, first + GROUP)) for first in range(0, dist.get_world_size(), GROUP)]
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    return nn.parallel.DistributedDataParallel(model, process_group=groups[rank // GROUP])


def words(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return what this rank has, to the last bit."""
    found: list[Any] = [optimizer.state_dict()["state"], [one.tolist() for one in model.state_dict().values()]]
    return repr(found)


@resilience.record
def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_printoptions(precision=20, threshold=100_000)
    model = part_of(rank)
    torch.manual_seed(50 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with resilience.FlashCheckpoint(sys.argv[1], disk_every=1_000_000, model=model, optimizer=optimizer) as checkpoint:
        start = checkpoint.restore(allow_fresh_start=True, allow_other_world="ANY_WORLD" in os.environ)
        (PROGRESS / f"restored_{rank}").write_text(words(model, optimizer))
        for step in range(start, int(sys.argv[2])):
            with resilience.section("step"):
                optimizer.zero_grad()
                model(torch.randn(8, 8)).square().mean().backward()
                optimizer.step()
                dist.barrier()
            (PROGRESS / f"saved_{rank}").write_text(words(model, optimizer))
            checkpoint.save(step, wait=60)
            resilience.heartbeat(step)
            strike(checkpoint, rank, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
