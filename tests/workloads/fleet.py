"""A training loop without torch that does what it is told: a test writes orders, a rank finds and obeys them.

    fleet.py STEPS

Before each step the rank looks for $PROGRESS/order_<rank> and $PROGRESS/order_any. Steps go on where the last cycle of this
rank ended (RESUME=1), or the last cycle of any rank of any node below the folder RESUME, so that a restart makes progress; or
from 0. Each step appends "<cycle> step-<n> <time> <pid>". With CEILINGS=8,3 the first cycle makes no more than 8 steps and every
later one 3: ranks then go on without getting any further, for as long as a test takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import resilience

RANK, WORLD, CYCLE = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "RESILIENCE_CYCLE"))
PROGRESS = Path(os.environ["PROGRESS"])
NOTES = PROGRESS / f"rank_{RANK}"
DT = float(os.environ.get("DT", "0.02"))
DEAF = threading.Event()  # asks no more whether it is to stop


def note(text: str) -> None:
    with NOTES.open("a") as file:
        file.write(f"{CYCLE} {text} {time.monotonic():.6f} {os.getpid()}\n")


def obey(order: str) -> None:  # noqa: PLR0912, PLR0915 - one branch per word
    """Do one thing; see the names."""
    what, _, rest = order.partition(" ")
    note(f"obeys-{what}")
    if what == "exit":
        os._exit(int(rest))
    elif what == "raise":
        raise ValueError(rest)
    elif what == "code":
        error = RuntimeError("with a code of its own")
        error.error_code = int(rest)  # type: ignore[attr-defined]
        raise error
    elif what == "kill":
        os.kill(os.getpid(), getattr(signal, rest))
    elif what == "crash":
        ctypes.string_at(0)
    elif what == "deaf":
        DEAF.set()
    elif what == "hang":
        time.sleep(1000)
    elif what == "overcome":
        with contextlib.suppress(ValueError):
            resilience.record(lambda: obey("raise got over it"))()
    elif what == "recover":  # a recorded function fails, is caught, and the rank goes on in another section
        with contextlib.suppress(OSError):
            resilience.record(_mirror)()
        with resilience.section("fallback"):
            time.sleep(float(rest))
    elif what == "clean-up":  # what raised takes its time to end
        try:
            resilience.record(lambda: obey("raise the first cause"))()
        finally:
            time.sleep(float(rest))
    elif what == "long-request":
        client = resilience.RankMonitorClient()
        client.init_workload_monitoring()
        action = resilience.WorkloadAction.ShutdownWorkload
        client.send_workload_control_request(resilience.WorkloadControlRequest(action, "x" * int(rest)))
    elif what == "memory":
        raise MemoryError
    elif what == "eat":
        held = []
        while True:
            held.append(bytearray(os.urandom(1 << 20)) * 8)
    elif what == "control":
        client = resilience.RankMonitorClient()
        client.init_workload_monitoring()
        request = resilience.WorkloadControlRequest(resilience.WorkloadAction[rest], f"told by the test ({rest})")
        client.send_workload_control_request(request)
        note("sent")
    else:
        raise AssertionError(order)


def _mirror() -> None:
    raise OSError("mirror A is down")


def orders() -> None:
    for name in (f"order_{RANK}", "order_any"):
        path = PROGRESS / name
        if path.exists():
            order = path.read_text()
            try:
                path.rename(PROGRESS / f"done_{name}_{os.getpid()}_{time.monotonic_ns()}")
            except FileNotFoundError:  # another rank of this node was quicker
                continue
            obey(order)


def start() -> int:
    known = os.environ.get("RESUME", "")
    files = [NOTES] if known == "1" else Path(known).glob("*/progress/rank_*") if known else []
    notes = "".join(file.read_text() for file in files if file.exists())
    return max((int(number) + 1 for number in re.findall(r" step-(\d+) ", notes)), default=0)


def ceiling() -> int:
    known = [int(number) for number in os.environ.get("CEILINGS", sys.argv[1]).split(",")]
    return known[min(CYCLE, len(known) - 1)]


@resilience.record
def main() -> None:
    step, last, most = start(), int(sys.argv[1]), ceiling()
    with resilience.section("setup"):
        note(f"world-{WORLD}")
        if os.environ.get("IGNORES_TERM"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            DEAF.set()
        time.sleep(600 if os.environ.get("SLEEPS_IN_CYCLE") == str(CYCLE) else 0)
        if os.environ.get("SETUP_FAILS"):
            raise KeyError(f"setup {CYCLE}")
    with resilience.expect_heartbeats():
        while step < last:
            with resilience.section("step"):
                orders()
                time.sleep(DT)
            if step < most:
                note(f"step-{step}")
                resilience.heartbeat(step)
            else:
                resilience.heartbeat()
            if not DEAF.is_set() and resilience.stop_requested():
                note(f"stopped-{step}")
                return
            if (PROGRESS / "finish").exists():
                break
            step = min(step + 1, most)
    note("end")


if __name__ == "__main__":
    main()
