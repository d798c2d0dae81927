"""Rare messages between rank, monitor and launcher: one JSON object per packet, with descriptors where needed.

Rule: nothing that arrives here is ever unpickled or evaluated. Sockets are SOCK_SEQPACKET, so one receive is one whole
message: there is no framing that a killed writer could leave half done. They are socket pairs, or live in a directory that
only their user can enter.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
from typing import Any

Message = dict[str, Any]
MAX_BYTES = 128 * 1024
_MAX_FDS = 64


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listen(path: str) -> socket.socket:
    """Listen at ``path``, which must lie in a private directory."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(path)
    os.chmod(path, 0o600)  # noqa: PTH101 - monitors import no pathlib
    server.listen(256)
    server.setblocking(False)
    return server


def connect(path: str, timeout: float) -> socket.socket:
    """Connect to ``path``; every later call on the socket has the same deadline."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(timeout)
    try:
        client.connect(path)
    except OSError:
        client.close()
        raise
    return client


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Send one message. Raises ``OSError`` when the other end is gone or full."""
    data = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    if len(data) > MAX_BYTES:
        raise OSError(errno.EMSGSIZE, f"a message of {len(data)} bytes is too long")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Receive one message and its descriptors; ``None`` when the other end is gone. Raises ``OSError`` on a deadline."""
    space = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(MAX_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    try:
        message = json.loads(data) if data else None
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict):
        return message, list(fds)
    for fd in fds:
        os.close(fd)
    return ({}, []) if data else None
