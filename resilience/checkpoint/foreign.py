"""Checkpoints of others, read and taken over: ``torch.distributed.checkpoint`` (DCP), ``torch.save``, safetensors.

The first two hold pickles. Values in them are read by torch's own unpickler for weights, the description of a DCP directory by one
that knows the few classes which that is made of: neither runs anything that a file asks for.
"""

from __future__ import annotations

import contextlib
import logging
import pickle  # restricted, see below
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from resilience.checkpoint import stores
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.errors import CheckpointError

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


def read(path: Path) -> dict[str, Any]:
    """Return the nested state that is in a directory of DCP, in a file of ``torch.save`` or in one of safetensors.

    Tensors come whole. Raises :class:`CheckpointError` for what is none of them, and for values that can't be had without running
    what is in the file.
    """
    with _told(path), _quiet():
        if path.is_dir():
            found = _read_dcp(path)
        elif path.suffix == ".safetensors":
            found = _read_safetensors(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"{path}: a {type(found).__name__} where parts by their names were expected.")
    return found


def take_over(path: Path, directory: stores.Where, step: int, names: Mapping[str, str]) -> None:
    """Write what :func:`read` finds into a directory of ours, as the state after ``step``. Any number of ranks restores it.

    ``names``: what its parts are called here, where that differs; those that are called nothing are left out.
    """
    state = {name: part for theirs, part in read(path).items() if (name := names.get(theirs, theirs))}
    for name in state:
        if not name.isidentifier():
            raise CheckpointError(f"{path}: {name!r} is no name of a part. Give it one: --name '{name}=model'.")
    held: dict[str, Any] = {name: _Held(as_we_have_it(part, state)) for name, part in state.items()}
    if stores.opened(directory).stored():
        raise CheckpointError(f"{directory} has checkpoints already. Nothing was written. Give another directory.")
    with FlashCheckpoint(str(directory), rng=False, disk_every=None, **held) as checkpoint:
        checkpoint.save(step, disk=True)


def as_we_have_it(part: Any, state: Mapping[str, Any]) -> Any:
    """Return an optimizer's state with its parameters named as in a checkpoint of ours: ``0.weight`` of the part ``model`` is
    ``model.0.weight``. Anything else is returned as it is."""
    if not isinstance(part, dict) or not {"state", "param_groups"} <= part.keys():
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
        text = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(
            f"{path} can't be read: {type(error).__name__}: {text}. Nothing was run of what is in it."
        ) from error


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


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file  # noqa: PLC0415 - an extra

    found: dict[str, Any] = {}
    for name, tensor in load_file(path).items():
        part, _, rest = name.partition(".")
        found.setdefault(part, {})[rest] = tensor
    return found


class _Description(pickle.Unpickler):
    """Reads the description of a DCP directory."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _DESCRIBING and not (module == "torch" and name in _DTYPES):
            raise CheckpointError(f"it asks for {module}.{name}, which no description of a checkpoint needs")
        return super().find_class(module, name)


def _read_dcp(path: Path) -> dict[str, Any]:
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"{path} is no directory of torch.distributed.checkpoint: it has no .metadata.")
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415 - takes its time, and only this needs it
    from torch.distributed.checkpoint import state_dict_loader  # noqa: PLC0415
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner  # noqa: PLC0415

    class Reader(dcp.FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(path / ".metadata", "rb") as file:
                return _Description(file).load()

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
