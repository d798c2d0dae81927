"""A rank that finds a small machine: room for the snapshots of one rank, not of two. argv: directory"""

import sys
import time

from torch import nn

import resilience
from resilience.checkpoint import arena, memory


def create(nbytes: int) -> arena.Slot:
    """Take as long as it does where there is much of it: the other rank comes meanwhile."""
    time.sleep(60)
    raise AssertionError(f"nobody was refused, and {nbytes} bytes are to be allocated")


memory.available = lambda: (50_000_000, "a machine of this test")
arena.Slot.create = create  # type: ignore[method-assign]


@resilience.record
def main() -> None:
    """Come; whoever comes last is refused."""
    resilience.FlashCheckpoint(sys.argv[1], model=nn.Linear(5000, 500, bias=False))


main()
