"""Wait for a signal, write down which one came first, and end with exit code 5. Rank 1 ignores SIGTERM. torch-free."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

HERE = Path(os.environ["PARITY_OUT"])
RANK = os.environ["RANK"]


def note(number: int, frame: FrameType | None) -> None:
    """Write the first signal's name and end; a rank that is slow to end may get a second one because another ended."""
    with suppress(FileExistsError), open(HERE / f"{RANK}.signal", "x") as file:
        file.write(signal.Signals(number).name)
    sys.exit(5)


for item in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(item, note)
if RANK == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(HERE / f"{RANK}.ready").touch()
while True:
    signal.pause()
