"""What a part could not do is brought again: time is passed in."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from resilience.integrations.kubernetes.api import Conflict, Forbidden
from resilience.integrations.kubernetes.delivery import Delivery
from resilience.integrations.kubernetes.parts import MODIFIED, NODES, PODS, Kind, Thing
from resilience.integrations.kubernetes.watching import Change


class Recorder:
    """A part that fails as often as it is told to."""

    def __init__(self, name: str = "recorder", kinds: Sequence[Kind] = (PODS,)) -> None:
        self.name = name
        self._kinds = kinds
        self.told: list[str] = []
        self.ticks: list[float] = []
        self.fails: list[Exception] = []

    def kinds(self) -> Sequence[Kind]:
        return self._kinds

    def changed(self, kind: Kind, verb: str, thing: Thing) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.told.append(thing["metadata"]["resourceVersion"])

    def tick(self, now: float) -> None:
        self.ticks.append(now)
        if self.fails:
            raise self.fails.pop(0)


def change(version: str, uid: str = "u") -> Change:
    return Change(PODS, MODIFIED, {"metadata": {"uid": uid, "name": "p", "resourceVersion": version}})


def test_part_that_raises_is_told_the_same_again_after_growing_pauses() -> None:
    part = Recorder()
    part.fails = [RuntimeError("no"), RuntimeError("no")]
    delivery = Delivery([part])
    delivery.deliver(change("1"), 0.0)
    delivery.again(0.4)
    assert part.told == []
    assert len(part.fails) == 1
    delivery.again(0.5)
    delivery.again(1.4)
    assert part.told == []
    delivery.again(1.5)
    assert part.told == ["1"]
    assert delivery.owes() == 0


def test_newer_state_takes_the_place_of_what_is_owed() -> None:
    part = Recorder()
    part.fails = [RuntimeError("no")]
    delivery = Delivery([part])
    delivery.deliver(change("1"), 0.0)
    delivery.deliver(change("2"), 0.1)
    delivery.again(100.0)
    assert part.told == ["2"]


def test_part_that_fails_holds_up_no_other_and_only_who_asked_is_told() -> None:
    bad, good, other = Recorder("bad"), Recorder("good"), Recorder("other", [NODES])
    bad.fails = [RuntimeError("no")]
    Delivery([bad, good, other]).deliver(change("1"), 0.0)
    assert (good.told, other.told) == (["1"], [])


def test_kind_that_two_parts_ask_for_is_watched_once() -> None:
    assert Delivery([Recorder("a"), Recorder("b", [NODES, PODS])]).kinds() == [PODS, NODES]


def test_tick_that_raises_comes_again_after_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    part = Recorder()
    part.fails = [RuntimeError("no")]
    delivery = Delivery([part])
    delivery.listed(PODS)
    for now in (0.0, 0.3, 0.5, 1.0):
        delivery.tick(now)
    assert part.ticks == [0.0, 0.5, 1.0]


def test_part_is_ticked_once_its_own_kinds_are_listed_whatever_another_part_waits_for() -> None:
    one, both = Recorder("one"), Recorder("both", [PODS, NODES])
    delivery = Delivery([one, both])
    delivery.tick(0.0)
    delivery.listed(PODS)
    delivery.tick(1.0)
    assert (one.ticks, both.ticks) == ([1.0], [])
    delivery.listed(NODES)
    delivery.tick(2.0)
    assert (one.ticks, both.ticks) == ([1.0, 2.0], [2.0])


def test_missing_permission_is_an_error_in_the_log_said_once_and_a_conflict_is_not_worth_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    part = Recorder()
    part.fails = [Conflict("changed", 409), *[Forbidden("missing permission: x", 403) for _ in range(5)]]
    delivery = Delivery([part])
    with caplog.at_level(logging.INFO):
        delivery.deliver(change("1"), 0.0)
        assert not caplog.records
        for now in (10.0, 100.0, 1000.0):
            delivery.again(now)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "missing permission: x" in caplog.text
