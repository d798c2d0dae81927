"""A post: one local rank's place in the launcher, with the monitor that stands there and the page it looks at."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from typing import Any

from resilience.monitor import proc
from resilience.monitor.testimony import describe
from resilience.monitor.verdict import learned_from
from resilience.pulse.page import Page
from resilience.pulse.timeouts import Samples


class Post:
    """What the hub knows about one local rank. The monitor stays; the rest is renewed with every cycle."""

    def __init__(self, local_rank: int) -> None:
        self.local_rank = local_rank
        self.process: subprocess.Popen[bytes] | None = None
        self.sock: socket.socket | None = None
        self.heard = 0.0
        self.testimony: dict[str, Any] | None = None
        self.answered = 0
        self.page: Page | None = None
        self.stacks_fd = -1
        self._forget()

    def _forget(self) -> None:
        self.cycle = -1
        self.rank = -1
        self.pid = 0
        self.started_ns = 0
        self.started_ticks = -1
        self.holder: int | None = None
        self.step: int | None = None
        self.hang: dict[str, Any] | None = None
        self.ended_ns = 0
        self.request: dict[str, Any] | None = None

    def renew(self, cycle: int, rank: int) -> None:
        """Make everything new for the next life of the rank."""
        self._release()
        self._forget()
        self.cycle, self.rank = cycle, rank
        self.started_ns = time.monotonic_ns()
        self.page = Page.create(cycle)
        self.stacks_fd = os.memfd_create("resilience-stacks", os.MFD_CLOEXEC)

    def alive(self) -> bool:
        """Whether the rank's process still runs (a zombie does not)."""
        if not self.pid or self.ended_ns:
            return False
        state = proc.state_of(self.pid)
        return state is not None and state.state != "Z" and state.started_ticks == self.started_ticks

    def last_known(self) -> dict[str, Any] | None:
        """Return what the page of a rank says that is dead or does not testify: its last step and its sections."""
        if self.page is None or not self.pid:
            return None
        now = self.ended_ns or time.monotonic_ns()
        live = proc.state_of(self.pid) if self.alive() else None
        state = live.state if live is not None else "gone"
        return describe(
            self.page, rank=self.rank, pid=self.pid, state=state, started_ns=self.started_ns, now_ns=now, stack=""
        )

    def seen(self) -> dict[str, Samples]:
        """Return what this life of the rank has seen so far, straight from its page."""
        return learned_from(self.page.read(), self.started_ns) if self.page is not None else {}

    def _release(self) -> None:
        if self.page is not None:
            self.page.close()
            os.close(self.stacks_fd)
            self.page = None

    def close(self) -> None:
        """End the monitor and let go of the page."""
        self._release()
        if self.sock is not None:
            self.sock.close()
            self.sock = None
        if self.process is not None:
            try:
                self.process.wait(2.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
