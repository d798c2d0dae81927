"""How an optimizer's state is kept and given back: by the names of its parameters, not by their numbers.

The names are those that the modules of the same checkpoint give them now: parameters may be replaced, resized and regrouped while
a job runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch

from resilience.checkpoint import sharding
from resilience.checkpoint.plan import OWN, PLAIN_TENSORS, SHARED
from resilience.checkpoint.source import Ref, Source, few_names
from resilience.errors import CheckpointError

_CPU = torch.device("cpu")


class Named(Protocol):
    """What names parameters: a module of the checkpoint."""

    name: str
    replicated: bool
    any_world: bool
    module: torch.nn.Module

    @property
    def seen(self) -> Mapping[str, Any]:
        """Its state when it was last looked at."""


class Names:
    """The names of the parameters of some modules, by identity. Looked at before every save; found anew only if they changed."""

    def __init__(self, modules: Sequence[Named]) -> None:
        self._modules = modules
        self._ids: list[int] | None = None
        self._names: dict[int, str] = {}
        self._shared: set[int] = set()

    def look(self) -> bool:
        """Look again; return whether anything has changed."""
        ids = [id(tensor) for module in self._modules for tensor in module.seen.values()]
        if ids == self._ids:  # an identity that was used again stands for the same name
            return False
        self._ids, self._names, self._shared = ids, {}, set()
        for module in self._modules:
            # A module may keep parameters out of its state; their names go last.
            for key, tensor in (*module.seen.items(), *module.module.named_parameters(remove_duplicate=False)):
                self._names.setdefault(id(tensor), f"{module.name}.{key}")
                if module.replicated:
                    self._shared.add(id(tensor))
        return True

    def of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """Return their names; those that no module has are numbered."""
        return [self._names.get(id(parameter), f"#{number}") for number, parameter in enumerate(parameters)]

    def are_shared(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all of them belong to replicated modules."""
        return bool(parameters) and all(id(parameter) in self._shared for parameter in parameters)

    def mean_the_same_anywhere(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether none of them belongs to a module that has a meaning of its own on some ranks."""
        theirs = (module.module.parameters() for module in self._modules if not module.any_world)
        return {id(one) for some in theirs for one in some}.isdisjoint(map(id, parameters))


class Optimizer:
    """A ``torch.optim.Optimizer``."""

    together = False
    weights = False

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, names: Names) -> None:
        self.name = name
        self.optimizer = optimizer
        self._names = names
        self._ids: list[int] | None = None
        self._order: list[str] = []
        self._owner = OWN
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise CheckpointError(
                f"{name} is a ZeroRedundancyOptimizer: its state is spread over ranks and would take a collective in every save. "
                "Nothing was set up. Use FSDP2, or a plain optimizer under DDP."
            )

    def owner(self, tensor: torch.Tensor) -> int:
        """See :class:`state.Part`."""
        return self._owner

    @property
    def any_world(self) -> bool:
        """See :class:`state.Part`."""
        return self._names.mean_the_same_anywhere(self._parameters())

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def order(self) -> list[str]:
        """Return the names of the parameters in the order in which ``state_dict`` numbers them."""
        parameters = self._parameters()
        ids = [id(parameter) for parameter in parameters]
        if self._names.look() or ids != self._ids:
            self._ids, self._order = ids, self._names.of(parameters)
            self._owner = SHARED if self._names.are_shared(parameters) else OWN
        return self._order

    def state(self) -> Any:
        """See :class:`state.Part`."""
        raw, names = self.optimizer.state_dict(), self.order()
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in raw["param_groups"]]
        state = {names[key] if type(key) is int else key: value for key, value in raw["state"].items()}
        rest = {key: value for key, value in raw.items() if key not in ("state", "param_groups")}
        return {**rest, "state": state, "param_groups": groups, KIND: kind_of(self.optimizer)}

    def check(self, tree: Any, source: Source, strict: bool) -> list[str]:
        """See :class:`state.Part`. Without ``strict``: what will be left as it is."""
        if not is_state(tree):
            return [f"{self.name}: what was saved is no optimizer's state"]
        tree = self._named(tree)
        mine, saved, kind = set(self.order()), _names_in(tree), tree.get(KIND, kind_of(self.optimizer))
        said = []
        if kind != kind_of(self.optimizer) and (strict or not self._has_settings_of(tree)):
            said.append(f"{self.name} is a {kind_of(self.optimizer)}, in the checkpoint a {kind}")
        said += few_names(f"{self.name}: parameters of the optimizer that are not in the checkpoint", mine - saved)
        said += few_names(f"{self.name}: parameters in the checkpoint that are not the optimizer's", saved - mine)
        said += few_names(f"{self.name}: parameters that have another shape now", self._reshaped(source))
        if strict and not said and None in self._partners(tree, strict):
            said.append(f"{self.name}: its parameters are grouped in another way than in the checkpoint")
        return said

    def load(self, tree: Any, source: Source) -> None:
        """See :class:`state.Part`. What was saved is written into the state that is there, as far as it fits. The optimizer's own
        ``load_state_dict`` has the last word: it keeps what it is given, unless the device or the type must be another."""
        tree = self._named(tree)
        if not self._has_settings_of(tree):
            return  # of another kind, and without ``strict``: it was said, and stays as it is
        usual, left_out = _is_usual(self.optimizer), self._reshaped(source)
        tree = {**tree, "state": {name: entry for name, entry in tree["state"].items() if name not in left_out}}
        partners = self._partners(tree, strict=False)
        fresh = source.fresh(tree, self._rooms(tree, source, usual))
        numbers = {name: number for number, name in enumerate(self.order())}
        state = {numbers[name]: value for name, value in fresh["state"].items() if name in numbers}
        groups, first = [], 0
        for group, partner in zip(self.optimizer.param_groups, partners, strict=True):
            params = range(first, first + len(group["params"]))
            settings = fresh["param_groups"][partner] if partner is not None else group
            # torch looks up every tensor in there; in a list that takes the square of their number
            groups.append({**settings, "params": params if usual else list(params)})
            first = params.stop
        rest = {key: value for key, value in fresh.items() if key != KIND}
        self.optimizer.load_state_dict({**rest, "state": state, "param_groups": groups})

    def _named(self, tree: Any) -> Any:
        """Return what was saved with names of parameters: a state of torch's own has their numbers, in the optimizer's order."""
        numbers, names = _names_in(tree), self.order()
        if numbers != set(range(len(names))):
            return tree
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in tree["param_groups"]]
        return {**tree, "state": {names[key]: entry for key, entry in tree["state"].items()}, "param_groups": groups}

    def _has_settings_of(self, tree: Any) -> bool:
        """Whether the groups of what was saved have the settings that this optimizer knows."""
        mine = {key for group in self.optimizer.param_groups for key in group}
        return tree.get(KIND, kind_of(self.optimizer)) == kind_of(self.optimizer) or all(
            mine == group.keys() for group in tree["param_groups"]
        )

    def _reshaped(self, source: Source) -> set[str]:
        """Return the parameters whose shape is not what it was: a state of the old shape is of no use to them."""
        found = zip(self.order(), self._parameters(), strict=True)
        return {name for name, parameter in found if source.shape_if_there(name) not in (None, tuple(parameter.shape))}

    def _partners(self, tree: Any, strict: bool) -> list[int | None]:
        """Return for each group the saved one with the same parameters; without ``strict`` the one with the most of them."""
        saved, found, first = [set(group["params"]) for group in tree["param_groups"]], [], 0
        for group in self.optimizer.param_groups:
            mine = set(self.order()[first : first + len(group["params"])])
            first += len(group["params"])
            common = [len(mine & other) for other in saved]
            best = max(range(len(saved)), key=lambda number: (saved[number] == mine, common[number]), default=None)
            fits = best is not None and (saved[best] == mine or (not strict and common[best] > 0))
            found.append(best if fits else None)
        return found

    def _rooms(self, tree: Any, source: Source, usual: bool) -> dict[str, torch.Tensor]:
        """Return tensors that can take what was saved, by its name: those of the state now, and new ones for what belongs to a
        parameter that is spread over ranks. Each has its memory to itself: what is written into it changes nothing else."""
        parameters = dict(zip(self.order(), self._parameters(), strict=True))
        memories = {_memory(parameter) for parameter in parameters.values()}
        rooms: dict[str, torch.Tensor] = {}
        for name, entry in tree["state"].items():
            parameter = parameters.get(name)
            if parameter is None or not isinstance(entry, dict):
                continue
            live = self.optimizer.state.get(parameter) or {}
            for key, ref in entry.items():
                tensor = live.get(key) if usual else None
                if type(ref) is not Ref:
                    continue
                if _takes(tensor, ref, source):
                    device = parameter.device if key != "step" else _CPU  # where torch would bring a new one
                    if tensor.device in (_CPU, device) and _memory(tensor) not in memories:
                        memories.add(_memory(tensor))
                        rooms[ref.name] = tensor
                if ref.name not in rooms and _is_spread(parameter, ref, source):
                    piece = sharding.local(parameter).tensor
                    rooms[ref.name] = sharding.like(
                        parameter, torch.empty_like(piece, dtype=source.dtype_of(ref.name), requires_grad=False)
                    )
        return rooms


KIND = "kind"


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return which optimizer it is."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def is_state(tree: Any) -> TypeGuard[dict[str, Any]]:
    """Whether it has the form of an optimizer's state: entries by parameter, and groups of parameters with their settings."""
    if not isinstance(tree, dict) or not isinstance(tree.get("state"), dict):
        return False
    groups = tree.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    params = [group.get("params") for group in groups]
    return all(
        isinstance(names, (list, tuple)) and all(isinstance(name, (str, int)) for name in names) for names in params
    )


def _names_in(tree: Any) -> set[Any]:
    return {name for group in tree["param_groups"] for name in group["params"]}


def _is_usual(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody but torch has a word when its state is taken or loaded, and its parameters are plain ones."""
    base = torch.optim.Optimizer
    hooks = (
        optimizer._optimizer_state_dict_pre_hooks,
        optimizer._optimizer_state_dict_post_hooks,
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    )
    return (
        getattr(optimizer.state_dict, "__func__", None) is base.state_dict
        and getattr(optimizer.load_state_dict, "__func__", None) is base.load_state_dict
        and not any(hooks)
        and all(
            type(one) in PLAIN_TENSORS or sharding.is_sharded(one)
            for group in optimizer.param_groups
            for one in group["params"]
        )
    )


def _memory(tensor: torch.Tensor) -> int:
    """Return where the bytes of a tensor are, or of what is here of it."""
    return int(sharding.local(tensor).tensor.untyped_storage().data_ptr())


def _is_spread(parameter: Any, ref: Ref, source: Source) -> bool:
    """Whether a value of a parameter's state is spread over ranks as the parameter is."""
    return hasattr(parameter, "device_mesh") and not ref.form and source.shape_of(ref.name) == tuple(parameter.shape)


def _takes(tensor: Any, ref: Ref, source: Source) -> TypeGuard[torch.Tensor]:
    """Whether a tensor is what a new one made of ``ref`` would be, but for its numbers and its device."""
    if ref.form or not (type(tensor) is torch.Tensor or hasattr(tensor, "device_mesh")):
        return False
    if (tuple(tensor.shape), tensor.dtype) != (source.shape_of(ref.name), source.dtype_of(ref.name)):
        return False
    here = sharding.local(tensor).tensor
    return here.is_contiguous() and not tensor.requires_grad and here.untyped_storage().nbytes() == here.nbytes
