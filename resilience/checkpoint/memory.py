"""How much memory the slots will need, and whether there is that much."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from resilience.checkpoint import sharding
from resilience.checkpoint.optimizers import Optimizer
from resilience.checkpoint.plan import SHARED
from resilience.checkpoint.state import Part
from resilience.errors import CheckpointError

_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_NO_LIMIT = 1 << 60


class NotEnoughMemory(CheckpointError):  # noqa: N818 - reads as what it is
    """The slots do not fit into what this machine or this control group has left."""


def check(nbytes: int, what: str, announce: Callable[[int, int], tuple[int, int]]) -> None:
    """Raise :class:`NotEnoughMemory` if ``nbytes`` more are more than there is.

    ``announce`` is told how many are wanted and how many are left; it returns how many were left before the ranks of this node
    began to take theirs, and how many the others want.
    """
    now, whose = available()
    before, others = announce(nbytes, now)
    left = now if nbytes > now else before
    if nbytes > now or nbytes + others > before:
        beside = f" beside {others / 1e9:.2f} GB for other ranks of this node" if others else ""
        raise NotEnoughMemory(
            f"the snapshot memory needs {nbytes / 1e9:.2f} GB for {what}{beside}, and {whose} has {left / 1e9:.2f} GB left. "
            "Nothing was allocated. Give it more memory, or fewer slots (slots=2)."
        )


def available() -> tuple[int, str]:
    """Return how much memory may still be used, and by whose limit: the machine's, or that of a control group (v1 or v2)."""
    machine = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    found = [(machine or _NO_LIMIT, "the machine")]
    for group in _groups():
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None and limit < _NO_LIMIT:
                cache = _field(group / "memory.stat", cache_name)  # the kernel takes that back when it has to
                found.append((limit - used + cache, f"the control group ({limit / 1e9:.2f} GB)"))
    return min(found)


def _groups() -> Iterable[Path]:
    """Yield this process's memory control groups, from its own up to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root = _V1
        elif number == "0" and (_V2 / "cgroup.controllers").exists():
            root = _V2
        else:
            continue
        folder = root / path.lstrip("/")
        folder = folder if folder.is_dir() else root
        while folder != root.parent:
            yield folder
            folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int:
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    return next((int(row[1]) for row in rows if row and row[0] == name), 0)


def missing_optimizer_state(parts: Iterable[Part], local_world: int) -> int:
    """Return the bytes that the optimizers' state will take once they have made their first step, as far as it is not there."""
    total = 0
    for part in parts:
        if isinstance(part, Optimizer):
            share = local_world if part.owner(torch.empty(0)) == SHARED else 1
            total += -(-_missing(part.optimizer) // share)
    return total


def _missing(optimizer: torch.optim.Optimizer) -> int:
    """Try one step on the meta device, where nothing is computed and nothing is changed; see what state comes of it."""
    absent = [
        {**group, "params": [parameter for parameter in group["params"] if not optimizer.state.get(parameter)]}
        for group in optimizer.param_groups
    ]
    parameters = [parameter for group in absent for parameter in group["params"] if parameter.requires_grad]
    if not parameters:
        return 0
    try:
        state = _rehearse(optimizer, absent)
    except Exception:  # noqa: BLE001 - any optimizer of the user's: then as much as Adam's
        here = [sharding.local(parameter).tensor for parameter in parameters]
        return sum(2 * tensor.numel() * max(4, tensor.element_size()) for tensor in here)
    tensors = [value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _rehearse(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Any:
    twin = copy.copy(optimizer)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in groups:
        fake = []
        for parameter in group["params"]:
            if parameter.requires_grad:
                here = sharding.local(parameter).tensor
                shadow = torch.empty_like(here, device="meta", requires_grad=False).requires_grad_()
                shadow.grad = torch.empty_like(shadow)
                fake.append(shadow)
        settings = {key: value for key, value in group.items() if key != "params"}
        twin.param_groups.append({**settings, "params": fake, "fused": False, "foreach": False, "capturable": False})
    twin.step()
    return twin.state
