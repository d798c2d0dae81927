"""A training loop without torch, with a fault in it.

    train.py STEPS [WHERE RANK STEP]

WHERE: what goes wrong on RANK at STEP in cycle 0 (see ``fault``). Each step appends a line to $PROGRESS/rank_<r>. With OUTLIVED=1
the other ranks train in cycle 0 until they are ended.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import resilience

RANK = int(os.environ["RANK"])
CYCLE = int(os.environ["RESILIENCE_CYCLE"])
PROGRESS = Path(os.environ["PROGRESS"])
DT = float(os.environ.get("DT", "0.02"))


def note(text: str) -> None:
    with (PROGRESS / f"rank_{RANK}").open("a") as file:
        file.write(f"{CYCLE} {text} {time.monotonic():.6f} {os.getpid()}\n")


def fault(where: str) -> None:
    """Go wrong in one of the ways that a rank can go wrong."""
    note(f"fault-{where}")
    if where == "sleep":
        time.sleep(1000)
    elif where == "gil":  # an endless C call that never lets go of the interpreter
        re.match(r"(a+)+$", "a" * 64 + "b")
    elif where == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    elif where == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    elif where == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif where == "raise":
        raise ValueError("bad batch")
    elif where.startswith("exit"):
        os._exit(int(where[4:]))


def main() -> None:
    steps = int(sys.argv[1])
    kind, rank, at = (sys.argv[2], int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 2 else ("", -1, -1)
    place, _, what = kind.rpartition(":")
    mine = rank in (RANK, 99) and CYCLE == 0
    if "OUTLIVED" in os.environ and CYCLE == 0 and not mine:
        steps = sys.maxsize
    with resilience.section("setup"):
        note("setup")
        if mine and place == "setup":
            fault(what)
    with resilience.section("epoch"), resilience.expect_heartbeats():
        for step in range(steps):
            if mine and step == at and place == "between":
                resilience.end_all_sections()
                fault(what)
            with resilience.section("load"):
                if mine and step == at and place == "load":
                    fault(what)
            if mine and step == at and place == "epoch":  # in the outer section, while inner ones are fine
                while True:
                    with resilience.section("load"):
                        time.sleep(DT)
                    resilience.heartbeat()
            if mine and step == at and place == "beats":  # sections go on, heartbeats do not
                while True:
                    with resilience.section("load"):
                        time.sleep(DT)
            time.sleep(DT)
            note(f"step-{step}")
            resilience.heartbeat(step)
    if mine and place == "after":
        fault(what)
    note("end")


if __name__ == "__main__":
    main()
