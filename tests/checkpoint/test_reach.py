"""What can be brought together from the memory of all nodes, and who fetches what from whom."""

from __future__ import annotations

from typing import Any

from resilience.checkpoint.saver.reach import reachable
from resilience.checkpoint.saver.restoring import DISK, MEMORY, Agreement, Candidate

K8, K9 = (2, 8), (2, 9)


def ask(first: int, memory: list[Any], replicas: list[Any] = [], **more: Any) -> dict[str, Any]:  # noqa: B006
    return {
        "memory": memory,
        "ranks": (first, 2),
        "replicas": replicas,
        "step": None,
        "timeout": 9,
        "fresh": False,
        **more,
    }


def test_what_all_nodes_have_needs_nothing() -> None:
    assert reachable({0: ask(0, [K8, K9]), 2: ask(2, [K9])}) == {K9: {}}


def test_node_that_has_nothing_gets_its_ranks_from_who_keeps_them_and_the_rest_from_who_has_it() -> None:
    asks = {0: ask(0, [K8], [(2, 8, 2)]), 2: ask(2, []), 4: ask(4, [K8], [(2, 8, 3), (2, 8, 2)])}
    assert reachable(asks) == {K8: {2: {"own": [[2, [0, 4]], [3, [4]]], "shared": [0, 4]}}}


def test_snapshot_of_which_one_rank_is_nowhere_can_not_be_reached() -> None:
    assert reachable({0: ask(0, [K8], [(2, 8, 2)]), 2: ask(2, [])}) == {}


def test_copies_alone_are_not_enough_for_somebody_must_have_what_all_share() -> None:
    kept = [(2, 8, rank) for rank in range(4)]
    assert reachable({0: ask(0, [], kept), 2: ask(2, [], kept)}) == {}


def test_nodes_of_an_earlier_version_that_say_nothing_of_copies_are_understood() -> None:
    assert reachable({0: {"memory": [K8]}, 2: {"memory": [K8, K9]}}) == {K8: {}}
    assert reachable({0: {"memory": [K8]}, 2: {"memory": []}}) == {}


def test_newer_one_in_memory_of_others_comes_before_an_older_one_on_disk_and_damage_leads_to_that() -> None:
    chair = {"disk": [(*K8, "a")], "left_out": [], "tries": []}
    agreement = Agreement()
    agreement.ask(0, ask(0, [K9], [(*K9, 2), (*K9, 3)], **chair), 0.0)
    agreement.ask(2, ask(2, []), 0.0)
    agreement.choose(K9)
    assert agreement.choice == Candidate(K9, MEMORY)
    assert agreement.fetch() == [(2, {"own": [[2, [0]], [3, [0]]], "shared": [0]})]
    agreement.spoil("the digest is wrong")
    agreement.choose(K9)
    assert agreement.choice == Candidate(K8, DISK, "a")
    assert agreement.fetch() == []
