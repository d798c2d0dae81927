"""One program at a time, started, signalled and awaited by one thread that never ends before it does.

Hazard: the kernel's parent-death signal comes when the *thread* that started a process ends. Methods of a Ray actor run in threads
that come and go, so none of them may start one.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from resilience import kin
from resilience.failover import exits

_LOG = logging.getLogger("resilience.ray")
_AFTER_A_STUMBLE_S = 1.0
# What a host lacks now and may have in a moment: tried again, and counted. Nothing else that keeps a program from starting passes.
_PASSING = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.EINTR}


@dataclass(frozen=True)
class Order:
    """What is to run. A higher ``number`` than before ends what runs, and starts this. ``stop``: ask it to end, once.
    ``refused``: why it can't be started, where that is known: it has ended."""

    number: int
    command: tuple[str, ...]
    variables: Mapping[str, str]
    cwd: str | None = None
    stop: bool = False
    refused: str = ""


class Keeper:
    """Keeps the newest order's program running, and knows how it ended. ``output``: its stdout is kept for :meth:`line`."""

    def __init__(self, output: bool = False) -> None:
        self._changed = threading.Condition()
        self._order: Order | None = None
        self._number, self._code, self._version = 0, None, 0  # type: tuple[int, int | None, int]
        self._why = ""  # it was not even started
        self._asked = 0  # the order whose program was asked to stop
        self._process: subprocess.Popen[bytes] | None = None
        self._output = output
        self._wake, self._bell = os.pipe()
        threading.Thread(target=self._keep, name="resilience-keeper", daemon=True).start()

    def give(self, order: Order) -> None:
        """Take an order; an older one than the newest is nothing new."""
        with self._changed:
            if self._order is None or (order.number, order.stop) > (self._order.number, self._order.stop):
                self._order = order
                os.write(self._bell, b"x")

    def stop(self) -> None:
        """Ask what runs to end."""
        with self._changed:
            order = self._order
        if order is not None:
            self.give(dataclasses.replace(order, stop=True))

    def end(self) -> None:
        """Kill what runs; nothing is started until there is a newer order."""
        with self._changed:
            if self._process is not None and self._code is None:
                self._process.kill()

    def look(self, version: int, wait_s: float) -> tuple[int, int, int | None]:
        """Return (version, number, exit code), as soon as the version is not the one given; at the latest after a while."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, wait_s)
            return self._version, self._number, self._code

    def _keep(self) -> None:
        """Never end: what this thread has started would end with it, and nobody would hear of the next order."""
        while True:
            try:
                self._act()
                self._await_something()
                self._reap(block=False)
            except Exception as error:  # noqa: BLE001 - whatever it is, it may be over in a moment
                sys.stderr.write(f"resilience: the keeper of a program stumbled: {type(error).__name__}: {error}\n")
                _LOG.debug("the keeper of a program stumbled", exc_info=True)
                time.sleep(_AFTER_A_STUMBLE_S)

    def _await_something(self) -> None:
        """Wait for an order, or for the program's end."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        pidfd = -1
        if self._process is not None and self._code is None:
            try:
                pidfd = os.pidfd_open(self._process.pid)
            except ProcessLookupError:
                return  # it has ended, and somebody has asked for its code
            poll.register(pidfd, select.POLLIN)
        try:
            ready = {fd for fd, _ in poll.poll()}
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        if self._wake in ready:
            os.read(self._wake, 4096)

    def _act(self) -> None:
        with self._changed:
            order = self._order
        if order is None:
            return
        if order.number > self._number:
            if self._process is not None and self._code is None:
                self._process.kill()
                self._reap(block=True)
            self._start(order)
        if order.stop and self._asked != order.number and self._process is not None and self._code is None:
            self._asked = order.number
            self._process.send_signal(signal.SIGTERM)

    def _start(self, order: Order) -> None:
        command = [sys.executable, "-m", "resilience.integrations.ray.tether", str(os.getpid()), *order.command]
        code: int | None = None
        why = ""
        try:
            if order.refused:
                raise ValueError(order.refused)
            kin.hear_of_children()  # Ray's workers may ignore them
            self._process = subprocess.Popen(
                command,
                env=dict(order.variables),
                cwd=order.cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._output else None,
                start_new_session=True,
            )
        except Exception as error:  # noqa: BLE001 - as OSError, ValueError for a NUL byte; a program that is not there has ended
            why = f"it can't be started in {order.cwd or 'the folder of its actor'}: {error}"
            sys.stderr.write(f"resilience: {' '.join(order.command[:1])}: {why}\n")
            passing = isinstance(error, OSError) and error.errno in _PASSING
            self._process, code = None, os.EX_OSERR if passing else exits.USAGE
        with self._changed:
            self._number, self._code, self._why = order.number, code, why
            self._version += 1
            self._changed.notify_all()

    def _reap(self, block: bool) -> None:
        if self._process is None or self._code is not None:
            return
        code = self._process.wait() if block else self._process.poll()
        if code is not None:
            with self._changed:
                self._code = code
                self._version += 1
                self._changed.notify_all()

    @property
    def runs(self) -> bool:
        """Return whether the newest program has been started and has not ended."""
        return self._process is not None and self._code is None

    @property
    def pid(self) -> int:
        """Return the newest program's process id; 0 before the first, and where it could not be started."""
        return self._process.pid if self._process is not None else 0

    @property
    def why(self) -> str:
        """Return why the newest program could not be started; empty where it was."""
        return self._why

    @property
    def output(self) -> IO[bytes] | None:
        """Return the program's stdout, where it is kept."""
        return self._process.stdout if self._process is not None else None
