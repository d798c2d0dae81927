"""Ranks of a node that each fit alone and do not fit together are told so before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.checkpoint import memory
from resilience.checkpoint.saver.rooms import Rooms
from tests.jobs import WORKLOADS, job


def test_those_who_are_at_it_count_against_what_the_first_one_found() -> None:
    rooms = Rooms()
    assert rooms.announce("a", 30, 100) == (100, 0)
    assert rooms.announce("b", 30, 80) == (100, 30), "a has taken 20 of its 30 meanwhile"
    rooms.through("a")
    assert rooms.announce("c", 30, 50) == (100, 60), "b is still at it"


def test_those_who_are_through_are_gone_from_what_is_left_and_not_counted_twice() -> None:
    rooms = Rooms()
    rooms.announce("a", 30, 100)
    rooms.through("a")
    assert rooms.announce("b", 30, 70) == (70, 0)


def test_one_that_asks_again_is_counted_once() -> None:
    rooms = Rooms()
    rooms.announce("a", 30, 100)
    rooms.announce("b", 30, 100)
    assert rooms.announce("a", 40, 90) == (100, 30)


def test_somebody_unknown_is_through_without_ado() -> None:
    Rooms().through("nobody")


def test_refusal_gives_the_figures_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: (20_000_000_000, "the machine"))
    memory.check(8_000_000_000, "3 slots", lambda need, left: (left, 12_000_000_000, 0))
    with pytest.raises(
        memory.NotEnoughMemory, match=r"8\.00 GB for 3 slots beside 13\.00 GB for other ranks.*20\.00 GB left"
    ):
        memory.check(8_000_000_000, "3 slots", lambda need, left: (left, 13_000_000_000, 0))
    with pytest.raises(memory.NotEnoughMemory, match=r"needs 21\.00 GB for 3 slots, and the machine has 20\.00 GB"):
        memory.check(21_000_000_000, "3 slots", lambda need, left: (30_000_000_000, 0, 0))


@pytest.mark.spawns
def test_two_ranks_that_fit_alone_and_not_together_are_refused(tmp_path: Path) -> None:
    with job(tmp_path, ["--nproc-per-node=2"], [str(WORKLOADS / "two_rooms.py"), str(tmp_path / "ck")]) as it:
        assert it.wait() == 1
        said = it.report(0)["culprit"]["message"]
        assert "needs 0.03 GB for 3 slots" in said
        assert "beside 0.03 GB for other ranks of this node, and a machine of this test has 0.05 GB left" in said
        it.assert_nothing_left()
