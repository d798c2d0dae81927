"""The check processes of this node, one per device, as the launcher sees them: started, asked with deadlines, ended.

Rule: a check that hangs, crashes or says nonsense is :class:`Broken` in words, and its process is ended. It is never the
launcher's problem, and nothing of it is left when :meth:`Crew.close` returns.

Hazard: the processes die with the thread that started them. Only the launcher's main thread may.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NoReturn

from resilience.errors import ConfigError

_LOG = logging.getLogger("resilience.nodecheck")
REMIND_S = 15.0
LOAD_S = 120.0  # to import torch from a slow file system, and an accelerator's own modules
_LOOK_S = 0.1
_LEAVE_S = 2.0
_GUARD_S = 5.0
_TAIL = 600
_LONGEST = 800
_QUIET: Mapping[str, str] = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

Answer = dict[str, Any]
Shape = Mapping[str, "type | Shape"]
_LOADED: Shape = {"accelerator": str, "type": str, "devices": int, "pid": int}
_ALONE: Shape = {
    "device": str,
    "seconds": float,
    "rate": float,
    "host": {"figures": dict, "faults": list, "warnings": list},
}
_SERVED: Shape = {"port": int}
_GATHERED: Shape = {"seconds": float}


def fits(said: Any, shape: Shape) -> bool:
    """Whether an answer has what is asked for: an accelerator's code shares the process, and may write anything."""
    if not isinstance(said, dict):
        return False
    for name, kind in shape.items():
        value = said.get(name)
        wanted = (int, float) if kind is float else kind
        if not (isinstance(value, wanted) if isinstance(wanted, (type, tuple)) else fits(value, wanted)):
            return False
    return True


def harmless(text: str) -> str:
    """Return what a check said as one line of bounded length that no terminal, log or JSON stumbles over."""
    line = " ".join("".join(letter if letter.isprintable() or letter.isspace() else "?" for letter in text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


class Broken(Exception):  # noqa: N818 - reads as what it is
    """A check did not go well; the message says how."""

    def __init__(self, how: str) -> None:
        super().__init__(harmless(how))


class Reminder:
    """Says now and then what is waited for, and how long at most: nobody should have to guess at a silent terminal."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._due = time.monotonic() + REMIND_S

    def say(self, what: str) -> None:
        """Say it, if it is time."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + REMIND_S
            _LOG.info("the node check waits for %s, %.0f s more at most.", what, max(0.0, self._deadline - now))


class _Hand:
    """One check process."""

    def __init__(self, accelerator: str, index: int, environment: Mapping[str, str]) -> None:
        self.index = index
        try:
            self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        except OSError as error:
            raise Broken(f"the check could not be started, there is no place for its log: {error}") from None
        ours, theirs = socket.socketpair()
        words = [accelerator, str(index), str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "resilience.nodecheck.process", *words],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**_QUIET, **environment},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            self._log.close()
            raise Broken(f"the check could not be started: {error}") from None
        finally:
            theirs.close()
        self._sock = ours
        self._heard = b""
        self.worker = 0  # the process id of the one that holds the device, once it has spoken

    def ask(self, message: Mapping[str, Any]) -> None:
        try:
            self._sock.settimeout(_LEAVE_S)
            self._sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise Broken(self._how_it_ended()) from None

    def answer(self, what: str, deadline: float, timeout: float, shape: Shape, give_up: Callable[[], str]) -> Answer:
        """Return what it says before the deadline, which was ``timeout`` seconds away once, and has this shape; ``give_up()`` may
        say in words why nobody waits any longer."""
        reminder = Reminder(deadline)
        while b"\n" not in self._heard:
            reminder.say(f"{what} on this node")
            left = deadline - time.monotonic()
            if left <= 0:
                raise Broken(f"{what} did not end within {timeout:g} s{self._last_words()}")
            why = give_up()
            if why:
                raise Broken(why)
            self._sock.settimeout(min(left, _LOOK_S))
            try:
                chunk = self._sock.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                chunk = b""
            if not chunk:
                raise Broken(f"{what}: {self._how_it_ended()}")
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if isinstance(said, dict) and "error" in said:
            raise Broken(f"{what}: {said['error']}")
        if not isinstance(said, dict) or not ("refused" in said or fits(said, shape)):
            raise Broken(f"{what}: it said {line[:100]!r}")
        return said

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        code = self._process.returncode
        if code is None:
            return "its process does not speak any more"
        how = _signal(-code) if code < 0 else f"exit code {code}"
        return f"its process ended with {how}{self._last_words()}"

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, self._log.tell() - _TAIL))
            text = self._log.read().decode("utf-8", "replace").strip()
            return f"; it last wrote: {text.splitlines()[-1]}" if text else ""
        return ""

    def let_go(self) -> None:
        """Ask it to end."""
        self._sock.close()

    def end(self, patience: float) -> None:
        """See that it ends, with all that it started."""
        self.let_go()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._process.terminate()  # its guard ends all that is below it, wherever it went
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GUARD_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # most of the real-time signals have no name
        return f"signal {number}"


class Crew:
    """All check processes of this node."""

    def __init__(self, accelerator: str, environment: Mapping[str, str]) -> None:
        self._accelerator = accelerator
        self._environment = dict(environment)
        self._hands: list[_Hand] = []
        self._unheard: list[_Hand] = []
        self._unready: list[_Hand] = []
        self.accelerator, self.devices = accelerator, 0
        self.host_only = False  # its devices are the host's own processors

    def start(self) -> None:
        """Start the processes, so that they load while the launcher does other things: as many as there were devices before.
        A process that can't be started is :class:`Broken` by the time it is asked."""
        for index in range(len(self._hands), max(1, self.devices)):
            self._hands.append(_Hand(self._accelerator, index, self._environment))
            self._unheard.append(self._hands[-1])

    def load(self, timeout: float = LOAD_S) -> None:
        """Wait until all have loaded the accelerator, one for each device that it has. Raises :class:`Broken`, or
        :class:`ConfigError` for an accelerator that can't be meant."""
        deadline = time.monotonic() + timeout
        while True:
            self.start()
            while self._unheard:
                said = self._hear(self._unheard[0], "loading the accelerator", deadline, timeout, _LOADED)
                self._unready.append(self._unheard.pop(0))
                if "refused" in said:
                    self.close()
                    raise ConfigError(str(said["refused"]))
                self._unready[-1].worker = said["pid"]
                self.accelerator, self.devices = harmless(said["accelerator"]), said["devices"]
                self.host_only = said["type"] == "cpu"
            if len(self._hands) >= self.devices:
                return

    def _await_ready(self) -> None:
        """Wait until all have imported what the tasks need."""
        deadline = time.monotonic() + LOAD_S
        while self._unready:
            self._hear(self._unready[0], "importing torch", deadline, LOAD_S, {"ready": bool})
            self._unready.pop(0)

    def alone(self, folder: str, timeout: float) -> list[Answer]:
        """Have every device do its own task; the first also looks at the host."""
        self._await_ready()
        for hand in self._hands:
            self._ask(hand, {"op": "alone", "folder": folder if hand.index == 0 else ""})
        return self._hear_all("the GEMM", timeout, _ALONE)

    def serve(self, timeout: float) -> int:
        """Open the store of a group; return its port."""
        self._await_ready()
        self._ask(self._hands[0], {"op": "serve", "timeout": timeout})
        said = self._hear(self._hands[0], "the group's store", time.monotonic() + timeout, timeout, _SERVED)
        return int(said["port"])

    def gather(
        self, address: tuple[str, int], tag: str, *, first: int, world: int, timeout: float, give_up: Callable[[], str]
    ) -> list[Answer]:
        """Have every device take part in a collective; ``first`` is the rank of this node's first device."""
        self._await_ready()
        for hand in self._hands:
            self._ask(
                hand,
                {
                    "op": "gather",
                    "host": address[0],
                    "port": address[1],
                    "tag": tag,
                    "rank": first + hand.index,
                    "world": world,
                    "timeout": timeout,
                },
            )
        return self._hear_all("the all-gather", timeout, _GATHERED, give_up)

    def pids(self) -> list[int]:
        """Return the processes that hold devices."""
        return [hand.worker for hand in self._hands if hand.worker]

    def close(self, patience: float = _LEAVE_S) -> None:
        """End all processes and what they started; returns when they are gone. They hold devices until then."""
        hands, self._hands, self._unheard, self._unready = self._hands, [], [], []
        for hand in hands:
            hand.let_go()
        deadline = time.monotonic() + patience
        for hand in hands:
            hand.end(max(0.0, deadline - time.monotonic()))

    def _hear_all(self, what: str, timeout: float, shape: Shape, give_up: Callable[[], str] = str) -> list[Answer]:
        deadline = time.monotonic() + timeout
        return [self._hear(hand, what, deadline, timeout, shape, give_up=give_up) for hand in self._hands]

    def _ask(self, hand: _Hand, message: Mapping[str, Any]) -> None:
        try:
            hand.ask(message)
        except Broken as broken:
            self._break(hand, broken)

    def _hear(
        self,
        hand: _Hand,
        what: str,
        deadline: float,
        timeout: float,
        shape: Shape,
        *,
        give_up: Callable[[], str] = str,
    ) -> Answer:
        try:
            return hand.answer(what, deadline, timeout, shape, give_up)
        except Broken as broken:
            self._break(hand, broken)

    def _break(self, hand: _Hand, broken: Broken) -> NoReturn:
        """One that broke breaks all: the others may wait for it. Name the device, where there are several."""
        several = len(self._hands) > 1
        self.close(patience=0.0)
        raise Broken(f"device {hand.index}: {broken}" if several else str(broken)) from None


def titles(answers: Sequence[Answer]) -> str:
    """Return what the devices are called: ``8 × NVIDIA H100``."""
    counted: dict[str, int] = {}
    for answer in answers:
        name = harmless(str(answer["device"]))
        counted[name] = counted.get(name, 0) + 1
    return ", ".join(name if number == 1 else f"{number} × {name}" for name, number in counted.items())
