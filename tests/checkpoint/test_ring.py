"""Who keeps whose copies: never oneself, other groups first, and the work is even."""

from __future__ import annotations

import random

import pytest

from resilience.checkpoint.saver.ring import keepers


def test_without_groups_the_next_ones_around_the_ring_keep_the_copies() -> None:
    nodes = dict.fromkeys((0, 4, 8, 12), "")
    assert {node: keepers(nodes, node, 1) for node in nodes} == {0: [4], 4: [8], 8: [12], 12: [0]}
    assert keepers(nodes, 8, 2) == [12, 0]


def test_more_copies_than_there_are_other_nodes_are_as_many_as_there_are() -> None:
    assert keepers({0: "", 2: ""}, 0, 5) == [2]
    assert keepers({0: ""}, 0, 1) == []


def test_copies_go_to_other_groups_and_stay_at_home_only_if_there_is_no_other() -> None:
    assert keepers({0: "a", 2: "a", 4: "b"}, 0, 1) == [4]
    assert keepers({0: "a", 2: "a", 4: "b"}, 0, 2) == [4, 2]
    assert keepers({0: "a", 2: "a"}, 0, 1) == [2]


def test_two_copies_go_to_two_groups_where_there_are_as_many() -> None:
    groups = {0: "a", 2: "b", 4: "b", 6: "c"}
    assert {groups[node] for node in keepers(groups, 0, 2)} == {"b", "c"}


def test_node_whose_group_is_not_known_counts_as_elsewhere() -> None:
    assert keepers({0: "a", 2: "a", 4: ""}, 0, 1) == [4]


@pytest.mark.parametrize("seed", range(200))
def test_rules_hold_for_any_nodes_and_groups(seed: int) -> None:
    rng = random.Random(seed)
    names = rng.sample(range(0, 400, 2), rng.randint(1, 24))
    groups = {name: rng.choice(["", "a", "b", "c", "d"]) for name in names}
    copies = rng.randint(1, 4)
    shuffled = dict(rng.sample(sorted(groups.items()), len(groups)))
    for node, group in groups.items():
        found = keepers(groups, node, copies)
        assert found == keepers(shuffled, node, copies), "everybody comes to the same answer"
        assert len(found) == len(set(found)) == min(copies, len(groups) - 1)
        assert node not in found
        elsewhere = {name for name in groups if name != node and (not groups[name] or groups[name] != group)}
        assert len(set(found) & elsewhere) == min(len(found), len(elsewhere)), "a copy at home and room elsewhere"


@pytest.mark.parametrize(
    ("number", "size", "copies"), [(1, 7, 1), (1, 7, 3), (2, 4, 1), (3, 3, 1), (4, 2, 1), (2, 4, 2)]
)
def test_groups_of_one_size_share_the_work_evenly(number: int, size: int, copies: int) -> None:
    groups = {index: ("" if number == 1 else f"group {index // size}") for index in range(number * size)}
    kept = [keeper for node in groups for keeper in keepers(groups, node, copies)]
    assert {kept.count(node) for node in groups} == {copies}
