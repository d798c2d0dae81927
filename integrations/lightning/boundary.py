"""The place between two training batches: everything of the last one is over, and the next one is not fetched yet.

Snapshots are taken there and nowhere else, and restored there: what comes next is then the same in both. No hook of Lightning's is
there. ``on_train_batch_end`` comes before validation and before the module's own hook, and what is saved in it is resumed without
them; ``on_train_batch_start`` comes after the fetch, which has moved the loader and perhaps the random numbers. So the fit loop's
data fetcher is watched: it becomes one of a class of ours, which is derived from its own.

Hazard: the fetcher is Lightning's own (``fit_loop._data_fetcher``). If a release has none, that is said before step 0.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from resilience.errors import ConfigError


class Watcher(Protocol):
    """Who is told."""

    def before_iteration(self, fetcher: Any) -> None:
        """An iterator over the data is about to be made."""

    def before_batch(self, fetcher: Any) -> None:
        """The next batch is about to be fetched."""

    def after_batch(self) -> None:
        """It is there, and training with it begins."""


@functools.cache
def _watched(kind: Any) -> Any:
    """Return the class of a fetcher of a kind, watched. Not one more base: then an object could not change to it."""
    begin, fetch = kind.__iter__, kind.__next__

    def __iter__(self: Any) -> Any:  # noqa: N807 - a method of the class below
        self.resilience.before_iteration(self)
        return begin(self)

    def __next__(self: Any) -> Any:  # noqa: N807
        watcher = self.resilience
        watcher.before_batch(self)
        batch = fetch(self)
        watcher.after_batch()
        return batch

    return type(f"Watched{kind.__name__}", (kind,), {"__iter__": __iter__, "__next__": __next__, "watches": kind})


def watch(trainer: Any, watcher: Watcher) -> None:
    """Have the fetcher of the fit loop watched, if it is not."""
    fetcher: Any = getattr(trainer.fit_loop, "_data_fetcher", None)
    if fetcher is None or not hasattr(fetcher, "fetched"):
        raise ConfigError(
            "this release of Lightning fetches its batches in a way that is not known here. Nothing was trained. docs/lightning.md "
            "names the releases that were tried; ResilienceCallback(snapshots=False) needs none of it."
        )
    if not hasattr(fetcher, "watches"):
        fetcher.resilience = watcher
        kind: Any = type(fetcher)
        fetcher.__class__ = _watched(kind)


def counter(trainer: Any) -> Any:
    """Return what counts the optimizer steps, in ``completed``: ``trainer.global_step`` asks through nine others for it, which
    takes longer than all else that is done between two batches."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        found = loop.automatic_optimization.optim_progress.optimizer.step.total
    else:
        found = loop.manual_optimization.optim_step_progress.total
    return found if found.completed == trainer.global_step else _Asking(trainer)


class _Asking:
    """Asks the trainer, where a release counts in another way."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def completed(self) -> int:
        return int(self._trainer.global_step)


def release(trainer: Any) -> None:
    """Let the fetcher be as it was."""
    fetcher: Any = getattr(trainer.fit_loop, "_data_fetcher", None)
    if hasattr(fetcher, "watches"):
        fetcher.__class__ = fetcher.watches
        del fetcher.resilience


def own_class(fetcher: Any) -> type:
    """Return what a watched fetcher is without us."""
    return getattr(fetcher, "watches", type(fetcher))
