"""Going back in the middle of training."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.receipt import Level
from resilience.checkpoint.saver.restoring import DISK, Back, Candidate, candidates
from resilience.checkpoint.stores.local import Directory
from resilience.errors import CheckpointError, NothingToRestore
from tests.checkpoint.conftest import savers
from tests.checkpoint.test_chair import Table, ask

FOUND = candidates([(2, 9), (2, 8)], [Candidate((2, 5), DISK), Candidate((1, 7), DISK), Candidate((1, 3), DISK)])


@pytest.mark.parametrize(
    ("back", "newest", "expected"),
    [
        (Back(0), (2, 9), (2, 9)),
        (Back(1), (2, 9), (2, 8)),
        (Back(2), (2, 9), (2, 5)),  # later generations come first, whatever their steps
        (Back(5), (2, 9), (1, 3)),
        (Back(7), (2, 9), None),
        (Back(0, before=9), (2, 9), (2, 8)),
        (Back(0, before=100), (2, 9), (2, 9)),
        (Back(1, before=100), (2, 9), (2, 8)),
        (Back(0), (2, 5), (2, 5)),  # what is newer than where training is was left behind once
    ],
)
def test_newest_that_is_far_enough_back_comes_first(
    back: Back, newest: tuple[int, int], expected: tuple[int, int] | None
) -> None:
    assert next((item.key for item in back.reach(FOUND, newest)), None) == expected


def test_all_nodes_go_back_together_and_what_was_written_after_it_is_set_aside() -> None:
    table = Table()
    held = [(4, 9), (4, 8), (4, 7)]
    ask(table, {0: held, 2: held[1:]}, [(4, 9, 4), (4, 5, 4)], back=[1, None])
    assert [table.take(node, "choice")[0]["key"] for node in (0, 2)] == [(4, 7)] * 2
    for node in (0, 2):
        table.say(node, op="loaded", wrong="")
    assert table.take(0, "aside")[0]["keys"] == [(4, 9)]
    assert table.take(2, "aside") == []
    assert [table.take(node, "go")[0]["key"] for node in (0, 2)] == [(4, 7)] * 2


def test_what_came_to_disk_while_the_ranks_went_back_behind_it_is_set_aside_too() -> None:
    """When the nodes were asked what is there it was not; when everybody has loaded it is not under way any more."""
    table = Table()
    table.sealed(0, 2, step=9, want=True)
    folder = table.take(0, "decided")[-1]["folder"]
    held = [(5, 9), (5, 8)]
    ask(table, {0: held, 2: held}, [], back=[1, None])
    table.written(0, 2, folder=folder)
    table.say(0, op="committed", folder=folder, why="")
    for node in (0, 2):
        table.say(node, op="loaded", wrong="")
    assert table.take(0, "aside")[0]["keys"] == [(5, 9)]


def test_nodes_that_want_to_go_back_differently_are_refused() -> None:
    table = Table()
    for node in table.nodes:
        back = None if node == 0 else [1, None]
        table.say(
            node, op="ask", step=None, back=back, fresh=False, timeout=60, memory=[], disk=[], tries=[], left_out=[]
        )
    assert "nodes ask for different steps: 1 steps back; the newest" in table.take(2, "refused")[0]["why"]


@pytest.fixture
def home(saver_home: Path, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "checkpoints"


class Counter:
    """Trains by counting, with a weight and a gradient that tell the step."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, checkpoint: FlashCheckpoint, step: int, **how: object) -> None:
        with torch.no_grad():
            self.model.weight.fill_(step)
        self.model.weight.grad = torch.full((1, 1), float(step))
        checkpoint.save(step, wait=60, **how)  # type: ignore[arg-type]
        checkpoint.wait(step, Level.COMPLETE)

    @property
    def at(self) -> int:
        return int(self.model.weight.item())


def open_checkpoint(home: Path, counter: Counter, **options: object) -> FlashCheckpoint:
    things = {"model": counter.model, "optimizer": counter.optimizer}
    return FlashCheckpoint(home, **{"disk_every": None, **options}, **things)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["blocking", "overlap"])
def test_rollback_goes_back_in_memory_and_training_goes_on_from_there(home: Path, mode: str) -> None:
    counter = Counter()
    with open_checkpoint(home, counter, mode=mode) as checkpoint:
        checkpoint.restore(allow_fresh_start=True)
        for step in range(6):
            counter.step(checkpoint, step)
        drawn = random.random()
        assert checkpoint.rollback() == 6
        assert random.random() == drawn, "random states go back too"
        assert counter.model.weight.grad is None, "the gradient of what is gone is gone"
        assert (checkpoint.rollback(steps=2), counter.at) == (4, 3)
        assert checkpoint.latest() == 3
        counter.step(checkpoint, 4)
        assert (checkpoint.rollback(steps=1), counter.at) == (4, 3)
        counter.step(checkpoint, 4)
        assert (checkpoint.rollback(before=4), counter.at) == (4, 3)
        assert checkpoint.rollback(before=100) == 4
        counter.step(checkpoint, 4)
    assert [item.manifest.step for item in Directory(home).stored()] == [4]


def test_rollback_further_than_memory_reaches_is_from_disk_and_what_is_newer_there_never_comes_back(
    home: Path,
) -> None:
    counter = Counter()
    with open_checkpoint(home, counter, slots=2) as checkpoint:
        checkpoint.restore(allow_fresh_start=True)
        for step in range(8):
            counter.step(checkpoint, step, disk=step in (2, 5))
            if step in (2, 5):
                checkpoint.wait(step)
        assert (checkpoint.rollback(steps=4), counter.at) == (3, 2)
        assert [item.manifest.step for item in Directory(home).stored()] == [2]
        assert (checkpoint.restore(), counter.at) == (3, 2)
        with pytest.raises(NothingToRestore, match=r"1 steps older than the newest .*rank 0.*There is step 2 \(disk\)"):
            checkpoint.rollback(steps=1)
        assert counter.at == 2, "nothing was changed"
        counter.step(checkpoint, 3)
    assert [item.manifest.step for item in Directory(home).stored()] == [3, 2]


def test_rollback_when_nothing_is_there_says_so(home: Path) -> None:
    counter = Counter()
    with open_checkpoint(home, counter) as checkpoint:
        checkpoint.restore(allow_fresh_start=True)
        with pytest.raises(NothingToRestore, match=r"There is nothing\. Nothing was changed"):
            checkpoint.rollback(steps=1)
        counter.step(checkpoint, 0)
        with pytest.raises(NothingToRestore, match=r"below step 0 .*There is step 0 \(memory\)"):
            checkpoint.rollback(before=0)
        for bad in (-1, 1.5, True):
            with pytest.raises(CheckpointError, match="whole number"):
                checkpoint.rollback(steps=bad)  # type: ignore[arg-type]


def test_step_that_was_being_written_when_the_job_went_back_behind_it_is_written_anew() -> None:
    table = Table(nodes=1)
    table.sealed(0, step=8)
    table.sealed(0, step=9, want=True)
    (first,) = [message["folder"] for message in table.take(0, "decided") if message["folder"]]
    ask(table, {0: [(5, 9), (5, 8)]}, back=[1, None])
    table.say(0, op="loaded", wrong="")
    (begun,) = table.take(0, "go")
    assert begun["key"] == (5, 8)
    table.say(0, op="sealed", key=(begun["generation"], 9), edition=3, want=True, anew=False)
    (second,) = [message["folder"] for message in table.take(0, "decided") if message["folder"]]
    assert second != first, "two snapshots in one folder: one of them would never be written"
    for folder, key in ((first, (5, 9)), (second, (begun["generation"], 9))):
        table.written(0, folder=folder)
        table.say(0, op="committed", folder=folder, why="")
        assert table.take(0, "durable")[0]["key"] == key
    assert [message["keys"] for message in table.take(0, "aside")] == [[], [(5, 9)]]


def test_snapshot_that_is_being_written_when_the_job_goes_back_behind_it_is_set_aside_too() -> None:
    table = Table()
    for node in table.nodes:
        table.say(node, op="want", step=9)
    for node in table.nodes:
        table.say(node, op="sealed", key=(5, 8), edition=1, want=False, anew=False)
        table.say(node, op="sealed", key=(5, 9), edition=2, want=True, anew=False)
    folder = next(message["folder"] for message in table.take(0, "decided") if message["folder"])
    held = [(5, 9), (5, 8)]
    ask(table, {0: held, 2: held}, back=[1, None])
    for node in table.nodes:
        table.say(node, op="loaded", wrong="")
    for node in table.nodes:
        table.say(node, op="written", folder=folder, shards=[], values=[])
    table.say(0, op="committed", folder=folder, why="")
    assert [message["keys"] for message in table.take(0, "aside")] == [[], [(5, 9)]]


def test_rollback_finds_another_saver_if_its_own_has_died(home: Path, saver_home: Path) -> None:
    counter = Counter()
    with open_checkpoint(home, counter) as checkpoint:
        checkpoint.restore(allow_fresh_start=True)
        for step in range(3):
            counter.step(checkpoint, step)
        (saver,) = savers(saver_home)
        os.kill(saver, signal.SIGKILL)
        assert (checkpoint.rollback(steps=1), counter.at) == (2, 1)
