"""Processes of ours that run others' code, and must not outlive who started them.

Rule: whoever starts such a process passes its own process id along. The kernel's parent-death signal comes only to who has asked
for it; a parent that died before that is known by its id.

:func:`stand_guard` is for code that starts processes of its own: who stays behind is the parent of all that are orphaned below it,
so it finds them wherever they went, a session of their own included.

Hazard: the kernel sends the signal when the *thread* that started us ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_REAP_S = 2.0  # for the kernel to end what was killed; a process that hangs in a driver may never end
_LOOK_S = 0.005


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end now, if that has happened already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def hear_of_children() -> None:
    """Have the kernel keep how children of this process end. In any thread.

    Where SIGCHLD is ignored it forgets, and Python takes every end for exit code 0. A parent that ignores it leaves that to its
    children, and a library may do so behind Python's back: the kernel knows.
    """
    if sys.platform == "linux" and signal.SIGCHLD in _ignored():
        ctypes.CDLL(None).signal(int(signal.SIGCHLD), None)  # Python's own is for the main thread only


def _ignored() -> set[int]:
    status = Path("/proc/self/status").read_text(errors="replace")
    bits = int(status.partition("SigIgn:")[2].split()[0], 16)
    return {number for number in range(1, 65) if bits >> number - 1 & 1}


def stand_guard(parent: int, fd: int) -> None:
    """Return in a child of this process. This one stays behind, and ends as the child does, or when it gets SIGTERM, or when its
    parent dies; and with it everything below it. ``fd`` is the child's: here it is closed, so that its end is heard."""
    if sys.platform != "linux":
        return
    heard = {signal.SIGTERM, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one that is ignored would be inherited, and never come
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:
        os._exit(1)
    me = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        end_with(me)
        return
    os.close(fd)
    status = None
    while status is None and signal.sigwait(heard) != signal.SIGTERM:
        status = _reap().get(child)
    _end_all_below(me)
    _end_as(status)


def _reap() -> dict[int, int]:
    """Return who has ended below us, and how."""
    found: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found[pid] = status


def _end_all_below(me: int) -> None:
    deadline = time.monotonic() + _REAP_S
    while (below := descendants(me)) and time.monotonic() < deadline:
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        _reap()
        time.sleep(_LOOK_S)


def end_all_but(known: Collection[int]) -> None:
    """Kill what was started below this process since ``known`` (:func:`descendants`) were all that there were."""
    for pid in set(descendants(os.getpid())) - set(known):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return all processes below one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                )
            except (OSError, IndexError):  # it has ended meanwhile
                continue
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return sorted(found)


def _end_as(status: int | None) -> NoReturn:
    """End as the child did: whoever waits for us wants to know."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it has left its own
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if status is not None else 128 + signal.SIGTERM)
