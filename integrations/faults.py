"""Simulated faults, to see what happens: a chosen rank is killed, hangs, is stopped or slow, at a chosen step.

    SimulatedFaultParams("kill", rank_to_fail=1, step=30)
    RESILIENCE_SIMULATED_FAULT='kill:rank=1,step=30;hang:rank=0,step=50,cycle=1'

The names of NVRx mean what they mean there: ``rank_killed``, ``rank_hung`` (stopped by a signal) and ``random``, after a delay.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resilience import config
from resilience.errors import ConfigError, nearest

KINDS = {"kill": "kill", "hang": "hang", "stop": "stop", "slow": "slow", "rank_killed": "kill", "rank_hung": "stop"}
_SHORT = {"rank": "rank_to_fail", "delay": "base_delay"}


@dataclass(frozen=True)
class SimulatedFaultParams:
    """One fault. It strikes in one life of the job only (``cycle``, from 0; ``None``: in each), so that the job gets through.

    ``fault_type``: ``"kill"`` (SIGKILL), ``"hang"`` (the step never ends), ``"stop"`` (SIGSTOP), ``"slow"`` (``seconds`` more in
    every step from there on), NVRx's ``"rank_killed"`` and ``"rank_hung"``, or ``"random"``: one of those two. ``step``: it strikes
    in this step, or the first one after it; without one after ``base_delay`` seconds and up to ``rand_delay`` more.
    ``rank_to_fail``: ``None`` is any one of them.
    """

    fault_type: str
    base_delay: float = 0.0
    rand_delay: float = 0.0
    rank_to_fail: int | None = None
    step: int | None = None
    cycle: int | None = 0
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.fault_type not in (*KINDS, "random"):
            raise ConfigError(
                f"simulated fault {self.fault_type!r} is unknown.{nearest(self.fault_type, (*KINDS, 'random'))}"
            )
        if self.step is None and self.fault_type == "slow":
            raise ConfigError("simulated fault 'slow': give the step that it begins at, step=N.")


def parse(given: Any) -> list[SimulatedFaultParams]:
    """Return the faults that were given: one, a mapping of its fields, or several; ``None`` for those of the environment."""
    if given is None:
        return [_from_text(text) for text in (config.simulated_fault() or "").split(";") if text.strip()]
    if isinstance(given, SimulatedFaultParams):
        return [given]
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [fault for one in given for fault in parse(one)]
    if isinstance(given, Mapping) or hasattr(given, "items"):
        return [_made({str(name): value for name, value in given.items()})]
    raise ConfigError(
        f"simulated_fault_params={given!r}: give SimulatedFaultParams(…), a mapping of its fields, or a list."
    )


def _from_text(text: str) -> SimulatedFaultParams:
    kind, _, rest = text.strip().partition(":")
    fields: dict[str, Any] = {"fault_type": kind}
    for item in filter(None, rest.split(",")):
        name, _, value = item.strip().partition("=")
        try:
            fields[_SHORT.get(name, name)] = None if value == "any" else float(value) if "." in value else int(value)
        except ValueError:
            raise ConfigError(f"{config.ENV_SIMULATED_FAULT}: {item!r} is not NAME=NUMBER or NAME=any.") from None
    return _made(fields)


def _made(fields: dict[str, Any]) -> SimulatedFaultParams:
    known = [field.name for field in dataclasses.fields(SimulatedFaultParams)]
    for name in fields:
        if name not in known:
            raise ConfigError(f"a simulated fault has no {name!r}.{nearest(name, known)}")
    return SimulatedFaultParams(**fields)


class Faults:
    """The faults of this rank."""

    def __init__(self, given: Sequence[SimulatedFaultParams], rank: int, world: int, cycle: int, run: str) -> None:
        self._mine: list[tuple[str, SimulatedFaultParams]] = []
        self._struck: set[int] = set()
        for number, fault in enumerate(given):
            drawn = random.Random(f"{run}/{cycle}/{number}")  # the same on all ranks, without asking them
            kind = KINDS.get(fault.fault_type) or drawn.choice(["kill", "stop"])
            rank_to_fail = drawn.randrange(world) if fault.rank_to_fail is None else fault.rank_to_fail
            if rank_to_fail == rank and fault.cycle in (None, cycle):
                self._mine.append((kind, fault))
                if fault.step is None:
                    self._after(fault.base_delay + drawn.random() * fault.rand_delay, kind, fault)

    def __bool__(self) -> bool:
        return bool(self._mine)

    def strike(self, step: int) -> None:
        """Do what is due in this step."""
        for number, (kind, fault) in enumerate(self._mine):
            if fault.step is not None and step >= fault.step and (kind == "slow" or number not in self._struck):
                self._struck.add(number)  # a hang may be ended by an exception, and a stopped rank be continued
                _ACTS[kind](fault)

    @staticmethod
    def _after(delay: float, kind: str, fault: SimulatedFaultParams) -> None:
        timer = threading.Timer(delay, _ACTS[kind], (fault,))
        timer.daemon = True
        timer.start()


def _say(what: str) -> None:
    sys.stderr.write(f"simulated fault: this rank is about to be {what} (pid {os.getpid()})\n")
    sys.stderr.flush()


def _kill(_: SimulatedFaultParams) -> None:
    _say("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_: SimulatedFaultParams) -> None:
    _say("stopped")
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(_: SimulatedFaultParams) -> None:
    _say("hung")
    while True:
        time.sleep(3600)


def _slow(fault: SimulatedFaultParams) -> None:
    time.sleep(fault.seconds)


_ACTS: dict[str, Callable[[SimulatedFaultParams], None]] = {"kill": _kill, "stop": _stop, "hang": _hang, "slow": _slow}
