"""What a checkpoint is made of, and how each part gets its state back.

Modules are treated with care: a module's tensors are written in place, so that there is no second copy of the model. Optimizers
have a room of their own, :mod:`optimizers`. Everything else has ``state_dict()`` and ``load_state_dict()``. The random states of
Python, numpy, torch and the device are a part of their own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from resilience.checkpoint import digest, sharding
from resilience.checkpoint.optimizers import Names, Optimizer
from resilience.checkpoint.plan import LEADER, OWN, SHARED
from resilience.checkpoint.source import Ref, Source, compared
from resilience.checkpoint.together import Together
from resilience.errors import CheckpointError


class Part(Protocol):
    """One part of a checkpoint."""

    name: str
    together: bool  # whether its state takes all ranks to form
    weights: bool  # whether it is what ``weights_only`` restores

    @property
    def any_world(self) -> bool:
        """Whether its state means the same to any rank of a job with more or fewer of them."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that it keeps the state of, if that is what it does: a rollback drops the gradients it would use."""

    def state(self) -> Any:
        """Return its state now. Tensors may be the live ones: they are copied before training goes on."""

    def owner(self, tensor: torch.Tensor) -> int:
        """Return whose a tensor of the state is."""

    def check(self, tree: Any, source: Source, strict: bool) -> list[str]:
        """Return what stands against loading ``tree``, in words."""

    def load(self, tree: Any, source: Source) -> None:
        """Take over a state. Shares no memory with ``source`` afterwards."""


@dataclass(frozen=True)
class Wrapping:
    """What is around a module. ``ddp``: the ranks that DDP keeps equal; 0 without it. ``buffers``: their buffers too."""

    ddp: int = 0
    buffers: bool = False

    @property
    def everywhere(self) -> bool:
        """Whether it is the same on all ranks of the job."""
        return bool(self.ddp) and self.ddp == torch.distributed.get_world_size()

    @property
    def partial(self) -> bool:
        """Whether it is the same on some ranks only: each group of them has a part of the model of its own, as with tensor or
        pipeline parallelism beside DDP."""
        return bool(self.ddp) and not self.everywhere


def unwrap(module: torch.nn.Module) -> tuple[torch.nn.Module, Wrapping]:
    """Return the module inside DDP and ``torch.compile``, and what is around it."""
    found = Wrapping()
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            found, module = Wrapping(module.process_group.size(), bool(module.broadcast_buffers)), module.module
        elif type(module).__name__ == "OptimizedModule":  # its module would import the whole compiler
            module = module._orig_mod
        else:
            return module, found


class Module:
    """A ``torch.nn.Module``, with or without DDP around it, or sharded by FSDP2."""

    together = False
    weights = True
    optimizer = None

    def __init__(self, name: str, module: torch.nn.Module, replicated: bool) -> None:
        self.name = name
        self.module, around = unwrap(module)
        self.replicated = replicated or around.everywhere
        self.any_world = replicated or not around.partial
        self._buffer_owner = LEADER if self.replicated and (around.buffers or not around.ddp) else OWN
        self.seen: dict[str, Any] = {}
        self._unfit: set[str] = set()  # keys of what was saved and does not fit, as the last check found

    def state(self) -> Any:
        """See :class:`Part`."""
        self.seen = dict(self.module.state_dict(keep_vars=True))
        return self.seen

    def owner(self, tensor: torch.Tensor) -> int:
        """See :class:`Part`."""
        if not self.replicated:
            return OWN
        is_parameter = type(tensor) is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter)  # that asks Python
        return SHARED if is_parameter else self._buffer_owner

    def check(self, tree: Any, source: Source, strict: bool) -> list[str]:
        """See :class:`Part`."""
        said, self._unfit = compared(self.name, self.state(), tree, source)
        return said

    def differs_by_rank(self, source: Source) -> bool:
        """Whether the module was not the same on all ranks, as far as its largest trained tensor tells. That may be so though it is
        replicated now."""
        trained = [
            (one.numel(), key)
            for key, one in self.state().items()
            if isinstance(one, torch.nn.Parameter) and one.requires_grad and not sharding.is_sharded(one)
        ]
        return bool(trained) and source.differs(f"{self.name}.{max(trained)[1]}")

    def load(self, tree: Any, source: Source) -> None:
        """See :class:`Part`."""
        live = self.state()
        own = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        plain = not _has_load_hooks(self.module)
        rest, in_place = {}, []
        for key, value in tree.items():
            tensor = live.get(key)
            if key in self._unfit or key not in live:
                continue  # was said; without ``strict`` it stays as it is
            if plain and type(value) is Ref and value.plain and id(tensor) in own:
                in_place.append((value.name, tensor))
            elif type(value) is Ref and sharding.is_sharded(tensor):
                rest[key] = sharding.like(tensor, torch.empty_like(sharding.local(tensor).tensor, requires_grad=False))
                in_place.append((value.name, rest[key]))
            else:
                rest[key] = source.fresh(value)
        source.copy_all(in_place)
        if rest:
            self.module.load_state_dict(rest, strict=False)


def _has_load_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody wants a word when a state is loaded: then torch's own way is gone."""
    standard = torch.nn.Module
    for part in module.modules():
        if part._load_state_dict_post_hooks or not all(map(_is_fsdps, part._load_state_dict_pre_hooks.values())):
            return True
        if type(part).load_state_dict is not standard.load_state_dict:
            return True
        if not type(part)._load_from_state_dict.__module__.startswith("torch.nn."):
            return True
    return False


def _is_fsdps(hook: Any) -> bool:
    """Whether a hook is that of FSDP2, which has the parameters sharded: they are, since their state was looked at."""
    module = getattr(getattr(hook, "hook", hook), "__module__", "")
    return str(module).startswith("torch.distributed.fsdp._fully_shard")


# As training goes; not said of their tensors.
_SAME_ON_ALL = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


class Stateful:
    """Anything with ``state_dict`` and ``load_state_dict``: loaders, schedulers, samplers, gradient scalers."""

    together = False
    weights = False
    optimizer = None

    def __init__(self, name: str, thing: Any, replicated: bool = False) -> None:
        self.name = name
        self.thing = thing
        self.any_world = replicated or isinstance(thing, _SAME_ON_ALL)
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
    any_world = False
    together = False
    weights = False
    optimizer = None

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

    def derive(self, tree: Any, source: Source, rank: int) -> None:
        """Begin as a rank that was not there: from what rank 0 had, and the rank. The same every time, and no other rank's."""
        found = source.fresh(tree)
        seed = int(digest.digest(memoryview(found["torch"].numpy().tobytes() + b"%d" % rank))[:15], 16)
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in found:
            _seed_numpy(seed % (1 << 32))


def _seed_numpy(seed: int) -> None:
    import numpy  # noqa: PLC0415

    numpy.random.seed(seed)


def _set_numpy(state: Any) -> None:
    import numpy  # noqa: PLC0415

    numpy.random.set_state(state)


def _set_cuda(state: Any) -> None:
    if torch.cuda.is_available():  # not run on a GPU yet
        torch.cuda.set_rng_state(state)


def parts_of(things: Mapping[str, Any], replicated: Iterable[str], rng: bool) -> tuple[list[Part], Together]:
    """Return the parts of a checkpoint of these things, and how ranks agree on what they do together."""
    declared, ranks = set(replicated), Together(needed=False)
    modules: dict[str, Any] = {
        name: _module(name, thing, name in declared, ranks)
        for name, thing in things.items()
        if isinstance(thing, torch.nn.Module)
    }
    ranks.needed = any(module.together for module in modules.values())
    found: list[Part] = list(modules.values())
    names = Names(list(modules.values()))
    for name, thing in things.items():
        if isinstance(thing, torch.optim.Optimizer):
            found.append(_optimizer(name, thing, names, [one for one in modules.values() if one.together], ranks))
        elif name not in modules:
            found.append(Stateful(name, thing, name in declared))
    return [*found, Random()] if rng else found, ranks


def _module(name: str, thing: torch.nn.Module, replicated: bool, ranks: Together) -> Part:
    if _has_fsdp1(thing):
        from resilience.checkpoint import fsdp1  # noqa: PLC0415 - takes half a second to import

        return fsdp1.Module(name, thing, ranks)
    return Module(name, thing, replicated)


def _optimizer(
    name: str, optimizer: torch.optim.Optimizer, names: Names, wrapped: Sequence[Any], ranks: Together
) -> Part:
    if not wrapped:
        return Optimizer(name, optimizer, names)
    from resilience.checkpoint import fsdp1  # noqa: PLC0415 - as above

    theirs = {id(one) for group in optimizer.param_groups for one in group["params"]}
    owners = [module for module in wrapped if theirs & {id(one) for one in module.module.parameters()}]
    if len(owners) != 1 or not theirs <= {id(one) for one in owners[0].module.parameters()}:
        raise CheckpointError(
            f"{name}: its parameters are not those of one model in FullyShardedDataParallel. Nothing was set up. Give each such "
            "model an optimizer of its own, or use FSDP2 (fully_shard)."
        )
    return fsdp1.Optimizer(name, optimizer, owners[0], ranks)


def _has_fsdp1(module: torch.nn.Module) -> bool:
    """Whether FSDP1 is in a module, without importing it where nobody has."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in module.modules())
