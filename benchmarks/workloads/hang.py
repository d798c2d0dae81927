"""A rank that hangs in a section, once in every cycle: ``hang KIND TIMEOUT PERIOD``.

Before it enters the section it waits for another part of ``PERIOD`` (the monitor's check interval) in each cycle, so that
the hang does not always start at the same point of the monitor's rhythm.
"""

from __future__ import annotations

import sys
import time

from benchmarks.workloads.voice import cycle, say, voice

_GOLDEN = 0.618034


def main() -> None:
    """Hang."""
    kind, timeout, period = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    speaker = voice(kind)
    speaker.beat(cycle())
    time.sleep((cycle() + 1) * _GOLDEN % 1.0 * period)
    before = time.monotonic_ns()
    speaker.enter(timeout)
    say("entered", entered=before)
    time.sleep(120.0)


if __name__ == "__main__":
    main()
