"""The launcher's desk: workers come with one request each, are answered, and go.

Whatever a worker sends can't hurt: it is JSON and bounded, there is room for so many callers and no more, and one that says
nothing is shown out.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from resilience.errors import LinkError
from resilience.failover.sentence import EXCLUDE_THIS_NODE, SHUTDOWN_WORKLOAD
from resilience.launcher.learner import Learner
from resilience.launcher.post import Post
from resilience.pulse import channel
from resilience.pulse.timeouts import from_json

_LOG = logging.getLogger("resilience.launcher")
_MAX_CALLERS = 64
_CALLER_S = 10.0


class Desk:
    """Listens on the node's socket; everything happens in the hub's thread, under its lock."""

    def __init__(
        self,
        path: str,
        selector: selectors.BaseSelector,
        *,
        posts: Sequence[Post],
        learner: Learner,
        learned: Callable[[], None],
        requested: Callable[[], None],
        saver: Callable[[], str],
    ) -> None:
        self.path = path
        self._selector = selector
        self._posts = posts
        self._learner = learner
        self._learned = learned
        self._requested = requested
        self._saver = saver
        self._callers: dict[socket.socket, float] = {}
        self._server = self._listen()

    def _listen(self) -> socket.socket:
        server = channel.listen(self.path)
        self._selector.register(server, selectors.EVENT_READ, self._accept)
        return server

    def close(self) -> None:
        """Close the socket and take it away."""
        for caller in list(self._callers):
            caller.close()
        self._server.close()
        Path(self.path).unlink(missing_ok=True)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        if len(self._callers) >= _MAX_CALLERS:
            connection.close()
            return
        connection.setblocking(False)
        self._callers[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ, self._hear_worker)

    def look_after(self) -> None:
        """Drop callers that never say anything; listen again if somebody cleaned our socket away."""
        late = [caller for caller, since in self._callers.items() if time.monotonic() - since > _CALLER_S]
        for caller in late:
            self._hang_up(caller)
        if not Path(self.path).exists() and Path(self.path).parent.is_dir():
            self._selector.unregister(self._server)
            self._server.close()
            self._server = self._listen()

    def _hang_up(self, caller: socket.socket) -> None:
        self._callers.pop(caller, None)
        self._selector.unregister(caller)
        caller.close()

    def _hear_worker(self, connection: socket.socket) -> None:
        """Answer one worker's one request. Whatever it sends can't hurt: it is JSON, and bounded."""
        try:
            received = channel.receive(connection)
            if received is not None:
                message, fds = received
                for fd in fds:
                    os.close(fd)
                self._answer(connection, message)
        except OSError:
            pass
        finally:
            self._hang_up(connection)

    def _answer(self, connection: socket.socket, message: channel.Message) -> None:
        post = next((item for item in self._posts if item.rank == message.get("rank")), None)
        if post is None or message.get("cycle") != post.cycle:
            channel.send(connection, {"error": "this rank is not of the current cycle"})
            return
        op = message.get("op")
        if op == "hello":
            pid = message.get("pid")
            if post.page is None or (post.holder is not None and post.holder != pid):
                channel.send(connection, {"error": "another process of this rank holds the page"})
            else:
                post.holder = pid
                channel.send(connection, {"ok": True}, (post.page.fd, post.stacks_fd))
        elif op == "timeouts":
            self.read_pages()
            channel.send(connection, self._learner.answer())
        elif op == "load":
            self._learner.merge(from_json(message.get("learned")))
            self._learned()
            channel.send(connection, {"ok": True})
        elif op == "calculated":
            limits = message.get("limits")
            if isinstance(limits, dict):
                self._learner.calculate(
                    {name: value for name, value in limits.items() if isinstance(value, (int, float))}
                )
                self._learned()
            channel.send(connection, {"ok": True})
        elif op == "saver":
            try:
                channel.send(connection, {"path": self._saver()})
            except (OSError, LinkError) as error:
                channel.send(connection, {"error": str(error)})
        elif op == "control":
            channel.send(connection, self._control(post, message))
        else:
            channel.send(connection, {"error": f"unknown request {op!r}"})

    def _control(self, post: Post, message: channel.Message) -> channel.Message:
        """Take a control request: the agent acts on it in its next turn, which begins now."""
        action, description = message.get("action"), str(message.get("description"))[:1000]
        if action not in ("Continue", EXCLUDE_THIS_NODE, SHUTDOWN_WORKLOAD):
            return {"error": f"unknown action {action!r}"}
        _LOG.info("rank %s asks for %s: %s", post.rank, action, description)
        if action != "Continue":
            post.request = {"rank": post.rank, "action": action, "description": description}
            self._requested()
        return {"ok": True}

    def read_pages(self) -> None:
        """Bring the learner up to date at once, without waiting for the monitors' next status."""
        for post in self._posts:
            table = post.seen()
            if table and self._learner.see((post.cycle, post.rank), table):
                self._learned()
