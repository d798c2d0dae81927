"""Testimony: the Python stacks of a rank, written by the rank itself at a signal.

The trampoline registered ``faulthandler`` for a real-time signal, and its handler is plain C that writes to a descriptor:
it works while the GIL is held, in an endless C call and before the script's first import.

Hazard: a process that has not registered the signal would die of it. :func:`collect` looks at what the process catches
before it sends anything.
"""

from __future__ import annotations

import os
import signal
import time

from resilience.monitor import proc

MAX_STACK_BYTES = 48 * 1024
_QUIET_S = 0.02
_SURELY_QUIET_S = 0.5


def collect(pid: int, stacks_fd: int, signum: int, timeout: float) -> str:
    """Return the stacks of ``pid``; a sentence about why there are none where there are none.

    A stopped process is continued first: it could neither testify nor end. The dump has no end mark, so it counts as
    whole when it has not grown for a moment.
    """
    state = proc.state_of(pid)
    if state is None or state.state == "Z":
        return "(no stack: the process is gone)"
    if not proc.catches(pid, signum):
        return _without_python(pid, "it has no handler for the stack signal (no trampoline, or it replaced itself)")
    before = os.fstat(stacks_fd).st_size
    try:
        os.kill(pid, signum)
        if state.state in "Tt":
            os.kill(pid, signal.SIGCONT)
    except OSError as error:
        return f"(no stack: {error})"
    deadline = time.monotonic() + timeout
    size, quiet_since = before, 0.0
    while (now := time.monotonic()) < deadline:
        grown = os.fstat(stacks_fd).st_size
        if grown != size:
            size, quiet_since = grown, now
        elif size > before and _settled(stacks_fd, before, size, now - quiet_since):
            break
        time.sleep(0.002)
    if size == before:
        return _without_python(pid, f"it did not answer the stack signal within {timeout:g} s")
    text = os.pread(stacks_fd, min(size - before, MAX_STACK_BYTES), before).decode("utf-8", "replace")
    return without_trampoline(text.strip()) + ("\n… (cut)" if size - before > MAX_STACK_BYTES else "")


def _settled(stacks_fd: int, start: int, end: int, quiet: float) -> bool:
    """Whether the dump is whole: quiet for a moment, its last line finished, and the thread that was asked (or the mark for
    "too many") in it. On an overloaded machine the writer may have to wait for a core."""
    if quiet < _QUIET_S or quiet >= _SURELY_QUIET_S:
        return quiet >= _SURELY_QUIET_S
    dump = os.pread(stacks_fd, end - start, start)
    return dump.endswith(b"\n") and (b"Current thread" in dump or dump.endswith(b"...\n"))


def without_trampoline(text: str) -> str:
    """Put the thread that was asked (the main one) first; leave out the frames below the script's own."""
    helpers, mark, current = text.rpartition("Current thread ")
    if mark and helpers.strip():
        text = f"{mark}{current}\n\n{helpers.strip()}"
    kept = [line for line in text.splitlines() if "/resilience/_worker/" not in line]
    kept = [line for line in kept if not line.lstrip().startswith('File "<frozen runpy>"')]
    return "\n".join(kept)


def _without_python(pid: int, why: str) -> str:
    kernel = proc.kernel_stack(pid)
    return f"(no Python stack: {why})" + (f"\n{kernel}" if kernel else "")
