"""A training script that loses nothing: kill it, start it again, and it goes on where it was, in the middle of an epoch too.

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
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import resilience

samples, epochs, batch, width = 320, 4, 16, 32


@resilience.record
def main() -> None:
    with resilience.section("setup"):
        if "RANK" not in os.environ:  # plain python: a world of one
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, 1)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(samples, width))
        sampler: DistributedSampler[int] = DistributedSampler(data)
        per_epoch = len(sampler) // batch
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)

    with resilience.FlashCheckpoint(
        sys.argv[1], model=model, optimizer=optimizer, schedule=schedule, disk_every=10
    ) as checkpoint:  # the random states are in it too
        start = step = checkpoint.restore(allow_fresh_start=True)
        with resilience.expect_heartbeats():
            while step < epochs * per_epoch:
                epoch, position = divmod(step, per_epoch)
                sampler.set_epoch(epoch)
                left = Subset(data, list(sampler)[position * batch :])  # of this rank's part of the epoch
                # Its own generator: without one every loader draws from torch's random state, once more after a restart.
                for (inputs,) in DataLoader(left, batch, generator=torch.Generator()):
                    with resilience.section("step"):
                        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=-1, keepdim=True))
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        schedule.step()
                    checkpoint.save(step)  # in memory when it returns; on disk behind its back
                    resilience.heartbeat(step)
                    step += 1

    if dist.get_rank() == 0 and start < step:
        print(f"loss {loss.item():.6f} after {step} steps on {dist.get_world_size()} ranks, from step {start}")
    dist.destroy_process_group()


main()
