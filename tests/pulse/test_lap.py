"""A lap writes what its parts would, whoever closes or opens them meanwhile."""

from __future__ import annotations

import threading

import pytest

from resilience.pulse import client
from resilience.pulse.lap import Lap
from resilience.pulse.page import Page, PageView
from resilience.pulse.section import Section
from resilience.pulse.writer import Pulse
from tests.fakes import FakeClock


class Steps:
    """What a lap stands for, step by step."""

    def __init__(self, work: Section, between: Section) -> None:
        self._work, self._between = work, between

    def over(self, step: int | None) -> None:
        self._work.close()
        client.heartbeat(step)
        self._between.enter()

    def begin(self) -> None:
        self._between.leave()
        self._work.enter()


def words(pulse: Pulse, monkeypatch: pytest.MonkeyPatch, clock: FakeClock, kind: type[Lap] | type[Steps]) -> PageView:
    """Return what a loop has written that goes round as usual, stops for something else, and beats a heart of its own."""
    monkeypatch.setattr(client._here, "pulse", pulse)
    monkeypatch.setattr(client._here, "sections", {})
    work = client.section("work")
    lap = kind(work, client.section("between"))
    for step, (fetch, train) in enumerate([(1, 5), (2, 4), (9, 3), (1, 8), (1, 1), (2, 2), (1, 30), (1, 2)]):
        lap.over(step - 1 if step else None)
        clock.wait(fetch)
        lap.begin()
        clock.wait(train)
        if step == 4:
            client.heartbeat(step)
            clock.wait(2)
        if step == 5:
            work.close()
            with client.section("else"):
                clock.wait(7)
    return pulse.page.read()


def test_lap_writes_what_its_parts_would(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    began = clock.now
    page, other = Page.private(), Page.private()
    short = words(Pulse(page), monkeypatch, clock, Lap)
    clock.now = began
    long = words(Pulse(other), monkeypatch, clock, Steps)
    assert short.rows == long.rows
    assert short.gaps == long.gaps
    assert short.gaps.largest > 0
    assert (short.step, short.beats, short.beat_at) == (long.step, long.beats, long.beat_at)
    assert [row.name for row in short.open_rows()] == ["work"]


def test_time_between_counts_as_inside_if_it_began_with_the_heartbeat(pulse: Pulse, clock: FakeClock) -> None:
    lap = Lap(client.section("work"), client.section("between"))
    for step in range(8):
        lap.over(step)
        clock.wait(100)
        lap.begin()
        clock.wait(1)
    assert pulse.page.read().gaps.largest == 0


def test_nothing_more_to_come_closes_what_was_between_and_says_so(pulse: Pulse) -> None:
    lap = Lap(client.section("work"), client.section("between"))
    lap.over(0)
    error = StopIteration()
    lap.fail(error)
    assert not pulse.page.read().open_rows()
    assert [name for name, _ in client.sections_left_by(error)] == ["between"]


def test_lap_in_another_thread_than_its_own_goes_the_long_way(pulse: Pulse) -> None:
    lap = Lap(client.section("work"), client.section("between"))
    seen: list[list[str]] = []

    def work() -> None:
        for step in range(3):
            lap.over(step)
            lap.begin()
        seen.append([row.name for row in pulse.page.read().open_rows()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [["work"]]
    assert pulse.page.read().step == 2
