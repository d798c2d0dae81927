"""Where in the data a rank is, and how it gets there again.

A loader with ``state_dict()`` and ``load_state_dict()`` (torchdata's ``StatefulDataLoader``) says it itself. Any other is brought
to its place: the order of the epoch is made again, from the random numbers that it was made from, and so many batches are left out;
at the sampler where there is one, so that no data is read, else by going through them.

Hazard: a shuffle without a generator draws its order from torch's random state when the iterator is made, or at its first batch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from resilience.integrations.lightning import boundary
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

_LOG = logging.getLogger("resilience.lightning")
_THROUGH = 1000  # batches that are gone through in silence


class Position:
    """A rank's place in an epoch."""

    def __init__(self) -> None:
        self._order: dict[str, Any] | None = None  # what the order of this epoch was made from
        self._target: dict[str, Any] | None = None  # the place to go to
        self._from: _From | None = None  # stands before a sampler
        self.drawn = 0  # batches of this iterator
        self._skipped = 0  # batches that were left out at the sampler
        self._moved = False  # stateful loaders were told their place, and the iterator was made after that
        self._before: list[Any] = []  # states of stateful loaders, one batch ago
        self._lengths: list[int | None] = []  # batches in an epoch, of each loader

    def state_dict(self, fetcher: Any) -> dict[str, Any]:
        """Return the place: how many batches were drawn. That need not be how many the epoch has had: Lightning's own resume in
        the middle of one begins the data anew."""
        states = self._before if _is_ahead(fetcher) else _states(_loaders(fetcher))
        return {"batches": self.drawn, "order": self._order, "loaders": states, "lengths": self._lengths}

    def go_to(self, state: dict[str, Any] | None) -> None:
        """Have the next :meth:`arrive` go to a place."""
        self._target, self._skipped, self._moved = state, 0, False

    def before_iteration(self, fetcher: Any) -> None:
        """An iterator is about to be made: note what its order is made from, or have it made from what was noted."""
        loaders, target, self.drawn = _loaders(fetcher), self._target, 0
        self._lengths = [_length(loader) for loader in loaders]
        if target is None:
            self._order = {"torch": torch.get_rng_state(), "generators": [_generator_states(one) for one in loaders]}
            self._before = _states(loaders) if _is_ahead(fetcher) else []
            return
        self._order, self._moved = target["order"], True
        if self._order is not None:
            torch.set_rng_state(self._order["torch"])
            for loader, states in zip(loaders, self._order["generators"], strict=False):
                _set_generators(loader, states)
        _load_states(loaders, target["loaders"])
        self._skip_at_the_sampler(loaders)

    def before_batch(self, fetcher: Any) -> None:
        """A batch is about to be fetched, and the state is saved already: note what is not there any more next time."""
        self.drawn += 1
        if getattr(fetcher, "batches", None) and _is_ahead(fetcher):
            self._before = _states(_loaders(fetcher))

    def arrive(self, fetcher: Any, completed: int) -> None:
        """Bring the data to the place, if there is one to go to, after ``completed`` batches of the epoch. There is an iterator."""
        target, loaders = self._target, _loaders(fetcher)
        if target is None:
            return
        batches, stateful = target["batches"], [state for state in target["loaders"] if state is not None]
        self._compare(target.get("lengths", []), loaders)
        if not self._moved and (stateful or (batches and self._may_begin_again(loaders))):
            iter(fetcher)
        elif not self._moved and not self._skipped:
            self._skip_at_the_sampler(loaders)
        if self._from is not None:
            self._from.begin()
        self._target = self._from = None
        left = 0 if stateful else batches - self._skipped
        if left > _THROUGH:
            _LOG.warning(
                "going through %s batches of the training data, to the place where the job was. A StatefulDataLoader, or a loader "
                "with a BatchSampler of torch, would be there at once.",
                left,
            )
        self._go_through(fetcher, left)
        self.drawn = batches
        _set_fetched(fetcher, completed + (1 if _is_ahead(fetcher) else 0))
        iterator = getattr(_combined(fetcher), "_iterator", None)
        if iterator is not None and hasattr(iterator, "_idx"):
            iterator._idx = fetcher.fetched

    @staticmethod
    def _compare(before: list[int | None], loaders: list[Any]) -> None:
        """Say that the data has changed, if its length tells."""
        now = [_length(loader) for loader in loaders]
        if before and now != before:
            _LOG.warning(
                "the training data has %s batches, and had %s when the snapshot was taken (another batch size, or other data): the "
                "rest of this epoch is not what it would have been.",
                now,
                before,
            )

    @staticmethod
    def _go_through(fetcher: Any, batches: int) -> None:
        """Draw batches and throw them away. Nothing is known of the random numbers that training drew between them."""
        step = boundary.own_class(fetcher).__next__
        _set_fetched(fetcher, 1 if _is_ahead(fetcher) else 0)
        drew = 0
        for number in range(batches):
            before = torch.get_rng_state()
            step(fetcher)
            drew += number > 0 and not torch.equal(before, torch.get_rng_state())
        if drew:
            _LOG.warning(
                "the training data draws from torch's random numbers while it is read in this process, and so may training: the "
                "batches from here on need not be those of an uninterrupted run. Give the data a generator of its own, or use "
                "a StatefulDataLoader."
            )

    def _may_begin_again(self, loaders: list[Any]) -> bool:
        """Whether making the iterator anew gives the same order, and spares reading what is left out."""
        return all(
            isinstance(one, DataLoader)
            and one.num_workers > 0
            and _is_batched(one)
            and _is_drawn_from_nothing(one.sampler)
            for one in loaders
        )

    def _skip_at_the_sampler(self, loaders: list[Any]) -> None:
        """Have a single loader leave out the batches at its sampler, if that has not given any yet."""
        assert self._target is not None
        batches = self._target["batches"]
        if len(loaders) != 1 or self._target["loaders"] != [None] or not batches or not _is_batched(loaders[0]):
            return
        if not self._moved and loaders[0].num_workers > 0:
            return  # its workers have been given indices already
        sampler = loaders[0].batch_sampler
        sampler.sampler = self._from = _From(sampler, batches * sampler.batch_size)
        self._skipped = batches


class _From:
    """A sampler that begins later, once."""

    def __init__(self, owner: Any, first: int) -> None:
        self._owner = owner
        self._inner = owner.sampler
        self._first = first
        self._rest: Iterator[Any] | None = None

    def begin(self) -> Iterator[Any]:
        """Have the order made now, from the random numbers that are there now, and leave out what is to be."""
        if self._rest is None:
            self._rest = iter(self._inner)
            next(itertools.islice(self._rest, self._first, self._first), None)
        return self._rest

    def __iter__(self) -> Iterator[Any]:
        self._owner.sampler = self._inner
        return self.begin()

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _combined(fetcher: Any) -> Any:
    return fetcher.combined_loader if hasattr(fetcher, "combined_loader") else fetcher.dataloader  # up to 2.0.8


def _set_fetched(fetcher: Any, number: int) -> None:
    """Have a fetcher know how many batches it has fetched, and whether those are all."""
    fetcher.fetched = number
    length = fetcher.length if hasattr(fetcher, "length") else _length(_combined(fetcher))
    if length is not None and "done" in vars(fetcher):
        fetcher.done = number >= length


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _loaders(fetcher: Any) -> list[Any]:
    return list(_combined(fetcher).flattened)


def _is_ahead(fetcher: Any) -> bool:
    """Whether the fetcher has a batch in hand before it is asked for one, to know which is the last."""
    unsized = fetcher.length is None if hasattr(fetcher, "length") else not getattr(fetcher, "_has_len", True)
    return unsized and bool(getattr(fetcher, "prefetch_batches", 0))


def _is_batched(loader: Any) -> bool:
    """Whether a loader's batches are made of a sampler's indices, by torch itself."""
    ours = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return ours and type(loader.batch_sampler) is BatchSampler


def _is_drawn_from_nothing(sampler: Any) -> bool:
    """Whether a sampler's order comes from its own settings alone."""
    return type(sampler) in (DistributedSampler, SequentialSampler)


def _states(loaders: list[Any]) -> list[Any]:
    return [loader.state_dict() if _is_stateful(loader) else None for loader in loaders]


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _load_states(loaders: list[Any], states: list[Any]) -> None:
    for loader, state in zip(loaders, states, strict=False):
        if state is not None and _is_stateful(loader):
            loader.load_state_dict(state)


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader's order is drawn from, if it has any of its own."""
    holders = (
        loader,
        getattr(loader, "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    )
    found = {id(one): one for one in (getattr(holder, "generator", None) for holder in holders)}
    return [one for one in found.values() if isinstance(one, torch.Generator)]


def _generator_states(loader: Any) -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators(loader)]


def _set_generators(loader: Any, states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators(loader), states, strict=False):
        generator.set_state(state)
