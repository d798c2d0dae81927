"""A state that ends whoever goes on from step 5: the step before it is fine.

poisoned.py DIRECTORY
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import resilience
from resilience.checkpoint.receipt import Level

CYCLE = int(os.environ["RESILIENCE_CYCLE"])


@resilience.record
def main() -> None:
    model = torch.nn.Linear(1, 1)
    with resilience.FlashCheckpoint(sys.argv[1], model=model, disk_every=1) as checkpoint:
        start = checkpoint.restore(allow_fresh_start=True)
        with (Path(os.environ["PROGRESS"]) / "starts").open("a") as file:
            file.write(f"{start}\n")
        if start == 6:
            raise ValueError(f"this can't be gone on from {'x' * CYCLE}")  # never twice the same
        for step in range(start, 10 if CYCLE else 6):
            checkpoint.save(step, wait=60)
            checkpoint.wait(level=Level.DURABLE)
            resilience.heartbeat(step)
            if step == 3 and CYCLE == 0:
                checkpoint.wait(3)
        if CYCLE == 0:
            os._exit(9)


if __name__ == "__main__":
    main()
