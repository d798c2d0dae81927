"""What `make demo` shows: rank 1 is killed at step 30 and hangs at step 60. The job survives both, goes on from memory where it
was, and ends with its loss.

resilience run --nproc-per-node=2 --max-restarts=3 examples/demo.py FOLDER
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilience

folder = Path(sys.argv[1])
steps, batch, width = 100, 32, 64


def strike(rank: int, step: int) -> None:
    """Do what clusters do, once each."""
    for at, name in ((30, "killed"), (60, "hung")):
        mark = folder / name
        if rank == 1 and step == at and not mark.exists():
            mark.touch()
            print(f"rank 1, step {step}: about to be {name}", flush=True)
            if name == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)


with resilience.section("setup"):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    wrapped = DistributedDataParallel(model)
    data = torch.randn(steps, batch, width)
    checkpoint = resilience.FlashCheckpoint(folder / "checkpoints", model=wrapped, optimizer=optimizer, disk_every=50)
    start = checkpoint.restore(allow_fresh_start=True)
    if rank == 0:
        print(f"training from step {start}", flush=True)

with resilience.expect_heartbeats():
    for step in range(start, steps):
        with resilience.section("load", timeout=5):
            strike(rank, step)
            inputs = data[step]
        with resilience.section("step"):
            loss = nn.functional.mse_loss(wrapped(inputs), inputs.sum(dim=-1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        checkpoint.save(step)
        if rank == 0 and step % 30 == 29:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        resilience.heartbeat(step)

checkpoint.close()
if rank == 0:
    print(f"done: loss {loss.item():.4f} after {steps} steps", flush=True)
dist.destroy_process_group()
