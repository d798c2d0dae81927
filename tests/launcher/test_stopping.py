"""The agreed stop, with real ranks' code and real launchers' code in a simulated world: one clock, one turn at a time.

Ranks run :class:`Stop` in threads that are only let run when it is their turn; they can be interrupted at every load and
store. Launchers run :class:`AgreedStop` over :class:`Brakes`. Stores reach the other side late, in order.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from resilience.config import FailoverConfig
from resilience.launcher import stopping
from resilience.launcher.brakes import Brakes
from resilience.launcher.post import Post
from resilience.launcher.stopping import AgreedStop
from resilience.pulse import stop as rank_side
from resilience.pulse.page import W_STOP_ASKED, Page
from resilience.pulse.stop import Stop

GRACE_S = FailoverConfig().stop_grace
IN_FLIGHT_S = 0.008  # how late a store may be seen by the other side; both ways together are less than _SETTLE_S


class _Ended(BaseException):
    """The world has come to its end."""


class Life:
    """A function in a thread of its own that runs only in its turns; ``pause`` gives the turn back."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._delay: float | None = 0.0
        self._error: BaseException | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._over:
                self._body()
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - shown by whoever gave it the turn
            self._error = error
        self._delay = None
        self._back.release()

    def pause(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._delay = seconds
        self._back.release()
        self._go.acquire()
        if self._over:
            raise _Ended

    def turn(self) -> float | None:
        """Run it to its next pause; return how long that is, None when it has ended."""
        self._go.release()
        assert self._back.acquire(timeout=60)
        if self._error is not None:
            raise self._error
        return self._delay

    def end(self) -> None:
        """Have it end wherever it is."""
        self._over = True
        self._go.release()
        self._thread.join(60)
        assert not self._thread.is_alive()


class Side:
    """One side's sight of a page: its own stores at once, those of the other side when they have arrived."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: dict[int, int] = {}
        self._coming: list[tuple[float, int, int]] = []
        self.other: Side = self
        self.before_access: Callable[[], None] = lambda: None

    def __getitem__(self, word: int) -> int:
        self.before_access()
        while self._coming and self._coming[0][0] <= self._world.now:
            _, where, value = self._coming.pop(0)
            self._seen[where] = value
        return self._seen.get(word, 0)

    def __setitem__(self, word: int, value: int) -> None:
        self.before_access()
        self._seen[word] = value
        last = self.other._coming[-1][0] if self.other._coming else 0.0
        arrives = max(last, self._world.now + self._world.rng.uniform(0, IN_FLIGHT_S))
        self.other._coming.append((arrives, word, value))

    def show(self, word: int, value: int) -> None:
        """Have this side see a value, whoever wrote it."""
        self._seen[word] = value


@dataclass
class Rank:
    """A rank: its page from both sides, its life, and where it stopped."""

    theirs: Side
    ours: Side
    step_s: float
    life: Life | None = None
    calls: int = 0
    stopped_at: int | None = None


@dataclass
class Node:
    """A launcher with its ranks."""

    ranks: list[Rank]
    stop: AgreedStop
    turn_s: tuple[float, float] = (0.01, 0.2)
    busy_until: float = 0.0
    hear_due: float = 0.0


class Wire:
    """The board: a dictionary that all nodes share."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.posted: list[str] = []

    def post(self, key: str, text: str) -> None:
        self.keys[key] = text
        self.posted.append(key)

    def peek(self, key: str) -> str | None:
        return self.keys.get(key)


@dataclass
class World:
    """Everything, and the order in which it happens."""

    rng: random.Random
    lockstep: bool = True
    calling: bool = True
    now: float = 1000.0
    wire: Wire = field(default_factory=Wire)
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queue: list[tuple[float, int, Callable[[], float | None]]] = []
        self._order = itertools.count()

    @property
    def ranks(self) -> list[Rank]:
        return [rank for node in self.nodes for rank in node.ranks]

    def at(self, when: float, act: Callable[[], float | None]) -> None:
        """Have ``act`` happen ``when``, and again after as many seconds as it returns."""
        heapq.heappush(self._queue, (when, next(self._order), act))

    def add_node(self, number: int, nodes: int, steps_s: list[float]) -> Node:
        """Add a node whose ranks take ``steps_s`` for a step each."""
        ranks = [self._new_rank(step_s) for step_s in steps_s]
        posts = [cast(Post, SimpleNamespace(page=SimpleNamespace(words=rank.ours))) for rank in ranks]
        stop = AgreedStop(Brakes(posts, threading.Condition()), self.wire, number, nodes, grace=GRACE_S)
        node = Node(ranks, stop)
        self.nodes.append(node)
        self.at(self.now + self.rng.random() / 10, lambda: self._launcher(node))
        return node

    def _new_rank(self, step_s: float) -> Rank:
        rank = Rank(Side(self), Side(self), step_s)
        rank.theirs.other, rank.ours.other = rank.ours, rank.theirs
        life = rank.life = Life(lambda: self._train(rank))
        rank.theirs.before_access = lambda: life.pause(self._moment())
        self.at(self.now + self.rng.random() * step_s, life.turn)
        return rank

    def _moment(self) -> float:
        """Between two instructions hardly any time passes, unless the kernel lets somebody else run."""
        return self.rng.uniform(0, 0.03) if self.rng.random() < 0.05 else self.rng.uniform(0, 0.0001)

    def _train(self, rank: Rank) -> None:
        assert rank.life is not None
        stop = Stop(cast(Page, SimpleNamespace(words=rank.theirs)), alone=False)
        while True:
            rank.life.pause(rank.step_s * self.rng.uniform(0.8, 1.2))
            while self.lockstep and any(other.calls < rank.calls for other in self.ranks):
                rank.life.pause(0.005)  # in a collective of this step: somebody has not come to it yet
            if self.calling:
                stopped = stop.requested()
                rank.calls += 1
                if stopped:
                    rank.stopped_at = rank.calls
                    return

    def _launcher(self, node: Node) -> float | None:
        if self.now < node.busy_until:
            return node.busy_until - self.now
        if self.now >= node.hear_due and len(self.nodes) > 1:
            node.hear_due = self.now + 0.25
            node.stop.hear()
        node.stop.turn(self.now)
        return self.rng.uniform(*node.turn_s)

    def run(self, until: Callable[[], bool]) -> None:
        """Let everything happen in its order, until something is true or the ranks had their time."""
        end = self.now + 3 * GRACE_S
        while not until() and not any(node.stop.overdue(self.now) for node in self.nodes):
            assert self.now < end, "it takes for ever"
            when, _, act = heapq.heappop(self._queue)
            self.now = max(self.now, when)
            delay = act()
            if delay is not None:
                self.at(self.now + delay, act)

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        self.run(lambda: self.now >= end)

    def all_ended(self) -> bool:
        """Whether every rank has left its loop."""
        return all(rank.stopped_at is not None for rank in self.ranks)

    def stopped_at(self) -> set[int | None]:
        """Return where the ranks have stopped; None is for those that have not."""
        return {rank.stopped_at for rank in self.ranks}


class Clock:
    """Stands in for the module ``time``: the world's clock, and sleep that lets the others have their turns."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        (life,) = [rank.life for rank in self._world.ranks if rank.life is not None and rank.life._thread is _me()]
        life.pause(max(seconds, 0.01))  # coarser than it is: a poll more or less shows nothing


def _me() -> threading.Thread:
    return threading.current_thread()


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """Make worlds: ``worlds(seed, nodes, ranks, lockstep)``."""
    made: list[World] = []

    def make(seed: int, nodes: int, per_node: int = 2, lockstep: bool = True, calling: bool = True) -> World:
        world = World(random.Random(seed), lockstep, calling)
        made.append(world)
        clock = Clock(world)
        monkeypatch.setattr(stopping, "time", clock)
        monkeypatch.setattr(rank_side, "time", clock)
        step = world.rng.choice((0.02, 0.1, 0.5))
        for number in range(nodes):
            speeds = [step * (1.0 if lockstep else world.rng.uniform(1, 3)) for _ in range(per_node)]
            world.add_node(number, nodes, speeds)
        return world

    yield make
    for world in made:
        for rank in world.ranks:
            if rank.life is not None:
                rank.life.end()


def ask_somebody(world: World) -> None:
    """Have somebody want the job to stop, by one of the ways there are, or by two at once."""
    for _ in range(world.rng.choice((1, 1, 2))):
        if world.rng.random() < 0.5:
            world.rng.choice(world.nodes).stop.ask("SIGTERM to a launcher")
        else:
            world.rng.choice(world.ranks).ours.show(W_STOP_ASKED, signal.SIGTERM)


def under_training(world: World) -> None:
    """Let the job run until every rank has been through a few steps."""
    world.run_for(world.rng.uniform(1, 3))
    world.run(lambda: all(rank.calls for rank in world.ranks))
    assert world.stopped_at() == {None}, "nobody asked for it"


def stall(world: World, least: float, most: float) -> None:
    """Have launchers be busy with something else now and then, from now on."""
    for node in world.nodes:
        for _ in range(world.rng.choice((0, 1, 1, 2))):

            def begin(node: Node = node) -> None:
                node.busy_until = max(node.busy_until, world.now + world.rng.uniform(least, most))

            world.at(world.now + world.rng.uniform(0, 4), begin)


# -- all or nobody ----------------------------------------------------------------------------------------------------

SPEEDS = pytest.mark.parametrize("lockstep", [True, False], ids=["lockstep", "each at its own speed"])


@SPEEDS
@pytest.mark.parametrize("nodes", range(1, 6))
@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_of_all_nodes_stop_at_the_same_call(
    worlds: Callable[..., World], seed: int, nodes: int, lockstep: bool
) -> None:
    world = worlds(seed, nodes, lockstep=lockstep)
    under_training(world)
    ask_somebody(world)
    world.run(world.all_ended)
    (step,) = world.stopped_at()
    assert step is not None, f"nobody stopped: {world.wire.keys}"
    assert {node.stop.agreed for node in world.nodes} == {step}
    assert not any(node.stop.in_vain for node in world.nodes)


@pytest.mark.parametrize("seed", range(8))
def test_stop_in_the_first_moments_of_a_job_is_taken_by_all_ranks_or_by_nobody(
    worlds: Callable[..., World], seed: int
) -> None:
    world = worlds(seed, nodes=3)
    world.run_for(world.rng.uniform(0.01, 1))
    ask_somebody(world)
    world.run(lambda: world.all_ended() or all(node.stop.in_vain for node in world.nodes))
    (step,) = world.stopped_at()
    assert (step is None) == all(node.stop.in_vain for node in world.nodes), world.wire.keys


@SPEEDS
@pytest.mark.parametrize("seed", range(8))
def test_launchers_that_are_busy_for_a_moment_agree_later(
    worlds: Callable[..., World], seed: int, lockstep: bool
) -> None:
    world = worlds(seed, nodes=4, lockstep=lockstep)
    under_training(world)
    ask_somebody(world)
    stall(world, 0.2, 0.9)
    world.run(world.all_ended)
    (step,) = world.stopped_at()
    assert step is not None, f"nobody stopped: {world.wire.keys}"


@SPEEDS
@pytest.mark.parametrize("stalls", [(1.0, 1.9), (2.5, 5.0)])
@pytest.mark.parametrize("seed", range(6))
def test_launchers_that_are_busy_for_seconds_have_all_ranks_stop_together_or_nobody(
    worlds: Callable[..., World], seed: int, stalls: tuple[float, float], lockstep: bool
) -> None:
    world = worlds(seed, nodes=4, lockstep=lockstep)
    under_training(world)
    ask_somebody(world)
    stall(world, *stalls)
    world.run(world.all_ended)
    assert len(world.stopped_at()) == 1, f"ranks stopped at {world.stopped_at()}: {world.wire.keys}"


def test_launcher_that_hears_of_the_decision_seconds_late_has_its_ranks_stop_where_the_others_did(
    worlds: Callable[..., World],
) -> None:
    world = worlds(seed=1, nodes=2)
    under_training(world)
    world.nodes[0].stop.ask("SIGTERM to a launcher")
    world.run(lambda: "stop/confirm/0/1" in world.wire.keys)
    world.nodes[1].busy_until = world.now + 6  # everything is agreed on; it only has to tell its ranks
    world.run(world.all_ended)
    assert world.stopped_at() == {int(world.wire.keys["stop/proposal/0"])}


def test_without_the_agreement_of_a_launcher_nobody_stops(worlds: Callable[..., World]) -> None:
    world = worlds(seed=3, nodes=3)
    under_training(world)
    world.nodes[0].stop.ask("SIGTERM to a launcher")
    world.nodes[2].busy_until = world.now + 2 * GRACE_S
    world.run(world.all_ended)
    assert world.stopped_at() == {None}
    assert world.nodes[0].stop.overdue(world.now)
    assert "stop/decision" not in world.wire.keys


@pytest.mark.parametrize("nodes", range(1, 6))
def test_nobody_calls_it_so_nobody_is_waited_for_on_any_node(worlds: Callable[..., World], nodes: int) -> None:
    world = worlds(seed=nodes, nodes=nodes, calling=False)
    world.run_for(2)
    world.nodes[-1].stop.ask("SIGTERM to a launcher")
    world.run(lambda: all(node.stop.in_vain for node in world.nodes))
    for node in world.nodes:
        assert node.stop.in_vain
        assert not node.stop.under_way
        assert not node.stop.overdue(world.now + 10 * GRACE_S)


# -- step by step -----------------------------------------------------------------------------------------------------


class FakeRanks:
    """Ranks that do what the test says, with the meaning of the words as in ``brakes.py``."""

    def __init__(self, *calls: int) -> None:
        self.calls = list(calls)
        self.waiting = [0] * len(calls)
        self.asked = self.armed = self.decided = self.confirmed = 0

    def stop_asked(self) -> int:
        return self.asked

    def stop_calls(self) -> list[int]:
        return self.calls

    def arm_stop(self, step: int) -> None:
        self.armed = step

    def passed(self, step: int) -> bool:
        return any(calls >= step and waiting != step for calls, waiting in zip(self.calls, self.waiting, strict=True))

    def confirm_stop(self, step: int) -> None:
        self.confirmed = step

    def decide_stop(self, step: int) -> None:
        self.decided = step

    def stop_taken(self) -> bool:
        return False


class Turns:
    """Launchers that have their turns when the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ranks: FakeRanks) -> None:
        self.now = 1000.0
        self.wire = Wire()
        self.ranks = ranks
        self.stops = [AgreedStop(each, self.wire, me, len(ranks), grace=GRACE_S) for me, each in enumerate(ranks)]
        monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: self.now))

    def all(self, times: int = 1, but: int | None = None) -> None:
        """Give every launcher ``times`` turns, but one."""
        for _ in range(times):
            self.now += 0.1
            for number, stop in enumerate(self.stops):
                if number != but:
                    stop.hear()
                    stop.turn(self.now)

    def until(self, key: str) -> str:
        """Give turns until a key is posted; return what it says."""
        for _ in range(30):
            if key in self.wire.keys:
                return self.wire.keys[key]
            self.all()
        raise AssertionError(f"{key} never came: {self.wire.keys}")


@pytest.mark.parametrize("node", [0, 1, 2])
def test_rank_that_is_past_the_proposal_leads_to_a_later_one(monkeypatch: pytest.MonkeyPatch, node: int) -> None:
    ranks = [FakeRanks(5, 5), FakeRanks(5, 4), FakeRanks(5, 5)]
    turns = Turns(monkeypatch, *ranks)
    turns.stops[1].ask("why")
    first = int(turns.until("stop/proposal/0"))
    assert first > 5
    ranks[node].calls[1] = first + 7
    second = int(turns.until("stop/proposal/1"))
    assert second > first + 7
    assert "stop/decision" not in turns.wire.keys
    turns.all(10)
    assert [each.decided for each in ranks] == [second] * 3
    assert [stop.agreed for stop in turns.stops] == [second] * 3


def test_rank_that_waits_at_the_proposal_is_not_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [FakeRanks(5), FakeRanks(5)]
    turns = Turns(monkeypatch, *ranks)
    turns.stops[0].ask("why")
    first = int(turns.until("stop/proposal/0"))
    ranks[1].calls[0] = ranks[1].waiting[0] = first
    turns.all(10)
    assert [each.decided for each in ranks] == [first, first]


def test_proposal_is_as_far_ahead_as_the_fastest_ranks_come_while_it_is_agreed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, fast = FakeRanks(0), FakeRanks(0)
    turns = Turns(monkeypatch, slow, fast)
    for _ in range(30):
        slow.calls[0] += 1
        fast.calls[0] += 10
        turns.all()
    turns.stops[0].ask("why")
    step = int(turns.until("stop/proposal/0"))
    assert step >= 300 + 50, "they make 100 calls a second, and the next turn of their launcher is not now"


def test_nobody_decides_before_everybody_has_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [FakeRanks(5), FakeRanks(5), FakeRanks(5)]
    turns = Turns(monkeypatch, *ranks)
    turns.stops[0].ask("why")
    turns.until("stop/proposal/0")
    turns.all(20, but=2)
    assert [each.decided for each in ranks] == [0, 0, 0]
    turns.all(10)
    assert len({each.decided for each in ranks}) == 1
    assert ranks[2].decided > 5


def test_proposal_is_confirmed_only_after_what_was_in_flight_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = FakeRanks(5)
    turns = Turns(monkeypatch, ranks)
    turns.stops[0].ask("why")
    first = int(turns.until("stop/proposal/0"))
    while not ranks.armed:
        turns.stops[0].turn(turns.now)
    turns.stops[0].turn(turns.now)
    turns.stops[0].turn(turns.now + 0.001)
    assert "stop/confirm/0/0" not in turns.wire.keys
    ranks.calls[0] = first  # it made that call before it could see what was armed
    turns.until("stop/confirm/0/0")
    assert json.loads(turns.wire.keys["stop/confirm/0/0"]) == first


def test_ranks_that_are_past_every_proposal_are_never_stopped_and_are_overdue_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [FakeRanks(5), FakeRanks(5)]
    turns = Turns(monkeypatch, *ranks)
    turns.stops[0].ask("why")
    for _ in range(100):
        turns.all()
        ranks[1].calls[0] = max(ranks[1].calls[0], ranks[1].armed + 1)
    assert [each.decided for each in ranks] == [0, 0]
    assert "stop/decision" not in turns.wire.keys
    assert len(turns.wire.posted) < 50, "they go on proposing for ever"
    assert all(stop.under_way for stop in turns.stops)
    assert all(stop.overdue(turns.now + GRACE_S) for stop in turns.stops)


def test_node_whose_ranks_have_not_called_yet_does_not_make_the_stop_a_vain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [FakeRanks(0, 0), FakeRanks(0, 3)]
    turns = Turns(monkeypatch, *ranks)
    turns.stops[0].ask("why")
    turns.all(10)
    assert not any(stop.in_vain for stop in turns.stops)
    assert ranks[0].decided == ranks[1].decided > 3


@pytest.mark.parametrize("nodes", [1, 3])
def test_asked_twice_is_asked_once(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    turns = Turns(monkeypatch, *[FakeRanks(5) for _ in range(nodes)])
    asked = turns.stops[-1]
    asked.ask("SIGTERM")
    turns.now += GRACE_S - 1
    asked.ask("SIGUSR1")
    assert asked.why == "SIGTERM"
    assert turns.wire.posted.count("stop/asked") == 1
    assert asked.overdue(turns.now + 2), "the second one bought them time"
    turns.all(10)
    asked.ask("SIGTERM again")
    turns.all(10)
    assert turns.wire.posted.count("stop/decision") == 1
    assert {stop.why for stop in turns.stops} == {"SIGTERM"}


def test_signal_to_a_rank_asks_on_every_node_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [FakeRanks(5), FakeRanks(5), FakeRanks(5)]
    turns = Turns(monkeypatch, *ranks)
    turns.all(3)
    assert not any(stop.under_way for stop in turns.stops)
    ranks[2].asked = signal.SIGUSR1
    turns.all(2)
    assert all(stop.under_way for stop in turns.stops)
    assert {stop.why for stop in turns.stops} == {"SIGUSR1 to a rank"}
    turns.all(10)
    assert len({each.decided for each in ranks}) == 1
    assert ranks[0].decided > 5


def test_without_a_request_nothing_is_armed_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [FakeRanks(5), FakeRanks(5)]
    turns = Turns(monkeypatch, *ranks)
    turns.all(100)
    assert turns.wire.posted == []
    assert [each.armed for each in ranks] == [0, 0]
    assert not any(stop.overdue(turns.now + 10 * GRACE_S) for stop in turns.stops)


def test_ranks_have_their_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, FakeRanks(5))
    (stop,) = turns.stops
    stop.ask("why")
    began = turns.now
    assert not stop.overdue(began + GRACE_S)
    assert stop.overdue(began + GRACE_S + 0.001)
