"""Two gloo ranks in lockstep; one fails in a chosen way, the other falls over it or waits.

collective.py FAULT      raise, exit201, kill, crash, leave, both (rank 1 raises, and once that is recorded rank 0)
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import resilience

RANK, CYCLE = int(os.environ["RANK"]), int(os.environ["RESILIENCE_CYCLE"])


def fail(fault: str) -> None:
    if fault == "raise":
        resilience.annotate(batch="shard-7", attempt=CYCLE)
        raise ValueError("bad sample 4711") from KeyError("label")
    if fault == "exit201":
        os._exit(201)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "crash":
        ctypes.string_at(0)


def wait_for_the_other() -> None:
    """Have rank 0 wait until rank 1 has recorded its error, and for longer than the clocks of two nodes may be apart."""
    place = [os.environ["TORCHELASTIC_ERROR_FILE"]]
    dist.broadcast_object_list(place, src=1)
    dist.barrier()
    if RANK == 0:
        while not Path(place[0]).exists():
            time.sleep(0.005)
        time.sleep(0.05)


@resilience.record
def main() -> None:
    fault = sys.argv[1]
    with resilience.section("setup"):
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with resilience.expect_heartbeats():
        for step in range(12):
            with resilience.section("step"):
                if CYCLE == 0 and step == 6:
                    if fault == "both":
                        wait_for_the_other()
                        raise RuntimeError(f"rank {RANK} is sure of itself")
                    if RANK == 1:
                        if fault == "leave":
                            return
                        with resilience.section("sample"):
                            fail(fault)
                ones = torch.ones(1)
                dist.all_reduce(ones)
                time.sleep(0.01)
            resilience.heartbeat(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
