"""Which batch comes next, after going back too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from resilience.checkpoint.supply import Supply
from resilience.errors import ConfigError


class Loader:
    """Epochs of five numbers; it knows where it is."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1
            if self.next % 5 == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Stream(IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def shuffled() -> DataLoader[Any]:
    data = TensorDataset(torch.arange(12))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
    return DataLoader(data, 2, sampler=sampler)


def numbers(supply: Supply, count: int) -> list[Any]:
    return [batch if isinstance(batch, int) else tuple(batch[0].tolist()) for _, batch in draws(supply, count)]


def draws(supply: Supply, count: int) -> list[tuple[int, Any]]:
    return [supply.draw() for _ in range(count)]


def begun(loader: Any, start: int = 0, *, kept: bool = True, reorder: bool = False) -> Supply:
    supply = Supply()
    supply.begin(loader, start, kept=kept, reorder=reorder)
    return supply


@pytest.mark.parametrize("kind", ["stateful", "function", "loader"])
def test_what_comes_after_going_back_is_what_came_before_over_epochs(kind: str) -> None:
    loader: Any = {"stateful": Loader(), "function": itertools.count, "loader": shuffled()}[kind]
    supply = begun(loader)
    assert numbers(supply, 8)
    saved, position = supply.state(), loader.state_dict() if kind == "stateful" else None
    expected = numbers(supply, 9)
    if kind == "stateful":
        loader.load_state_dict(position)
    supply.load(saved)
    assert numbers(supply, 9) == expected
    fresh = Supply()  # in another process
    if kind == "stateful":
        loader.load_state_dict(position)
    fresh.load(saved)
    fresh.begin(loader, 8, kept=True, reorder=False)
    assert numbers(fresh, 9) == expected


def test_every_epoch_has_an_order_of_its_own_and_all_of_its_batches() -> None:
    found = numbers(begun(shuffled()), 18)
    epochs = [found[at : at + 6] for at in (0, 6, 12)]
    assert [sorted(itertools.chain(*epoch)) for epoch in epochs] == [list(range(12))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_what_is_left_out_does_not_come_and_going_back_does_not_forget_it() -> None:
    supply = begun(itertools.count)
    before = supply.state()
    assert [number for number, _ in draws(supply, 6)] == [0, 1, 2, 3, 4, 5]
    supply.leave_out(3, 3)
    supply.load(before)
    assert numbers(supply, 4) == [0, 1, 2, 4]
    supply.leave_out(5, 7)
    assert numbers(supply, 2) == [8, 9]
    supply.load(before)
    assert numbers(supply, 6) == [0, 1, 2, 4, 8, 9]
    other = Supply()
    other.load(supply.state())
    assert other.left_out == [(3, 3), (5, 7)]


def test_another_order_gives_what_is_left_of_the_epoch_differently() -> None:
    supply = begun(shuffled(), reorder=True)
    straight = numbers(begun(shuffled()), 12)
    assert numbers(supply, 2) == straight[:2]
    supply.orders += 1
    supply.reopen()
    later = numbers(supply, 10)
    assert later != straight[2:]
    assert sorted(itertools.chain(*later[4:])) == list(range(12)), "the next epoch is a whole one"


def test_supply_that_begins_late_begins_at_its_step() -> None:
    assert numbers(begun(shuffled(), 8), 3) == numbers(begun(shuffled()), 11)[8:]
    supply = begun(itertools.count, 5)
    draws(supply, 3)
    supply.went_back_by(2)
    assert numbers(supply, 1) == [6]


def test_going_through_a_loader_again_in_the_middle_of_an_epoch_leaves_the_random_state_alone() -> None:
    supply = begun(shuffled())
    draws(supply, 3)
    before = torch.get_rng_state()
    supply.reopen()
    draws(supply, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_can_not_be_gone_back_in_is_refused_in_words() -> None:
    data = TensorDataset(torch.arange(12))
    for loader, kept, reorder, match in (
        (Loader(), False, False, "would not go back with the rest"),
        (iter([1, 2]), True, False, "no length and no state"),
        (DataLoader(Stream(), 2), True, False, "no length and no state"),
        (DataLoader(data, 2, shuffle=True), True, False, "shuffle=True can't be repeated"),
        (DataLoader(data, 2), True, True, "set_epoch"),
        (itertools.count, True, True, "set_epoch"),
    ):
        with pytest.raises(ConfigError, match=match):
            begun(loader, kept=kept, reorder=reorder)


def test_loader_that_gives_nothing_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(ConfigError, match="gives no batch"):
        begun(lambda number: []).draw()


@pytest.mark.parametrize(
    "loader", [[], DataLoader(TensorDataset(torch.arange(3)), 4, drop_last=True)], ids=["list", "DataLoader"]
)
def test_loader_without_a_batch_is_said_to_be_empty(loader: Any) -> None:
    with pytest.raises(ConfigError, match="the loader is empty: its length is 0"):
        begun(loader, 2).draw()
