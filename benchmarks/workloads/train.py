"""Two ranks that train next to nothing, with a real gloo group: ``train KIND``.

The first cycle goes on until somebody ends it; the next ones end by themselves after a few steps.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

from benchmarks.workloads.voice import cycle, say, voice

_FIRST_CYCLE_STEPS = 600
_LATER_CYCLE_STEPS = 5


def main() -> None:
    """Train."""
    say("started")
    import torch
    import torch.distributed as dist

    speaker = voice(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = torch.nn.Linear(8, 8)
    for step in range(_LATER_CYCLE_STEPS if cycle() else _FIRST_CYCLE_STEPS):
        model.zero_grad()
        model(torch.ones(8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        speaker.beat(step)
        if step == 0:
            say("step", rank=int(os.environ["RANK"]))
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
