"""Training with its state spread over ranks in some way, over gloo.

    sharded_flash.py DIRECTORY STEPS [FAULT RANK STEP]

$LAYOUT: ``plain`` (one rank), ``ddp``, ``fsdp2``, ``hsdp``, ``fsdp1``, ``fsdp1-flat``, ``fsdp1-mesh``. FAULT: see ``blows.py``.
The model has shapes that no number of ranks divides, tied weights, a frozen parameter and a parameter without rows for some ranks.
What the whole state is, whoever holds which part of it, goes to $PROGRESS: ``restored_<rank>`` after restoring, ``final_<rank>`` at
the end; ``rank_<rank>`` has what is this rank's own. $DCP: where DCP saves it too.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from blows import PROGRESS, strike  # type: ignore[import-not-found]
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import resilience

LAYOUT = os.environ.get("LAYOUT", "fsdp2")


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 33)
        self.norm = nn.BatchNorm1d(33)
        self.middle = nn.Linear(33, 7, bias=False)
        self.back = nn.Linear(7, 33, bias=False)
        self.tied = nn.Linear(16, 33, bias=False)
        self.tied.weight = self.enter.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=LAYOUT == "fsdp1-flat")  # which can't have both

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.enter(inputs)).relu(), 0.2, self.training)
        return self.back(self.middle(hidden)) * self.scale + self.tied(inputs) + self.frozen.sum()


def spread(model: nn.Module) -> nn.Module:
    """Spread a model over the ranks as $LAYOUT says."""
    if LAYOUT == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    world = dist.get_world_size()
    if LAYOUT in ("fsdp2", "hsdp"):
        from torch.distributed.fsdp import fully_shard

        shape, names = ((world,), ("shard",)) if LAYOUT == "fsdp2" else ((2, world // 2), ("copy", "shard"))
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model.middle, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if LAYOUT.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel

        mesh = dist.init_device_mesh("cpu", (world,)) if LAYOUT == "fsdp1-mesh" else None
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=LAYOUT != "fsdp1-flat", device_mesh=mesh
        )
    return model


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of the whole state of model and optimizer, which all ranks have a part of."""
    found, options = hashlib.sha256(), StateDictOptions(full_state_dict=True)
    parts: list[dict[str, Any]] = [get_model_state_dict(model, options=options)]
    if optimizer.state:  # of a fresh one torch would make a step
        state = get_optimizer_state_dict(model, optimizer, options=options)["state"]
        parts += [{f"{name}.{key}": value for name, entry in state.items() for key, value in entry.items()}]
    for part in parts:
        for name in sorted(part):
            if ".norm." not in f".{name}" or "running" not in name:  # those are each rank's own
                found.update(f"{name} {tuple(part[name].shape)}".encode() + part[name].numpy().tobytes())
    return found.hexdigest()


@resilience.record
def main() -> None:
    warnings.simplefilter("ignore")  # torch's own, about FSDP1 and ShardedTensor
    if LAYOUT == "plain":
        os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = spread(Net())
    torch.manual_seed(50 + rank)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
    every = int(os.environ.get("DISK_EVERY", "1000000"))
    mode = os.environ.get("MODE", "blocking")
    things = {"model": model, "optimizer": optimizer} | ({} if "IMPORTED" in os.environ else {"schedule": schedule})
    with resilience.FlashCheckpoint(
        sys.argv[1], disk_every=every, mode=mode, verify=mode == "overlap", **things
    ) as checkpoint:
        start = checkpoint.restore(allow_fresh_start=True)
        with (PROGRESS / f"starts_{rank}").open("a") as file:
            file.write(f"{start}\n")
        (PROGRESS / f"restored_{rank}").write_text(whole_state(model, optimizer))
        for step in range(start, int(sys.argv[2])):
            with resilience.section("step"):
                batch = torch.randn(8, 16)
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            checkpoint.save(step, wait=60)
            resilience.heartbeat(step)
            strike(checkpoint, rank, step)
    (PROGRESS / f"final_{rank}").write_text(whole_state(model, optimizer))
    if "DCP" in os.environ:
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer), "epoch": 3}
        dcp.save(state, checkpoint_id=os.environ["DCP"])
    buffers = [buffer.tolist() for name, buffer in sorted(model.named_buffers())]
    (PROGRESS / f"rank_{rank}").write_text(repr((buffers, schedule.state_dict(), float(torch.rand(1)))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
