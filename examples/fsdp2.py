"""FSDP2: every rank keeps its shards in memory and behind that on disk; a killed rank costs one step.

resilience run --nproc-per-node=2 --max-restarts=3 examples/fsdp2.py FOLDER
torchrun --nproc-per-node=2 examples/fsdp2.py FOLDER

Started again with another number of ranks it goes on too: shards are cut anew.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import resilience

steps, batch, width, layers = 40, 8, 64, 4


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.layers(inputs)


@resilience.record
def main() -> None:
    with resilience.section("setup"):
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(layers)), nn.Linear(width, 1))
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model[:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    # "overlap": the shards are copied behind the next forward and backward. The random states are in it too.
    with resilience.FlashCheckpoint(
        sys.argv[1], model=model, optimizer=optimizer, schedule=schedule, mode="overlap", disk_every=10
    ) as checkpoint:
        start = checkpoint.restore(allow_fresh_start=True)
        with resilience.expect_heartbeats():
            for step in range(start, steps):
                with resilience.section("step"):
                    inputs = torch.randn(batch, width)
                    loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=-1, keepdim=True))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    schedule.step()
                checkpoint.save(step)
                resilience.heartbeat(step)

    if dist.get_rank() == 0 and start < steps:
        print(f"loss {loss.item():.6f} after {steps} steps on {dist.get_world_size()} ranks, from step {start}")
    dist.destroy_process_group()


main()
