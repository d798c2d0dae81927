"""Training runs as lists of what a rank does, and a clock that drives them through the real page and verdict.

Nothing sleeps: a day of training takes a second. The rank's side is the real :class:`Pulse` on a real page, the monitor's
side the real :func:`verdict`, the launcher's side the real :class:`Learner`; only the time is made up.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from resilience.config import Settings
from resilience.launcher.learner import Learner
from resilience.monitor.verdict import FINE, Life, Verdict, learned_from, verdict
from resilience.pulse.page import W_ATTACHED, Page
from resilience.pulse.section import Section
from resilience.pulse.timeouts import Timeouts
from resilience.pulse.writer import Pulse
from tests.fakes import FakeClock, S, writer_time


@dataclass(frozen=True)
class Beat:
    """A heartbeat."""

    step: int


@dataclass(frozen=True)
class Enter:
    """A section begins."""

    name: str


@dataclass(frozen=True)
class Leave:
    """A section ends."""

    name: str


@dataclass(frozen=True)
class Wait:
    """Work: time passes at a place."""

    seconds: float
    place: str
    step: int


Action = Beat | Enter | Leave | Wait


@dataclass(frozen=True)
class Plan:
    """How a script trains and which of our calls it makes."""

    step_s: Callable[[random.Random, int], float]
    beats: bool = True
    step_section: bool = True
    evaluate_every: int = 0
    evaluate_s: float = 0.0
    save_every: int = 0
    save_s: float = 0.0
    marked: bool = True  # evaluation and saving have sections of their own

    def actions(self, seed: int, steps: int) -> Iterator[Action]:
        """Yield what one life of the rank does."""
        rng = random.Random(seed)
        for step in range(steps):
            yield from self._part("step", self.step_s(rng, step), step, self.step_section)
            yield Wait(rng.uniform(0.001, 0.02), "between", step)
            if self.save_every and step % self.save_every == self.save_every - 1:
                yield from self._part("save", self.save_s * rng.uniform(0.8, 1.2), step, self.marked)
            if self.evaluate_every and step % self.evaluate_every == self.evaluate_every - 1:
                yield from self._part("evaluate", self.evaluate_s * rng.uniform(0.8, 1.2), step, self.marked)
            if self.beats:
                yield Beat(step)

    def _part(self, name: str, seconds: float, step: int, marked: bool) -> Iterator[Action]:
        if marked:
            yield Enter(name)
        yield Wait(seconds, name, step)
        if marked:
            yield Leave(name)


def steady(rng: random.Random, step: int) -> float:
    """One second, give or take a twentieth."""
    return rng.uniform(0.95, 1.05)


def stalling(rng: random.Random, step: int) -> float:
    """Half a second, and in one step of a hundred a stall of the data with a heavy tail, up to 25 s."""
    stall = min(25.0, rng.paretovariate(1.1)) if rng.random() < 0.01 else 0.0
    return rng.lognormvariate(-0.7, 0.3) + stall


def warming(rng: random.Random, step: int) -> float:
    """Minutes for the first step (compilation), less for the next two, then one second."""
    return {0: 240.0, 1: 60.0, 2: 20.0}.get(step, 1.0) * rng.uniform(0.8, 1.25)


PLANS = {
    "steady, sections": Plan(steady),
    "steady, heartbeats only": Plan(steady, step_section=False),
    "steady, sections only": Plan(steady, beats=False),
    "evaluation and saving, in sections": Plan(
        steady, evaluate_every=200, evaluate_s=240.0, save_every=100, save_s=20.0
    ),
    "the same, steps not marked": Plan(
        steady, step_section=False, evaluate_every=200, evaluate_s=240.0, save_every=100, save_s=20.0
    ),
    "evaluation below the floor, heartbeats only": Plan(
        steady, step_section=False, evaluate_every=200, evaluate_s=22.0, marked=False
    ),
    "heavy-tailed stalls, sections": Plan(stalling),
    "heavy-tailed stalls, heartbeats only": Plan(stalling, step_section=False),
    "slow warm-up, sections": Plan(warming),
    "slow warm-up, heartbeats only": Plan(warming, step_section=False),
}


@dataclass(frozen=True)
class End:
    """How a life ended: by itself (``verdict`` None), in a false alarm, or in a hang and how long that took to find."""

    steps: int
    verdict: Verdict | None = None
    found_s: float = 0.0
    hung: bool = False


@dataclass
class Simulation:
    """A job of one rank: its launcher's memory, over as many lives as are lived."""

    learner: Learner = field(default_factory=lambda: Learner(Settings()))
    clock: FakeClock = field(default_factory=FakeClock)
    cycle: int = 0

    def live(self, actions: Iterator[Action], hang: tuple[str, int] | None = None) -> End:
        """Live one life. ``hang``: a place, and from which step on the first visit there never ends."""
        page = Page.create(self.cycle)
        page.words[W_ATTACHED] = self.clock.now
        try:
            with writer_time(self.clock):
                end = self._live(page, actions, hang)
            self.learner.see((self.cycle, 0), learned_from(page.read(), self._started))
            if end.verdict is not None and end.verdict.clock is not None:
                clock = end.verdict.clock
                self.learner.alarm(clock.name, clock.limit)
        finally:
            os.close(page.fd)
        self.cycle += 1
        return end

    def _live(self, page: Page, actions: Iterator[Action], hang: tuple[str, int] | None) -> End:
        pulse, rows = Pulse(page), dict[str, Section]()
        self._started = self.clock.now
        life = Life(self._started, adopted=self.learner.adopted)
        timeouts = self.learner.timeouts()
        step = -1
        for action in actions:
            if isinstance(action, Wait):
                step = action.step
                view = page.read()
                if hang is not None and action.place == hang[0] and step >= hang[1]:
                    return self._hang(verdict(view, timeouts, self.clock.now, life), page, timeouts, life, step)
                judged = verdict(view, timeouts, self.clock.now + round(action.seconds * S), life)
                if judged.kind != FINE:
                    assert judged.clock is not None
                    self.clock.now = round(judged.clock.deadline_ns)
                    return End(step, judged)
                self.clock.wait(action.seconds)
            elif isinstance(action, Enter):
                if action.name not in rows:
                    rows[action.name] = pulse.borrow(action.name)
                rows[action.name].enter()
            elif isinstance(action, Leave):
                rows[action.name].leave()
            else:
                pulse.beat(action.step)
            self.clock.now += 1000  # no two calls in the same nanosecond
            if isinstance(action, Beat) or (isinstance(action, Leave) and action.name == "step"):
                self.learner.adopted = True
                if self.learner.see((self.cycle, 0), learned_from(page.read(), self._started)):
                    timeouts = self.learner.timeouts()
        return End(step)

    def _hang(self, before: Verdict, page: Page, timeouts: Timeouts, life: Life, step: int) -> End:
        """Wait for the monitor to look at its next deadline, as often as it takes."""
        assert before.kind == FINE
        since = self.clock.now
        self.clock.now = round(before.next_ns)
        judged = verdict(page.read(), timeouts, self.clock.now + 1000, life)  # a float's nanosecond or two
        assert judged.kind != FINE
        return End(step, judged, (self.clock.now - since) / S, hung=True)
