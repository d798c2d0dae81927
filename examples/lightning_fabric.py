"""Lightning Fabric with the plain API: the loop is yours, so the calls are the same as without Lightning.

python examples/lightning_fabric.py FOLDER
resilience run --nproc-per-node=2 --max-restarts=3 examples/lightning_fabric.py FOLDER
"""

import os
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import resilience

samples, epochs, batch, width = 320, 3, 16, 32


@resilience.record
def main() -> None:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with resilience.section("setup"):
        fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
        fabric.launch()
        fabric.seed_everything(1)
        module = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, 1))
        model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=0.01))
        data = TensorDataset(torch.randn(samples, width))
        sampler: DistributedSampler[int] = DistributedSampler(data, fabric.world_size, fabric.global_rank)
        per_epoch = len(sampler) // batch
        fabric.seed_everything(10 + fabric.global_rank)

    # What is inside Fabric's wrappers: names and hooks are then those of the model itself.
    inside = model._forward_module
    with resilience.FlashCheckpoint(
        sys.argv[1], model=inside, optimizer=optimizer.optimizer, mode="overlap"
    ) as checkpoint:
        start = step = checkpoint.restore(allow_fresh_start=True)
        with resilience.expect_heartbeats():
            while step < epochs * per_epoch:
                epoch, position = divmod(step, per_epoch)
                sampler.set_epoch(epoch)
                left = Subset(data, list(sampler)[position * batch :])
                for (inputs,) in DataLoader(left, batch, generator=torch.Generator()):
                    with resilience.section("step"):
                        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=-1, keepdim=True))
                        optimizer.zero_grad()
                        fabric.backward(loss)
                        optimizer.step()
                    checkpoint.save(step)
                    resilience.heartbeat(step)
                    step += 1
                    if resilience.stop_requested():
                        return

    if fabric.global_rank == 0 and start < step:
        print(f"loss {loss.item():.6f} after {step} steps on {fabric.world_size} ranks, from step {start}")


main()
