"""Load from disk what ``snapshot`` left, into a model that exists, and tell what each took: ``load GIGABYTES FOLDER``.

*cold*: the files are not in the page cache, as on a new node. *warm*: they are.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.workloads.state import GIB, TENSORS, Memcpy, model_of, sync, tensors_of, timed
from benchmarks.workloads.voice import say
from resilience import FlashCheckpoint


def loaders(
    model: torch.nn.Module, folder: Path, checkpoint: FlashCheckpoint
) -> dict[str, tuple[Path, Callable[[], object]]]:
    """Return whose files are where, and how they are loaded."""
    step = checkpoint.latest()

    def by_torch(mmap: bool) -> None:
        model.load_state_dict(torch.load(folder / "torch.pt", mmap=mmap))

    def by_dcp() -> None:
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "dcp")

    return {
        "ours": (folder / "flash", lambda: checkpoint.restore(step)),
        "torch.load": (folder / "torch.pt", lambda: by_torch(False)),
        "torch.load, mmap": (folder / "torch.pt", lambda: by_torch(True)),
        "dcp.load": (folder / "dcp", by_dcp),
    }


def main() -> None:
    """Measure and tell."""
    folder = Path(sys.argv[2])
    model = model_of(int(float(sys.argv[1]) * GIB), TENSORS)
    tensors = tensors_of(model)
    memcpy = Memcpy(tensors)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with FlashCheckpoint(folder / "flash", disk_every=None, slots=2, model=model) as checkpoint:
        known = loaders(model, folder, checkpoint)
        checkpoint.restore()
        wanted = tensors[-1].clone()
        for number in range(3 if sum(tensor.nbytes for tensor in tensors) < GIB else 2):
            turn = number % len(known)
            for who, (path, load) in [*known.items()][turn:] + [*known.items()][:turn]:
                gc.collect()
                sync(path)
                for how in ("cold", "warm"):
                    tensors[-1].zero_()
                    before = timed(memcpy)
                    took = timed(load)
                    assert torch.equal(tensors[-1], wanted), f"{who}: not what was saved"
                    say("load", who=who, how=how, pairs=[[took, before, timed(memcpy)]])
    dist.destroy_process_group()
    say("measured")


if __name__ == "__main__":
    main()
