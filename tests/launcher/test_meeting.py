from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from resilience.failover import exits
from resilience.failover.culprit import blame
from resilience.failover.failure import examine
from resilience.failover.history import History, Past
from resilience.launcher import agreement, meeting, roster
from resilience.launcher.agreement import Agreement, Node, agree, settle
from resilience.launcher.meeting import Meeting, NotWanted, Patience
from resilience.launcher.roster import Member, Outcome, Roster, Rules
from resilience.pulse.timeouts import Samples, from_json, to_json
from tests.jobs import wait_for

NEVER = 1e6
SOON = 30.0  # seconds after which a test gives up; nothing takes that long
STORE_TIMEOUT = timedelta(seconds=SOON)
PATIENT = Patience(join=NEVER, last_call=NEVER, silence=NEVER, lost=NEVER)
TWO = Rules(2, 2, by_infra=False)


class Died(Exception):  # noqa: N818 - no error of the code under test
    """What ends a launcher that is killed: it says nothing more."""


class Launcher(Meeting):
    """A launcher that can be killed, and stopped between looking at the roster and acting on it."""

    killed = False

    def die(self) -> None:
        """Be killed at the next word with the store."""
        self.killed = True

    def hear(self) -> None:
        if self.killed:
            raise Died

    def stall(self, seen: Roster) -> None:
        """Called before ``seen`` is acted on."""

    def _move_on(self, roster: Roster, waiting: Any) -> None:
        self.stall(roster)
        super()._move_on(roster, waiting)


class Exchange:
    """A store, and connections to it that one test after the other uses: a new one may take seconds where DNS is slow."""

    def __init__(self) -> None:
        self.server: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
        self.port = self.server.port
        self.connections: list[Any] = []
        self.jobs = itertools.count()

    def connection(self, number: int) -> Any:
        while len(self.connections) <= number:
            store = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
            self.connections.append(store)
        return self.connections[number]


class Town:
    """One job, and the launchers that meet for it, each in a thread of its own and on a connection of its own."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.threads: list[threading.Thread] = []
        self.job = f"job-{next(exchange.jobs)}"
        self.launchers: list[Launcher] = []
        self.desk = self.launcher("nobody")  # looks at the roster and never arrives

    def launcher(
        self,
        id_: str,
        rules: Rules = TWO,
        patience: Patience = PATIENT,
        *,
        infra: int | None = None,
        run_id: str = "",
    ) -> Launcher:
        store = self.exchange.connection(len(self.launchers))
        me = Member(id_, f"host-{id_}", infra)
        made = Launcher(store, run_id or self.job, me, rules=rules, patience=patience, excluded_code=exits.NODE_LEFT)
        made.answered = made.hear
        self.launchers.append(made)
        return made

    def arrive(self, *launchers: Meeting) -> list[Future[Any]]:
        """Let launchers come to the rendezvous; return what will have come of it."""
        return [self.run(it.next_rendezvous) for it in launchers]

    def run(self, work: Callable[[], Any], name: str | None = None) -> Future[Any]:
        future: Future[Any] = Future()

        def body() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - the future has it
                future.set_exception(error)

        thread = threading.Thread(target=body, name=name)
        self.threads.append(thread)
        thread.start()
        return future

    def meet(self, *launchers: Meeting) -> list[Any]:
        """Let launchers meet."""
        return [future.result(SOON) for future in self.arrive(*launchers)]

    def await_roster(self, condition: Callable[[Roster], bool], what: str) -> Roster:
        found: Roster = wait_for(lambda: it if condition(it := self.desk.look()) else None, what, SOON)
        return found

    def await_place(self, id_: str, place: str) -> Roster:
        return self.await_roster(lambda it: it.place_of(id_) == place, f"{id_} to be {place}")

    def spare(self, launcher: Meeting) -> Future[Any]:
        """Let a launcher come to a job that is full; return when it waits."""
        (future,) = self.arrive(launcher)
        self.await_place(launcher.me.id, "waiting")
        return future

    def kill_on_arrival(self, launcher: Launcher) -> None:
        """Let a launcher come and be killed as soon as it is on the roster."""
        launcher.die()
        (future,) = self.arrive(launcher)
        assert isinstance(future.exception(SOON), Died)
        assert self.desk.look().place_of(launcher.me.id) != "outside"

    def leave(self) -> None:
        """End the job; whoever is still at the rendezvous goes home."""
        if self.exchange.server is not None:
            self.desk.close(Outcome(0, "the test is over"))
        for thread in self.threads:
            thread.join(SOON)
        assert not [thread for thread in self.threads if thread.is_alive()], "a launcher did not come home"


@pytest.fixture(scope="module", autouse=True)
def hurried() -> Iterator[None]:
    """Launchers that look and tell five times as often as they do in a cluster."""
    with pytest.MonkeyPatch.context() as patch:
        for pace in ("_LOOK_S", "_FULL_LOOK_S", "_ALIVE_S"):
            patch.setattr(meeting, pace, getattr(meeting, pace) / 5)
        yield


@pytest.fixture(scope="module")
def exchange() -> Exchange:
    return Exchange()


@pytest.fixture
def town(exchange: Exchange) -> Iterator[Town]:
    made = Town(exchange)
    yield made
    made.leave()


@pytest.fixture
def doomed() -> Iterator[Town]:
    """A town whose store nobody else needs."""
    made = Town(Exchange())
    yield made
    made.leave()


def ranks(infos: list[Any]) -> list[int]:
    return [info.rank for info in infos]


def worlds(infos: list[Any]) -> set[int]:
    return {info.world_size for info in infos}


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_launchers_that_come_together_get_distinct_ranks_in_the_same_world(town: Town) -> None:
    rules = Rules(5, 5, by_infra=False)
    infos = town.meet(*(town.launcher(f"node-{number}", rules) for number in (10, 9, 8, 7, 100)))
    assert ranks(infos) == [3, 2, 1, 0, 4]
    assert worlds(infos) == {5}


def test_launchers_with_ranks_from_the_infrastructure_keep_to_them(town: Town) -> None:
    rules = Rules(3, 3, by_infra=True)
    assert ranks(town.meet(*(town.launcher(f"n{infra}", rules, infra=2 - infra) for infra in range(3)))) == [2, 1, 0]


def test_launchers_of_another_job_on_the_same_store_do_not_meet_ours(town: Town) -> None:
    theirs = town.launcher("b", run_id=f"not-{town.job}")
    (other,) = town.arrive(theirs)
    wait_for(lambda: theirs.roster.place_of("b") == "member", "b to arrive", SOON)
    infos = town.meet(town.launcher("a"), town.launcher("c"))
    assert worlds(infos) == {2}
    assert set(town.desk.look().members) == {"a", "c"}
    assert not other.done()
    town.launcher("janitor", run_id=f"not-{town.job}").close(Outcome(0, "the test is over"))
    assert isinstance(other.exception(SOON), NotWanted)


def test_second_round_has_the_same_ranks_and_a_store_without_the_keys_of_the_first(town: Town) -> None:
    crew = [town.launcher(id_) for id_ in "ab"]
    first = town.meet(*crew)
    first[0].store.set("gloo", "a port that nobody listens on any more")
    first[1].store.wait(["gloo"], timedelta(seconds=30))  # the store of a round is shared; nobody acknowledges a set
    second = town.meet(*crew[::-1])[::-1]
    assert ranks(second) == ranks(first)
    assert not second[0].store.check(["gloo"])
    assert town.desk.look().round == 1


def test_connection_for_another_thread_leads_to_the_same_round(town: Town) -> None:
    crew = [town.launcher(id_) for id_ in "ab"]
    infos = town.meet(*crew)
    infos[0].store.set("alarm", "x")
    of_the_round, of_the_job = crew[1].connect()
    assert bytes(of_the_round.get("alarm")) == b"x"
    of_the_job.set("alive/b", "1")
    town.meet(*crew)
    again, job = crew[0].connect()
    assert not again.check(["alarm"])
    assert bytes(job.get("alive/b")) != b""


def test_node_that_came_and_said_nothing_is_not_waited_for_as_long_as_a_silent_store(town: Town) -> None:
    """Killed in that moment, it would otherwise hold the others until their watchdogs end them."""
    crew = [town.launcher(id_, patience=dataclasses.replace(PATIENT, answer=0.2)) for id_ in "ab"]
    first, second = town.meet(*crew)
    with pytest.raises(DistStoreError):
        first.store.get("word")
    with pytest.raises(DistStoreError):
        first.store.multi_get(["word", "other"])
    second.store.set("word", "x")
    assert bytes(first.store.get("word")) == b"x", "whoever only took long is heard"
    assert ranks(town.meet(*crew)) == ranks([first, second])


def test_too_few_for_a_full_job_meet_when_the_last_call_is_over(town: Town) -> None:
    rules, patience = Rules(2, 9, by_infra=False), dataclasses.replace(PATIENT, last_call=0.2)
    assert worlds(town.meet(*(town.launcher(id_, rules, patience) for id_ in "ab"))) == {2}


@pytest.mark.parametrize("before", [True, False], ids=["before-they-come", "while-they-wait"])
def test_node_that_departs_lets_the_others_meet_at_once_without_it(town: Town, before: bool) -> None:
    rules = Rules(2, 3, by_infra=False)
    a, b, c = crew = [town.launcher(id_, rules) for id_ in "abc"]
    town.meet(*crew)
    if before:
        b.depart(["b"])
    futures = town.arrive(a, c)
    if not before:
        town.await_roster(lambda it: set(it.members) == {"a", "c"}, "the others to be there")
        b.depart(["b"])
    infos = [future.result(SOON) for future in futures]  # the last call would last eleven days
    assert worlds(infos) == {2}
    assert ranks(infos) == [0, 1]


def test_crowd_that_comes_all_at_once_fills_the_job_and_the_rest_waits(town: Town) -> None:
    rules = Rules(4, 4, by_infra=False)
    crowd = [town.launcher(f"n{number}", rules) for number in range(10)]
    futures = town.arrive(*crowd)
    town.await_roster(lambda it: it.is_complete and len(it.waiting) == 6, "four to meet and six to wait")
    met = wait_for(lambda: done if len(done := [it for it in futures if it.done()]) == 4 else None, "four", SOON)
    assert sorted(ranks([future.result() for future in met])) == [0, 1, 2, 3]
    assert not town.desk.is_closed()
    town.desk.close(Outcome(exits.PREEMPTED, "preempted"))
    for future in futures:
        if future not in met:
            error = future.exception(SOON)
            assert isinstance(error, NotWanted)
            assert error.outcome.exit_code == exits.PREEMPTED
    assert town.desk.look().waiting == {}, "whoever holds the store would wait for them"


def test_changes_that_many_make_at_the_same_moment_are_all_made(town: Town) -> None:
    crowd = [town.launcher(f"n{number}") for number in range(6)]
    together = threading.Barrier(len(crowd))

    def exclude_many(launcher: Launcher) -> None:
        together.wait(SOON)
        for number in range(10):
            launcher.exclude(f"{launcher.me.id}-{number}", "broken")

    for future in [town.run(functools.partial(exclude_many, it)) for it in crowd]:
        future.result(SOON)
    assert len(town.desk.look().excluded) == 60, "somebody's change was overwritten"


# -- spares -----------------------------------------------------------------------------------------------------------


def test_spare_waits_and_takes_over_when_a_node_departs(town: Town) -> None:
    a, b = crew = [town.launcher(id_) for id_ in "ab"]
    town.meet(*crew)
    spare = town.spare(town.launcher("s"))
    a.depart(["a"])
    (info,) = town.meet(b)
    assert (info.rank, spare.result(SOON).rank) == (1, 0)
    assert worlds([info, spare.result()]) == {2}


def test_spare_does_not_take_the_place_of_a_node_that_is_slow_to_restart(town: Town) -> None:
    crew = [town.launcher(id_) for id_ in "ab"]
    first = town.meet(*crew)
    s = town.launcher("s")
    spare = town.spare(s)
    (quick,) = town.arrive(crew[0])
    wait_for(lambda: s.roster.round == 1, "the spare to see that the round forms", SOON)
    (slow,) = town.meet(crew[1])
    assert ranks([quick.result(SOON), slow]) == ranks(first)
    assert not spare.done()
    assert town.desk.look().place_of("s") == "waiting"


def test_spare_that_waited_longer_than_a_round_may_take_is_patient_with_the_round_it_gets_into(town: Town) -> None:
    rules = Rules(3, 3, by_infra=False)
    a, b, c = crew = [town.launcher(id_, rules) for id_ in "abc"]
    town.meet(*crew)
    limit = 2.0
    s = town.launcher("s", rules, dataclasses.replace(PATIENT, join=limit))
    since = time.monotonic()
    spare = town.spare(s)
    wait_for(lambda: time.monotonic() > since + limit, "the spare to have waited too long for a member", SOON)
    assert not spare.done(), "a spare waits without a limit"
    a.depart(["a"])
    town.arrive(b)
    wait_for(lambda: spare.done() or "s" in s.roster.members, "the spare to see that it is in", SOON)
    town.arrive(c)
    assert spare.result(SOON).world_size == 3


def test_spare_takes_over_from_members_that_died_and_left_nobody_to_notice(town: Town) -> None:
    rules = Rules(1, 2, by_infra=False)
    town.meet(*(town.launcher(id_, rules) for id_ in "ab"))  # from now on they say nothing
    s = town.launcher("s", rules, dataclasses.replace(PATIENT, lost=1.0, last_call=0.1))
    (spare,) = town.arrive(s)
    assert spare.result(SOON).world_size == 1
    assert set(town.desk.look().members) == {"s"}


@pytest.mark.parametrize("by_infra", [False, True])
def test_node_takes_over_from_members_that_died_while_they_came_together(town: Town, by_infra: bool) -> None:
    rules, patience = Rules(1, 2, by_infra), dataclasses.replace(PATIENT, silence=0.5, lost=0.5, last_call=0.1)
    a, b = crew = [town.launcher(id_, rules, infra=infra) for infra, id_ in enumerate("ab")]
    town.meet(*crew)
    spare = town.spare(town.launcher("s", rules, patience, infra=1))
    town.kill_on_arrival(a)  # and b, which has the same rank from the infrastructure as the spare, never comes back
    assert spare.result(SOON).world_size == 1
    assert town.desk.look().place_of(b.me.id) == "outside"


def test_spare_that_died_while_it_waited_is_not_counted_on(town: Town) -> None:
    rules = Rules(1, 2, by_infra=False)
    a = town.launcher("a", rules, dataclasses.replace(PATIENT, silence=1.0))
    b = town.launcher("b", rules)
    town.meet(a, b)
    town.kill_on_arrival(town.launcher("s", rules))
    b.depart(["b"])
    (info,) = town.meet(a)
    assert info.world_size == 1, "it would train with a node that is not there"


def test_newcomers_are_counted_and_spares_of_a_full_job_are_not(town: Town) -> None:
    rules = Rules(1, 3, by_infra=False)
    first = dataclasses.replace(PATIENT, last_call=0.1)
    a = town.launcher("a", rules, first)
    town.meet(a)
    assert a.num_nodes_waiting() == 0
    crew = [town.launcher(id_, rules) for id_ in "bcde"]
    for number, it in enumerate(crew, start=1):
        town.spare(it)
        assert a.num_nodes_waiting() == min(number, 2)
    town.meet(a)
    roster_now = town.await_roster(lambda it: it.round == 1 and it.is_complete, "the second round")
    assert set(roster_now.waiting) == {"d", "e"}
    assert a.num_nodes_waiting() == 0
    crew[0].depart(["b"])
    assert a.num_nodes_waiting() == 1


# -- nodes that do not come, or fall silent ---------------------------------------------------------------------------


def test_node_that_waits_too_long_for_the_others_gives_up_and_is_off_the_roster(town: Town) -> None:
    a = town.launcher("a", patience=dataclasses.replace(PATIENT, join=0.3))
    (future,) = town.arrive(a)
    error = future.exception(SOON)
    assert isinstance(error, RendezvousTimeoutError)
    assert "1 of at least 2" in str(error)
    assert town.desk.look() == Roster()
    town.meet(town.launcher("b"), town.launcher("c"))


def test_round_that_completes_while_a_node_gives_up_is_not_left_with_a_hole(town: Town) -> None:
    a = town.launcher("a", patience=dataclasses.replace(PATIENT, join=0.3))

    def completed_by_another(seen: Roster) -> None:
        town.desk._update(lambda it: roster.complete(roster.arrive(it, Member("b", "host-b"), TWO), TWO))
        since = time.monotonic()
        wait_for(lambda: time.monotonic() > since + 0.3, "a to have waited too long", SOON)

    a.stall = completed_by_another  # type: ignore[method-assign]
    (future,) = town.arrive(a)
    gave_up = isinstance(future.exception(SOON), RendezvousTimeoutError)
    assert not (gave_up and town.desk.look().is_complete), "b has been told that there are two of them"


def test_member_that_falls_silent_while_the_nodes_come_together_is_taken_out(
    town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    rules, patience = Rules(2, 4, by_infra=False), dataclasses.replace(PATIENT, silence=1.0)
    town.kill_on_arrival(town.launcher("dead", rules))
    futures = town.arrive(*(town.launcher(id_, rules, patience) for id_ in "ab"))
    town.await_roster(lambda it: set(it.members) == {"a", "b"}, "the dead node to be taken out")
    assert "host-dead fell silent while the nodes came together; it is taken out." in caplog.text
    futures += town.arrive(*(town.launcher(id_, rules, patience) for id_ in "cd"))
    assert worlds([future.result(SOON) for future in futures]) == {4}


def test_node_that_never_comes_back_is_taken_out_and_not_waited_for(town: Town) -> None:
    rules = Rules(1, 2, by_infra=False)
    a = town.launcher("a", rules, dataclasses.replace(PATIENT, silence=1.0))
    town.meet(a, town.launcher("b", rules))
    (info,) = town.meet(a)
    assert info.world_size == 1
    assert town.desk.look().place_of("b") == "outside"


def test_node_that_is_slow_but_gives_signs_of_life_is_waited_for(town: Town) -> None:
    rules = Rules(1, 2, by_infra=False)
    a = town.launcher("a", rules, dataclasses.replace(PATIENT, silence=0.4))
    b = town.launcher("b", rules)
    town.meet(a, b)
    _, job = b.connect()
    beats = itertools.count()
    since = time.monotonic()
    (future,) = town.arrive(a)

    def beats_until_late() -> bool:
        job.set("alive/b", str(next(beats)))
        return time.monotonic() > since + 1.8

    wait_for(beats_until_late, "a to have called the roll twice", SOON)
    assert not future.done()
    town.meet(b)
    assert future.result(SOON).world_size == 2


@pytest.mark.parametrize("place", ["member", "waiting"])
def test_launcher_that_waits_gives_signs_of_life_that_no_other_takes_for_silence(town: Town, place: str) -> None:
    if place == "waiting":
        town.meet(town.launcher("b"), town.launcher("c"))
    town.arrive(town.launcher("a"))
    town.await_place("a", place)
    _, job = town.desk.connect()
    seen: set[bytes] = set()

    def beaten() -> bool:
        if job.check(["alive/a"]):
            seen.add(bytes(job.get("alive/a")))
        return len(seen) >= 3

    wait_for(beaten, "three signs of life that differ", SOON)


def test_launcher_that_was_taken_out_while_it_waited_comes_back_by_itself(town: Town) -> None:
    (future,) = town.arrive(town.launcher("a"))
    town.await_place("a", "member")
    town.desk.depart(["a"])
    town.await_place("a", "member")
    town.meet(town.launcher("b"))
    assert future.result(SOON).world_size == 2


def test_launcher_that_stalls_does_not_complete_a_later_round_over_the_heads_of_the_others(town: Town) -> None:
    rules = Rules(1, 2, by_infra=False)
    a, b = crew = [town.launcher(id_, rules) for id_ in "ab"]
    town.meet(*crew)
    restarted = threading.Event()

    def others_go_ahead(seen: Roster) -> None:
        if roster.ready(seen, rules, waited=False) and not restarted.is_set():
            restarted.set()
            town.desk._update(lambda it: roster.complete(it, rules))  # b was quicker, its workers failed at once,
            town.desk._update(lambda it: roster.arrive(it, b.me, rules))  # and it waits for a in the next round

    a.stall = others_go_ahead  # type: ignore[method-assign]
    town.desk._update(lambda it: roster.arrive(it, b.me, rules))
    (future,) = town.arrive(a)
    third = town.await_roster(lambda it: it.round == 2 and it.is_complete, "the round after the one that a missed")
    assert set(third.members) == {"a", "b"}
    assert future.result(SOON).world_size == 2


# -- not wanted -------------------------------------------------------------------------------------------------------


def test_excluded_node_is_told_so_with_the_code_of_a_node_that_was_taken_out(town: Town) -> None:
    town.desk.exclude("host-a", "3 failures on it")
    (future,) = town.arrive(town.launcher("a"))
    error = future.exception(SOON)
    assert isinstance(error, NotWanted)
    assert error.outcome.exit_code == exits.NODE_LEFT
    assert "host-a" in str(error)
    assert "3 failures on it" in str(error)


def test_excluded_node_that_came_back_is_not_on_the_roster(town: Town) -> None:
    town.desk.exclude("host-a", "3 failures on it")
    (future,) = town.arrive(town.launcher("a"))
    assert isinstance(future.exception(SOON), NotWanted)
    assert town.desk.look().place_of("a") == "outside"
    infos = town.meet(town.launcher("b"), town.launcher("c"))
    assert worlds(infos) == {2}


def test_spare_whose_node_is_excluded_goes_and_is_no_longer_counted_on(town: Town) -> None:
    a, b = crew = [town.launcher(id_) for id_ in "ab"]
    town.meet(*crew)
    spare = town.spare(town.launcher("s"))
    town.desk.exclude("host-s", "no disk")
    assert isinstance(spare.exception(SOON), NotWanted)
    b.depart(["b"])
    assert a.num_nodes_waiting() == 0


@pytest.mark.parametrize("code", [exits.FINISHED, exits.ABORTED])
def test_launcher_that_comes_to_a_job_that_is_over_ends_as_the_job_did(town: Town, code: int) -> None:
    town.meet(town.launcher("a"), town.launcher("b"))
    town.desk.close(Outcome(code, "how it ended"))
    town.desk.set_closed()  # the first outcome stands
    assert town.desk.is_closed()
    over = threading.Event()

    def a_takes_its_time() -> None:
        _, alive = town.desk.connect()
        for beat in itertools.count():
            if over.wait(0.02):
                return
            alive.set("alive/a", str(beat))

    lingering = town.run(a_takes_its_time)
    (future,) = town.arrive(town.launcher("c"))
    error = future.exception(SOON)
    over.set()
    lingering.result(SOON)
    assert isinstance(error, NotWanted)
    assert error.outcome.exit_code == code
    assert error.outcome.why.startswith(
        "how it ended. That was before this launcher came: for another run give another --rdzv-id"
    )
    assert town.desk.look().place_of("c") == "outside"


def test_next_run_in_a_store_that_outlived_the_job_begins_anew_but_for_those_who_are_excluded(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_GONE_S", 0.3)
    town.meet(town.launcher("a"), town.launcher("b"))
    town.desk.exclude("host-x", "it was sick")
    town.desk.close(Outcome(exits.PREEMPTED, "stopped together"))
    first, second = town.meet(town.launcher("c"), town.launcher("d"))
    assert {first.rank, second.rank} == {0, 1}
    (future,) = town.arrive(town.launcher("x"))
    error = future.exception(SOON)
    assert isinstance(error, NotWanted)
    assert error.outcome.exit_code == exits.NODE_LEFT


def test_job_that_ends_while_the_nodes_come_together_ends_for_those_who_are_there(town: Town) -> None:
    (future,) = town.arrive(town.launcher("a"))
    town.await_place("a", "member")
    town.desk.shutdown()
    error = future.exception(SOON)
    assert isinstance(error, NotWanted)
    assert error.outcome.exit_code == exits.FAILED


# -- a store that is gone ---------------------------------------------------------------------------------------------


def test_store_that_is_gone_before_the_launcher_comes_is_a_connection_error(doomed: Town) -> None:
    a = doomed.launcher("a")
    doomed.exchange.server = None
    (future,) = doomed.arrive(a)
    assert isinstance(future.exception(SOON), RendezvousConnectionError)


@pytest.mark.parametrize("place", ["member", "waiting"])
def test_store_that_goes_while_a_launcher_waits_is_a_connection_error(doomed: Town, place: str) -> None:
    if place == "waiting":
        doomed.meet(doomed.launcher("a"), doomed.launcher("b"))
    (future,) = doomed.arrive(doomed.launcher("c"))
    doomed.await_place("c", place)
    doomed.exchange.server = None
    assert isinstance(future.exception(SOON), RendezvousConnectionError)


def test_patience_is_read_from_torchs_own_keys() -> None:
    conf = {
        "join_timeout": "5",
        "last_call_timeout": 2,
        "keep_alive_interval": "3",
        "keep_alive_max_attempt": 4,
        "read_timeout": 60,
    }
    assert Patience.from_conf(conf, 7.0, 30.0) == Patience(5.0, 2.0, 12.0, 7.0, 10.0)
    assert Patience.from_conf({}, 60.0) == Patience()


# -- what they agree on -----------------------------------------------------------------------------------------------

S = 1_000_000_000
TICK = 1_000_000


def failed(*cycles: int) -> History:
    """A job that failed in these cycles and was restarted."""
    history = History()
    for cycle in cycles:
        history = history.after(Past(cycle, "exit", "signature", node="n"), restarted=True)
    return history


def offer(number: int, cycle: int = 0, learned: Any = None, history: History | None = None) -> dict[str, Any]:
    """What a node has to say, as it comes out of the store."""
    place = [f"host-{number}", [2 * number, 2 * number + 1], f"id-{number}", f"name-{number}"]
    return {"cycle": cycle, "node": place, "learned": learned or {}, "history": (history or History()).as_json()}


def test_decision_has_the_largest_cycle_so_that_a_replaced_node_repeats_none() -> None:
    assert settle([offer(0, cycle=0), offer(1, cycle=7), offer(2, cycle=3)])["cycle"] == 7


def test_decision_has_the_samples_of_all_nodes() -> None:
    one = {"heartbeat": Samples(20, 1.0, 9.0), "section:load": Samples(1, 2.0, 0.0)}
    two = {"heartbeat": Samples(5, 3.0, 1.0)}
    decided = settle([offer(0), offer(1, learned=to_json(one)), offer(2, learned=to_json(two))])
    assert from_json(decided["learned"]) == {"heartbeat": Samples(20, 3.0, 9.0), "section:load": Samples(1, 2.0, 0.0)}


def test_decision_is_not_spoiled_by_samples_of_another_form() -> None:
    good = to_json({"heartbeat": Samples(1, 2.0, 3.0)})
    decided = settle([offer(0, learned=["?"]), offer(1, learned={**good, "bad": "x"}), offer(2, learned=good)])
    assert decided["learned"] == good


@pytest.mark.parametrize("knows", range(3))
def test_history_that_knows_most_wins_whoever_has_it(knows: int) -> None:
    most, less = failed(0, 1, 2), failed(0)
    histories = [most if number == knows else less if number == 1 else History() for number in range(3)]
    decided = settle([offer(number, history=it) for number, it in enumerate(histories)])
    assert History.from_json(decided["history"]) == most


def test_lone_node_agrees_with_itself_and_needs_no_store() -> None:
    node = Node("host", (0, 1), "id", "name")
    said = agree(None, 0, 1, node=node, cycle=4, learned={"x": [1, 2.0, 3.0]}, history=failed(1))
    assert said == Agreement(4, (node,), {"x": [1, 2.0, 3.0]}, failed(1))


def test_nodes_that_met_agree_on_everything_but_their_clocks(town: Town) -> None:
    rules = Rules(3, 3, by_infra=False)
    infos = town.meet(*(town.launcher(f"n{number}", rules) for number in range(3)))
    history = failed(0, 4)

    def speak(number: int) -> Callable[[], Agreement]:
        learned = to_json({"heartbeat": Samples(number, float(number), 10.0 - number)})
        return lambda: agree(
            infos[number].store,
            number,
            3,
            node=Node(f"host-{number}", (number,), f"n{number}", f"name-{number}"),
            cycle=[0, 5, 2][number],
            learned=learned,
            history=history if number == 1 else History(),
        )

    said = [future.result(SOON) for future in [town.run(speak(number)) for number in range(3)]]
    alike = {repr(dataclasses.replace(it, offset_ns=0)) for it in said}
    assert len(alike) == 1, alike
    assert said[2].cycle == 5
    assert said[2].history == history
    assert from_json(said[2].learned) == {"heartbeat": Samples(2, 2.0, 10.0)}
    assert said[2].nodes == tuple(Node(f"host-{n}", (n,), f"n{n}", f"name-{n}") for n in range(3))
    assert said[0].offset_ns == 0


def test_node_that_dies_before_it_has_said_anything_is_not_waited_for_longer_than_the_store_waits() -> None:
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=200))
    for me in (0, 1):
        with pytest.raises(RuntimeError):
            agree(store, me, 3, node=Node("host", (me,)), cycle=0, learned={}, history=History())


class Clocks:
    """Takes the place of :mod:`time` on hosts that were booted at different times; a tick passes with every look."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * S
        self.ahead_ns: dict[str, int] = {}
        self._lock = threading.Lock()

    def monotonic_ns(self) -> int:
        with self._lock:
            self.now_ns += TICK
            return self.reads(threading.current_thread().name, self.now_ns)

    def reads(self, host: str, moment_ns: int) -> int:
        """What a host's clock shows at a moment."""
        return moment_ns + self.ahead_ns.get(host, 0)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(agreement, "time", made)
    return made


def clock_offsets(town: Town, clocks: Clocks, hosts: list[str], late: str) -> dict[str, int]:
    """Let hosts agree, one of them an hour later than the others; return how far each believes to be ahead of the first."""
    store = HashStore()

    def speak(number: int) -> Future[Any]:
        return town.run(
            lambda: agree(
                store, number, len(hosts), node=Node(hosts[number], (number,)), cycle=0, learned={}, history=History()
            ),
            hosts[number],
        )

    futures = {number: speak(number) for number, host in enumerate(hosts) if host != late}
    others = [f"resilience/offer/{number}" for number in futures]
    wait_for(lambda: store.check(others), "the punctual ones to have spoken", SOON)
    clocks.now_ns += 3600 * S
    number = hosts.index(late)
    futures[number] = speak(number)
    return {hosts[number]: future.result(SOON).offset_ns for number, future in futures.items()}


@pytest.mark.parametrize("late", ["first", "ahead", "behind"])
def test_failure_is_dated_right_on_a_host_that_was_booted_at_another_time_whoever_is_late(
    town: Town, clocks: Clocks, late: str
) -> None:
    clocks.ahead_ns = {"ahead": 86_400 * S, "behind": -500 * S}
    offsets = clock_offsets(town, clocks, ["first", "ahead", "behind"], late)
    moment = clocks.now_ns + 50 * S
    for host, offset in offsets.items():
        corrected = clocks.reads(host, moment) - offset
        assert abs(corrected - moment) <= 5 * TICK, f"{host} is {(corrected - moment) / S:g} s off"


def test_first_failure_is_blamed_although_its_host_was_booted_a_day_before_the_others(
    town: Town, clocks: Clocks
) -> None:
    clocks.ahead_ns = {"old": 86_400 * S}
    offsets = clock_offsets(town, clocks, ["young", "old"], late="old")
    moment = clocks.now_ns + 50 * S
    first = examine(1, -9, clocks.reads("old", moment))
    second = examine(0, -9, clocks.reads("young", moment + 100 * TICK))
    assert blame([], [first, second], []).rank == 0, "as they were seen, the young host's came first"
    there = dataclasses.replace(first, at_ns=first.at_ns - offsets["old"])
    here = dataclasses.replace(second, at_ns=second.at_ns - offsets["young"])
    assert blame([], [here, there], []).rank == 1
