"""A rank that finds a small machine: room for the snapshots of one rank, not of two. argv: directory"""

import sys
import time

from torch import nn

import resilience
from resilience.checkpoint import memory

memory.available = lambda: (50_000_000, "a machine of this test")
flash.make_slots = lambda number, nbytes: time.sleep(
    60
)  # it takes long where there is much of it: the other one comes meanwhile


@resilience.record
def main() -> None:
    """Come; whoever comes last is refused."""
    resilience.FlashCheckpoint(sys.argv[1], model=nn.Linear(5000, 500, bias=False))


main()
