"""gloo ranks in lockstep that leave together when they are asked to; with STAY they do not, or fail while they do.

lockstep.py STEPS
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

import resilience

RANK, CYCLE = int(os.environ["RANK"]), int(os.environ["RESILIENCE_CYCLE"])
DT, STAY = float(os.environ.get("DT", "0.02")), os.environ.get("STAY", "")
NOTES = Path(os.environ["PROGRESS"]) / f"rank_{RANK}"


def note(text: str) -> None:
    with NOTES.open("a") as file:
        file.write(f"{CYCLE} {text} {time.monotonic():.6f} {os.getpid()}\n")


def on_signal(number: int, frame: FrameType | None) -> None:
    note("user-handler")


signal.signal(signal.SIGUSR1, on_signal)
dist.init_process_group("gloo")
for step in range(int(sys.argv[1])):
    total = torch.ones(1)
    dist.all_reduce(total)
    time.sleep(DT)
    note(f"step-{step}")
    resilience.heartbeat(step)
    if resilience.stop_requested():
        note("stopped" if STAY else f"stopped-{step}")
        if STAY == "raise" and RANK == 1:
            raise ValueError("could not save")
        if STAY:
            time.sleep(1000)
        break
dist.destroy_process_group()
