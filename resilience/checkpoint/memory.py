"""How much memory the slots will need, and whether there is that much."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from resilience.checkpoint import limits, sharding
from resilience.checkpoint.optimizers import Optimizer
from resilience.checkpoint.plan import SHARED
from resilience.checkpoint.state import Part
from resilience.errors import CheckpointError

available = limits.available


class NotEnoughMemory(CheckpointError):  # noqa: N818 - reads as what it is
    """The slots do not fit into what this machine or this control group has left."""


def check(nbytes: int, what: str, announce: Callable[[int, int], tuple[int, int, int]]) -> None:
    """Raise :class:`NotEnoughMemory` if ``nbytes`` more are more than there is.

    ``announce`` is told how many are wanted and how many are left; it returns how many were left before the ranks of this node
    began to take theirs, how many the others want, and how many more are left because of the question.
    """
    now, whose = available()
    before, others, freed = announce(nbytes, now)
    now += freed
    left = now if nbytes > now else before
    if nbytes > now or nbytes + others > before:
        beside = f" beside {others / 1e9:.2f} GB for other ranks of this node" if others else ""
        raise NotEnoughMemory(
            f"the snapshot memory needs {nbytes / 1e9:.2f} GB for {what}{beside}, and {whose} has {left / 1e9:.2f} GB left. "
            "Nothing was allocated. Give it more memory, or fewer slots (slots=2)."
        )


def missing_optimizer_state(parts: Iterable[Part], local_world: int) -> tuple[int, int]:
    """Return the bytes that the optimizers' state will take once they have made their first step, as far as it is not there: all
    that this rank stages, and of that what is its own."""
    total = own = 0
    for part in parts:
        if isinstance(part, Optimizer):
            shared = part.owner(torch.empty(0)) == SHARED
            share = -(-_missing(part.optimizer) // (local_world if shared else 1))
            total += share
            own += 0 if shared else share
    return total, own


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
