"""Processes of ours that run others' code, and must not outlive who started them.

Rule: whoever starts such a process passes its own process id along. The kernel's parent-death signal comes only to who has asked
for it; a parent that died before that is known by its id.

Hazard: the kernel sends the signal when the *thread* that started us ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end now, if that has happened already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
