"""What a checkpoint is made of, and how each part gets its state back.

Modules and optimizers are treated with care: a module's tensors are written in place (no second copy of the model), an optimizer's
state goes by parameter name. Everything else has ``state_dict()`` and ``load_state_dict()``. The random states of Python, numpy,
torch and the device are a part of their own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeGuard

import torch

from resilience.checkpoint.plan import LEADER, OWN, PLAIN_TENSORS, SHARED
from resilience.checkpoint.reading import Ref, Source
from resilience.errors import CheckpointError

_CPU = torch.device("cpu")


class Part(Protocol):
    """One part of a checkpoint."""

    name: str

    def state(self) -> Any:
        """Return its state now. Tensors may be the live ones: they are copied before training goes on."""

    def owner(self, tensor: torch.Tensor) -> int:
        """Return whose a tensor of the state is."""

    def check(self, tree: Any, source: Source, strict: bool) -> list[str]:
        """Return what stands against loading ``tree``, in words."""

    def load(self, tree: Any, source: Source) -> None:
        """Take over a state. Shares no memory with ``source`` afterwards."""


def unwrap(module: torch.nn.Module) -> tuple[torch.nn.Module, bool, bool]:
    """Return the module inside DDP, whether it is replicated, and whether its buffers are too."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return module.module, True, bool(module.broadcast_buffers)
    return module, False, False


class Module:
    """A ``torch.nn.Module``, with or without DDP around it."""

    def __init__(self, name: str, module: torch.nn.Module, replicated: bool) -> None:
        self.name = name
        self.module, wrapped, same_buffers = unwrap(module)
        self.replicated = replicated or wrapped
        self._buffer_owner = LEADER if same_buffers or (replicated and not wrapped) else OWN
        refuse_sharded(name, self.module)

    def state(self) -> Any:
        """See :class:`Part`."""
        return dict(self.module.state_dict(keep_vars=True))

    def owner(self, tensor: torch.Tensor) -> int:
        """See :class:`Part`."""
        if not self.replicated:
            return OWN
        is_parameter = type(tensor) is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter)  # that asks Python
        return SHARED if is_parameter else self._buffer_owner

    def check(self, tree: Any, source: Source, strict: bool) -> list[str]:
        """See :class:`Part`."""
        if not isinstance(tree, dict):
            return [f"{self.name}: what was saved is no module's state"]
        live = self.state()
        said = []
        if strict:
            said += _names(f"{self.name}: in the model, not in the checkpoint", live.keys() - tree.keys())
            said += _names(f"{self.name}: in the checkpoint, not in the model", tree.keys() - live.keys())
        for key in live.keys() & tree.keys():
            ref, tensor = tree[key], live[key]
            if isinstance(ref, Ref) and isinstance(tensor, torch.Tensor):
                said += ref.differs(f"{self.name}.{key}", tensor, source)
        return said

    def load(self, tree: Any, source: Source) -> None:
        """See :class:`Part`."""
        live = self.state()
        own = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        plain = not _has_load_hooks(self.module)
        rest = {}
        for key, value in tree.items():
            tensor = live.get(key)
            if isinstance(value, Ref) and isinstance(tensor, torch.Tensor) and value.differs(key, tensor, source):
                continue  # was said; without ``strict`` it stays as it is
            in_place = plain and isinstance(value, Ref) and tensor is not None and id(tensor) in own
            if in_place and value.plain:
                source.copy_into(value.name, tensor)
            elif key in live:
                rest[key] = source.fresh(value)
        if rest:
            self.module.load_state_dict(rest, strict=False)


def refuse_sharded(name: str, module: torch.nn.Module) -> None:
    """Raise for modules whose state is spread over ranks in a way that is not known here."""
    kind = type(module).__name__
    if kind == "FullyShardedDataParallel" or kind.startswith("FSDP"):
        raise CheckpointError(
            f"{name} is wrapped in {kind}, whose sharded state is not supported yet. Nothing was set up. Use "
            "torch.distributed.checkpoint for it meanwhile."
        )


def _has_load_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody wants a word when a state is loaded: then torch's own way is gone."""
    standard = torch.nn.Module
    for part in module.modules():
        if part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks:
            return True
        if type(part).load_state_dict is not standard.load_state_dict:
            return True
        if not type(part)._load_from_state_dict.__module__.startswith("torch.nn."):
            return True
    return False


class Optimizer:
    """A ``torch.optim.Optimizer``. Its state is kept by the names of its parameters, not by their numbers."""

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], shared: Iterable[int]
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self._names = names
        parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        everywhere = set(shared)
        self._owner = SHARED if parameters and all(item in everywhere for item in parameters) else OWN
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise CheckpointError(
                f"{name} is a ZeroRedundancyOptimizer: its state is spread over ranks and would take a collective in every save. "
                "Nothing was set up. Use FSDP2, or a plain optimizer under DDP."
            )

    def owner(self, tensor: torch.Tensor) -> int:
        """See :class:`Part`."""
        return self._owner

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _order(self) -> list[str]:
        """Return the names of the parameters in the order in which ``state_dict`` numbers them."""
        return [self._names.get(id(parameter), f"#{number}") for number, parameter in enumerate(self._parameters())]

    def state(self) -> Any:
        """See :class:`Part`."""
        raw, names = self.optimizer.state_dict(), self._order()
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in raw["param_groups"]]
        state = {names[key] if type(key) is int else key: value for key, value in raw["state"].items()}
        rest = {key: value for key, value in raw.items() if key not in ("state", "param_groups")}
        return {**rest, "state": state, "param_groups": groups}

    def check(self, tree: Any, source: Source, strict: bool) -> list[str]:
        """See :class:`Part`."""
        if not isinstance(tree, dict) or not {"state", "param_groups"} <= tree.keys():
            return [f"{self.name}: what was saved is no optimizer's state"]
        mine = set(self._order())
        saved = {name for group in tree["param_groups"] for name in group["params"]}
        if not strict:
            return []
        return [
            *_names(f"{self.name}: parameters of the optimizer that are not in the checkpoint", mine - saved),
            *_names(f"{self.name}: parameters in the checkpoint that are not the optimizer's", saved - mine),
        ]

    def load(self, tree: Any, source: Source) -> None:
        """See :class:`Part`. What was saved is written into the state that is there, as far as it fits. The optimizer's own
        ``load_state_dict`` has the last word: it keeps what it is given, unless the device or the type must be another."""
        usual = _is_usual(self.optimizer)
        fresh = source.fresh(tree, self._rooms(tree, source) if usual else None)
        numbers = {name: number for number, name in enumerate(self._order())}
        state = {numbers[name]: value for name, value in fresh["state"].items() if name in numbers}
        groups, first = [], 0
        for group in fresh["param_groups"]:
            last = first + sum(name in numbers for name in group["params"])
            params = range(first, last)  # the numbers of now, in their order: the state goes by name
            # torch looks up every tensor in there; in a list that takes the square of their number
            groups.append({**group, "params": params if usual else list(params)})
            first = last
        self.optimizer.load_state_dict({**fresh, "state": state, "param_groups": groups})

    def _rooms(self, tree: Any, source: Source) -> dict[str, torch.Tensor]:
        """Return those tensors of the state now that can take what was saved, by its name. Each has its memory to itself: what is
        written into it changes nothing else."""
        parameters = dict(zip(self._order(), self._parameters(), strict=True))
        memories = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
        rooms: dict[str, torch.Tensor] = {}
        for name, entry in tree["state"].items():
            live = self.optimizer.state.get(parameters.get(name)) or {}
            for key, ref in entry.items() if isinstance(entry, dict) else ():
                tensor = live.get(key)
                if type(ref) is not Ref or not _takes(tensor, ref, source):
                    continue
                device = parameters[name].device if key != "step" else _CPU  # where torch would bring a new one
                memory = tensor.untyped_storage().data_ptr()
                if tensor.device in (_CPU, device) and memory not in memories:
                    memories.add(memory)
                    rooms[ref.name] = tensor
        return rooms


def _is_usual(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody but torch has a word when its state is taken or loaded, and its parameters are plain ones."""
    kind, base = type(optimizer), torch.optim.Optimizer
    hooks = (
        optimizer._optimizer_state_dict_pre_hooks,
        optimizer._optimizer_state_dict_post_hooks,
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    )
    return (
        kind.state_dict is base.state_dict
        and kind.load_state_dict is base.load_state_dict
        and not {"state_dict", "load_state_dict"} & vars(optimizer).keys()
        and not any(hooks)
        and {type(one) for group in optimizer.param_groups for one in group["params"]} <= PLAIN_TENSORS
    )


def _takes(tensor: Any, ref: Ref, source: Source) -> TypeGuard[torch.Tensor]:
    """Whether a tensor is what a new one made of ``ref`` would be, but for its numbers and its device."""
    return (
        type(tensor) is torch.Tensor
        and not ref.form
        and (tuple(tensor.shape), tensor.dtype) == (source.shape_of(ref.name), source.dtype_of(ref.name))
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


class Stateful:
    """Anything with ``state_dict`` and ``load_state_dict``: loaders, schedulers, samplers, gradient scalers."""

    def __init__(self, name: str, thing: Any, replicated: bool = False) -> None:
        self.name = name
        self.thing = thing
        self._owner = SHARED if replicated else OWN

    def state(self) -> Any:
        """See :class:`Part`."""
        return self.thing.state_dict()

    def owner(self, tensor: torch.Tensor) -> int:
        """See :class:`Part`."""
        return self._owner

    def check(self, tree: Any, source: Source, strict: bool) -> list[str]:
        """See :class:`Part`."""
        return []

    def load(self, tree: Any, source: Source) -> None:
        """See :class:`Part`."""
        self.thing.load_state_dict(source.fresh(tree))


class Random:
    """The random states of this rank: Python, numpy, torch, and the device in use."""

    name = "rng"

    def state(self) -> Any:
        """See :class:`Part`."""
        found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            found["numpy"] = numpy.random.get_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # not run on a GPU yet
            found["cuda"] = torch.cuda.get_rng_state()
        return found

    def owner(self, tensor: torch.Tensor) -> int:
        """See :class:`Part`."""
        return OWN

    def check(self, tree: Any, source: Source, strict: bool) -> list[str]:
        """See :class:`Part`."""
        return []

    def load(self, tree: Any, source: Source) -> None:
        """See :class:`Part`."""
        found = source.fresh(tree)
        setters: dict[str, Callable[[Any], None]] = {
            "python": random.setstate,
            "torch": torch.set_rng_state,
            "numpy": _set_numpy,
            "cuda": _set_cuda,
        }
        for name, state in found.items():
            setters[name](state)


def _set_numpy(state: Any) -> None:
    import numpy  # noqa: PLC0415

    numpy.random.set_state(state)


def _set_cuda(state: Any) -> None:
    if torch.cuda.is_available():  # not run on a GPU yet
        torch.cuda.set_rng_state(state)


def _names(what: str, names: Iterable[str]) -> list[str]:
    found = sorted(names)
    shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    return [f"{what}: {shown}"] if found else []


def parts_of(things: Mapping[str, Any], replicated: Iterable[str], rng: bool) -> list[Part]:
    """Return the parts of a checkpoint of these things."""
    modules = {name: thing for name, thing in things.items() if isinstance(thing, torch.nn.Module)}
    declared = set(replicated)
    found: list[Part] = []
    names: dict[int, str] = {}
    shared: list[int] = []
    for name, thing in modules.items():
        part = Module(name, thing, name in declared)
        found.append(part)
        prefix = "" if len(modules) == 1 else f"{name}."
        for key, parameter in part.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), f"{prefix}{key}")
            shared += [id(parameter)] if part.replicated else []
    for name, thing in things.items():
        if name in modules:
            continue
        if isinstance(thing, torch.optim.Optimizer):
            found.append(Optimizer(name, thing, names, shared))
        else:
            found.append(Stateful(name, thing, name in declared))
    return [*found, Random()] if rng else found
