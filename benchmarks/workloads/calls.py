"""Time the in-loop calls from inside a rank: ``calls KIND``.

*batched* is the time of a whole loop of calls less that of an empty loop, per call. *single* is one call between two readings
of the clock, less what two readings alone cost. A pause before each call lets caches and the core go cold as a step would.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from time import perf_counter_ns

from benchmarks.workloads.voice import say, voice

Call = Callable[[int], None]
_BATCH = 200
_SECONDS = 0.4
_SINGLE_CALLS = 20_000
_PAUSED_CALLS = 700


def batched(call: Call) -> float:
    """Return the median cost of one call in ns, over batches."""
    full, empty = [], []
    until = perf_counter_ns() + int(_SECONDS * 1e9)
    while perf_counter_ns() < until:
        start = perf_counter_ns()
        for step in range(_BATCH):
            call(step)
        middle = perf_counter_ns()
        for _ in range(_BATCH):
            pass
        full.append(middle - start)
        empty.append(perf_counter_ns() - middle)
    return (statistics.median(full) - statistics.median(empty)) / _BATCH


def single(call: Call, count: int, pause: float) -> list[int]:
    """Return what each call took in ns, the clock's own cost included. At most ``count`` calls; fewer if they are slow."""
    took: list[int] = []
    until = perf_counter_ns() + int((_SECONDS + 4 * pause * count) * 1e9)
    for step in range(count):
        if perf_counter_ns() > until:
            break
        if pause:
            time.sleep(pause)
        start = perf_counter_ns()
        call(step)
        took.append(perf_counter_ns() - start)
    return took


def clock_alone(count: int, pause: float) -> float:
    """Return the median of two readings of the clock with nothing between them, in ns."""
    took = []
    for _ in range(count):
        if pause:
            time.sleep(pause)
        start = perf_counter_ns()
        took.append(perf_counter_ns() - start)
    return statistics.median(took)


def measure(call: Call) -> dict[str, float]:
    """Return all figures of one call in ns."""
    single(call, 100, 0)  # warm up
    figures = {"batched": batched(call)}
    for name, count, pause in (("single", _SINGLE_CALLS, 0.0), ("paused", _PAUSED_CALLS, 0.001)):
        clock = clock_alone(min(count, 1000), pause)
        took = sorted(single(call, count, pause))
        figures[f"{name}_clock"] = clock
        figures[f"{name}_median"] = max(0.0, took[len(took) // 2] - clock)
        figures[f"{name}_p99"] = max(0.0, took[len(took) * 99 // 100] - clock)
    return figures


def main() -> None:
    """Measure and tell."""
    speaker = voice(sys.argv[1])
    empty = voice("plain").beat
    told = {"heartbeat": measure(speaker.beat), "section": measure(speaker.pair), "empty": measure(empty)}
    if speaker.stop is not None:
        told["stop_requested"] = measure(speaker.stop)
    say("measured", **told)


if __name__ == "__main__":
    main()
