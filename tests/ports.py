"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket

_ANY = random.SystemRandom()  # a test may have seeded the other one


def free_ports(number: int, *beside: int) -> list[int]:
    """Return ports that are free, and those so far beside each too.

    They are below those that the kernel gives to whoever connects: nobody gets them before the server does, or while it is down.
    """
    found: list[int] = []
    while len(found) < number:
        port = _ANY.randrange(11_000, 32_000 - max(beside, default=0))
        if port not in found and all(_is_free(port + more) for more in (0, *beside)):
            found.append(port)
    return found


def free_port() -> int:
    """Return one of them."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
