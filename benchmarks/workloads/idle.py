"""A rank that does nothing but live: ``idle KIND [BEATS_PER_SECOND]``. Imports no torch of its own."""

from __future__ import annotations

import sys
import time

from benchmarks.workloads.voice import say, voice

_LONGEST_S = 120.0


def main() -> None:
    """Say one heartbeat, and go on saying it if a rate was given."""
    speaker = voice(sys.argv[1])
    speaker.beat(0)
    say("idle")
    rate = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    until = time.monotonic() + _LONGEST_S
    step = 0
    while time.monotonic() < until:
        time.sleep(1 / rate if rate else _LONGEST_S)
        step += 1
        speaker.beat(step)


if __name__ == "__main__":
    main()
