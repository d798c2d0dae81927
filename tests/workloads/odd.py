"""Scripts that do odd things. odd.py WHAT"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

if sys.argv[1] == "exec" and "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])

import resilience

what, cycle = sys.argv[1], os.environ["RESILIENCE_CYCLE"]


def note(text: str) -> None:
    with (Path(os.environ["PROGRESS"]) / f"rank_{os.environ['RANK']}").open("a") as file:
        file.write(f"{cycle} {text} {time.monotonic()} {os.getpid()}\n")


def beat_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with resilience.section("step"):
            time.sleep(0.2)
        note("step")
        resilience.heartbeat()


if what == "leaves-with-0":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with resilience.section("step"):
        while cycle == "0":
            time.sleep(0.1)
elif what == "other-thread":  # the main thread returns, another one trains on
    threading.Thread(target=beat_for, args=(5.0,)).start()
elif what == "slow-goodbye":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(5), sys.exit(1)))  # type: ignore[func-returns-value]
    beat_for(2.0)
    if cycle == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if cycle == "0":
        beat_for(60.0)
else:
    beat_for(float(sys.argv[2]))
note("end")
