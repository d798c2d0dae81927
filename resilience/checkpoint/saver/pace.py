"""How busy the processors are that this process may use, and how much of one the calling thread has had."""

from __future__ import annotations

import os
import time

from resilience.checkpoint.saver.throttle import Courtesy

_LOOK_S = 0.25  # the kernel counts in hundredths of a second
_IDLE, _IOWAIT = 3, 4  # among the counters of a processor


class Pace:
    """Tells a thread how long to pause. One thread at a time."""

    def __init__(self) -> None:
        self._courtesy = Courtesy(len(os.sched_getaffinity(0)))
        self._looked = 0.0
        self._ran = 0.0

    def begin(self) -> None:
        """Another thread begins to send."""
        self._ran = time.thread_time()

    def courtesy(self) -> float:
        """Return how long to pause before going on."""
        now, ran = time.monotonic(), time.thread_time()
        if now - self._looked > _LOOK_S:
            self._looked = now
            self._courtesy.look(*processors())
        ran, self._ran = ran - self._ran, ran
        return self._courtesy.pause(max(0.0, ran))


def processors() -> tuple[float, float]:
    """Return how long the processors that we may use have been idle, and how long there have been any, in all."""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    idle = total = 0.0
    try:
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, *counts = line.split()
                if not name.startswith("cpu"):
                    break
                if name in mine:
                    numbers = [float(count) for count in counts[:8]]
                    idle += numbers[_IDLE] + numbers[_IOWAIT]
                    total += sum(numbers)
    except (OSError, ValueError, IndexError):  # nobody counts: then they are short
        return 0.0, 0.0
    return idle, total
