"""One process, no launcher: kill it in the middle of an epoch, start it again, and it ends with the same loss.

python examples/checkpoint_single.py FOLDER
"""

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import resilience

samples, batch, epochs = 96, 8, 4


class Loader:
    """Shuffled batches whose position can be saved, as torchdata's StatefulDataLoader does it for real data."""

    def __init__(self) -> None:
        self.left: list[int] = []  # of this epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.left = self.left or random.sample(range(samples), samples)
        while self.left:
            taken, self.left = self.left[:batch], self.left[batch:]
            yield torch.tensor(taken, dtype=torch.float32).unsqueeze(1) / samples

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


torch.manual_seed(0)
random.seed(0)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
loader = Loader()

with resilience.FlashCheckpoint(
    sys.argv[1], model=model, optimizer=optimizer, loader=loader, disk_every=5
) as checkpoint:  # Python's and torch's random states are in it too
    step = checkpoint.restore(allow_fresh_start=True)
    start, loss = step, torch.zeros(())
    while step < epochs * samples // batch:
        for inputs in loader:
            loss = nn.functional.mse_loss(model(inputs), torch.sin(6 * inputs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.save(step)
            step += 1
    print(f"loss {loss.item():.6f} after {step} steps, from step {start}")
