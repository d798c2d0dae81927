"""How the savers of a job meet: one of them is the chair, the others have a line to it.

The chair's own book speaks to it within the process; a job of one node has no line at all. A line that is cut is built up again, at
the same address: a saver that takes another's place listens where that did. What was said on a line that was cut may be lost, so
the book says it again after it has joined.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from resilience.checkpoint.saver.chair import Chair
from resilience.checkpoint.saver.line import PROVE_S, Line, Message, listen

_LOG = logging.getLogger("resilience.saver")
_CALL_S = 2.0
_AGAIN_S = 0.5


class Council:
    """One book's way to the chair, and the chair itself where it is here. ``hear`` is called with what the chair says."""

    def __init__(self, selector: selectors.BaseSelector, node: int, hear: Callable[[Message], None]) -> None:
        self.node = node
        self.chair: Chair | None = None
        self._selector = selector
        self._hear = hear
        self._said: deque[tuple[int, Message]] = deque()  # to the chair, where it is here
        self._told: deque[Message] = deque()  # by the chair
        self._server: socket.socket | None = None
        self._secret = ""
        self._lines: list[Line] = []
        self._address: tuple[str, int] | None = None
        self._line: Line | None = None
        self._call_at = 0.0
        self.rejoin: Callable[[], None] = lambda: None  # called when there is a new line to the chair
        self.cut: Callable[[], None] = lambda: None  # called when there is none any more
        self.cut_since = 0.0

    # -- taking seats -----------------------------------------------------------------------------------------------

    def preside(self, chair: Chair, host: str = "", port: int = 0, secret: str = "") -> dict[str, Any]:
        """Be the chair; with a ``host``, for other nodes too. Returns where they find it."""
        gone = [line.node for line in self._lines if line.node >= 0]
        self._leave()
        self.chair = chair
        for node in gone:  # it is to come again, or to be waited for no longer
            chair.lost(node, time.monotonic())
        if not host:
            return {}
        self._secret = secret or secrets.token_hex(16)
        if self._server is None:
            self._server = listen(host, port)
            self._selector.register(self._server, selectors.EVENT_READ, lambda _: self._accept())
        return {"host": host, "port": self._server.getsockname()[1], "secret": self._secret}

    def attend(self, host: str, port: int, secret: str) -> None:
        """Have a line to the chair, from now on."""
        self._leave()
        self._address, self._secret, self._call_at = (host, port), secret, 0.0
        self.cut_since = time.monotonic()

    def _leave(self) -> None:
        for line in [*self._lines, *([self._line] if self._line is not None else [])]:
            line.close()
        self.chair, self._lines, self._line, self._address = None, [], None, None
        self._said.clear()
        self._told.clear()

    def close(self) -> None:
        """Hang up on everybody, but let them hear the last words."""
        for line in [*self._lines, *([self._line] if self._line is not None else [])]:
            line.close(flush_s=2.0)
        if self._server is not None:
            self._selector.unregister(self._server)
            self._server.close()
            self._server = None
        self.chair, self._lines, self._line, self._address = None, [], None, None

    # -- speaking ---------------------------------------------------------------------------------------------------

    @property
    def seated(self) -> bool:
        """Whether it is known who the chair is."""
        return self.chair is not None or self._address is not None

    def cut_for(self) -> float:
        """Return for how long there has been no line to the chair."""
        return time.monotonic() - self.cut_since if self.chair is None and self._line is None else 0.0

    def say(self, **message: Any) -> None:
        """Say something to the chair. Lost if there is no line to it."""
        if self.chair is not None:
            self._said.append((self.node, message))
        elif self._line is not None:
            self._line.send(message)

    def turn(self) -> None:
        """Carry what was said, until everybody is silent; call the chair if there is no line to it."""
        now = time.monotonic()
        if self.chair is not None:
            self.chair.tick(now)
        elif self._address is not None and self._line is None and now >= self._call_at:
            self._call(now)
        for line in [line for line in self._lines if not line.proven and now - line.since > PROVE_S]:
            self._lines.remove(line)
            line.close()
        while self._carry(now):
            pass

    def _carry(self, now: float) -> bool:
        if self._said and self.chair is not None:
            node, message = self._said.popleft()
            try:
                self.chair.hear(node, message, now)
            except (LookupError, TypeError, ValueError) as error:  # another version at the other end, or worse
                _LOG.warning("what the node with rank %s says makes no sense: %s (%s)", node, message.get("op"), error)
            return True
        if self.chair is not None and self.chair.out:
            node, message = self.chair.out.popleft()
            if node == self.node:
                self._told.append(message)
            else:
                for line in self._lines:
                    if line.node == node:
                        line.send(message)
            return True
        if self._told:
            self._hear(self._told.popleft())
            return True
        return False

    # -- lines ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._server is not None
        with contextlib.suppress(OSError):
            sock, _ = self._server.accept()
            self._lines.append(
                Line(
                    sock,
                    self._secret,
                    self._selector,
                    called=True,
                    heard=self._heard_from_node,
                    cut=self._node_cut,
                )
            )

    def _heard_from_node(self, line: Line, message: Message) -> None:
        if message.get("op") == "join":
            line.node = int(message["node"])
            for other in [other for other in self._lines if other is not line and other.node == line.node]:
                self._lines.remove(other)  # it came again before we knew that it was gone
                other.close()
        if line.node >= 0:
            self._said.append((line.node, message))

    def _node_cut(self, line: Line) -> None:
        if line in self._lines:
            self._lines.remove(line)
            if self.chair is not None and line.node >= 0:
                self.chair.lost(line.node, time.monotonic())

    def _call(self, now: float) -> None:
        assert self._address is not None
        self._call_at = now + _AGAIN_S
        try:
            sock = socket.create_connection(self._address, _CALL_S)
        except OSError:
            return
        self._line = Line(
            sock,
            self._secret,
            self._selector,
            called=False,
            heard=lambda _, message: self._told.append(message),
            cut=self._chair_cut,
        )
        self.rejoin()

    def _chair_cut(self, line: Line) -> None:
        if line is self._line:
            self._line = None
            self.cut_since = time.monotonic()
            self.cut()
            self._call_at = time.monotonic() + _AGAIN_S
