"""A function for Ray Train's TorchTrainer, with everything of ours that works without a launcher.

    ray_train_loop ADDRESS FOLDER STEPS DIES_AT      ADDRESS: of a cluster; ``none`` trains without Ray, as a rank of a launcher

It saves each step, and rank 1 raises at one of them in its first life if it is told to.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilience
from resilience.checkpoint.receipt import Level


@resilience.record
def loop(config: dict[str, Any]) -> None:
    folder, rank = Path(config["folder"]), dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with resilience.FlashCheckpoint(
        folder / "checkpoints", model=model, optimizer=optimizer, disk_every=2
    ) as checkpoint:
        start = checkpoint.restore(allow_fresh_start=True)
        with (folder / f"starts_{rank}").open("a") as file:
            file.write(f"{start} {os.environ['RANK']} {os.environ['WORLD_SIZE']}\n")
        for step in range(start, config["steps"]):
            with resilience.section("step"):
                loss = model(torch.full((4, 8), float(step + rank))).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            checkpoint.save(step, wait=30)
            resilience.heartbeat(step)
            if step == config["dies_at"] and start == 0 and rank == 1:
                checkpoint.wait(level=Level.DURABLE)
                raise ValueError("a bad batch, once")
    if rank == 0:
        (folder / "final").write_text(" ".join(value.hex() for value in model.module.weight.flatten().tolist()))


def main() -> None:
    address, folder, steps, dies_at = sys.argv[1:]
    if address == "none":
        dist.init_process_group("gloo")
        loop({"folder": folder, "steps": int(steps), "dies_at": int(dies_at)})
        dist.destroy_process_group()
        return
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address=address, log_to_driver=True)
    TorchTrainer(
        loop,
        train_loop_config={"folder": folder, "steps": int(steps), "dies_at": int(dies_at)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/ray", name="train", failure_config=FailureConfig(max_failures=1)),
    ).fit()


if __name__ == "__main__":
    main()
