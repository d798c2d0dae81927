"""Telling the configured :class:`ErrorMonitor` of faulty nodes, and leaving a termination message.

A monitor is anybody's code and calls services. Each attempt runs in a process of its own, with a deadline, from a thread beside the
launcher: it may hang, leak or crash, and nothing waits for it but the launcher's very end, and that not for long.

1) (launcher) ``Marker(spec)`` at start: a wrong name, class or file is found before anything is started; a service that does not
   answer just now is a warning, and no reason not to train
2) (launcher) ``tell(fault)``: returns at once; attempts follow, with growing pauses
3) (launcher) ``close()``: waits a little for what is under way; what could not be marked is said, with what to do

Rule: a fault that was told is marked, or there is a line in the log that says that it was not.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import inspect
import json
import logging
import os
import secrets
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilience import kin
from resilience.errors import ConfigError, double_colon, imported, nearest, nearest_class
from resilience.failover.attempt import Attempt
from resilience.failover.error_monitor import ErrorMonitor, NodeFault, from_message

_LOG = logging.getLogger("resilience.launcher")
GROUP = "resilience.error_monitors"
NONE = "none"
_FILE = "file:"
_IMPORT_S = 60.0
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # and then every 30 s
_REFUSED = 2
_DONE = 83  # no code that a monitor's own sys.exit has by chance: mark() has returned
_UNTIDY = 84  # and close() has not
_NO_TIME = "there was no time for an attempt"
_LONGEST = 800
_LEAVE_S = 2.0
_PLAINLY = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe that nobody reads is an error
TERMINATION_LOG = "/dev/termination-log"


class FileMonitor(ErrorMonitor):
    """Keeps faulty nodes in a file, one JSON object per line, for whoever acts on them. It is only ever added to."""

    def __init__(self, path: str) -> None:
        """Raise :class:`ConfigError` where no such file can be. A folder that is not there is a typo, or a mount that is missing:
        nobody would look for faults in one that we make. A disk that is full now may not be later."""
        self.path = Path(path).expanduser()
        if not self.path.parent.is_dir():
            raise _no_such_file(path, f"there is no folder {self.path.parent}")
        target = self.path if self.path.exists() else self.path.parent.absolute()
        if self.path.is_dir() or not os.access(target, os.W_OK):
            raise _no_such_file(path, "Is a directory" if self.path.is_dir() else f"{target} is not writable")

    def mark(self, fault: NodeFault) -> None:
        """Add a line, unless it is there, and see that it is on the disk."""
        is_new = not self.path.exists()
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # launchers may share the file
            file.seek(0)
            lines = file.read()
            entry = dataclasses.asdict(fault)
            if any(_read(line) == entry for line in lines.splitlines()):
                return
            torn = bool(lines) and not lines.endswith(b"\n")  # by somebody who was killed
            file.write(b"\n" * torn + json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _no_such_file(path: str, why: str) -> ConfigError:
    return ConfigError(f"error_monitor='file:{path}': it can't be written: {why}. Nothing was started.")


def _read(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # the latter: brackets without end
        return None


def load(spec: str) -> ErrorMonitor:
    """Make the monitor that ``--ft-error-monitor`` names; raise :class:`ConfigError` where there is none."""
    word = spec.strip()
    if word.startswith(_FILE) and len(word) > len(_FILE):
        return FileMonitor(word[len(_FILE) :])
    if word in ("file", _FILE):
        raise ConfigError(f"error_monitor={spec!r}: which file? The form is file:PATH. Nothing was started.")
    module_name, separator, name = word.partition("::")
    if separator and module_name and name:
        try:
            module = imported(module_name)
        except (ImportError, AttributeError, SyntaxError) as error:
            raise ConfigError(f"error_monitor={spec!r}: {error}. Nothing was started.") from error
        if not hasattr(module, name):
            why = f"module {module_name!r} has no attribute {name!r}.{nearest_class(name, module)}"
            raise ConfigError(f"error_monitor={spec!r}: {why} Nothing was started.")
        return _made(getattr(module, name), spec)
    points = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    if word not in points:
        close = double_colon(word) or nearest(word.partition(":")[0], [NONE, "file", *points])
        known = ", ".join([NONE, "file:PATH", "module::Class", *points])
        raise ConfigError(f"error_monitor={spec!r} is not known.{close} Known are {known}. Nothing was started.")
    return _made(points[word].load(), spec)


def _made(found: Any, spec: str) -> ErrorMonitor:
    if not isinstance(found, type) or not issubclass(found, ErrorMonitor):
        raise ConfigError(
            f"error_monitor={spec!r} does not derive from resilience.failover.error_monitor.ErrorMonitor."
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"error_monitor={spec!r} does not define {missing}. Nothing was started.")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ConfigError(f"error_monitor={spec!r} is made without arguments: {error}. Nothing was started.") from error
    return found()


class Marker:
    """The launcher's side. ``spec`` is the setting; with ``none`` nobody is told."""

    def __init__(self, spec: str, timeout: float) -> None:
        """Try the monitor out; raise :class:`ConfigError` for one that can't be meant."""
        self._spec = spec
        self._timeout = timeout
        self._open: dict[NodeFault, str] = {}  # what is not marked yet, with the last error
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._attempt: Attempt | None = None
        if spec != NONE:
            code, why = self._run("rehearse", b"", _IMPORT_S)
            if code == _REFUSED:
                raise ConfigError(
                    why if "error_monitor" in why else f"error_monitor={spec!r}: {why}. Nothing was started."
                )
            if why:
                _LOG.warning(
                    "error_monitor=%r: %s. Training goes on; it is tried again when there is a fault.", spec, why
                )

    def tell(self, fault: NodeFault) -> None:
        """Have a node marked, behind the launcher's back; the same fault twice is one."""
        if self._spec == NONE:
            return
        with self._changed:
            self._open.setdefault(fault, _NO_TIME)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="resilience-marking", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for what is under way, not longer than one attempt may take; say what could not be marked."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, self._timeout)
            self._closing.set()
            self._changed.notify_all()
            left, self._open = self._open, {}
        if self._attempt is not None:
            self._attempt.cut_short()
        if self._thread is not None:
            self._thread.join(_LEAVE_S)
        for fault, why in left.items():
            _LOG.error(
                "node %s is NOT marked as faulty (%s): %s says: %s. Take it out of scheduling by hand. What is wrong with it: %s",
                fault.node,
                fault.reason,
                self._spec,
                why,
                fault.message,
            )

    def _work(self) -> None:
        tries: dict[NodeFault, tuple[int, float]] = {}
        while True:
            with self._changed:
                if self._closing.is_set():
                    return
                now = time.monotonic()
                due = min(self._open, key=lambda fault: tries.get(fault, (0, 0.0))[1], default=None)
                when = tries.get(due, (0, 0.0))[1] if due is not None else now + 60.0
                if due is None or when > now:
                    self._changed.wait(when - now)
                    continue
                if self._open[due] == _NO_TIME:
                    self._open[due] = "its first attempt has not come to an end"
            code, why = self._run("mark", due.as_message().encode(), self._timeout)
            count = tries.get(due, (0, 0.0))[0]
            with self._changed:
                if self._closing.is_set():
                    return
                if code in (_DONE, _UNTIDY):
                    _LOG.info("node %s is marked as faulty (%s) by %s.", due.node, due.reason, self._spec)
                    if why:
                        _LOG.warning(
                            "%s failed in close(), after it had marked node %s: %s.", self._spec, due.node, why
                        )
                    self._open.pop(due, None)
                else:
                    _LOG.warning("node %s could not be marked as faulty: %s. It is tried again.", due.node, why)
                    self._open[due] = why
                    pause = _PAUSES_S[min(count, len(_PAUSES_S) - 1)]
                    tries[due] = (count + 1, time.monotonic() + pause)
                self._changed.notify_all()

    def _run(self, verb: str, text: bytes, timeout: float) -> tuple[int | None, str]:
        """Run one attempt; return its exit code, if it ended, and what went wrong, or an empty string."""
        command = [sys.executable, "-m", "resilience.failover.marking", verb, self._spec, str(os.getpid())]
        self._attempt = Attempt(command)
        try:
            code, said = self._attempt.run(text, timeout)
        except OSError as error:
            return None, f"it could not be started: {error}"
        if code is None:
            return None, f"it did not {verb} within {timeout:g} s"
        if code == _DONE:
            return code, ""
        lines = said.strip().splitlines()
        last = lines[-1] if lines else f"its process ended with {code} before it could {verb}"
        return code, last if len(last) <= _LONGEST else f"{last[:_LONGEST]}…"


def leave_message(fault: NodeFault, path: str | None) -> None:
    """Write the termination message. ``path`` None: to a Kubernetes container's own place, where there is one.

    In a folder where others may write too (``/tmp``, mode 1733) nothing of theirs is written to, followed or waited for: the
    message is then in a new file beside it, ``<path>.<random>``. A name that could be guessed could be taken before.
    """
    target = Path(path or TERMINATION_LOG)
    if path is None and not (target.is_file() and os.access(target, os.W_OK)):
        return
    try:
        fd = _open_shared(target) if _is_shared(target.parent) else os.open(target, _PLAINLY, 0o666)
        with os.fdopen(fd, "wb") as file:
            file.write(fault.as_message().encode())
    except OSError as error:
        _LOG.error("the termination message could not be written to %s: %s.", target, error.strerror or error)


def _is_shared(folder: Path) -> bool:
    mode = folder.stat().st_mode
    return bool(mode & stat.S_ISVTX) and bool(mode & stat.S_IWOTH)


def _open_shared(target: Path) -> int:
    """Return a new file beside ``target``; or that, emptied, where it is a plain file of ours or root's, as a container's is."""
    try:
        fd = os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return _new_beside(target)
    try:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid()) and found.st_nlink == 1:
            os.ftruncate(fd, 0)
            return fd
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return _new_beside(target)


def _new_beside(target: Path) -> int:
    path = target.with_name(f"{target.name}.{secrets.token_hex(8)}")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def main(verb: str, spec: str, told: Callable[[], str] = sys.stdin.read) -> int:
    """One attempt, in a process of its own; what goes wrong is the last line of stderr."""
    text = told()
    try:
        monitor = load(spec)
        if verb == "mark":
            fault = from_message(text)
            if fault is None:
                raise ConfigError(f"this is no fault: {text[:100]!r}")
            monitor.mark(fault)
            return _leave(monitor)
        monitor.close()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return _REFUSED
    except Exception as error:  # noqa: BLE001 - a plugin's boundary
        _say(error)
        return 1
    return _DONE


def _leave(monitor: ErrorMonitor) -> int:
    """Close a monitor that has marked a node: it is marked, whatever comes of leaving."""
    try:
        monitor.close()
    except Exception as error:  # noqa: BLE001 - a plugin's boundary
        _say(error)
        return _UNTIDY
    return _DONE


def _say(error: Exception) -> None:
    sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")


if __name__ == "__main__":
    kin.end_with(int(sys.argv[3]))  # a killed launcher leaves nothing behind
    sys.exit(main(sys.argv[1], sys.argv[2]))
