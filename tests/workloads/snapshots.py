"""Ranks whose state at every step is known in advance, so that whatever is restored can be checked to the bit.

    snapshots.py DIRECTORY STEPS [KIBIBYTES]

``model`` is the same on all ranks (staged once, divided), ``own`` is each rank's. With MODE=overlap there is a module with an
optimizer too, copied behind the next step; with MODE=fsdp2 that is sharded over the ranks. Notes in $PROGRESS/rank_<r>:
``restored-<step>`` or ``fresh``, ``BAD-…`` if it is not what it was, ``complete-<step>``, ``replicated-<step>`` and
``durable-<step>`` as acknowledged. With REPLICAS=1 another node keeps copies. With UNTIL_LOST=1 cycle 0 goes on until somebody ends
it, and the next one makes STEPS more. With DISK_UNTIL nothing from that step on goes to disk in cycle 0, so that what is in memory
gets ahead of the disk and stays there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import resilience
from resilience.checkpoint import sharding
from resilience.checkpoint.receipt import Level, Receipt

RANK = int(os.environ.get("RANK", "0"))
CYCLE = int(os.environ.get("RESILIENCE_CYCLE", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
NOTES = Path(os.environ["PROGRESS"]) / f"rank_{RANK}"
DT = float(os.environ.get("DT", "0.01"))


def note(text: str) -> None:
    with NOTES.open("a") as file:
        file.write(f"{CYCLE} {text} {time.monotonic():.6f} {os.getpid()}\n")


class State:
    """Tensors that say at which step they were written, and by whom."""

    def __init__(self, who: int, numbers: int) -> None:
        self.who = who
        self.values = {
            "large": torch.zeros(numbers),
            "rows": torch.zeros(7, 11, dtype=torch.float64),
            "step": torch.zeros((), dtype=torch.int64),
            "grown": torch.zeros(1),
        }
        self.plain: dict[str, Any] = {}

    def advance(self, step: int) -> None:
        self.values["large"].fill_(step + self.who / 8)
        self.values["rows"].copy_(torch.arange(77, dtype=torch.float64).view(7, 11) * (step + 1) + self.who)
        self.values["step"].fill_(step)
        self.values["grown"] = torch.full((1 + step % 5,), float(step))  # another structure in every step
        self.plain = {"step": step, "who": self.who, "names": [f"item-{step}"] * (step % 3)}

    def is_of(self, step: int) -> bool:
        twin = State(self.who, self.values["large"].numel())
        twin.advance(step)
        same = all(torch.equal(self.values[name], twin.values[name]) for name in twin.values)
        return same and self.plain == twin.plain

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "plain": self.plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.plain = state["values"], state["plain"]


def here(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what this rank has of a tensor, and the number of each of its rows in the whole."""
    local, _, box = sharding.local(tensor)
    return local.detach(), torch.arange(box.offsets[0], box.offsets[0] + box.shape[0], dtype=local.dtype).unsqueeze(1)


class Marks(torch.optim.Optimizer):  # type: ignore[misc]
    """Writes the step into every row of every parameter, beside the row's number, and its half into their state."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module.parameters(), {"at": -1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["at"] += 1
            for parameter in group["params"]:
                local, rows = here(parameter)
                local.data.copy_((group["at"] + rows / 16).expand_as(local))  # no counter moves for that
                self.state[parameter] = {"half": torch.full_like(parameter, group["at"] / 2, requires_grad=False)}

    def is_of(self, step: int) -> bool:
        good = []
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            local, rows = here(parameter)
            half, _ = here(self.state[parameter]["half"])
            good.append(bool((local == step + rows / 16).all() and (half == step / 2).all()))
        return all(good) and self.param_groups[0]["at"] == step


def acknowledge(receipts: dict[int, Receipt]) -> None:
    """Note what is known by now of earlier saves."""
    for step, receipt in list(receipts.items()):
        level = receipt.level
        if level in (Level.COMPLETE, Level.REPLICATED, Level.DURABLE):
            note(f"{level.value.lower()}-{step}")
        # Copies may take seconds.
        if level in (Level.DURABLE, Level.SKIPPED, Level.FAILED) or step < max(receipts) - 200:
            del receipts[step]


@resilience.record
def main() -> None:
    directory, steps = sys.argv[1], int(sys.argv[2])
    numbers = int(sys.argv[3]) * 256 if len(sys.argv) > 3 else 1000
    model, own = State(0, numbers), State(RANK + 1, numbers // 4)
    module = torch.nn.Linear(numbers // 8, 7, bias=False)
    mode = os.environ.get("MODE", "blocking")
    lockstep = "LOCKSTEP" in os.environ  # as ranks are that reduce gradients: all save, and skip, at the same steps
    if lockstep or mode == "fsdp2":
        dist.init_process_group("gloo")
    if mode == "fsdp2":
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    marks = Marks(module)
    elastic = "ELASTIC" in os.environ  # nothing that belongs to single ranks
    things = (
        {"model": model}
        | ({} if elastic else {"own": own})
        | ({"module": module, "marks": marks} if mode != "blocking" else {})
    )
    how = "blocking" if mode == "blocking" else "overlap"
    disk_every = int(os.environ.get("DISK_EVERY", "3"))
    disk_until = int(os.environ.get("DISK_UNTIL", "1000000000")) if not int(CYCLE) else 1_000_000_000
    copies: dict[str, Any] = {"replicas": int(os.environ.get("REPLICAS", "0"))}
    if "BANDWIDTH" in os.environ:
        copies["replica_bandwidth"] = os.environ["BANDWIDTH"]
    with resilience.FlashCheckpoint(
        directory, disk_every=disk_every, replicated=["model"], mode=how, **copies, **things
    ) as checkpoint:
        note("restoring")
        start = checkpoint.restore(allow_fresh_start=True)
        note(f"restored-{start - 1}" if start else "fresh")
        marked = mode == "blocking" or not start or marks.is_of(start - 1)
        if start and not (model.is_of(start - 1) and (elastic or own.is_of(start - 1)) and marked):
            note(f"BAD-{start - 1}")
            os._exit(3)
        receipts: dict[int, Receipt] = {}
        if elastic or "UNTIL_LOST" in os.environ:  # until it begins again with others, and then so many steps more
            steps = start + steps if int(CYCLE) else 1_000_000
        for step in range(start, steps):
            with resilience.section("step"):
                model.advance(step)
                own.advance(step)
                marks.step()
                time.sleep(DT)
                if lockstep:
                    dist.barrier()
            receipts[step] = checkpoint.save(
                step, disk=None if step < disk_until else False, wait=60 if step == steps - 1 else 0
            )
            acknowledge(receipts)
            note(f"step-{step}")
            resilience.heartbeat(step)
    note("end")


if __name__ == "__main__":
    main()
