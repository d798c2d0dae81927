"""A line between two savers: JSON messages over TCP, after both have proven that they know the secret of the job.

1) (who listens) sends a nonce
2) (who calls)   sends the proof of it, and a nonce of its own
3) (who listens) sends the proof of that; from here on both believe each other

The secret travels through the store of the job, which whoever can reach it can read: it keeps strangers and earlier rounds out, it
does not hide anything. Nothing that arrives here is unpickled or evaluated. Sending never waits: what the other end does not take
is kept, up to a limit; then the line is cut.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
_LENGTH = struct.Struct("!I")
_MOST = 64 << 20
_STRANGER_MOST = 4096
_BACKLOG = 256 << 20
PROVE_S = 10.0


class Line:
    """One end. ``heard`` is called with each message, ``cut`` once, when the other end is gone or can't be believed."""

    def __init__(
        self,
        sock: socket.socket,
        secret: str,
        selector: selectors.BaseSelector,
        *,
        called: bool,
        heard: Callable[[Line, Message], None],
        cut: Callable[[Line], None],
    ) -> None:
        self.node = -1  # who is at the other end, once it has said so
        self.proven = False
        self.since = time.monotonic()
        self._sock, self._secret, self._selector = sock, secret.encode(), selector
        self._called, self._heard, self._cut = called, heard, cut
        self._nonce = secrets.token_hex(16)
        self._in = bytearray()
        self._out = bytearray()
        self._waiting: list[Message] = []  # until the other end is proven
        self.open = True
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        selector.register(sock, selectors.EVENT_READ, lambda _: self._ready())
        if called:
            self._put({"nonce": self._nonce})

    def send(self, message: Message) -> None:
        """Send a message; it goes out when the other end is proven."""
        if self.proven:
            self._put(message)
        else:
            self._waiting.append(message)

    def close(self, flush_s: float = 0.0) -> None:
        """Hang up; wait so long for the other end to take what was sent."""
        if not self.open:
            return
        self.open = False
        self._selector.unregister(self._sock)
        with contextlib.suppress(OSError):
            if self._out and flush_s:
                self._sock.settimeout(flush_s)
                self._sock.sendall(self._out)
            self._sock.shutdown(socket.SHUT_WR)
        self._sock.close()

    def _hang_up(self) -> None:
        if self.open:
            self.close()
            self._cut(self)

    def _proof(self, who: str, nonce: object) -> str:
        return proof(self._secret, who, nonce)

    def _put(self, message: Message) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        self._out += _LENGTH.pack(len(data)) + data
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out and self.open:
                del self._out[: self._sock.send(self._out)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._hang_up()
        if not self.open:
            return
        if len(self._out) > _BACKLOG:
            self._hang_up()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self._selector.modify(self._sock, events, lambda _: self._ready())

    def _ready(self) -> None:
        if self._out:
            self._flush()
        try:
            while self.open and (data := self._sock.recv(1 << 20)):
                self._in += data
            ended = self.open
        except (BlockingIOError, InterruptedError):
            ended = False
        except OSError:
            ended = True
        self._take()
        if ended:
            self._hang_up()

    def _take(self) -> None:
        while self.open and len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            if length > (_MOST if self.proven else _STRANGER_MOST):
                self._hang_up()
                return
            if len(self._in) < _LENGTH.size + length:
                return
            data = bytes(self._in[_LENGTH.size : _LENGTH.size + length])
            del self._in[: _LENGTH.size + length]
            try:
                message = json.loads(data)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self._hang_up()
            elif self.proven:
                self._heard(self, message)
            else:
                self._prove(message)

    def _prove(self, message: Message) -> None:
        if self._called:
            good = hmac.compare_digest(str(message.get("proof")), self._proof("caller", self._nonce))
            if good:
                self._put({"proof": self._proof("called", message.get("nonce"))})
        elif "proof" in message:
            good = hmac.compare_digest(str(message["proof"]), self._proof("called", self._nonce))
        else:
            self._put({"proof": self._proof("caller", message.get("nonce")), "nonce": self._nonce})
            return
        if not good:
            self._hang_up()
            return
        self.proven = True
        for kept in self._waiting:
            self._put(kept)
        self._waiting.clear()


def proof(secret: bytes, who: str, nonce: object) -> str:
    """Return what only those can say who know the secret."""
    return hmac.new(secret, f"{who} {nonce}".encode(), hashlib.sha256).hexdigest()


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address of this node, port 0: at a free one. A name of this node that stands for loopback here stands for
    something else elsewhere: then everywhere."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if str(address[0]).startswith(("127.", "::1")) and not host.startswith(("127.", "::1", "localhost")):
        family, address = socket.AF_INET, ("", port)
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(4096)
        server.setblocking(False)
    except BaseException:
        server.close()
        raise
    return server
