"""A user's failover extension, in a process of its own, asked with a deadline.

It may call a service, run a model, hang, leak or crash: none of that can take the launcher down, and no answer in time means
NORMAL. What can be wrong with it is found at start-up by a rehearsal: the import, the class, and what it returns.

1) (launcher) starts ``python -m resilience.failover.extension module::Class FD``
2) (extension) imports and makes the object, says ``{"ok": true}`` or ``{"error": …}``
3) (launcher) sends an :class:`AgentFailureInfo` per line; (extension) answers ``{"strategy": …}`` or ``{"error": …}``
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from resilience import kin
from resilience.errors import ConfigError, double_colon, imported, nearest_class
from resilience.failover.strategy import AgentFailureInfo, DynamicFailoverExtension, FailoverStrategy

_LOG = logging.getLogger("resilience.launcher")
_IMPORT_S = 120.0
_LOOK_S = 0.1


class Extension:
    """The launcher's side: starts the process, rehearses, asks, ends it."""

    def __init__(self, path: str, timeout: float) -> None:
        """Start and rehearse; raise :class:`ConfigError` for anything that is wrong with it."""
        module, separator, name = path.partition("::")
        if not separator or not module or not name:
            raise ConfigError(
                f"dynamic_failover_extension={path!r}: the form is module::Class, for example "
                f"my_package.failover::MyExtension.{double_colon(path)} Nothing was started."
            )
        self.path = path
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._give_up: Callable[[], bool] = lambda: False
        try:
            self._start(_IMPORT_S)
        except _Wrong as wrong:
            self._refuse(str(wrong))
        try:
            self._strategy(AgentFailureInfo(rehearsal=True, extra_info={"rehearsal": True}))
        except _Wrong as wrong:
            self._refuse(f"at its rehearsal (failure_info.rehearsal is set, its texts are empty) {wrong}")

    def _refuse(self, why: str) -> NoReturn:
        self.close()
        file = " Give the module's name, not its file." if "/" in self.path or ".py::" in self.path else ""
        raise ConfigError(f"dynamic_failover_extension={self.path!r}: {_sentence(why)}{file} Nothing was started.")

    def ask(self, info: AgentFailureInfo, give_up: Callable[[], bool] = lambda: False) -> FailoverStrategy:
        """Return what the extension wants; NORMAL, with a line in the log, when it does not answer well or in time, or when
        ``give_up()`` turns true meanwhile."""
        self._give_up = give_up
        try:
            if self._sock is None:
                self._start(self._timeout)
            return self._strategy(info)
        except _Wrong as wrong:
            why = _sentence(str(wrong))
            _LOG.error("the failover extension %s was no help: %s The launcher's own rules decide.", self.path, why)
            self.close()  # whatever state it is in; it is started afresh when it is needed again
            return FailoverStrategy.NORMAL_FAILOVER

    def close(self) -> None:
        """End the process."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
            with contextlib.suppress(ProcessLookupError):  # what it started is in its session, and goes with it
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _start(self, timeout: float) -> None:
        ours, theirs = socket.socketpair()
        words = [self.path, str(theirs.fileno()), str(os.getpid())]
        command = [sys.executable, "-m", "resilience.failover.extension", *words]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            ours.close()
            raise _Wrong(f"it could not be started: {error}") from None
        finally:
            theirs.close()
        self._sock = ours
        self._answer(timeout, "import")

    def _strategy(self, info: AgentFailureInfo) -> FailoverStrategy:
        assert self._sock is not None
        try:
            self._sock.settimeout(self._timeout)
            self._sock.sendall(json.dumps(info.as_json(), default=str).encode() + b"\n")
        except OSError as error:
            raise _Wrong(f"its process is gone ({error})") from None
        said = self._answer(self._timeout, "answer").get("strategy")
        if not isinstance(said, str) or said not in FailoverStrategy.__members__:
            raise _Wrong(f"it answered {said!r}")
        return FailoverStrategy[said]

    def _answer(self, timeout: float, what: str) -> dict[str, Any]:
        """Read one line, in ``timeout`` seconds at most, however it dribbles in."""
        assert self._sock is not None
        deadline = time.monotonic() + timeout
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise _Wrong(f"it did not {what} within {timeout:g} s")
            if self._give_up():
                raise _Wrong("the launcher is to end and does not wait for it")
            self._sock.settimeout(min(left, _LOOK_S))
            try:
                chunk = self._sock.recv(65536)
            except TimeoutError:
                continue
            except OSError as error:
                raise _Wrong(f"its process is gone ({error})") from None
            if not chunk:
                raise _Wrong(f"its process ended with {self._exit_code()}")
            line += chunk
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise _Wrong(f"it answered {line[:100]!r}")
        if "error" in answer:
            raise _Wrong(str(answer["error"]))
        return answer

    def _exit_code(self) -> int | None:
        """Return how the process ended; it may have closed its socket only."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(1.0)
        return None


def _sentence(why: str) -> str:
    """End what is wrong as a sentence, unless it ends as one."""
    said = why.rstrip()
    return said if said.endswith((".", "?")) else f"{said}."


class _Wrong(Exception):  # noqa: N818 - reads as what it is
    """Something is wrong with the extension, in words."""


# -- the extension's side ---------------------------------------------------------------------------------------------


def load(path: str) -> DynamicFailoverExtension:
    """Import ``module::Class`` and make the object; raise :class:`_Wrong` in words."""
    module_name, _, name = path.partition("::")
    module = _said(f"module {module_name!r} can't be imported", lambda: imported(module_name))
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise _Wrong(f"module {module_name!r} has no class {name!r}.{nearest_class(name, module)}")
    if not issubclass(found, DynamicFailoverExtension):
        raise _Wrong(f"{name} does not derive from resilience.failover.DynamicAgentFailoverExtension")
    if inspect.isabstract(found):
        raise _Wrong(f"{name} does not define {', '.join(sorted(found.__abstractmethods__))}")
    made: DynamicFailoverExtension = _said(f"{name}() raised", found)
    return made


def answer(extension: DynamicFailoverExtension, data: dict[str, Any]) -> FailoverStrategy:
    """Ask the extension; raise :class:`_Wrong` for an exception or for anything but a strategy."""
    info = AgentFailureInfo(**data)
    name = type(extension).__name__
    asked = _said(f"{name}.get_user_failover_strategy raised", lambda: extension.get_user_failover_strategy(info))
    if not isinstance(asked, FailoverStrategy):
        raise _Wrong(
            f"{name}.get_user_failover_strategy returned {asked!r} and not a resilience.failover.FailoverStrategy"
        )
    return asked


def _said(what: str, act: Callable[[], Any]) -> Any:
    try:
        return act()
    except BaseException as error:  # noqa: BLE001 - a plugin's boundary; SystemExit too
        trace = traceback.format_exc(limit=-4).strip()
        raise _Wrong(f"{what}: {type(error).__name__}: {error}\n{trace}\n") from None


def main(path: str, fd: int) -> None:
    """Serve one launcher until it is gone."""
    from resilience.failover import extension as here  # noqa: PLC0415, PLW0406 - the module that users' code sees, not __main__

    with socket.socket(fileno=fd) as sock, sock.makefile("rwb") as line:

        def say(message: dict[str, Any]) -> None:
            line.write(json.dumps(message).encode() + b"\n")
            line.flush()

        try:
            loaded = here.load(path)
        except here._Wrong as wrong:
            say({"error": str(wrong)})
            return
        say({"ok": True})
        for request in line:
            try:
                say({"strategy": here.answer(loaded, json.loads(request)).name})
            except here._Wrong as wrong:
                say({"error": str(wrong)})


if __name__ == "__main__":
    kin.end_with(int(sys.argv[3]))
    main(sys.argv[1], int(sys.argv[2]))
