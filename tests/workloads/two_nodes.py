"""A gloo training loop over several nodes, with a fault on the last rank in cycle 0.

two_nodes.py STEPS FAULT STEP      FAULT: none, hang, stop, kill
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import resilience

rank, world, cycle = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "RESILIENCE_CYCLE"))
notes = Path(os.environ["PROGRESS"]) / f"rank_{rank}"
steps, fault, at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
last = rank == world - 1


def note(what: str) -> None:
    with notes.open("a") as file:
        file.write(f"{cycle} {what} {time.monotonic():.3f} {os.getpid()}\n")


with resilience.section("setup"):
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("PG_TIMEOUT", "600"))))
total = torch.zeros(1)
with resilience.expect_heartbeats():
    for step in range(steps):
        with resilience.section("load"):
            if cycle == 0 and last and step == at and fault == "hang":
                note("fault")
                time.sleep(1000)
            if cycle == 0 and last and step == at and fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if cycle == 0 and last and step == at and fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        with resilience.section("step"):
            ones = torch.ones(1)
            dist.all_reduce(ones)
            total += ones
            time.sleep(float(os.environ.get("DT", "0.02")))
        note(f"step-{step}")
        resilience.heartbeat(step)
note(f"total-{int(total.item())}")
dist.destroy_process_group()
