"""Checkpoints of others, read and taken over: ``torch.distributed.checkpoint`` (DCP), ``torch.save``, safetensors.

The first two hold pickles. Values in them are read by torch's own unpickler for weights, the description of a DCP directory by one
that knows the few classes which that is made of: neither runs anything that a file asks for.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import pickle  # restricted, see below
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from resilience.checkpoint import stores
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.optimizers import is_state
from resilience.errors import CheckpointError, nearest

_METADATA = "torch.distributed.checkpoint.metadata"
_DESCRIBING = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_METADATA, f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
    (_METADATA, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("collections", "OrderedDict"),
}
_DTYPES = {name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype)}
_ASKED_FOR = re.compile(r"Unsupported (?:global: GLOBAL|class) ([\w.]+)")
_ARGUMENTS = {
    name
    for name, parameter in inspect.signature(FlashCheckpoint.__init__).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
}
_MOST_NAMES = 12


def read(path: Path, *, flat: bool = False) -> dict[str, Any]:
    """Return the nested state that is in a directory of DCP, in a file of ``torch.save`` or in one of safetensors.

    Tensors come whole. ``flat``: those of a safetensors file under their full names. Raises :class:`CheckpointError` for what is
    none of them, and for values that can't be had without running what is in the file.
    """
    with _told(path), _quiet():
        if path.is_dir():
            found = _read_dcp(path)
        elif path.suffix == ".safetensors":
            found = _read_safetensors(path, flat)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"{path}: a {type(found).__name__} where parts by their names were expected.")
    return found


def take_over(path: Path, directory: stores.Where, step: int, names: Mapping[str, str]) -> None:
    """Write what :func:`read` finds into a directory of ours, as the state after ``step``. Any number of ranks restores it.

    ``names``: see :func:`named`.
    """
    found = read(path, flat="" in names)
    try:
        state = named(found, names)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error} Nothing was written.") from error
    held: dict[str, Any] = {name: _Held(as_we_have_it(part, state)) for name, part in state.items()}
    if stores.opened(directory).stored():
        raise CheckpointError(f"{directory} has checkpoints already. Nothing was written. Give another directory.")
    with FlashCheckpoint(str(directory), rng=False, disk_every=None, **held) as checkpoint:
        checkpoint.save(step, disk=True)


def named(found: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return parts by the names that they have here. Raises :class:`CheckpointError` for what nobody could restore. Pure.

    ``names``: what they are called, where that differs; those that are called nothing are left out. That of ``""`` is for
    everything: all of it is one part.
    """
    if "" in names:
        if len(names) > 1 or not names[""]:
            raise CheckpointError("--name =OURS takes everything as one part: give that name, and no other --name.")
        found = {"": found}
    for theirs in names:
        if theirs not in found:
            raise CheckpointError(f"--name {theirs}=…: there is no such part.{nearest(theirs, found)} {_listed(found)}")
    state: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for theirs, part in found.items():
        name = names.get(theirs, theirs)
        if not name and theirs in names:
            continue
        if name in state:
            raise CheckpointError(
                f"the parts {origins[name]!r} and {theirs!r} would both be called {name!r}. Give one of them another name, --name "
                f"'{theirs}=…', or leave it out, --name '{theirs}='."
            )
        _check(theirs, name, part)
        state[name], origins[name] = part, theirs
    if not state:
        raise CheckpointError("there is no part in it to take over.")
    return state


def _check(theirs: str, name: str, part: Any) -> None:
    """Raise for a part that no ``FlashCheckpoint(…, name=…)`` could restore."""
    or_not = f", or leave it out, --name '{theirs}='." if theirs else "."  # nothing: all of it is that part
    if isinstance(part, torch.Tensor):
        raise CheckpointError(
            f"{theirs!r} is a tensor, where the state of a model or of something else was expected. If all of it is the state of "
            f"one model, take it as that, --name =model{or_not}"
        )
    if not name.isidentifier():
        raise CheckpointError(
            f"{name!r} is no name of a part. Give it one, --name '{theirs}=model'{or_not} If all of it is the state of one model, "
            "take it as that, --name =model."
        )
    if name in _ARGUMENTS:
        raise CheckpointError(
            f"{name!r} is an argument of FlashCheckpoint, which no part can be called as. Give it another name, --name "
            f"{theirs}=their_{name}{or_not}"
        )


def _listed(parts: Iterable[str]) -> str:
    known = sorted(map(repr, parts))
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return f"There is {', '.join(known[:_MOST_NAMES]) or 'nothing'}{more}."


def as_we_have_it(part: Any, state: Mapping[str, Any]) -> Any:
    """Return an optimizer's state with its parameters named as in a checkpoint of ours: ``0.weight`` of the part ``model`` is
    ``model.0.weight``. Anything else is returned as it is."""
    if not is_state(part):
        return part
    groups = part["param_groups"]
    params = [name for group in groups for name in group["params"]]
    owners = [name for name, module in state.items() if isinstance(module, dict) and module.keys() >= set(params)]
    if not params or not owners or not all(isinstance(name, str) for name in params):
        return part
    prefix = f"{owners[0]}."
    return {
        **part,
        "state": {f"{prefix}{name}": entry for name, entry in part["state"].items()},
        "param_groups": [{**group, "params": [f"{prefix}{name}" for name in group["params"]]} for group in groups],
    }


class _Held:
    """A state that is there already, as a part of a checkpoint."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        raise CheckpointError("there is nothing to load it into")


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}.") from error
    except Exception as error:  # whatever torch raises for bytes that are no checkpoint
        raise CheckpointError(f"{path} can't be read: {_in_words(error)}. Nothing was run of what is in it.") from error


def _in_words(error: Exception) -> str:
    """Say what an error is about. Torch would advise to run what is in a file: that is not passed on."""
    text = str(error)
    if isinstance(error, _StrangerError):
        return f"it asks for {text}, which no description of a checkpoint needs"
    if (asked := _ASKED_FOR.search(text)) is not None:
        return f"it asks for {asked[1]}, and only tensors and plain values are read"
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in text:
        return "it is damaged, or holds something else than tensors and plain values"
    first = text.splitlines()[0].rstrip(".") if text else "it ends too early"
    return f"{type(error).__name__}: {first}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Have torch keep to itself that this is one process, and what it tries in vain: what comes of it is told."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    before = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(before)


def _read_safetensors(path: Path, flat: bool) -> dict[str, Any]:
    from safetensors.torch import load_file  # noqa: PLC0415 - an extra

    tensors: dict[str, Any] = load_file(path)
    alone = tensors if flat else {name: tensor for name, tensor in tensors.items() if "." not in name}
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name not in alone:
            part, _, rest = name.partition(".")
            found.setdefault(part, {})[rest] = tensor
    if both := found.keys() & alone.keys():
        raise CheckpointError(
            f"{path}: {min(both)!r} is a tensor, and the name of a part too. Take all as one: --name =model."
        )
    return {**found, **alone}


class _StrangerError(Exception):
    """A pickle asks for something that is not known to be harmless."""


class _Description(pickle.Unpickler):
    """Reads the description of a DCP directory."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _DESCRIBING and not (module == "torch" and name in _DTYPES):
            raise _StrangerError(f"{module}.{name}")
        return super().find_class(module, name)


def _described(path: Path) -> Any:
    """Return the description of a DCP directory."""
    from torch.distributed.checkpoint.metadata import Metadata  # noqa: PLC0415 - takes its time, and only this needs it

    with open(path / ".metadata", "rb") as file, _told(path / ".metadata"):
        found = _Description(file).load()
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} can't be read: its .metadata describes no checkpoint.")
    return found


def _read_dcp(path: Path) -> dict[str, Any]:
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"{path} is no directory of torch.distributed.checkpoint: it has no .metadata.")
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415 - takes its time, and only this needs it
    from torch.distributed.checkpoint import state_dict_loader  # noqa: PLC0415
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner  # noqa: PLC0415

    description = _described(path)  # before torch is asked, which logs what goes wrong here with a traceback

    class Reader(dcp.FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return description

    class Planner(_EmptyStateDictLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: Any, value: Any) -> None:
            found = torch.load(value, weights_only=True)
            self.state_dict[read_item.dest_index.fqn] = found
            if self.flatten_state_dict:
                set_element = dcp._nested_dict.set_element
                set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], found)

    state: dict[str, Any] = {}
    try:
        state_dict_loader._load_state_dict(state, storage_reader=Reader(path), planner=Planner(), no_dist=True)
    except dcp.api.CheckpointException as error:  # no Exception, and a page of text around the one that it is about
        raise next(iter(error.failures.values()))[0] from None
    return state
