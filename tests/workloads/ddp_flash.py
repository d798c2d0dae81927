"""Real DDP over gloo, with everything that makes a resume hard: dropout, batch norm, a schedule, a shuffled loader, mid-epoch.

    ddp_flash.py DIRECTORY STEPS [FAULT RANK STEP]

FAULT: see ``blows.py``. At the end each rank writes the digest of everything it has to $PROGRESS/final_<rank>.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from blows import PROGRESS, strike  # type: ignore[import-not-found]
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilience


class Loader:
    """Shuffled batches, for ever; its position is part of its state."""

    def __init__(self, rank: int) -> None:
        self.rng = random.Random(100 + rank)
        self.order: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if not self.order:
                self.order = list(range(7))
                self.rng.shuffle(self.order)
            yield torch.linspace(-1, 1, 8 * 16).view(8, 16) * (1 + self.order.pop())

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, state["rng"] = state["order"], state["rng"]
        self.rng.setstate(state["rng"])


@resilience.record
def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 33), nn.BatchNorm1d(33), nn.Dropout(0.2), nn.Linear(33, 1))
    model = DistributedDataParallel(inner)
    torch.manual_seed(50 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
    loader = Loader(rank)
    every = int(os.environ.get("DISK_EVERY", "1000000"))
    mode = os.environ.get("MODE", "blocking")
    things = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    things["replicas"] = int(os.environ.get("REPLICAS", "0"))
    with resilience.FlashCheckpoint(sys.argv[1], disk_every=every, mode=mode, **things) as checkpoint:
        start = checkpoint.restore(allow_fresh_start=True)
        with (PROGRESS / f"starts_{rank}").open("a") as file:
            file.write(f"{start}\n")
        for step, batch in zip(range(start, int(sys.argv[2])), loader, strict=False):
            with resilience.section("step"):
                loss = model(batch + 0.1 * torch.randn_like(batch)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            checkpoint.save(step, wait=60)
            resilience.heartbeat(step)
            strike(checkpoint, rank, step)
    tensors = [*inner.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    found = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))
    found.update(repr((schedule.state_dict(), loader.state_dict(), float(torch.rand(1)))).encode())
    (PROGRESS / f"final_{rank}").write_text(found.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
