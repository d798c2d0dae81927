"""Time the steps of a Lightning trainer, from one ``training_step`` to the next, with and without callbacks, in turns."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import lightning.pytorch as pl
import torch
from resilience.integrations.lightning import ResilienceCallback, boundary
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads.voice import say
from resilience.checkpoint import overlap

_STEPS, _WARM, _WIDTH, _TURN = 1500, 1100, 64, 10
_HOME = tempfile.mkdtemp()


class Model(pl.LightningModule):
    """Small: the step itself should not hide what is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
        self.at: list[int] = []
        self.turns: Callable[[bool], None] | None = None

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.at.append(perf_counter_ns())
        if self.turns and index % _TURN == 0:
            self.turns(index // _TURN % 2 == 0)
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def idle() -> dict[str, list[Any]]:
    """Return the callbacks of each variant in which no snapshot is taken, new ones every time."""
    never: Any = {"memory_every": 1 << 40, "disk_every": None}
    return {
        "no callback": [],
        "a callback that does nothing": [pl.Callback()],
        "ResilienceCallback(snapshots=False)": [ResilienceCallback(snapshots=False)],
        "ResilienceCallback, no snapshot due": [ResilienceCallback(_folder(), **never)],
    }


def saving() -> dict[str, list[Any]]:
    """Return those with a snapshot in every step. What they leave in the heap slows down whoever comes after them."""
    return {
        "no callback": [],
        "ResilienceCallback, a snapshot in every step": [ResilienceCallback(_folder(), disk_every=None)],
        "the same, mode='blocking'": [ResilienceCallback(_folder(), disk_every=None, mode="blocking")],
    }


def _folder() -> str:
    return tempfile.mkdtemp(dir=_HOME)


def steps(callbacks: list[Any]) -> list[int]:
    """Train; return the time of each step after the first ones."""
    model, trainer = Model(), _trainer(callbacks, _STEPS)
    _fit(trainer, model, _STEPS)
    return _took(model)[_WARM:]


def in_one(callbacks: list[Any], number: int = 5 * _STEPS) -> float:
    """Train with and without the callback, in turns of a few steps; return how much longer the steps with it are.

    It is in the trainer's list and watches the fetcher, or neither. In one training there is one layout of memory and one noise.
    """
    model, trainer = Model(), _trainer(callbacks, number)
    mine = trainer.callbacks[-1]

    def turns(on: bool) -> None:
        trainer.callbacks[:] = [one for one in trainer.callbacks if one is not mine] + [mine] * on
        if isinstance(mine, ResilienceCallback):
            boundary.watch(trainer, mine) if on else boundary.release(trainer)

    model.turns = turns
    _fit(trainer, model, number)
    took = {True: [], False: []}  # type: dict[bool, list[int]]
    for step, ns in enumerate(_took(model)):
        if step >= _WARM and 1 < step % _TURN < _TURN - 1:
            took[step // _TURN % 2 == 0].append(ns)
    return _quartile(took[True]) - _quartile(took[False])


def _trainer(callbacks: list[Any], number: int) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        max_steps=number,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=callbacks,
    )


def _fit(trainer: Any, model: Model, number: int) -> None:
    gc.collect()
    if overlap._Hook.handle is not None:  # of an earlier training: all optimizers of this process would call it
        overlap._Hook.handle.remove()
        overlap._Hook.handle = None
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(number * 4, _WIDTH)), 4))


def _took(model: Model) -> list[int]:
    return [after - before for before, after in itertools.pairwise(model.at)]


_spent: list[int] = []


def _timed(method: Any) -> Any:
    """Return a method of the callback's with a clock around it."""

    def call(*args: Any) -> Any:
        began = perf_counter_ns()
        method(*args)
        _spent.append(perf_counter_ns() - began)

    return call


def calls(callbacks: list[Any]) -> float:
    """Train; return how long the calls of ours take between two steps, where they are made."""
    _spent.clear()
    mine: Any = ResilienceCallback
    mine.before_batch, mine.after_batch = _timed(mine.before_batch), _timed(mine.after_batch)
    try:
        steps(callbacks)
    finally:
        del mine.before_batch, mine.after_batch
    return _quartile([before + after for before, after in zip(_spent[::2], _spent[1::2], strict=False)][_WARM:])


def main() -> None:
    """Measure all variants in turns, and tell."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    say("in one", **{name: [in_one(idle()[name]) for _ in range(11)] for name in idle() if name != "no callback"})
    say("idle", **in_turns(idle, 21))
    say("calls", **{name: calls(chosen) for name, chosen in idle().items() if name.startswith("Resilience")})
    say("saving", **in_turns(saving, 5))


def in_turns(variants: Callable[[], dict[str, list[Any]]], rounds: int) -> dict[str, list[float]]:
    """Return how long a step takes in each variant, once per round. Whoever comes first or last has no advantage from it."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        chosen = variants()
        for name in random.sample(list(chosen), len(chosen)):
            found.setdefault(name, []).append(_quartile(steps(chosen[name])))
    return found


def _quartile(ns: list[int]) -> float:
    """Return the lower quartile: other work on the machine only ever adds."""
    return statistics.quantiles(ns, n=4)[0] / 1e3


if __name__ == "__main__":
    main()
