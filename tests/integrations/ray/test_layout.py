"""Who stands where: groups are contiguous, spread evenly over as few racks as have room, and never share one."""

from __future__ import annotations

import pytest
from resilience.integrations.ray.layout import (
    NODE_ID,
    Node,
    another_rack,
    home_of_the_store,
    seats,
    selector,
    spread,
    usable,
)

LABEL = "RACK_ID"


def cluster(racks: str) -> list[Node]:
    return [Node(f"n{number}", labels={LABEL: rack}) for number, rack in enumerate(racks)]


@pytest.mark.parametrize(
    ("number", "room", "size", "taken"),
    [
        (4, {"a": 2, "b": 2}, None, {"a": 2, "b": 2}),
        (4, {"a": 3, "b": 3, "c": 3}, None, {"a": 2, "b": 2}),  # each keeps a spare
        (4, {"a": 4, "b": 2}, None, {"a": 4}),
        (5, {"a": 4, "b": 1, "c": 1}, None, {"a": 4, "b": 1}),
        (4, {"a": 8, "b": 2}, 2, {"a": 2, "b": 2}),
        (4, {"a": 8, "b": 1}, 2, None),
        (4, {"a": 1, "b": 2}, None, None),
        (1, {}, None, None),
    ],
)
def test_job_takes_as_few_racks_as_have_room(
    number: int, room: dict[str, int], size: int | None, taken: dict[str, int] | None
) -> None:
    assert spread(number, room, size) == taken


def test_ranks_are_contiguous_in_a_group_however_nodes_are_mixed() -> None:
    found = seats(4, cluster("abab"), LABEL)
    assert found is not None
    assert [(seat.rank, seat.group, seat.rack) for seat in found] == [
        (0, 0, "a"),
        (1, 0, "a"),
        (2, 1, "b"),
        (3, 1, "b"),
    ]
    assert len({seat.node for seat in found}) == 4


def test_too_few_nodes_are_no_seats() -> None:
    assert seats(3, cluster("ab"), LABEL) is None
    assert seats(3, cluster("ab"), None) is None


def test_full_leaving_broken_and_unlabelled_nodes_are_not_usable() -> None:
    nodes = [
        Node("full", labels={LABEL: "a"}, room=False),
        Node("leaving", labels={LABEL: "a"}, leaving=True),
        Node("broken", labels={LABEL: "a"}),
        Node("bare"),
        Node("fit", labels={LABEL: "a", "gpu": "h100"}),
        Node("other", labels={LABEL: "b", "gpu": "h100"}),
    ]
    assert [node.id for node in usable(nodes, {}, {"broken"}, LABEL)] == ["fit", "other"]
    assert [node.id for node in usable(nodes, {}, {"broken"}, None)] == ["bare", "fit", "other"]
    assert [node.id for node in usable(nodes, {"gpu": "h100"}, {"fit"}, LABEL)] == ["other"]


def test_group_moves_to_the_rack_with_the_most_room_that_has_none_of_the_job() -> None:
    assert another_rack(2, cluster("aabbbcccc"), LABEL, {"c"}) == "b"
    assert another_rack(3, cluster("aabb"), LABEL, set()) is None


def test_store_stands_where_nobody_trains() -> None:
    head, worker = Node("h", head=True), Node("w")
    assert home_of_the_store([worker, head], {"w"}) == "h"
    assert home_of_the_store([worker, head], {"h"}) == "w"
    assert home_of_the_store([worker, head], {"w", "h"}) == "h"
    assert home_of_the_store([], ()) is None


def test_claim_names_its_node_or_those_it_must_not_have() -> None:
    assert selector({"gpu": "h100"}, LABEL, "a", "n1", ()) == {"gpu": "h100", LABEL: "a", NODE_ID: "n1"}
    assert selector({}, LABEL, "a", "", ("n2", "n1")) == {LABEL: "a", NODE_ID: "!in(n1,n2)"}
    assert selector({}, None, "", "", ()) == {}
