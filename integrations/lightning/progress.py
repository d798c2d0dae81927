"""What a trainer knows beside model and optimizers: loops, callbacks, precision, data module, and what their hooks put into a
checkpoint. It means the same on all ranks.

Loops are counted, not told that they restart: what is restored between two batches (see :mod:`boundary`) is in the middle of a
loop that has begun in the usual way, and no counter is guessed from another.

Hazard: nobody here asks a loop, a progress or a callback for its ``__dict__``. Up to Python 3.12 an object that was asked once
keeps its attributes in another place, and every step of Lightning's takes 10 µs longer from then on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from resilience.integrations.lightning import flavour

_LOOPS = ("epoch_loop", "automatic_optimization", "manual_optimization", "val_loop", "validate_loop")
_PROGRESSES = ("epoch_progress", "batch_progress", "scheduler_progress", "optim_progress", "optim_step_progress")
_COUNTERS = ("_batches_that_stepped",)  # numbers of loops that are not in a progress
_NUMBERS = (int, bool, float, type(None))
_NOTHING = object()
_SAME = "resilience.same"  # keys of what a hook has given another name to
_LIGHTNING = ("lightning.", "pytorch_lightning.")


class Progress:
    """A part of a snapshot."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._counted = list(_counted(trainer.fit_loop))
        self._loops: dict[str, Any] = {}
        self.over = False  # training has come to its end

    def state_dict(self) -> dict[str, Any]:
        """Return what the trainer knows now."""
        trainer = self._trainer
        loops, callbacks = loops_state(self._counted), _callback_states(trainer)
        found = {
            "loops": json.dumps(loops),
            "callbacks": callbacks,
            "over": self.over,
            "should_stop": bool(trainer.should_stop),
        }
        for name, thing in (("precision", trainer.precision_plugin), ("datamodule", trainer.datamodule)):
            if thing is not None:
                found[name] = thing.state_dict()
        return {**found, "hooks": self._from_hooks(loops, callbacks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state. The loops are set once more by :meth:`resume`, where they were counted."""
        trainer = self._trainer
        self._loops, self.over = json.loads(state["loops"]), state["over"]
        load_loops(self._counted, self._loops)
        trainer.should_stop = state["should_stop"]
        for callback in trainer.callbacks:
            known = state["callbacks"].get(callback.state_key)
            if known:
                callback.load_state_dict(deepcopy(known))
        for name, thing in (("precision", trainer.precision_plugin), ("datamodule", trainer.datamodule)):
            if thing is not None and state.get(name):
                thing.load_state_dict(state[name])
        self._to_hooks(state)

    def count(self) -> None:
        """Set the loops to where they were, unless the epoch was over: then the next one has begun as it should."""
        if not self.over:
            load_loops(self._counted, self._loops)

    def resume(self) -> None:
        """Do so for the last time: from here on they count."""
        self.count()
        self._loops, self.over = {}, False

    def _from_hooks(self, loops: dict[str, Any], callbacks: dict[str, Any]) -> dict[str, Any]:
        """Return what ``on_save_checkpoint`` of callbacks and module put into a checkpoint, if they have one."""
        trainer = self._trainer
        mine = [one for one in trainer.callbacks if _overrides(one, "on_save_checkpoint")]
        module = trainer.lightning_module
        if not mine and not _overrides(module, "on_save_checkpoint"):
            return {}
        standard = self._as_checkpoint(loops, callbacks)
        checkpoint = dict(standard)
        for callback in mine:
            callback.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        return _added(standard, checkpoint)

    def _to_hooks(self, state: dict[str, Any]) -> None:
        trainer, module = self._trainer, self._trainer.lightning_module
        mine = [one for one in trainer.callbacks if _overrides(one, "on_load_checkpoint")]
        if not mine and not _overrides(module, "on_load_checkpoint"):
            return
        standard = self._as_checkpoint(self._loops, state["callbacks"])
        again = {key: standard[name] for key, name in state["hooks"].get(_SAME, {}).items()}
        checkpoint = {**standard, **{key: value for key, value in state["hooks"].items() if key != _SAME}, **again}
        module.on_load_checkpoint(checkpoint)
        for callback in mine:
            callback.on_load_checkpoint(trainer, module, checkpoint)

    def _as_checkpoint(self, loops: dict[str, Any], callbacks: dict[str, Any]) -> dict[str, Any]:
        """Return what hooks find in a checkpoint of Lightning's. The tensors are the live ones."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": flavour.version(trainer),
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": {"fit_loop": loops},
            "callbacks": callbacks,
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }


def _callback_states(trainer: Any) -> dict[str, Any]:
    found = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    return {key: state for key, state in found.items() if state}


def _added(standard: dict[str, Any], checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return what hooks have put into a checkpoint, or in the place of what was there; a thing that was only given another name
    (as weight averaging does with the weights) by that, and not once more."""
    # A number is nobody's own.
    names = {id(value): key for key, value in standard.items() if isinstance(value, (dict, list))}
    new = {key: value for key, value in checkpoint.items() if value is not standard.get(key, _NOTHING)}
    same = {key: names[id(value)] for key, value in new.items() if id(value) in names}
    found = {key: value for key, value in new.items() if key not in same}
    return {**found, _SAME: same} if same else found


def begins_with_hooks(trainer: Any) -> bool:
    """Whether somebody's own hooks run when training or an epoch begins. Lightning's callbacks know when they are restored."""
    mine = [one for one in trainer.callbacks if not type(one).__module__.startswith(_LIGHTNING)]
    hooks = ("on_train_start", "on_train_epoch_start")
    return any(_overrides(one, hook) for one in (trainer.lightning_module, *mine) for hook in hooks)


def _overrides(thing: Any, hook: str) -> bool:
    """Whether somebody has written this hook: in Lightning's own base classes it does nothing."""
    mine, method = getattr(thing, hook, None), getattr(type(thing), hook, None)
    if method is None or getattr(mine, "__func__", mine) is not method:  # of this object alone, if there is one
        return mine is not None
    home = str(method.__module__)
    return not home.endswith((".callbacks.callback", ".core.hooks", ".core.module")) and not home.startswith(
        "resilience."
    )


# -- loops ------------------------------------------------------------------------------------------------------------


def _walk(loop: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a loop and all that are in it, with the place of each."""
    yield prefix, loop
    for name in _LOOPS:
        if hasattr(loop, name):
            yield from _walk(getattr(loop, name), f"{prefix}{name}.")


def _numbers(progress: Any) -> dict[str, Any]:
    """Return the numbers of a progress, as its own ``state_dict`` would: that copies deeply, which takes ten times as long."""
    found = {field.name: getattr(progress, field.name) for field in dataclasses.fields(progress)}
    return {name: _numbers(value) if dataclasses.is_dataclass(value) else value for name, value in found.items()}


def _set_numbers(progress: Any, numbers: dict[str, Any]) -> None:
    """Set the numbers of a progress, as far as it has them."""
    for field in dataclasses.fields(progress):
        if field.name in numbers:
            value = getattr(progress, field.name)
            if dataclasses.is_dataclass(value):
                _set_numbers(value, numbers[field.name])
            else:
                setattr(progress, field.name, numbers[field.name])


def begin_as_usual(fit_loop: Any) -> None:
    """Have the loops know nothing of a checkpoint of Lightning's that they were told to restart from."""
    for _, loop in _walk(fit_loop):
        for name in ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"):
            if hasattr(loop, name):
                setattr(loop, name, False)
        if hasattr(loop, "reset_restart_stage"):
            loop.reset_restart_stage()


def _counted(fit_loop: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield what the loops count with: its place, whose it is, and its name there."""
    for prefix, loop in _walk(fit_loop):
        for name in (*_PROGRESSES, *_COUNTERS):
            if hasattr(loop, name):
                yield prefix + name, loop, name


def loops_state(counted: list[tuple[str, Any, str]]) -> dict[str, Any]:
    """Return every number that the loops count with."""
    found: dict[str, Any] = {}
    for key, loop, name in counted:
        value = getattr(loop, name)
        found[key] = value if name in _COUNTERS else _numbers(value)
    return found


def load_loops(counted: list[tuple[str, Any, str]], state: dict[str, Any]) -> None:
    """Set every number that the loops count with."""
    for key, loop, name in counted:
        if key not in state:
            continue
        if name in _COUNTERS:
            setattr(loop, name, state[key])
        else:
            _set_numbers(getattr(loop, name), state[key])
