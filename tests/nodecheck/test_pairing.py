"""Pairing, with simulated nodes: the bad ones are found, the good ones are not blamed, and what can't be told is said."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from resilience.nodecheck.pairing import (
    FAULTY,
    HEALTHY,
    MOST_ROUNDS,
    STRAGGLER,
    UNDECIDED,
    VANISHED,
    Evidence,
    Group,
    Rule,
    Trial,
    cannot_tell,
    first,
    following,
    slow_ones,
    standing,
)


@dataclass
class Cluster:
    """Nodes with known faults. ``leaves``: the round before which a node vanishes. ``broken``: pairs with a bad cable between."""

    count: int
    bad: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()
    leaves: dict[int, int] | None = None
    passing: frozenset[int] = frozenset()  # fail in round 1 only

    def tried(self, group: Group, number: int) -> Trial:
        troubled = self.bad | (self.passing if number == 1 else frozenset())
        if troubled & set(group):
            return Trial(group, False)
        return Trial(group, True, 5.0 if self.slow & set(group) else 1.0 + 0.01 * (group[0] % 7))

    def check(self) -> tuple[dict[int, str], int]:
        """Go through all rounds; return what is known of everybody, and how many rounds it took."""
        nodes, trials, gone = range(self.count), [], set[int]()
        leaves = self.leaves or {}
        groups: Sequence[Group] = first(list(nodes))
        number = 0
        while groups:
            number += 1
            gone |= {node for node, when in leaves.items() if when == number}
            used = [node for group in groups for node in group]
            assert len(used) == len(set(used)), "a node in two groups at once"
            trials += [self.tried(group, number) for group in groups if not gone & set(group)]
            trials += [Trial(group, False) for group in groups if gone & set(group)]
            groups = following(Evidence(nodes, trials, gone), number)
        return standing(Evidence(nodes, trials, gone)), number


def those(found: dict[int, str], state: str) -> set[int]:
    return {node for node, it in found.items() if it == state}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 999, 1000])
def test_healthy_nodes_are_healthy_after_one_round(count: int) -> None:
    found, rounds = Cluster(count).check()
    assert those(found, HEALTHY) == set(range(count))
    assert rounds == min(1, count - 1)


def test_round_1_pairs_neighbours_and_an_odd_number_ends_with_three() -> None:
    assert first([0, 1, 2, 3]) == ((0, 1), (2, 3))
    assert first([0, 1, 2, 3, 4]) == ((0, 1), (2, 3, 4))
    assert first([4, 7, 9]) == ((4, 7, 9),)
    assert first([3]) == first([]) == ()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_of_three_nodes_the_faulty_one_is_found(bad: int) -> None:
    found, rounds = Cluster(3, frozenset({bad})).check()
    assert those(found, FAULTY) == {bad}
    assert those(found, HEALTHY) == {0, 1, 2} - {bad}
    assert rounds <= 4


@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_every_pair_of_faulty_nodes_is_found_while_two_good_ones_are_left(count: int) -> None:
    for bad in itertools.combinations(range(count), 2):
        found, _ = Cluster(count, frozenset(bad)).check()
        assert those(found, FAULTY) == set(bad), bad
        assert those(found, HEALTHY) == set(range(count)) - set(bad), bad


def test_two_nodes_whose_pair_fails_are_undecided_and_it_is_said_why() -> None:
    found, rounds = Cluster(2, frozenset({1})).check()
    assert those(found, UNDECIDED) == {0, 1}
    assert rounds == 2  # once more: it may have been a passing failure
    assert "a third one would tell" in cannot_tell(2, [0, 1])


def test_failure_that_passes_is_no_fault() -> None:
    for count in (2, 3, 10):
        found, _ = Cluster(count, passing=frozenset({1})).check()
        assert those(found, HEALTHY) == set(range(count))


def test_where_nobody_gets_through_nobody_is_blamed() -> None:
    for count in (2, 3, 4, 50):
        found, rounds = Cluster(count, frozenset(range(count))).check()
        assert those(found, UNDECIDED) == set(range(count))
        assert rounds <= MOST_ROUNDS
    assert "more than a faulty node" in cannot_tell(4, [0, 1, 2, 3])


def some(count: int, number: int, seed: int, but: Iterable[int] = ()) -> frozenset[int]:
    taken = set(but)
    return frozenset(random.Random(seed).sample([node for node in range(count) if node not in taken], number))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("bad", "slow"), [(1, 1), (20, 10), (100, 50)])
def test_a_thousand_nodes_with_faults_and_stragglers_are_told_apart(seed: int, bad: int, slow: int) -> None:
    faulty = some(1000, bad, seed)
    stragglers = some(1000, slow, seed + 100, but=faulty)
    found, rounds = Cluster(1000, faulty, stragglers).check()
    assert those(found, FAULTY) == faulty
    assert those(found, STRAGGLER) == stragglers
    assert rounds <= 3


@pytest.mark.parametrize("seed", range(5))
def test_suspects_that_outnumber_the_healthy_are_still_told_apart(seed: int) -> None:
    faulty = some(1000, 500, seed)  # of 500 pairs only some 125 pass: 250 helpers for 750 suspects
    found, rounds = Cluster(1000, faulty).check()
    assert those(found, FAULTY) == faulty
    assert those(found, HEALTHY) == set(range(1000)) - faulty
    assert rounds <= MOST_ROUNDS


def test_nobody_is_blamed_wrongly_when_nearly_all_are_faulty() -> None:
    faulty = some(1000, 950, 3)
    found, rounds = Cluster(1000, faulty).check()
    assert rounds <= MOST_ROUNDS
    assert those(found, FAULTY) <= faulty
    assert those(found, HEALTHY) <= set(range(1000)) - faulty
    assert those(found, UNDECIDED)  # six rounds are not enough, and it is said


@pytest.mark.parametrize("seed", range(5))
def test_nodes_that_vanish_in_between_are_no_blame_to_their_partners(seed: int) -> None:
    faulty = some(1000, 40, seed)
    going = {node: 1 + node % 2 for node in some(1000, 60, seed + 7, but=faulty)}
    found, _ = Cluster(1000, faulty, leaves=going).check()
    assert those(found, FAULTY) == faulty
    assert set(going) >= those(found, VANISHED)
    stayed = set(range(1000)) - faulty - set(going)
    assert those(found, HEALTHY) >= stayed


@pytest.mark.parametrize("count", [3, 4, 5])
def test_partner_of_a_node_that_vanished_is_tried_again_with_somebody_else(count: int) -> None:
    found, _ = Cluster(count, leaves={0: 1}).check()
    assert found[0] == VANISHED
    assert those(found, HEALTHY) == set(range(1, count))


def test_two_slow_nodes_that_were_neighbours_are_both_found() -> None:
    found, _ = Cluster(8, slow=frozenset({2, 3})).check()
    assert those(found, STRAGGLER) == {2, 3}


def test_where_all_are_equally_slow_none_is_a_straggler() -> None:
    found, _ = Cluster(6, slow=frozenset(range(6))).check()
    assert those(found, HEALTHY) == set(range(6))


def test_partner_of_a_slow_node_is_cleared_by_the_next_round() -> None:
    found, rounds = Cluster(6, slow=frozenset({5})).check()
    assert those(found, STRAGGLER) == {5}
    assert rounds == 2


def test_straggler_takes_more_than_twice_the_median_and_that_is_adjustable() -> None:
    times = {0: 1.0, 1: 1.1, 2: 1.9, 3: 2.3}
    assert slow_ones(times, Rule()) == {3}
    assert slow_ones(times, Rule(factor=1.5)) == {2, 3}
    assert slow_ones(times, Rule(factor=3.0)) == frozenset()
    assert slow_ones({0: 9.0}, Rule()) == frozenset()


def test_of_two_nodes_the_quicker_one_is_the_measure() -> None:
    assert slow_ones({0: 1.0, 1: 5.0}, Rule()) == {1}


def test_milliseconds_make_no_straggler() -> None:
    assert slow_ones({0: 0.001, 1: 0.001, 2: 0.009}, Rule()) == frozenset()


def test_what_one_node_alone_can_not_tell_is_said() -> None:
    assert "one node alone" in cannot_tell(1, [])
    assert "one pair" in cannot_tell(2, [])
    assert cannot_tell(3, []) == ""
