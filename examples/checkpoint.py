"""A training script that loses nothing: kill it, start it again, and it goes on where it was.

python examples/checkpoint.py FOLDER
torchrun --nproc-per-node=2 examples/checkpoint.py FOLDER
resilience run --nproc-per-node=2 --max-restarts=3 examples/checkpoint.py FOLDER
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilience

steps, batch, width = 40, 16, 32


@resilience.record
def main() -> None:
    with resilience.section("setup"):
        if "RANK" not in os.environ:  # plain python: a world of one
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, 1)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    with resilience.FlashCheckpoint(
        sys.argv[1], model=model, optimizer=optimizer, schedule=schedule, disk_every=10
    ) as checkpoint:  # the random states are in it too
        start = checkpoint.restore(allow_fresh_start=True)
        with resilience.expect_heartbeats():
            for step in range(start, steps):
                with resilience.section("step"):
                    inputs = torch.randn(batch, width)
                    loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=-1, keepdim=True))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    schedule.step()
                checkpoint.save(step)  # in memory when it returns; on disk behind its back
                resilience.heartbeat(step)

    if dist.get_rank() == 0 and start < steps:
        print(f"loss {loss.item():.6f} after {steps} steps on {dist.get_world_size()} ranks, from step {start}")
    dist.destroy_process_group()


main()
