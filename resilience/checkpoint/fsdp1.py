"""Models in ``FullyShardedDataParallel`` (FSDP1), and their optimizers.

It keeps parameters flat and cut anywhere, so its state has to be brought into rows by collectives, in every save and in every
restore: FSDP2 needs none. What is kept is the same for both, and either restores what the other has saved. Parameters are not
staged behind the training (``mode="overlap"``): what is kept is a copy already.

Not run on a GPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig

from resilience.checkpoint import sharding
from resilience.checkpoint.optimizers import KIND, kind_of
from resilience.checkpoint.plan import OWN
from resilience.checkpoint.source import Ref, Source, compared, few_names
from resilience.checkpoint.together import Together
from resilience.errors import CheckpointError


@contextlib.contextmanager
def _sharded(module: torch.nn.Module) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own about parts of itself that are to go
        warnings.simplefilter("ignore", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            module, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        ):
            yield


class Module:
    """A module with FSDP1 in it."""

    any_world = True
    together = True
    weights = True
    optimizer = None

    def __init__(self, name: str, module: torch.nn.Module, ranks: Together) -> None:
        self.name = name
        self.module = module
        self.replicated = False
        self._ranks = ranks
        self._unfit: set[str] = set()
        self.seen: dict[str, Any] = {}

    def state(self) -> Any:
        """See :class:`state.Part`. All ranks call it."""
        with _sharded(self.module):
            self.seen = dict(self.module.state_dict())
        return self.seen

    def owner(self, tensor: torch.Tensor) -> int:
        """See :class:`state.Part`."""
        return OWN

    def check(self, tree: Any, source: Source, strict: bool) -> list[str]:
        """See :class:`state.Part`. All ranks call it."""
        said, self._unfit = compared(self.name, self.state(), tree, source)
        return said

    def load(self, tree: Any, source: Source) -> None:
        """See :class:`state.Part`. All ranks call it, and it is loaded on all or on none."""
        live = dict(self.seen)
        with self._ranks.or_none():
            tensors = [key for key in live if key not in self._unfit and _is_tensor(live[key])]
            source.copy_all((tree[key].name, live[key]) for key in tensors)
            rest = live.keys() - set(tensors) - self._unfit
            live |= {key: source.fresh(tree[key]) for key in rest}
        with _sharded(self.module):
            self.module.load_state_dict(live)


class Optimizer:
    """The optimizer of a module with FSDP1 in it."""

    any_world = True
    together = True
    weights = False

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, module: Module, ranks: Together) -> None:
        self.name = name
        self.optimizer = optimizer
        self._module = module
        self._ranks = ranks

    def owner(self, tensor: torch.Tensor) -> int:
        """See :class:`state.Part`."""
        return OWN

    def state(self) -> Any:
        """See :class:`state.Part`. All ranks call it. Parameters are named as by an optimizer without FSDP."""
        with _sharded(self._module.module):
            raw = FullyShardedDataParallel.optim_state_dict(self._module.module, self.optimizer)
        prefix = f"{self._module.name}."
        groups = [{**group, "params": [prefix + name for name in group["params"]]} for group in raw["param_groups"]]
        state = {prefix + name: entry for name, entry in raw["state"].items()}
        return {"state": state, "param_groups": groups, KIND: kind_of(self.optimizer)}

    def check(self, tree: Any, source: Source, strict: bool) -> list[str]:
        """See :class:`state.Part`. All ranks call it."""
        live = self.state()
        if not isinstance(tree, dict) or not {"state", "param_groups"} <= tree.keys():
            return [f"{self.name}: what was saved is no optimizer's state"]
        mine, saved = ([name for group in one["param_groups"] for name in group["params"]] for one in (live, tree))
        said = few_names(
            f"{self.name}: parameters of the optimizer that are not in the checkpoint", set(mine) - set(saved)
        )
        said += few_names(
            f"{self.name}: parameters in the checkpoint that are not the optimizer's", set(saved) - set(mine)
        )
        if tree.get(KIND, live[KIND]) != live[KIND]:
            said.append(f"{self.name} is a {live[KIND]}, in the checkpoint a {tree[KIND]}")
        if len(live["param_groups"]) != len(tree["param_groups"]):
            said.append(f"{self.name}: its parameters are grouped in another way than in the checkpoint")
        if said and not strict:
            raise CheckpointError(f"{'; '.join(said)}. An optimizer of FSDP1 is restored whole or not at all.")
        return said

    def load(self, tree: Any, source: Source) -> None:
        """See :class:`state.Part`. All ranks call it, and it is loaded on all or on none."""
        prefix, patterns = f"{self._module.name}.", self._module.seen
        with self._ranks.or_none():
            rooms: dict[str, Any] = {}
            for name, entry in tree["state"].items():
                pattern = patterns[name.removeprefix(prefix)]
                for ref in entry.values():
                    if type(ref) is Ref and not ref.form and source.shape_of(ref.name) == tuple(pattern.size()):
                        rooms[ref.name] = sharding.empty_like(pattern, source.dtype_of(ref.name))
            fresh = source.fresh(tree, rooms)
            state = {name.removeprefix(prefix): entry for name, entry in fresh["state"].items()}
            groups = [
                {**group, "params": [name.removeprefix(prefix) for name in group["params"]]}
                for group in fresh["param_groups"]
            ]
        with _sharded(self._module.module):
            flat = FullyShardedDataParallel.optim_state_dict_to_load(
                self._module.module, self.optimizer, {"state": state, "param_groups": groups}
            )
            self.optimizer.load_state_dict(flat)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or sharding.is_sharded(value)
