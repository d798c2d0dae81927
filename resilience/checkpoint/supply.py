"""Batches by number: which one comes next, after a rollback and after a restart too, and which are left out.

A batch has the number of its draw, counted from the beginning of the training. Three things can be drawn from:

1) a loader with ``state_dict()`` that is a part of the checkpoint: it goes on by itself where it was saved
2) a function that is given a number and returns the batches from there on
3) anything else that can be gone through again in the same order and has a length: it is gone through to the place

What is to be left out is known to whoever has seen it do harm, and is not forgotten when everything else goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from resilience.errors import ConfigError

_STRIDE = 1_000_003  # between the epochs that different orders are made for


class Supply:
    """Draws, and keeps count."""

    def __init__(self) -> None:
        self.drawn: int | None = None  # the number of the next batch; None: not known yet
        self.orders = 0  # how often another order was asked for
        self.left_out: list[tuple[int, int]] = []  # from and to, both of them too
        self._epoch = self._into = 0  # of a loader with a state: epochs so far, batches of this one
        self._loader: Any = None
        self._batches: Iterator[Any] | None = None

    def begin(self, loader: Any, start: int, *, kept: bool, reorder: bool) -> None:
        """Draw from a loader from now on. ``start``: the step, for a supply that has no state yet. ``kept``: the loader's state
        is in the checkpoint. ``reorder``: other orders will be asked for. Raises :class:`ConfigError` for what can't be gone
        back in."""
        _check(loader, kept, reorder)
        self._loader, self._batches = loader, None
        if self.drawn is None:
            self.drawn = start

    def leave_out(self, first: int, last: int) -> None:
        """Never give these batches out again."""
        self.left_out = sorted({*self.left_out, (first, last)})

    def reopen(self) -> None:
        """The loader's state has changed: what was about to come is not what comes next."""
        self._batches = None

    def draw(self) -> tuple[int, Any]:
        """Return the next batch that is not left out, and its number."""
        while True:
            batch = self._next()
            number, self.drawn = self._number(), self._number() + 1
            self._into += 1
            if not any(first <= number <= last for first, last in self.left_out):
                return number, batch

    def _number(self) -> int:
        assert self.drawn is not None
        return self.drawn

    def _next(self) -> Any:
        """Return the next batch of this epoch, or the first of the next one."""
        for _ in range(3):  # what is left of this epoch may be nothing
            if self._batches is None:
                self._batches = self._open()
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = None
                self._epoch, self._into = self._epoch + 1, 0
        raise ConfigError(f"the loader gives no batch (after {self.drawn}). Nothing was trained on.")

    def _open(self) -> Iterator[Any]:
        loader, number = self._loader, self._number()
        if _is_function(loader):
            from_here: Iterator[Any] = iter(loader(number))
            return from_here
        epoch, into = (self._epoch, self._into) if _has_state(loader) else divmod(number, _length(loader))
        setter = _set_epoch_of(loader)
        if setter is not None:
            setter(epoch + self.orders * _STRIDE)
        before = torch.get_rng_state() if into and isinstance(loader, DataLoader) else None
        batches: Iterator[Any] = iter(loader)
        if before is not None:  # it draws a seed: a run that did not stop here has not done so
            torch.set_rng_state(before)
        for _ in range(0 if _has_state(loader) else into):
            next(batches, None)
        return batches

    # -- what is saved ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return where it is, and what it knows."""
        known = {"left_out": [list(pair) for pair in self.left_out], "orders": self.orders}
        return {"drawn": self.drawn, "epoch": self._epoch, "into": self._into, **known}

    def load(self, state: dict[str, Any]) -> None:
        """Go back or on to where it was. What is known to do harm stays known."""
        self.drawn, self._epoch, self._into = state["drawn"], state["epoch"], state["into"]
        self.left_out = sorted({*self.left_out, *((first, last) for first, last in state["left_out"])})
        self.orders = max(self.orders, state["orders"])
        self._batches = None

    def went_back_by(self, steps: int) -> None:
        """Everything went back so far, to where there was no supply yet: every step had one batch."""
        self.drawn = self._number() - steps
        self._into = max(0, self._into - steps)
        self._batches = None


def _has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _has_length(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except TypeError:  # a DataLoader of an IterableDataset has the method, and no length
        return False


def _length(loader: Any) -> int:
    length = len(loader)
    if length == 0:
        raise ConfigError(
            "the loader is empty: its length is 0. No batch was given out. Look at its data set and its batch size: drop_last=True "
            "leaves out a batch that is not full."
        )
    return length


def _is_function(loader: Any) -> bool:
    return callable(loader) and (isinstance(loader, type) or not hasattr(loader, "__iter__"))


def _set_epoch_of(loader: Any) -> Callable[[int], Any] | None:
    """Return how a loader is told the epoch, which its order depends on."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for thing in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        setter: Callable[[int], Any] | None = getattr(thing, "set_epoch", None)
        if setter is not None:
            return setter
    return None


def _check(loader: Any, kept: bool, reorder: bool) -> None:
    advice = (
        "Give a loader with state_dict() that is a part of the checkpoint (torchdata's StatefulDataLoader), one with a "
        "DistributedSampler, or a function that returns the batches from a number on."
    )
    if reorder and (_is_function(loader) or _set_epoch_of(loader) is None):
        raise ConfigError(
            'data="reorder" needs a loader or a sampler with set_epoch(): that is what changes the order.'
        )
    if _is_function(loader):
        return
    if _has_state(loader):
        if not kept:
            raise ConfigError(
                "the loader has a state_dict() and is no part of the checkpoint, so that it would not go back with the rest. "
                "Nothing was trained on. FlashCheckpoint(…, loader=loader)."
            )
        return
    if not _has_length(loader):
        raise ConfigError(
            f"a {type(loader).__qualname__} can't be gone back in: it has no length and no state. {advice}"
        )
    if isinstance(getattr(loader, "sampler", None), RandomSampler):
        raise ConfigError(f"the order of a DataLoader with shuffle=True can't be repeated after a rollback. {advice}")
