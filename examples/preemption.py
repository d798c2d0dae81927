"""Train with DDP, and leave together when the job is preempted: every rank saves at the same step, the next run goes on there.

resilience run --nproc-per-node=2 examples/preemption.py checkpoints
kill -TERM LAUNCHER      # or what your scheduler sends; exit code 79 means: start me again
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilience

STEPS = int(os.environ.get("STEPS", "2000"))


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write whole or not at all."""
    partial = path.with_suffix(".partial")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    partial.replace(path)


@resilience.record
def main() -> None:
    """Train from the last saved step to the end, or until somebody wants the job to stop."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "last.pt"
    with resilience.section("setup"):
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        start = 0
        if path.exists():
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            start = state["step"] + 1
    stopped = False
    loss = torch.zeros(())
    with resilience.expect_heartbeats():
        for step in range(start, STEPS):
            with resilience.section("step"):
                batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * 1000 + dist.get_rank()))
                loss = (model(batch) - batch.sin().sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            resilience.heartbeat(step)
            if step % 100 == 0 and dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.6f}", flush=True)
            stopped = resilience.stop_requested()
            if stopped or step == STEPS - 1:
                if dist.get_rank() == 0:
                    save(path, step, model, optimizer)
                print(f"rank {dist.get_rank()}: step {step} is the last one, loss {loss.item():.6f}", flush=True)
                break
    dist.barrier()  # nobody leaves before it is saved
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
