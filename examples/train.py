"""A small training script, watched. Runs alike under plain python, plain torchrun and resilience run:

python examples/train.py
torchrun --nproc-per-node=2 examples/train.py
resilience run --nproc-per-node=2 --max-restarts=3 examples/train.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilience

steps, batch, width = 40, 16, 32

with resilience.section("setup"):
    if "RANK" not in os.environ:  # plain python: a world of one
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.randn(steps, batch, width)
    target = data.sum(dim=-1, keepdim=True)

with resilience.expect_heartbeats():  # from here to the end of the block
    for step in range(steps):
        with resilience.section("step"):
            loss = nn.functional.mse_loss(model(data[step]), target[step])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        resilience.heartbeat(step)

if dist.get_rank() == 0:
    print(f"loss {loss.item():.6f} after {steps} steps on {dist.get_world_size()} ranks")
dist.destroy_process_group()
