"""Tiny DDP over gloo with FlashCheckpoint, the same numbers whatever befalls it.

    ray_steps.py FOLDER STEPS [SECONDS [REPLICAS]]      REPLICAS -1: nothing is saved

Rank 0 appends "STEP LOSS" to FOLDER/losses, every rank "RANK PID START RACK" to FOLDER/starts. A file FOLDER/order_RANK tells a
rank what to do at its next step: ``exit CODE``, ``raise``, ``kill``. Once there is a file FOLDER/finish
all ranks leave at the same step.
"""

from __future__ import annotations

import logging
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


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def obey(folder: Path, rank: int) -> None:
    path = folder / f"order_{rank}"
    if not path.exists():
        return
    words = path.read_text().split()
    path.unlink()
    if words[0] == "exit":
        os._exit(int(words[1]))
    if words[0] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("bad batch")


def train(folder: Path, steps: int, pause: float = 0.0, replicas: int = 0) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    # Otherwise DDP forms its buckets anew after the first step of a process, and with them the order of sums over the ranks.
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    things = {"model": model, "optimizer": optimizer}
    with resilience.FlashCheckpoint(
        folder / "checkpoints", disk_every=int(os.environ.get("DISK_EVERY", "5")), replicas=max(0, replicas), **things
    ) as checkpoint:
        start = checkpoint.restore(allow_fresh_start=True)
        with (folder / "starts").open("a") as file:
            file.write(f"{rank} {os.getpid()} {start} {os.environ.get('RESILIENCE_NODE_GROUP', '-')}\n")
        with resilience.expect_heartbeats():
            for step in range(start, steps):
                with resilience.section("step"):
                    loss = model(batch(step, rank)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                shown = torch.stack([loss.detach(), torch.tensor(float((folder / "finish").exists() and rank == 0))])
                dist.all_reduce(shown)
                if rank == 0:
                    with (folder / "losses").open("a") as file:
                        file.write(f"{step} {shown[0].item().hex()}\n")
                if replicas >= 0:
                    checkpoint.save(step, wait=60)
                resilience.heartbeat(step)
                obey(folder, rank)
                if resilience.stop_requested() or shown[1].item() > 0:
                    break
                time.sleep(pause)
    dist.destroy_process_group()


@resilience.record
def main() -> None:
    logging.basicConfig(level=logging.INFO)  # where it was restored from is told so
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    train(folder, steps, float(sys.argv[3]) if len(sys.argv) > 3 else 0.0, int(sys.argv[4]) if len(sys.argv) > 4 else 0)


def called(folder: str, steps: int, config: dict[str, float]) -> None:
    """The same, as a function that a job calls."""
    train(Path(folder), steps, config["pause"])


if __name__ == "__main__":
    main()
