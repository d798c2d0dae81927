"""The actor that serves a round's rendezvous store, apart from the nodes that train wherever there is such a node.

A store that is lost takes what the launchers know of each other with it: they end with 75, and the job forms again with another.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from resilience.integrations.ray.process import Keeper, Order

from resilience import config

READY_S = 60.0


class StoreKeeper:
    """Runs ``resilience store``."""

    def __init__(self, host: str, program: Sequence[str] = ("-m", "resilience", "store")) -> None:
        self._keeper = Keeper(output=True)
        command = (sys.executable, *program, f"--host={host}", "--port=0")
        self._keeper.give(Order(1, command, dict(config.environment())))
        self._keeper.look(0, READY_S)  # version 1: it was started
        line = _first_line(self._keeper.output, READY_S) if self._keeper.output is not None else ""
        found = re.search(r"serving (\S+:\d+)\.", line)
        self._endpoint = found.group(1) if found else ""
        if not found:
            sys.stderr.write(f"resilience store: it did not say within {READY_S:g} s where it serves, and was ended\n")
            self._keeper.end()

    def report(self, wait_s: float) -> dict[str, Any]:
        """Say where it serves; at once when it has ended, else after a while."""
        _, _, code = self._keeper.look(1, wait_s)
        return {"endpoint": self._endpoint, "code": code}


def _first_line(output: IO[bytes], seconds: float) -> str:
    """Return what a program says first; what there is of it if that takes too long."""
    deadline, said = time.monotonic() + seconds, b""
    while b"\n" not in said:
        left = max(0.0, deadline - time.monotonic())
        ready = select.select([output], [], [], left)[0]
        more = os.read(output.fileno(), 4096) if ready else b""
        if not more:
            break
        said += more
    return said.decode(errors="replace")
