"""Hangs, and says which signal it gets."""

import os
import signal
import sys
import time

import resilience


def say(number: int, frame: object) -> None:
    print(signal.Signals(number).name, flush=True)
    sys.exit(1)


signal.signal(signal.SIGUSR1, say)
with resilience.section("load"):
    if os.environ["RANK"] == "1" and os.environ["RESILIENCE_CYCLE"] == "0":
        time.sleep(1000)
