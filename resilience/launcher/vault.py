"""The launcher's part in checkpoints: it starts the saver when a rank first asks for it, holds the snapshot memory too, and starts
another saver where one died. Everything happens in the hub's thread, under its lock.

The memory is held as descriptors, nothing else: with rank and saver dead it is still there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from resilience.checkpoint import hire
from resilience.pulse import channel

_LOG = logging.getLogger("resilience.launcher")
_SAY_EVERY_S = 5.0


class Vault:
    """The saver of this node, and what it was given."""

    def __init__(self, folder: Path, selector: selectors.BaseSelector) -> None:
        self._folder = folder
        self._selector = selector
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._number = 0
        self._held: dict[tuple[str, int], tuple[dict[str, Any], list[int]]] = {}  # by directory and rank
        self._rounds: dict[str, dict[str, Any]] = {}  # by directory: where the savers of all nodes meet

    def address(self) -> str:
        """Return where the saver listens; start it if there is none."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        return self._path

    @property
    def _path(self) -> str:
        return str(self._folder / f"saver{self._number}")

    def _start(self) -> None:
        self._number += 1
        ours, theirs = channel.pair()
        ours.setblocking(False)
        estate = [({**message, "op": "vault"}, tuple(fds)) for message, fds in self._held.values()]
        estate += [(message, ()) for message in self._rounds.values()]
        try:
            left = _handed_over(ours, estate)  # before it runs: what is on its way is there even if we die now
            self._process = hire.start(self._path, theirs)
        except Exception:
            ours.close()
            raise
        finally:
            theirs.close()
        self._sock = ours
        self._selector.register(ours, selectors.EVENT_READ, self._hear)
        ours.setblocking(True)
        _handed_over(ours, left)
        ours.setblocking(False)

    def _hear(self, sock: socket.socket) -> None:
        try:
            received = channel.receive(sock)
        except BlockingIOError:
            return
        except OSError:
            received = None
        if received is None:
            self._selector.unregister(sock)
            sock.close()
            self._sock = None
            return
        message, fds = received
        if message.get("op") == "deposit":
            key = (str(message["directory"]), int(message["rank"]))
            _, before = self._held.get(key, ({}, []))
            for fd in before:
                os.close(fd)
            self._held[key] = (message, fds)
        elif message.get("op") == "forget":
            for rank in message["ranks"]:
                for fd in self._held.pop((str(message["directory"]), int(rank)), ({}, []))[1]:
                    os.close(fd)
        elif message.get("op") == "round":
            self._rounds[str(message["directory"])] = message
        else:
            for fd in fds:
                os.close(fd)

    def look_after(self) -> None:
        """Start another saver where one died."""
        process = self._process
        if process is not None and self._held and process.poll() is not None:
            if self._sock is not None:
                self._selector.unregister(self._sock)
                self._sock.close()
                self._sock = None
            _LOG.warning(
                "the saver ended (%s); a new one was started and goes on with what is in memory.", process.returncode
            )
            self._start()

    def close(self, patience: float = hire.DEADLINE_S) -> None:
        """Let the saver finish: what is complete becomes durable. Waits for that, ``patience`` seconds at most."""
        process = self._process
        if self._sock is not None:
            with contextlib.suppress(OSError):
                channel.send(self._sock, {"op": "quit"})
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None
        for _, fds in self._held.values():
            for fd in fds:
                os.close(fd)
        self._held = {}
        if process is not None:
            self._await(process, patience)
            self._process = None
        with contextlib.suppress(OSError):
            Path(self._path).unlink()

    def _await(self, process: subprocess.Popen[bytes], patience: float) -> None:
        began = said = time.monotonic()
        while time.monotonic() - began < patience:
            try:
                process.wait(0.2)
                return
            except subprocess.TimeoutExpired:
                if time.monotonic() - said > _SAY_EVERY_S:
                    said = time.monotonic()
                    _LOG.info("waiting until the last snapshot is on disk (saver, pid %s).", process.pid)
        _LOG.warning(
            "not waiting for the saver (pid %s) any longer; it ends when the last snapshot is on disk.", process.pid
        )


def _handed_over(sock: socket.socket, estate: list[tuple[dict[str, Any], tuple[int, ...]]]) -> list[Any]:
    """Send what was deposited, in order; return what did not fit."""
    for number, (message, fds) in enumerate(estate):
        try:
            channel.send(sock, message, fds)
        except OSError:  # full; or it died again, and the next one is given all of it
            return estate[number:]
    return []
