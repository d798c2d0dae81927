"""What the ranks ask of their saver; the first one's words count."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from resilience.checkpoint.saver.chair import Chair
from resilience.checkpoint.schedule import Clock, Every


@dataclass
class Options:
    """What the ranks ask for; the first one's words count."""

    keep: int = 3
    keep_every: int = 0
    memory: list[float] = field(default_factory=lambda: [0, 0.0, False])  # an Every each
    disk: list[float] = field(default_factory=lambda: [0, 0.0, False])
    failures_s: float = 0.0  # how long the job runs between two failures, on average
    run: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    replicas: int = 0  # nodes that keep copies of each node's snapshots
    interface: str = ""  # that copies go through: its name, or an address; "": whichever leads to rank 0's node
    bandwidth: float = 0.0  # of copies, bytes per second; 0: no limit
    group: str = ""  # of this node, if known: copies go to other groups

    def chair(self) -> Chair:
        """Return a chair that goes by these clocks."""
        memory, disk = (Every(int(steps), seconds, bool(auto)) for steps, seconds, auto in (self.memory, self.disk))
        now, mark = time.monotonic(), f"{os.getpid()}-"
        clocks = Clock(memory, self.failures_s, now), Clock(disk, self.failures_s, now)
        return Chair(*clocks, mark, replicate=self.replicas > 0)
