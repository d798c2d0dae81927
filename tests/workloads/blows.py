"""What befalls a training with FlashCheckpoint, as its command line says: ``DIRECTORY STEPS [FAULT RANK STEP]``.

FAULT, in cycle 0: ``kill`` or ``raise`` once STEP is COMPLETE; ``node``: RANK stands still once it is REPLICATED and says so in
$PROGRESS/ready, for its node to be lost.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import resilience
from resilience.checkpoint.receipt import Level

PROGRESS = Path(os.environ["PROGRESS"])
CYCLE = int(os.environ.get("RESILIENCE_CYCLE", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def strike(checkpoint: resilience.FlashCheckpoint, rank: int, step: int) -> None:
    """Have it happen, if this is the rank and the step."""
    if len(sys.argv) <= 5 or CYCLE > 0 or (rank, step) != (int(sys.argv[4]), int(sys.argv[5])):
        return
    if sys.argv[3] == "node":
        checkpoint.wait(level=Level.REPLICATED)
        (PROGRESS / "ready").touch()
        time.sleep(3600)
    checkpoint.wait(level=Level.COMPLETE)
    if sys.argv[3] == "raise":
        raise ValueError("bad batch")
    os.kill(os.getpid(), signal.SIGKILL)
