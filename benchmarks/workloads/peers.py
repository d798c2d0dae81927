"""Save with a peer that has a virtual environment of its own and tell what each call took: ``peers WHO GIGABYTES FOLDER``.

``WHO``: ``lightning`` (AsyncCheckpointIO) or ``dlrover`` (DdpCheckpointer, into memory; needs its launcher and master).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads.state import GIB, TENSORS, Memcpy, model_of, tensors_of, timed
from benchmarks.workloads.voice import say

_SAVES = 4
State = dict[str, Any]


def lightning(state: State, folder: Path) -> Iterator[Callable[[], Any]]:
    """Yield saves; between two of them the one before is on disk."""
    plugins = importlib.import_module("lightning.pytorch.plugins.io")
    for number in range(_SAVES):
        saver = plugins.AsyncCheckpointIO(plugins.TorchCheckpointIO())
        path = folder / f"lightning-{number}.ckpt"
        yield lambda: saver.save_checkpoint({"state_dict": state}, path)  # noqa: B023 - called at once
        saver.teardown()
        path.unlink()


def dlrover(state: State, folder: Path) -> Iterator[Callable[[], Any]]:
    """Yield saves into shared memory."""
    module = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
    torch.distributed.init_process_group("gloo")
    saver = module.DdpCheckpointer(str(folder / "dlrover"))
    for number in range(_SAVES):
        yield lambda: saver.save_checkpoint(number, {"model": state}, storage_type=module.StorageType.MEMORY)  # noqa: B023
    torch.distributed.destroy_process_group()


def main() -> None:
    """Measure and tell: the first save apart, it is often another matter."""
    who, folder = sys.argv[1], Path(sys.argv[3])
    model = model_of(int(float(sys.argv[2]) * GIB), TENSORS)
    memcpy = Memcpy(tensors_of(model))
    pairs = []
    for save in (lightning if who == "lightning" else dlrover)(model.state_dict(), folder):
        before = timed(memcpy)  # not after it: then the peer's own threads are still at work
        pairs.append([timed(save), before, before])
    say("stall", who=f"{who}, first", pairs=pairs[:1])
    say("stall", who=who, pairs=pairs[1:])
    say("measured")


if __name__ == "__main__":
    main()
