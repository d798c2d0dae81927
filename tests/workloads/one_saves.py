"""Only rank 0 saves, as scripts do that were written for torch.save. argv: directory, how long the other one stays"""

import os
import sys
import time
from pathlib import Path

import torch

import resilience

rank = int(os.environ["RANK"])
over = Path(sys.argv[1]).with_name("over")
with resilience.FlashCheckpoint(sys.argv[1], thing=torch.nn.Linear(2, 2)) as checkpoint:
    checkpoint.restore(allow_fresh_start=True)
    if rank == 0:
        receipt = checkpoint.save(3)
        time.sleep(float(sys.argv[2]))
    else:
        time.sleep(float(sys.argv[2]))
if rank == 0:
    print(f"left with {receipt}", flush=True)
    over.touch()
while not over.exists():  # as in a barrier: this rank's process does not end before the other one has left
    time.sleep(0.05)
