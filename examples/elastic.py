"""Another number of ranks each time: the run goes on, every sample of an epoch is seen once, whoever is there.

resilience run --nproc-per-node=2 examples/elastic.py FOLDER 30
resilience run --nproc-per-node=3 examples/elastic.py FOLDER 60
resilience run --nproc-per-node=1 examples/elastic.py FOLDER 90

The last word is how many samples to see in all. Model and optimizer are sharded over however many ranks there are. The place in
the data is a number of samples, the same on all ranks: it means the same to any number of them, and ``replicated`` says so. What
belongs to single ranks, and is not declared, would be refused when their number changes.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import resilience

samples, batch, width = 48, 2, 16


class Place:
    """How many samples all ranks together have seen."""

    def __init__(self) -> None:
        self.seen = 0

    def take(self) -> list[int]:
        """Return the samples of this rank for the next step: an epoch is shuffled by its number, and dealt out in turn."""
        epoch, first = divmod(self.seen, samples)
        order: list[int] = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).tolist()
        step = order[first : first + batch * dist.get_world_size()]  # the last one of an epoch may be shorter
        self.seen += len(step)
        return step[dist.get_rank() :: dist.get_world_size()] or step[:1]

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


@resilience.record
def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, model = torch.randn(samples, width), nn.Sequential(nn.Linear(width, 33), nn.Tanh(), nn.Linear(33, 1))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, place = torch.optim.AdamW(model.parameters(), lr=0.01), Place()

    with resilience.FlashCheckpoint(
        sys.argv[1], model=model, optimizer=optimizer, place=place, replicated=["place"]
    ) as checkpoint:
        step = start = checkpoint.restore(allow_fresh_start=True)
        before, seen = place.seen, []
        while place.seen < int(sys.argv[2]):
            mine = place.take()
            seen += mine
            loss = nn.functional.mse_loss(model(data[mine]), data[mine].sum(dim=-1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.save(step)
            resilience.heartbeat(step)
            step += 1

    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: samples {before} to {place.seen}, mine {seen}, from step {start}"
    )
    dist.destroy_process_group()


main()
