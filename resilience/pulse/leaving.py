"""How a rank's interpreter ends without losing what the rank achieved.

A thread of torch (gloo's, for one) may still hold the last reference to a Python object when the script is over. If it first
runs after the interpreter has begun to finalize, Python 3.11 ends the thread inside C++ code that must not be unwound, and
the process dies with "terminate called without an active exception": a finished rank counts as failed, and its job is
restarted or lost. With torch 2.13, gloo and DDP on a busy host that was one exit in six. So we wait, before finalization
begins, until such threads have come to rest.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

_PATIENCE_S = 0.5
_LOOK_S = 0.001
_QUIET_LOOKS = 2  # a thread may go from running to waiting for us between two lines of ours


def let_native_threads_rest() -> None:
    """Return when no thread that Python doesn't know is running or ready to run; after half a second in any case."""
    if "torch" not in sys.modules or sys.platform != "linux":
        return
    until, quiet = time.monotonic() + _PATIENCE_S, 0
    while quiet < _QUIET_LOOKS and time.monotonic() < until:
        time.sleep(_LOOK_S)  # also gives the interpreter's lock away
        quiet = 0 if _native_thread_is_running() else quiet + 1


def _native_thread_is_running() -> bool:
    known = {str(thread.native_id) for thread in threading.enumerate()}
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - no pathlib in a rank
            if thread not in known and _state(thread) in ("R", "D"):
                return True
    return False


def _state(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended
        return ""
