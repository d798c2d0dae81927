"""Ranks that train next to nothing over gloo, with snapshots on disk, and tell every step: ``cluster_train FOLDER``.

They go on until there is a file FOLDER/finish, or they are asked to stop, and leave at the same step then. A rank that finds
FOLDER/exit_RANK takes it away, and ends with the code that is in it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from benchmarks.workloads.voice import say


def main() -> None:
    """Train."""
    import torch
    import torch.distributed as dist

    import resilience

    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(8, 8)
    with resilience.FlashCheckpoint(folder / "checkpoints", model=model, disk_every=5) as checkpoint:
        step = checkpoint.restore(allow_fresh_start=True)
        going = True
        while going:
            _obey(folder / f"exit_{rank}")
            word = torch.tensor([float((folder / "finish").exists())])
            dist.all_reduce(word)
            stop = resilience.stop_requested()
            going = word.item() == 0 and not stop
            checkpoint.save(step, disk=stop or None)
            resilience.heartbeat(step)
            say("step", rank=rank, step=step, node=os.environ.get("SLURMD_NODENAME", ""))
            step += 1
            time.sleep(0.05)
    dist.destroy_process_group()


def _obey(order: Path) -> None:
    if order.exists():
        code = int(order.read_text())
        order.unlink()
        os._exit(code)


if __name__ == "__main__":
    main()
