"""Training that notes each step and does what it is told in the middle of it.

    slurm_train.py DIRECTORY STEPS     DDP over gloo that saves every step
    slurm_train.py - STEPS             heartbeats only: no torch, quick to start, and at step 0 again after each restart

Each rank adds "step loss restart node procid group" to $PROGRESS/steps_<rank>. An order for rank N is a file $PROGRESS/order_N:
``kill``, ``exit CODE`` (both once), ``raise`` (each time, before the step), or ``end`` (the counting ranks are done).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import resilience

PROGRESS = Path(os.environ["PROGRESS"])
PACE_S = float(os.environ.get("PACE", "0.1"))


def obey(rank: int) -> bool:
    """Do what this rank is told; return whether it is done."""
    path = PROGRESS / f"order_{rank}"
    if not path.exists():
        return False
    what, _, number = path.read_text().partition(" ")
    if what == "raise":
        raise ValueError("told to raise")
    if what == "end":
        return True
    path.unlink()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(int(number))


def note(rank: int, step: int, loss: float) -> None:
    told = [os.environ.get(name, "-") for name in ("SLURM_RESTART_COUNT", "SLURMD_NODENAME", "SLURM_PROCID")]
    group = os.environ.get("RESILIENCE_NODE_GROUP", "-")
    with (PROGRESS / f"steps_{rank}").open("a") as file:
        file.write(" ".join([str(step), f"{loss:.9f}", *told, group]) + "\n")


def count(steps: int) -> None:
    rank = int(os.environ["RANK"])
    for step in range(steps):
        if obey(rank):
            break
        note(rank, step, 0.0)
        resilience.heartbeat(step)
        time.sleep(PACE_S)
        if resilience.stop_requested():
            break


def train(directory: str, steps: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with resilience.FlashCheckpoint(directory, model=model, optimizer=optimizer, disk_every=1) as checkpoint:
        start = checkpoint.restore(allow_fresh_start=True)
        for step in range(start, steps):
            obey(rank)
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.save(step)
            note(rank, step, loss.item())
            resilience.heartbeat(step)
            time.sleep(PACE_S)
            if resilience.stop_requested():
                break
    dist.destroy_process_group()


@resilience.record
def main() -> None:
    if sys.argv[1] == "-":
        count(int(sys.argv[2]))
    else:
        train(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    main()
