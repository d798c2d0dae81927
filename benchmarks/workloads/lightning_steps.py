"""Time the steps of a Lightning trainer, from one ``training_step`` to the next, with and without callbacks, in turns."""

from __future__ import annotations

import itertools
import logging
import random
import statistics
import tempfile
import warnings
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import lightning.pytorch as pl
import torch
from resilience.integrations.lightning import ResilienceCallback, boundary
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads.voice import say
from resilience.checkpoint import overlap

_STEPS, _WARM, _ROUNDS, _WIDTH, _TURN = 400, 100, 21, 64, 20
_FOLDER = Path(tempfile.mkdtemp())
_NEVER = 1 << 40


class Model(pl.LightningModule):
    """Small: the step itself should not hide what is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
        self.at: list[int] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.at.append(perf_counter_ns())
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def variants() -> dict[str, list[Any]]:
    """Return the callbacks of each variant, new ones every time."""
    fresh = tempfile.mkdtemp(dir=_FOLDER)
    never: Any = {"memory_every": _NEVER, "disk_every": None}
    return {
        "no callback": [],
        "a callback that does nothing": [pl.Callback()],
        "ResilienceCallback(snapshots=False)": [ResilienceCallback(snapshots=False)],
        "ResilienceCallback, no snapshot due": [ResilienceCallback(fresh + "/a", **never)],
        "ResilienceCallback, a snapshot in every step": [ResilienceCallback(fresh + "/b", disk_every=None)],
        "the same, mode='blocking'": [ResilienceCallback(fresh + "/c", disk_every=None, mode="blocking")],
    }


def steps(callbacks: list[Any], warm: int = _WARM) -> list[int]:
    """Train; return the time of each step after ``warm`` ones."""
    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=_STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=callbacks,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(_STEPS * 4, _WIDTH)), 4))
    return [after - before for before, after in zip(model.at[warm:], model.at[warm + 1 :], strict=False)]


_spent: list[int] = []


def _timed(self: Any) -> Any:
    """Fetch as the fetcher does that our callback watches, with a clock around every call of ours."""
    watcher, at = self.resilience, [perf_counter_ns()]
    watcher.before_batch(self)
    with boundary._LOAD:
        at.append(perf_counter_ns())
        batch = super(boundary._Watched, self).__next__()
        at.append(perf_counter_ns())
    watcher.after_batch()
    at.append(perf_counter_ns())
    _spent.append(at[1] - at[0] + at[3] - at[2])
    return batch


def calls(callbacks: list[Any]) -> float:
    """Train; return how long the calls of ours take between two steps, where they are made."""
    _spent.clear()
    before = boundary._Watched.__next__
    boundary._Watched.__next__ = _timed
    try:
        steps(callbacks)
    finally:
        boundary._Watched.__next__ = before
    return _quartile(_spent[_WARM:])


def in_turns(callbacks: list[Any]) -> float:
    """Train, with our calls in every other turn of so many steps; return how much longer those steps take.

    In one training there is one layout of memory and one warm interpreter: what differs from one training to the next is left out.
    """
    number, joins = itertools.count(), overlap.Behind.join
    fetch = boundary._Watched.__next__

    def nothing(*_: Any) -> None:
        """No snapshot is due, so there is nothing to join."""

    def turns(self: Any) -> Any:
        ours = is_ours(next(number))
        overlap.Behind.join = joins if ours else nothing  # type: ignore[assignment, method-assign]
        return fetch(self) if ours else super(boundary._Watched, self).__next__()

    boundary._Watched.__next__ = turns
    try:
        took = steps(callbacks, _WARM)
    finally:
        boundary._Watched.__next__, overlap.Behind.join = fetch, joins  # type: ignore[method-assign]
    with_us = [ns for at, ns in enumerate(took, _WARM + 1) if is_ours(at) and is_ours(at - 2)]
    without = [ns for at, ns in enumerate(took, _WARM + 1) if not is_ours(at) and not is_ours(at - 2)]
    return _quartile(with_us) - _quartile(without)


def is_ours(fetch: int) -> bool:
    """Whether a fetch, and the step before it, is in a turn with our calls."""
    return fetch // _TURN % 2 == 0


def main() -> None:
    """Measure all variants in turns, and tell."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found: dict[str, list[list[int]]] = {}
    for _ in range(_ROUNDS):
        chosen = variants()
        for name in random.sample(list(chosen), len(chosen)):  # whoever comes first or last has no advantage from it
            found.setdefault(name, []).append(steps(chosen[name]))
    timed = {name: calls(chosen) for name, chosen in variants().items() if name.startswith("Resilience")}
    say("timed", **timed)
    idle = [name for name in timed if "every step" not in name]
    say("turns", **{name: [in_turns(variants()[name]) for _ in range(_ROUNDS)] for name in idle})
    say("measured", **{name: [_quartile(one) for one in rounds] for name, rounds in found.items()})


def _quartile(ns: list[int]) -> float:
    """Return the lower quartile: other work on the machine only ever adds."""
    return statistics.quantiles(ns, n=4)[0] / 1e3


if __name__ == "__main__":
    main()
