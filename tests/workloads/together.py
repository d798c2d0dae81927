"""``resilience run``, but the launchers of a fleet come to their first rendezvous at the same time.

    together.py FOLDER NUMBER [what resilience run takes]

On a busy machine one may take seconds longer than another until it is there, which is longer than the last call of a job that
begins with fewer nodes too. Each leaves a file in FOLDER and waits until NUMBER of them are there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.pop(0)  # this folder's: launchers don't have it

from torch.distributed.elastic.rendezvous import RendezvousInfo

from resilience.launcher.cli import main
from resilience.launcher.meeting import Meeting

_LIMIT_S = 60.0  # one that ends before it comes so far keeps the others for no longer
_join = Meeting.next_rendezvous


def next_rendezvous(self: Meeting) -> RendezvousInfo:
    """Join, the first time together with the others."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + _LIMIT_S
    while len(list(folder.iterdir())) < number and time.monotonic() < deadline:
        time.sleep(0.02)
        self.answered()  # or the watchdog takes us for cut off
    setattr(Meeting, _join.__name__, _join)
    return _join(self)


if __name__ == "__main__":
    setattr(Meeting, _join.__name__, next_rendezvous)
    sys.exit(main(sys.argv[3:]))
