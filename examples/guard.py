"""A bad batch, and a training that goes on as if it had never been there.

python examples/guard.py FOLDER
torchrun --nproc-per-node=2 examples/guard.py FOLDER
resilience run --nproc-per-node=2 --max-restarts=3 examples/guard.py FOLDER
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import resilience

samples, steps, batch, width = 1280, 100, 16, 32


@resilience.record
def main() -> None:
    if "RANK" not in os.environ:  # plain python: a world of one
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(samples, width)
    inputs[123] = torch.nan  # in every epoch one rank finds this one
    sampler: DistributedSampler[int] = DistributedSampler(TensorDataset(inputs))
    loader = DataLoader(TensorDataset(inputs), batch, sampler=sampler)

    with resilience.FlashCheckpoint(sys.argv[1], model=model, optimizer=optimizer, disk_every=20) as checkpoint:
        guard = resilience.Guard(checkpoint)  # before restore(): what it knows is in the checkpoint too
        start = checkpoint.restore(allow_fresh_start=True)
        for step, (features,) in guard.steps(loader, start, steps):  # over epochs, with set_epoch()
            loss = nn.functional.mse_loss(model(features), features.sum(dim=-1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if guard.bad(loss, norm):  # on any rank: all are back at the last good step, and the batch is left out
                continue
            optimizer.step()
            checkpoint.save(step)

    if dist.get_rank() == 0 and start < steps:
        print(f"loss {loss.item():.6f} after {step + 1} steps on {dist.get_world_size()} ranks, from step {start}")
    dist.destroy_process_group()


main()
