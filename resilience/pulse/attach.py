"""How a rank comes by its page.

1) (launcher) makes a fresh page for every life of a rank, before it starts the process
2) (trampoline) connects to the launcher's socket, says who it is and receives the page and the stack file
3) (trampoline) registers the stack signal and the parent-death signal, then runs the script
4) (script) its first heartbeat or section finds the page here, without any further message

With ``--no-python`` there is no trampoline: the first process of the rank that calls us does 2) and 3) itself, late.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
from time import monotonic_ns

from resilience import config
from resilience.pulse import channel, leaving
from resilience.pulse.page import FLAG_ATTACHED, W_ATTACHED, W_FLAGS, W_PID, Page

STACK_SIGNAL: int = getattr(signal, "SIGRTMIN", 34) + 3
_ATTACH_DEADLINE_S = 10.0
_HIGH_FD = 500

atexit.register(leaving.let_native_threads_rest)


class _Attached:
    """The page of this process, if it has one."""

    page: Page | None = None


def page_of_this_process() -> Page | None:
    """Return the page that the trampoline left for us, or fetch it now where there was no trampoline."""
    if _Attached.page is None and sys.platform == "linux":
        env = config.rank_environment()
        # Or the trampoline could not, or the script replaced itself: it is still the process that the launcher started.
        if env.late_attach or (env.launcher_pid and os.getppid() == env.launcher_pid):
            attach()
    return _Attached.page


def page_if_attached() -> Page | None:
    """Return the page if this process has it already."""
    return _Attached.page


def attach() -> Page | None:
    """Fetch this rank's page from the launcher and make the process ready to testify.

    Never blocks longer than its deadline and never raises for the launcher's sake: without a page the script runs as it
    would under torchrun.
    """
    env = config.rank_environment()
    if env.socket is None or env.rank is None:
        return None
    try:
        with channel.connect(env.socket, _ATTACH_DEADLINE_S) as sock:
            channel.send(sock, {"op": "hello", "rank": env.rank, "cycle": env.cycle, "pid": os.getpid()})
            answer = channel.receive(sock)
    except OSError as error:
        sys.stderr.write(
            f"resilience: rank {env.rank} could not reach its launcher ({error}). The script runs on without heartbeats.\n"
        )
        return None
    if answer is None or len(answer[1]) != 2:
        return None  # refused: another process of this rank has the page, or this one belongs to a cycle that is over
    import fcntl  # noqa: PLC0415 - Linux only, and so is everything from here on

    page_fd, stacks_fd = answer[1]
    page = Page(page_fd)
    # The handler writes to this number whatever it then stands for, so it is moved out of the way of scripts that close
    # and reopen low descriptors.
    with contextlib.suppress(OSError):  # fewer descriptors are allowed: then it stays where it is
        stacks_fd = fcntl.fcntl(stacks_fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
    faulthandler.register(STACK_SIGNAL, file=stacks_fd, all_threads=True, chain=False)
    page.words[W_PID] = os.getpid()
    page.words[W_ATTACHED] = monotonic_ns()
    page.words[W_FLAGS] = FLAG_ATTACHED
    _Attached.page = page
    return page


def trace_crashes() -> None:
    """Have segfaults and aborts leave the stacks of all threads on stderr."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # stderr may be closed, or no real file
            faulthandler.enable(all_threads=True)


def ask(message: channel.Message, timeout: float = 5.0) -> channel.Message | None:
    """Ask the launcher something rare (timeouts, a control request). ``None`` when there is no launcher or no answer."""
    env = config.rank_environment()
    if env.socket is None or _Attached.page is None:
        return None
    try:
        with channel.connect(env.socket, timeout) as sock:
            channel.send(sock, {**message, "rank": env.rank, "cycle": env.cycle, "pid": os.getpid()})
            answer = channel.receive(sock)
    except (TimeoutError, OSError):
        return None
    return answer[0] if answer else None
