"""Several hosts on one machine: network namespaces joined by a bridge in a namespace of its own.

The machine's own network is untouched. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def _ip(*arguments: str) -> None:
    subprocess.run([shutil.which("ip") or "/usr/sbin/ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Host:
    """One host: a namespace with its own address and name."""

    space: str
    name: str
    address: str

    def command(self, words: list[str]) -> list[str]:
        """Return ``words`` to be run on this host, with its hostname."""
        inside = ["sh", "-c", f'hostname {self.name} && exec "$@"', "sh", *words]
        return [shutil.which("ip") or "/usr/sbin/ip", "netns", "exec", self.space, "unshare", "--uts", *inside]

    def cut(self) -> None:
        """Take the link down."""
        _ip("-n", self.space, "link", "set", "eth0", "down")

    def heal(self) -> None:
        """Bring the link up again."""
        _ip("-n", self.space, "link", "set", "eth0", "up")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make ``count`` hosts on 10.99.0.0/24, and take them away again."""
    mark = f"rsl{os.getpid()}"
    switch = f"{mark}sw"
    made: list[Host] = []
    spaces = [switch]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number in range(count):
            host = Host(f"{mark}h{number}", f"host-{'abcdef'[number]}", f"10.99.0.{number + 1}")
            _ip("netns", "add", host.space)
            spaces.append(host.space)
            _ip("-n", host.space, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{number}", "netns", switch)
            _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.space, "link", "set", "eth0", "up")
            _ip("-n", host.space, "link", "set", "lo", "up")
            _ip("-n", switch, "link", "set", f"p{number}", "master", "br0")
            _ip("-n", switch, "link", "set", f"p{number}", "up")
            made.append(host)
        yield made
    finally:
        for space in reversed(spaces):
            subprocess.run(
                [shutil.which("ip") or "/usr/sbin/ip", "netns", "del", space], check=False, capture_output=True
            )


def can_make_hosts() -> bool:
    """Whether this machine lets us (root, iproute2, namespaces)."""
    return os.geteuid() == 0 and Path("/usr/sbin/ip").exists()
