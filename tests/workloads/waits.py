"""Rank 1 is stuck without a timeout; rank 0 waits for it in a section with one."""

import os
import time

import resilience

rank, cycle = int(os.environ["RANK"]), int(os.environ["RESILIENCE_CYCLE"])
for step in range(5):
    with resilience.section("load"):
        if rank == 1 and cycle == 0 and step == 3:
            time.sleep(1000)
    with resilience.section("wait"):
        if rank == 0 and cycle == 0 and step == 3:
            time.sleep(1000)
    resilience.heartbeat(step)
