"""A checkpoint in a form that other programs read: safetensors, ``torch.save``, or ``torch.distributed.checkpoint`` (DCP).

The first has the tensors and nothing else. The others have the whole state of one rank, but for its random states, nested as the
training script had it, with optimizers as ``torch.distributed.checkpoint.state_dict`` has them: ``{"state": {parameter: …},
"param_groups": […]}``, parameters by their names in the model. So DCP's ``load`` fills what ``get_state_dict(model, optimizer)``
gives, and ``load_state_dict`` takes what ``torch.load`` gives.

Rule: a target that is there afterwards is whole, and every byte that went into it was checked.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from resilience.checkpoint import decoding, reading
from resilience.checkpoint.encoding import UnknownCodec
from resilience.checkpoint.optimizers import is_state
from resilience.checkpoint.reading import Opened
from resilience.checkpoint.stores import Kept
from resilience.errors import CheckpointError

_BY_NAME = {".safetensors": "safetensors", "": "dcp", **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")}


def form_of(target: Path) -> str:
    """Return the form that a target's name stands for. Raises :class:`CheckpointError`."""
    if target.suffix not in _BY_NAME:
        raise CheckpointError(f"{target}: in which form? Give --format=safetensors, torch or dcp. Nothing was written.")
    return _BY_NAME[target.suffix]


def import_all(modules: Sequence[str]) -> None:
    """Import what somebody asked for by name, from the working directory too, as ``python -m`` would."""
    if modules:
        sys.path.insert(0, str(Path.cwd()))
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # somebody else's code
            raise CheckpointError(f"--import={name}: {type(error).__name__}: {error}. Nothing was written.") from error


def write(item: Kept, rank: int, form: str, target: Path) -> None:
    """Write what rank ``rank`` would restore to ``target``, which does not exist yet. Raises :class:`CheckpointError`."""
    opened = _open(item, rank, only_tensors=form == "safetensors")
    writers = {"safetensors": _as_safetensors, "torch": _as_torch, "dcp": _as_dcp}
    with _made(target, folder=form == "dcp"):
        writers[form](opened, target)
        wrong = opened.check.wrong()
        if wrong:
            raise CheckpointError(f"{item.path.name} is damaged: {wrong}. {target} was not written.")


def _open(item: Kept, rank: int, only_tensors: bool) -> Opened:
    with decoding.looks_only() if only_tensors else contextlib.nullcontext():
        try:
            return reading.open_disk(item.path, item.manifest, rank)
        except CheckpointError as error:
            if not isinstance(error, UnknownCodec) and not isinstance(error.__cause__, UnknownCodec):
                raise
            raise CheckpointError(
                f"{error}. Nothing was written. Give --import MODULE, one that does so, or --format=safetensors: tensors only."
            ) from error


@contextlib.contextmanager
def _made(target: Path, folder: bool) -> Iterator[None]:
    """Claim a target, and take it away again unless all goes well."""
    try:
        if folder:
            target.mkdir(parents=True)
        else:
            target.touch(exist_ok=False)
    except FileExistsError:
        raise CheckpointError(f"{target} exists already. Nothing was written.") from None
    except OSError as error:
        raise CheckpointError(f"{target} can't be made: {error.strerror}. Nothing was written.") from error
    try:
        yield
    except BaseException:
        if folder:
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)
        raise


def _as_safetensors(opened: Opened, target: Path) -> None:
    try:
        from safetensors.torch import save_file  # noqa: PLC0415
    except ImportError:
        raise CheckpointError(
            "exporting to safetensors needs the package safetensors: pip install safetensors"
        ) from None

    mode = target.stat().st_mode
    save_file(opened.source.tensors(), str(target), {"format": "pt"})
    target.chmod(mode)  # it puts a temporary file in the place of ours, which nobody else may read


def _as_torch(opened: Opened, target: Path) -> None:
    with _told(target):
        torch.save(_state_of(opened), target)


def _as_dcp(opened: Opened, target: Path) -> None:
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415

    with _told(target), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is one process: it is
        try:
            dcp.save(_state_of(opened), checkpoint_id=str(target), no_dist=True)
        except dcp.api.CheckpointException as error:  # no Exception, and a page of text around the one that it is about
            raise next(iter(error.failures.values()))[0] from None


@contextlib.contextmanager
def _told(target: Path) -> Iterator[None]:
    """Say in words that torch can't write something: two names that are one, a value that can't be pickled."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{target} can't be written: {error.strerror}.") from error
    except Exception as error:  # whatever a value raises that is to be pickled
        raise CheckpointError(
            f"torch can't write this state: {type(error).__name__}: {error}. {target} was not written. --format=safetensors takes "
            "the tensors alone."
        ) from error


def _state_of(opened: Opened) -> Any:
    """Return a rank's whole state, nested, with tensors of its own."""
    state = opened.source.fresh(opened.values)
    state.pop("rng", None)  # of one rank at one moment; with numpy in it torch.load would refuse the file
    return {name: as_torch_has_it(part, state) for name, part in state.items()}


def as_torch_has_it(part: Any, state: Mapping[str, Any]) -> Any:
    """Return an optimizer's state as torch has it: with its parameters called as in their module, if they all are of one.

    In a checkpoint ``model.0.weight`` is the parameter ``0.weight`` of the part ``model``. Anything else is returned as it is.
    """
    if not is_state(part):
        return part
    groups = part["param_groups"]
    names = [name for group in groups for name in group["params"]]
    if not all(isinstance(name, str) for name in names):
        return part
    modules = [f"{name}." for name in state if all(known.startswith(f"{name}.") for known in names)]
    prefix = max(modules, key=len) if names and modules else ""
    return {
        **{key: value for key, value in part.items() if key != "kind"},  # which optimizer it was: for us
        "state": {_without(prefix, name): value for name, value in part["state"].items()},
        "param_groups": [{**group, "params": [_without(prefix, name) for name in group["params"]]} for group in groups],
    }


def _without(prefix: str, name: Any) -> Any:
    return name.removeprefix(prefix) if isinstance(name, str) else name
