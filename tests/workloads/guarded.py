"""Real DDP over gloo under a guard: one rank has a bad batch.

    guarded.py DIRECTORY STEPS BAD

BAD: ``nan RANK BATCH``, ``spike RANK BATCH``, ``none`` or ``without BATCH`` (it never was there, and nobody guards). At the end
each rank writes the digest of everything it has to $PROGRESS/final_<rank>; $PROGRESS/went_<rank> has ``from-to`` of each rollback.
KILL=during: in cycle 0 rank 1 is killed while it restores in a rollback; KILL=after: right after it.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilience

PROGRESS = Path(os.environ["PROGRESS"])
CYCLE = int(os.environ.get("RESILIENCE_CYCLE", "0"))
KIND, *NUMBERS = sys.argv[3].split()


def strike(when: str) -> None:
    if CYCLE == 0 and os.environ.get("RANK") == "1" and os.environ.get("KILL") == when:
        os.kill(os.getpid(), signal.SIGKILL)


class Loader:
    """Shuffled batches, for ever; its position is part of its state."""

    def __init__(self, rank: int) -> None:
        self.rng = random.Random(100 + rank)
        self.rank, self.number = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            batch = torch.linspace(-1, 1, 8 * 16).view(8, 16) * self.rng.uniform(0.8, 1.2)
            self.number += 1
            if KIND in ("nan", "spike") and [self.rank, self.number - 1] == list(map(int, NUMBERS)):
                batch *= torch.nan if KIND == "nan" else 1e4
            if not (KIND == "without" and self.number - 1 == int(NUMBERS[0])):
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["number"]:
            strike("during")
        self.number = state["number"]
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
    loader = Loader(rank)
    mode, every = os.environ.get("MODE", "blocking"), int(os.environ.get("DISK_EVERY", "1000000"))
    things = {"model": model, "optimizer": optimizer, "loader": loader}
    with resilience.FlashCheckpoint(sys.argv[1], disk_every=every, mode=mode, **things) as checkpoint:
        guard = None if KIND == "without" else resilience.Guard(checkpoint, warmup=8)
        start, end = checkpoint.restore(allow_fresh_start=True), int(sys.argv[2])
        last = start - 1
        for step, batch in guard.steps(loader, start, end) if guard else zip(range(start, end), loader, strict=False):
            if step != last + 1:
                with (PROGRESS / f"went_{rank}").open("a") as file:
                    file.write(f"{last}-{step}\n")
                strike("after")
            last = step
            with resilience.section("step"):
                outputs = model(batch + 0.1 * torch.randn_like(batch))
                loss = (outputs * batch.abs().amax()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                if guard and guard.bad(loss):  # each rank knows its own loss only
                    last = step
                    continue
                optimizer.step()
            checkpoint.save(step, wait=60)
            resilience.heartbeat(step)
    tensors = [*inner.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    found = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))
    found.update(repr((loader.state_dict(), float(torch.rand(1)))).encode())
    (PROGRESS / f"final_{rank}").write_text(found.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
