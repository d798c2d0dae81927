"""Accelerators with something wrong with them: real check processes on the host's processors, that fail as they are told.

What ails one is in the variable AILMENT, or in the file that AILMENT_FILE names, and may change between two checks. One that hangs
makes the file HANGING first, if there is to be one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from resilience.nodecheck.accelerators import Cpu


def ailment() -> str:
    path = os.environ.get("AILMENT_FILE")
    if path and Path(path).exists():
        return Path(path).read_text().strip()
    return os.environ.get("AILMENT", "")


class Patient(Cpu):
    """As told: ``wrong``, ``flaky``, ``raises``, ``hangs``, ``crashes``, ``slow`` in its GEMM; ``mute`` in its all-gather."""

    size = 128

    def __init__(self) -> None:
        self._calls = 0
        if ailment() == "does not load":
            os.kill(os.getpid(), signal.SIGSEGV)

    def multiply(self, left: Any, right: Any) -> Any:
        self._calls += 1
        what, product = ailment(), left @ right
        if what == "wrong" or (what == "flaky" and self._calls == 4):
            product[3, 5] += 1
        elif what == "raises":
            raise RuntimeError("uncorrectable ECC error")
        elif what == "hangs":
            if "HANGING" in os.environ:
                Path(os.environ["HANGING"]).touch()
            time.sleep(1000)
        elif what == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif what == "slow":
            time.sleep(0.15)
        return product

    def synchronize(self) -> None:
        import torch.distributed as dist

        if ailment() == "mute" and dist.is_initialized():
            time.sleep(1000)


class TwoDevices(Patient):
    """Two devices, of which the second may be ill."""

    def count(self) -> int:
        return 2

    def use(self, index: int) -> Any:
        if index == 1 and ailment() == "second":
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().use(index)


class WithHelpers(Patient):
    """Its tools are processes, one in a session of its own. They hang; their ids are in the file HELPERS."""

    def count(self) -> int:
        started = [subprocess.Popen(["sleep", "1000"], start_new_session=own).pid for own in (True, False)]
        partial = Path(os.environ["HELPERS"] + ".partial")
        partial.write_text(" ".join(map(str, started)))
        partial.rename(os.environ["HELPERS"])
        return 1


class Talkative(Patient):
    """Writes what SAYS is into whatever it finds open, the line to the launcher included."""

    def count(self) -> int:
        for fd in (number for path in Path("/proc/self/fd").iterdir() if (number := int(path.name)) > 2):
            with contextlib.suppress(OSError):
                os.write(fd, os.environ["SAYS"].encode() + b"\n")
        return 1


class Leaver(Patient):
    """Has enough."""

    def use(self, index: int) -> Any:
        sys.exit(3)


class NoDevice(Patient):
    """A kind of which none is there."""

    def count(self) -> int:
        return 0


class Odd(Cpu):
    """Says whatever COUNT is, in Python, when it is asked for its number of devices."""

    def count(self) -> int:
        return eval(os.environ.get("COUNT", "1"))  # type: ignore[no-any-return]


class NoSize(Cpu):
    """Nothing to multiply."""

    size = 0


class NoBackend(Cpu):
    """Something is missing."""

    backend = ""


class NotOne:
    """Not even an accelerator."""
