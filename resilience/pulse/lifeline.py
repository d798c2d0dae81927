"""A worker must not outlive its launcher.

Rule: the monitor is the one that ends orphans (it sees the launcher's pidfd). The parent-death signal set here is the
second line, for when launcher and monitor are killed at once.

Hazard: the kernel sends the signal when the *thread* that started us ends; torch starts workers from the main thread.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from resilience import config
from resilience.pulse import attach

_PR_SET_PDEATHSIG = 1


def tie_to_launcher() -> None:
    """Have the kernel kill this process when its launcher dies; end now if that has happened already."""
    if sys.platform != "linux":
        return
    import ctypes  # noqa: PLC0415 - ranks only; torch imports it anyway

    launcher = config.rank_environment().launcher_pid
    if os.getppid() != launcher:
        if launcher and not _lives(launcher):
            raise SystemExit("resilience: the launcher is gone; this worker was not started.")
        return  # a wrapper stands between: its death is not the launcher's
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != launcher:
        raise SystemExit("resilience: the launcher is gone; this worker was not started.")


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has heard of yet does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def begin() -> Callable[[], None]:
    """Make this process a watched rank; return what is to be called when the script has returned."""
    tie_to_launcher()
    attach.trace_crashes()
    if attach.attach() is None:
        return lambda: None

    def finish() -> None:
        from resilience.pulse import client  # noqa: PLC0415 - only now: a script that never calls us never loads it

        client.finish()

    return finish


def run_path(script: str, *arguments: str) -> None:
    """Run a script inside a process that torch made with ``multiprocessing`` (``--run-path``)."""
    from torch.distributed.run import run_script_path  # noqa: PLC0415

    os.setsid()
    finish = begin()
    try:
        run_script_path(script, *arguments)
    finally:
        finish()
