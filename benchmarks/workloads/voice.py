"""How a workload speaks: to its launcher (ours, NVRx's or none) and to the benchmark that started it.

Rule: imports nothing heavy by itself, and must work in the virtual environment of a peer.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

EVENTS = "BENCH_EVENTS"


def say(event: str, **fields: Any) -> None:
    """Append one line to the benchmark's event file. A short line written at once is never torn."""
    line = json.dumps({"event": event, "at": monotonic_ns(), "pid": os.getpid(), "cycle": cycle(), **fields}) + "\n"
    fd = os.open(os.environ[EVENTS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def cycle() -> int:
    """Return how often the workers were restarted."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass(frozen=True)
class Voice:
    """The in-loop calls of one launcher. ``pair`` enters and leaves a section; all take the step or a timeout."""

    beat: Callable[[int], None]
    pair: Callable[[int], None]
    enter: Callable[[float], None]
    stop: Callable[[int], None] | None = None


def voice(kind: str) -> Voice:
    """Return the calls of ``resilience``, ``nvrx`` or ``plain`` (which has none)."""
    if kind == "resilience":
        return _ours()
    return _nvrx() if kind == "nvrx" else Voice(_nothing, _nothing, _nothing)


def _nothing(_: float) -> None:
    return None


def _ours() -> Voice:
    import resilience

    section = resilience.section

    def pair(_: int) -> None:
        with section("step"):
            pass

    def enter(timeout: float) -> None:
        section("hang", timeout=timeout).__enter__()

    def stop(_: int) -> None:
        resilience.stop_requested()

    return Voice(resilience.heartbeat, pair, enter, stop)


def _nvrx() -> Voice:
    client = importlib.import_module("nvidia_resiliency_ext.fault_tolerance").RankMonitorClient()
    client.init_workload_monitoring()

    def beat(_: int) -> None:
        client.send_heartbeat()

    def pair(_: int) -> None:
        client.start_section("step")
        client.end_section("step")

    def enter(_: float) -> None:
        client.start_section("hang")  # its timeout is a flag of the launcher

    return Voice(beat, pair, enter)
