from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable

import pytest

from resilience.launcher.roster import (
    Member,
    Outcome,
    Roster,
    Rules,
    arrive,
    close,
    complete,
    depart,
    exclude,
    ready,
)

RUNS = 200
STEPS = 60

ANY = Rules(2, 2, by_infra=False)  # two nodes, any spare will do
SLURM = Rules(2, 2, by_infra=True)  # two nodes, each with its own place
ELASTIC = Rules(1, 3, by_infra=False)


def node(id_: str, infra: int | None = None) -> Member:
    """A launcher that has just been started."""
    return Member(id_, f"host-{id_}", infra)


def all_arrive(roster: Roster, nodes: Iterable[Member], rules: Rules) -> Roster:
    for me in nodes:
        roster = arrive(roster, me, rules)
    return roster


def running(nodes: Iterable[Member], rules: Rules) -> Roster:
    """A job of these nodes, in its first round."""
    roster = complete(all_arrive(Roster(), nodes, rules), rules)
    assert roster.is_complete
    return roster


def ranks(roster: Roster) -> dict[str, int | None]:
    return {key: member.rank for key, member in roster.members.items()}


A, B, C, S, T = (node(id_) for id_ in "abcst")


# -- places -----------------------------------------------------------------------------------------------------------


def test_spare_never_takes_the_place_of_a_node_that_only_restarts() -> None:
    roster = arrive(running([A, B], ANY), S, ANY)
    forming = arrive(arrive(roster, B, ANY), S, ANY)  # the spare asks again while A is not back
    assert forming.place_of("s") == "waiting"
    assert not ready(forming, ANY, waited=True)
    both = complete(arrive(forming, A, ANY), ANY)
    assert ranks(both) == {"a": 0, "b": 1}
    assert list(both.waiting) == ["s"]


def test_place_of_a_departed_node_goes_to_the_spare_when_the_others_come_back() -> None:
    roster = depart(arrive(running([A, B], ANY), S, ANY), ["a"], ANY)
    assert roster.place_of("s") == "waiting", "the round is complete: nothing changes before the next one"
    forming = arrive(roster, B, ANY)
    assert set(forming.members) == {"b", "s"}
    assert ranks(complete(forming, ANY)) == {"b": 1, "s": 0}


def test_place_of_a_node_that_departs_while_the_others_wait_for_it_goes_to_the_spare_at_once() -> None:
    forming = arrive(arrive(running([A, B], ANY), S, ANY), B, ANY)
    assert set(forming.members) == {"b"}
    assert set(depart(forming, ["a"], ANY).members) == {"b", "s"}


def test_spare_takes_the_place_of_a_departed_node_that_has_no_rank_from_the_infrastructure() -> None:
    roster = depart(arrive(running([A, B], SLURM), S, SLURM), ["a"], SLURM)
    assert set(arrive(roster, B, SLURM).members) == {"b", "s"}


@pytest.mark.parametrize(("infra", "gets_in"), [(0, True), (1, False), (2, False), (None, False)])
def test_only_a_node_with_the_same_rank_from_the_infrastructure_takes_a_vacated_place(
    infra: int | None, gets_in: bool
) -> None:
    roster = depart(running([node("a", 0), node("b", 1)], SLURM), ["a"], SLURM)
    forming = arrive(arrive(roster, node("s", infra), SLURM), node("b", 1), SLURM)
    assert forming.place_of("s") == ("member" if gets_in else "waiting")
    assert ready(forming, SLURM, waited=True) is gets_in
    if gets_in:
        assert ranks(complete(forming, SLURM)) == {"s": 0, "b": 1}
        assert forming.vacated == ()


def test_node_with_another_rank_that_came_first_does_not_block_the_successor() -> None:
    roster = depart(running([node("a", 0), node("b", 1)], SLURM), ["a"], SLURM)
    roster = all_arrive(roster, [node("stranger", 7), node("heir", 0)], SLURM)
    assert set(arrive(roster, node("b", 1), SLURM).members) == {"b", "heir"}


def test_vacated_place_is_given_once() -> None:
    roster = depart(running([node("a", 0), node("b", 1)], SLURM), ["a"], SLURM)
    roster = all_arrive(roster, [node("heir", 0), node("twin", 0), node("b", 1)], SLURM)
    assert set(roster.members) == {"b", "heir"}
    assert set(roster.waiting) == {"twin"}


def test_vacated_places_are_forgotten_when_ranks_of_the_infrastructure_are_not_wanted() -> None:
    roster = depart(arrive(running([node("a", 0), node("b", 1)], ANY), node("s", 5), ANY), ["a"], ANY)
    assert roster.vacated == ()
    assert set(arrive(roster, node("b", 1), ANY).members) == {"b", "s"}


def test_no_place_is_kept_for_a_rank_whose_new_launcher_is_already_in() -> None:
    rules = Rules(1, 3, by_infra=True)
    roster = running([node("a", 0), node("b", 1)], rules)
    # There is room: it need not wait for the loss.
    roster = all_arrive(roster, [node("a-again", 0), node("b", 1)], rules)
    roster = depart(roster, ["a"], rules)
    assert set(roster.members) == {"a-again", "b"}
    roster = arrive(roster, node("c", 2), rules)
    assert roster.place_of("c") == "member", "three nodes may be in, and there are two"


def test_more_nodes_than_there_are_places_wait_and_close_nothing() -> None:
    crowd = [node(f"n{number}") for number in range(10)]
    roster = all_arrive(Roster(), crowd, ELASTIC)
    assert list(roster.members) == ["n0", "n1", "n2"]
    assert list(roster.waiting) == [f"n{number}" for number in range(3, 10)]
    assert roster.outcome is None
    roster = depart(complete(roster, ELASTIC), ["n1"], ELASTIC)
    forming = all_arrive(roster, [crowd[0], crowd[2]], ELASTIC)
    assert set(forming.members) == {"n0", "n2", "n3"}, "who came first is first"


def test_late_node_waits_for_the_round_after_the_one_it_missed() -> None:
    roster = arrive(running([A, B], ELASTIC), C, ELASTIC)
    assert roster.place_of("c") == "waiting"
    assert set(all_arrive(roster, [A, B], ELASTIC).members) == {"a", "b", "c"}


def test_node_that_waits_and_departs_is_not_let_in_later() -> None:
    roster = depart(arrive(running([A, B], ANY), S, ANY), ["s"], ANY)
    assert roster.place_of("s") == "outside"
    assert set(arrive(depart(roster, ["a"], ANY), B, ANY).members) == {"b"}


def test_node_that_waited_keeps_no_place_when_it_departs() -> None:
    rules = Rules(1, 2, by_infra=True)
    roster = arrive(running([node("a", 0), node("b", 1)], rules), node("s", 2), rules)
    assert depart(roster, ["s"], rules).vacated == ()


def test_node_that_comes_back_after_having_departed_is_a_newcomer() -> None:
    roster = all_arrive(depart(running([A, B], ANY), ["a"], ANY), [S, A, B], ANY)
    assert set(roster.members) == {"b", "s"}
    assert set(roster.waiting) == {"a"}


def test_node_that_comes_back_after_having_departed_does_not_claim_the_rank_it_had() -> None:
    rules = Rules(2, 3, by_infra=False)
    roster = running([A, B, C], rules)
    departed = roster.members["a"]
    assert departed.rank == 0
    roster = complete(all_arrive(depart(roster, ["a"], rules), [S, B, C], rules), rules)
    assert ranks(roster) == {"s": 0, "b": 1, "c": 2}
    roster = depart(roster, ["c"], rules)
    roster = complete(all_arrive(roster, [departed, S, B], rules), rules)  # a launcher knows the rank of its last round
    assert ranks(roster) == {"s": 0, "b": 1, "a": 2}


def test_node_that_was_too_late_does_not_claim_the_rank_of_the_one_that_is_in_its_place() -> None:
    rules = Rules(2, 3, by_infra=False)
    late = running([A, B, C], rules).members["a"]
    roster = complete(all_arrive(running([A, B, C], rules), [B, C], rules), rules)  # the last call was over
    roster = complete(all_arrive(depart(roster, ["c"], rules), [S, B], rules), rules)
    assert ranks(roster) == {"s": 0, "b": 1}
    roster = complete(all_arrive(roster, [late, S, B], rules), rules)
    assert ranks(roster) == {"s": 0, "b": 1, "a": 2}


# -- when a round is ready --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waited", [True, False])
def test_fewer_than_min_nodes_are_never_ready(waited: bool) -> None:
    rules = Rules(3, 4)
    assert not ready(Roster(), rules, waited)
    assert not ready(all_arrive(Roster(), [A, B], rules), rules, waited)
    back = depart(running([A, B, C], rules), ["c"], rules)
    assert not ready(all_arrive(back, [A, B], rules), rules, waited), "all that are left are back, but they are too few"


def test_first_round_waits_for_the_last_call_unless_it_is_full() -> None:
    two = all_arrive(Roster(), [A, B], ELASTIC)
    assert not ready(two, ELASTIC, waited=False)
    assert ready(two, ELASTIC, waited=True)
    assert ready(arrive(two, C, ELASTIC), ELASTIC, waited=False)


def test_everybody_back_is_ready_at_once_and_somebody_missing_only_after_the_last_call() -> None:
    one = arrive(running([A, B], ELASTIC), A, ELASTIC)
    assert not ready(one, ELASTIC, waited=False)
    assert ready(one, ELASTIC, waited=True)
    assert ready(arrive(one, B, ELASTIC), ELASTIC, waited=False)


def test_missing_node_that_departs_is_not_waited_for() -> None:
    one = arrive(running([A, B], ELASTIC), A, ELASTIC)
    assert ready(depart(one, ["b"], ELASTIC), ELASTIC, waited=False)


def test_newcomers_without_anybody_of_the_round_before_wait_for_the_last_call() -> None:
    roster = depart(arrive(running([A], ELASTIC), S, ELASTIC), ["a"], ELASTIC)
    assert not ready(roster, ELASTIC, waited=False)
    assert ready(roster, ELASTIC, waited=True)


def test_round_that_is_complete_or_a_job_that_is_over_is_not_ready_again() -> None:
    assert not ready(running([A, B], ANY), ANY, waited=True)
    assert not ready(close(all_arrive(Roster(), [A, B], ANY), Outcome(0, "done")), ANY, waited=True)


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_first_member_that_comes_back_opens_the_next_round_and_the_second_joins_it() -> None:
    roster = arrive(running([A, B], ANY), B, ANY)
    assert (roster.round, roster.is_complete, set(roster.expected)) == (1, False, {"a", "b"})
    roster = arrive(roster, A, ANY)
    assert roster.round == 1
    assert complete(roster, ANY).round == 1


def test_node_that_arrives_twice_is_there_once() -> None:
    forming = all_arrive(Roster(), [A, B], ANY)
    assert arrive(forming, A, ANY) == forming
    waiting = arrive(complete(forming, ANY), S, ANY)
    assert arrive(waiting, S, ANY) == waiting


def test_node_that_departs_twice_leaves_one_place() -> None:
    roster = depart(running([node("a", 0), node("b", 1)], SLURM), ["a"], SLURM)
    assert depart(roster, ["a"], SLURM) == roster
    assert roster.vacated == (0,)


def test_departed_node_that_nobody_knows_changes_nothing() -> None:
    for roster in (Roster(), running([A, B], SLURM), arrive(running([A, B], SLURM), A, SLURM)):
        assert depart(roster, ["stranger"], SLURM) == roster


def test_ranks_are_kept_when_everybody_only_restarts_in_another_order() -> None:
    first = running([B, C, A], ELASTIC)
    again = complete(all_arrive(first, [C, A, B], ELASTIC), ELASTIC)
    assert ranks(again) == ranks(first) == {"a": 0, "b": 1, "c": 2}


def test_all_members_gone_opens_a_new_round_for_those_who_wait() -> None:
    roster = all_arrive(running([A, B], ANY), [S, T, C], ANY)
    roster = depart(depart(roster, ["a"], ANY), ["b"], ANY)
    assert (roster.round, roster.is_complete) == (1, False)
    assert list(roster.members) == ["s", "t"]
    assert list(roster.waiting) == ["c"]
    assert ranks(complete(roster, ANY)) == {"s": 0, "t": 1}


def test_all_members_gone_and_nobody_waiting_leaves_the_job_open_for_the_next() -> None:
    roster = depart(running([A, B], ANY), ["a", "b"], ANY)
    assert roster.outcome is None
    assert set(all_arrive(roster, [S, T], ANY).members) == {"s", "t"}


def test_excluded_names_are_kept_through_rounds() -> None:
    roster = exclude(running([A, B], ANY), "host-a", "GPU 3 fell off the bus")
    roster = exclude(depart(roster, ["a"], ANY), "host-z", "no disk")
    roster = complete(all_arrive(roster, [S, B], ANY), ANY)
    roster = depart(roster, ["s", "b"], ANY)
    assert roster.excluded == {"host-a": "GPU 3 fell off the bus", "host-z": "no disk"}


def test_excluded_node_that_comes_back_gets_no_place_and_does_not_wait_for_one() -> None:
    again = dataclasses.replace(A, id="a-again")  # another launcher on the same node
    complete_round = exclude(depart(running([A, B], ANY), ["a"], ANY), "host-a", "broken")
    forming = arrive(complete_round, B, ANY)
    for roster in (complete_round, forming):
        assert arrive(roster, again, ANY).place_of("a-again") == "outside"


# -- newcomers --------------------------------------------------------------------------------------------------------


def test_spare_of_a_full_job_is_no_newcomer() -> None:
    assert arrive(running([A, B], ANY), S, ANY).newcomers(ANY) == 0


def test_nodes_that_have_room_are_newcomers_and_only_so_many() -> None:
    roster = all_arrive(running([A], ELASTIC), [S, T, C], ELASTIC)
    assert roster.newcomers(ELASTIC) == 2


def test_spare_becomes_a_newcomer_when_a_member_departs() -> None:
    roster = arrive(running([A, B], ANY), S, ANY)
    assert depart(roster, ["a"], ANY).newcomers(ANY) == 1


@pytest.mark.parametrize(("infra", "number"), [(0, 1), (2, 0), (None, 0)])
def test_only_the_successor_is_a_newcomer_where_the_infrastructure_gives_the_ranks(
    infra: int | None, number: int
) -> None:
    roster = arrive(running([node("a", 0), node("b", 1)], SLURM), node("s", infra), SLURM)
    assert depart(roster, ["a"], SLURM).newcomers(SLURM) == number


def test_spare_is_no_newcomer_while_the_members_come_back_one_by_one() -> None:
    roster = arrive(arrive(running([A, B], ANY), S, ANY), B, ANY)
    assert roster.newcomers(ANY) == 0, "A is expected: there is no room"


# -- the end ----------------------------------------------------------------------------------------------------------


def test_first_outcome_stands() -> None:
    roster = close(running([A, B], ANY), Outcome(77, "aborted"))
    assert close(roster, Outcome(0, "done")).outcome == Outcome(77, "aborted")


def test_nobody_gets_into_a_job_that_is_over() -> None:
    over = close(arrive(running([A, B], ANY), S, ANY), Outcome(0, "done"))
    for me in (A, S, T):
        assert arrive(over, me, ANY) == over


def test_spare_can_be_taken_out_of_a_job_that_is_over() -> None:
    over = close(arrive(running([A, B], ANY), S, ANY), Outcome(0, "done"))
    assert depart(over, ["s"], ANY).waiting == {}
    assert depart(over, ["s"], ANY).outcome == Outcome(0, "done")


def test_roster_with_everything_in_it_survives_its_text() -> None:
    roster = depart(running([node("a", 0), node("b", 1)], SLURM), ["a"], SLURM)
    roster = all_arrive(roster, [node("b", 1), node("ü\n\"'", None)], SLURM)
    roster = close(exclude(roster, "höst", 'why: "x"\n'), Outcome(79, "preempted"))
    again = Roster.from_text(roster.as_text())
    assert again == roster
    assert again.as_text() == roster.as_text(), "compare-and-set compares texts"
    assert isinstance(again.vacated, tuple)
    assert isinstance(again.outcome, Outcome)
    assert all(isinstance(it, Member) for people in (again.members, again.waiting) for it in people.values())


# -- any order of anything --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Call:
    """A change that somebody is about to write: computed from ``text``, which may be old by now."""

    verb: str
    id: str
    change: Callable[[Roster], Roster]
    text: str


class Job:
    """Nodes that do anything at any time, over one text that is written by compare-and-set as ``meeting.py`` does it."""

    def __init__(self, rng: random.Random, rules: Rules, slots: int) -> None:
        self.rng = rng
        self.rules = rules
        self.text = Roster().as_text()
        self.nodes = {f"n{slot}": node(f"n{slot}", self._infra(slot)) for slot in range(slots)}
        self.calls: list[Call] = []
        self.lives = 0

    def _infra(self, slot: int) -> int | None:
        return self.rng.choice([slot, slot, slot, None])

    def step(self) -> tuple[Call, Roster, Roster] | None:
        """Somebody reads the roster, or tries to write what came of an earlier reading; return what was written."""
        if len(self.calls) < 4 and (not self.calls or self.rng.random() < 0.5):
            self.calls.append(self._call())
            return None
        call = self.rng.choice(self.calls)
        if call.text != self.text:  # somebody was quicker
            call.text = self.text
            return None
        self.calls.remove(call)
        before = Roster.from_text(self.text)
        after = call.change(before)
        self.text = after.as_text()
        return call, before, after

    def _call(self) -> Call:
        id_ = self.rng.choice(list(self.nodes))
        me, rules = self.nodes[id_], self.rules
        verb = self.rng.choice(["arrive"] * 6 + ["complete"] * 3 + ["depart", "replace"])
        if verb == "replace":  # the node gets a new launcher, which knows nothing
            self.lives += 1
            del self.nodes[id_]
            id_ = f"{id_.partition('.')[0]}.{self.lives}"
            me = self.nodes[id_] = Member(id_, me.name, me.infra)
            verb = "arrive"
        waited = self.rng.random() < 0.3
        changes: dict[str, Callable[[Roster], Roster]] = {
            "arrive": lambda it: arrive(it, me, rules),
            "depart": lambda it: depart(it, [id_], rules),
            "complete": lambda it: complete(it, rules) if ready(it, rules, waited) else it,
        }
        return Call(verb, id_, changes[verb], self.text)


def check_places(after: Roster, rules: Rules) -> None:
    assert len(after.members) <= rules.max_nodes
    assert len({**after.members, **after.expected}) <= rules.max_nodes, "a kept place was given away"
    assert not set(after.waiting) & set(after.members), "somebody is in two places"
    assert not set(after.waiting) & set(after.expected), "somebody who has a place waits for one"
    for people in (after.members, after.expected, after.waiting):
        assert all(member.id == key for key, member in people.items())


def check_step(call: Call, before: Roster, after: Roster) -> None:
    known = {**before.members, **before.expected, **before.waiting}
    assert set(after.members) <= {*known, *([call.id] if call.verb == "arrive" else [])}, "a stranger was let in"
    belonging = {*before.members, *before.expected}
    if call.verb == "depart":
        belonging.discard(call.id)
        assert call.id not in {**after.members, **after.expected, **after.waiting}
    if call.verb != "complete":
        assert belonging <= {*after.members, *after.expected}, "somebody who only restarts lost its place"
    if call.verb == "arrive" and call.id in belonging:
        assert call.id in after.members, "somebody who only restarts was made to wait"
    assert 0 <= after.round - before.round <= 1
    assert not (before.is_complete and after.is_complete and after.round != before.round)


def check_completion(before: Roster, after: Roster, rules: Rules) -> None:
    assert rules.min_nodes <= len(after.members) <= rules.max_nodes
    assert set(after.members) == set(before.members)
    assert sorted(member.rank for member in after.members.values() if member.rank is not None) == list(
        range(len(after.members))
    )
    if not rules.by_infra:
        had = {key: it.rank for key, it in before.members.items() if it.rank is not None}
        kept = {key: rank for key, rank in had.items() if rank < len(after.members)}
        assert {key: after.members[key].rank for key in kept} == kept


def check_no_place_is_empty(after: Roster, rules: Rules) -> None:
    """While a round forms, nobody waits for a place that it could have."""
    taken = len({**after.members, **after.expected})
    for member in after.waiting.values():
        others = [infra for infra in after.vacated if infra != member.infra] if rules.by_infra else []
        assert taken + len(others) >= rules.max_nodes, f"{member.id} waits although there is room"


def check_newcomers(after: Roster, rules: Rules) -> None:
    """What is promised to those who wait is what they get when the members come back."""
    back = all_arrive(after, after.members.values(), rules)
    assert after.newcomers(rules) == len(set(back.members) - set(after.members))


RULES = [
    Rules(1, 1, by_infra=False),
    Rules(2, 3, by_infra=False),
    Rules(3, 3, by_infra=False),
    Rules(1, 4, by_infra=True),
    Rules(3, 3, by_infra=True),
]


def in_words(rules: Rules) -> str:
    return f"{rules.min_nodes}-to-{rules.max_nodes}-by-{'infra' if rules.by_infra else 'descriptor'}"


@pytest.mark.parametrize("rules", RULES, ids=in_words)
def test_no_order_of_events_breaks_a_roster(rules: Rules) -> None:
    seen = {"opened": 0, "completed": 0, "waited": 0, "departed": 0}
    for seed in range(RUNS):
        job = Job(random.Random(seed), rules, slots=rules.max_nodes + 2)
        for _ in range(STEPS):
            written = job.step()
            if written is None:
                continue
            call, before, after = written
            try:
                check_places(after, rules)
                check_step(call, before, after)
                if after.is_complete and not before.is_complete:
                    check_completion(before, after, rules)
                if after.is_complete:
                    check_newcomers(after, rules)
                else:
                    check_no_place_is_empty(after, rules)
                assert Roster.from_text(after.as_text()) == after
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {call.verb} {call.id}: {error}\n{before}\n{after}") from error
            seen["opened"] += after.round > before.round
            seen["completed"] += after.is_complete and not before.is_complete
            seen["waited"] += bool(after.waiting)
            seen["departed"] += call.verb == "depart" and before != after
    assert min(seen.values()) > RUNS / 2, f"too little happened: {seen}"


@pytest.mark.parametrize("rules", [rules for rules in RULES if not rules.by_infra], ids=in_words)
def test_nobody_who_waits_is_passed_by_one_who_came_later(rules: Rules) -> None:
    let_in = 0
    for seed in range(RUNS):
        job = Job(random.Random(1000 + seed), rules, slots=rules.max_nodes + 3)
        for _ in range(STEPS):
            written = job.step()
            if written is None:
                continue
            call, before, after = written
            queue = [key for key in before.waiting if not (call.verb == "depart" and key == call.id)]
            still = [key for key in queue if key in after.waiting]
            assert queue[len(queue) - len(still) :] == still, f"seed {seed}: {before}\n{after}"
            let_in += len(queue) - len(still)
    assert let_in > RUNS / 10, "nobody who waited was ever let in"
