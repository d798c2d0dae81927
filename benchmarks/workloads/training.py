"""Train, with and without a save in the middle, and tell what each block of steps took: ``training GIGABYTES FOLDER ROUNDS``.

The state is a model with Adam's. A block is long enough for whatever a save does in the background to be through with it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.workloads.state import GIB, Memcpy, sync, tensors_of, timed
from benchmarks.workloads.voice import say
from resilience import FlashCheckpoint

_WIDTH, _BATCH = 2048, 16
_STEPS = 6  # of a block
# Begins a save of a step; what it returns is called at the end of the block.
Save = Callable[[int], Callable[[], object]]


class Training:
    """A model, an optimizer, and a step."""

    def __init__(self, nbytes: int) -> None:
        layers = max(1, nbytes // (3 * 4 * _WIDTH * _WIDTH))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self._inputs = torch.randn(_BATCH, _WIDTH)
        self.step()

    def step(self) -> None:
        """Do one."""
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block(self, number: int, save: Save | None) -> float:
        """Return what some steps take, with a save after the first of them."""

        def run() -> None:
            finish: Callable[[], object] = lambda: None  # noqa: E731
            for step in range(_STEPS):
                self.step()
                if step == 0 and save is not None:
                    finish = save(number)
            finish()

        return timed(run)

    def state(self) -> dict[str, Any]:
        """Return what a script would give to ``torch.save``."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@contextmanager
def _ours(training: Training, folder: Path, mode: str) -> Iterator[Save]:
    things: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
    with FlashCheckpoint(folder / mode, mode=mode, disk_every=None, keep=1, **things) as checkpoint:

        def save(number: int) -> Callable[[], object]:
            checkpoint.save(number, disk=True, wait=60)
            return lambda: checkpoint.wait(number)

        yield save


def _theirs(training: Training, folder: Path) -> dict[str, Save]:
    """Peers as their users call them; what they have written is synced at the end, outside of the time that is measured."""

    def plain(number: int) -> Callable[[], object]:
        torch.save(training.state(), folder / "torch.pt")
        return lambda: None

    def blocking(number: int) -> Callable[[], object]:
        dcp.save(training.state(), checkpoint_id=folder / "dcp")
        return lambda: None

    def behind(number: int) -> Callable[[], object]:
        pending = dcp.async_save(training.state(), checkpoint_id=folder / "async")
        finish: Callable[[], object] = pending.result
        return finish

    return {"torch.save": plain, "dcp.save": blocking, "dcp.async_save": behind}


def main() -> None:
    """Measure and tell."""
    nbytes, folder, rounds = int(float(sys.argv[1]) * GIB), Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = Training(nbytes)
    memcpy = Memcpy(tensors_of(training.model, training.optimizer))
    with _ours(training, folder, "blocking") as blocking, _ours(training, folder, "overlap") as overlap:
        ways: dict[str, Save] = {"ours": blocking, "ours, overlap": overlap, **_theirs(training, folder)}
        for number in range(rounds):
            before = training.block(0, None)
            for who, save in ways.items():
                took = training.block(number, save)
                for name in ("torch.pt", "dcp", "async"):
                    if (folder / name).exists():
                        sync(folder / name)
                        shutil.rmtree(folder / name, ignore_errors=True)
                        (folder / name).unlink(missing_ok=True)
                after = training.block(0, None)
                say("block", who=who, round=number, took=took, before=before, after=after, memcpy=timed(memcpy))
                before = after
    dist.destroy_process_group()
    say("measured")


if __name__ == "__main__":
    main()
