"""One run of somebody else's code in a process of its own, with a deadline, which another thread may cut short.

1) (one thread) ``run()``: once; returns when the process has ended or its time is up; what it started in its session is ended too
2) (any thread) ``cut_short()``: ends it, if it runs; it says so by ``run()``'s return

Rule: a process is killed only while nobody has waited for it. Afterwards its number may be another's.

Hazard: a pipe ends with the last process that has it, be it one in the background. So what is told and heard are files, in memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Sequence

_HEARD = 2**20  # bytes of what it said last


class Attempt:
    """A process that is yet to be started."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._running: int | None = None

    def run(self, text: bytes, timeout: float) -> tuple[int | None, str]:
        """Return its exit code, None if its time was up, and the end of what it said to stderr. Raises ``OSError``."""
        told, heard = (os.memfd_create("resilience-attempt", os.MFD_CLOEXEC) for _ in range(2))
        try:
            os.write(told, text)
            os.lseek(told, 0, os.SEEK_SET)
            process = subprocess.Popen(
                self._command, stdin=told, stdout=subprocess.DEVNULL, stderr=heard, start_new_session=True
            )
            with self._lock:
                self._running = process.pid
            try:
                in_time = _ends_within(process.pid, timeout)
            finally:
                self.cut_short(last=True)
                process.wait()
            said = os.pread(heard, _HEARD, max(0, os.fstat(heard).st_size - _HEARD))
            return process.returncode if in_time else None, said.decode("utf-8", "replace")
        finally:
            os.close(told)
            os.close(heard)

    def cut_short(self, last: bool = False) -> None:
        """End the process and what it started, if it runs. ``last``: it is about to be waited for."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            running, self._running = self._running, None if last else self._running
            if running is not None:
                os.killpg(running, signal.SIGKILL)


def _ends_within(pid: int, timeout: float) -> bool:
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(fd)
