"""Cycle 0: many quick steps, then rank 1 is killed. Cycle 1: rank 0 hangs in its fifth step. Cycle 2: all is well."""

import os
import signal
import time

import resilience

rank, cycle = os.environ["RANK"], os.environ["RESILIENCE_CYCLE"]
for step in range(200):
    with resilience.section("work"):
        if cycle == "1" and rank == "0" and step == 5:
            time.sleep(1000)
        time.sleep(0.02)
    if cycle == "0" and rank == "1" and step == 150:
        os.kill(os.getpid(), signal.SIGKILL)
