"""When snapshots go to other nodes: one at a time, the newest next, and REPLICATED only when all of it is there."""

from __future__ import annotations

from typing import Any

from resilience.checkpoint.saver.chair import Chair, Message
from resilience.checkpoint.saver.relay import NEVER, Relay
from tests.checkpoint.test_chair import NEVER as NO_CLOCK
from tests.checkpoint.test_chair import Table

K1, K2, K3 = (5, 1), (5, 2), (5, 3)


class Ring(Table):
    """Two nodes that keep copies for each other."""

    def __init__(self, nodes: int = 2) -> None:
        super().__init__(nodes, join=False)
        self.chair = Chair(NO_CLOCK, NO_CLOCK, replicate=True)
        self.chair.new_round(2 * nodes, 0)
        for node in self.nodes:
            self.join(node)

    def join(self, node: int, held: Any = None, **more: Any) -> None:
        super().join(node, held, **{"peer": (f"host{node}", 1000 + node, ""), **more})

    def sent(self, *nodes: int, step: int, why: str = "") -> None:
        for node in nodes:
            self.say(node, op="sent", key=(5, step), why=why)

    def to_send(self, node: int) -> list[tuple[int, int]]:
        """What a node was told to have copies made of."""
        found = [message for message in self.told[node] if message["op"] == "send" or message.get("send")]
        self.told[node] = [message for message in self.told[node] if message not in found]
        return [message["key"] for message in found]

    def ends(self, node: int) -> list[tuple[str, Any]]:
        """What a node was told of the end of it."""
        found: list[Message] = [*self.take(node, "replicated"), *self.take(node, "unsent")]
        return [(message["op"], message["key"]) for message in found if message["key"] != NEVER]


def test_complete_snapshot_goes_out_with_its_decision_and_is_replicated_when_the_last_node_says_so() -> None:
    ring = Ring()
    ring.sealed(0, 2, step=1)
    assert ring.to_send(0) == ring.to_send(2) == [K1]
    ring.sent(0, step=1)
    assert ring.ends(0) == []
    ring.sent(2, step=1)
    assert ring.ends(0) == ring.ends(2) == [("replicated", K1)]


def test_nothing_queues_up_and_the_newest_is_next() -> None:
    ring = Ring()
    for step in (1, 2, 3):
        ring.sealed(0, 2, step=step)
    assert ring.to_send(0) == ring.to_send(2) == [K1]
    ring.sent(0, 2, step=1)
    assert ring.to_send(0) == ring.to_send(2) == [K3]
    ring.sent(0, 2, step=3)
    assert ring.to_send(0) == [], "there is no newer one"
    assert ring.ends(2) == [("replicated", K1), ("replicated", K3)]


def test_snapshot_that_one_node_could_not_send_is_not_replicated_and_a_newer_one_is_tried() -> None:
    ring = Ring()
    ring.sealed(0, 2, step=1)
    ring.to_send(0)
    ring.sent(0, step=1)
    ring.sent(2, step=1, why="no memory")
    assert ring.ends(0) == [("unsent", K1)]
    assert ring.to_send(0) == [], "not the same one over and over"
    ring.sealed(0, 2, step=2)
    assert ring.to_send(0) == [K2]


def test_node_that_is_lost_ends_what_is_under_way_and_nobody_waits_for_it() -> None:
    ring = Ring()
    ring.sealed(0, 2, step=1)
    ring.sent(0, step=1)
    ring.chair.lost(2, 1.0)
    ring.deliver()
    assert ring.ends(0) == [("unsent", K1)]


def test_node_that_comes_again_gets_the_newest_once_more_for_what_it_kept_may_be_gone() -> None:
    ring = Ring()
    ring.sealed(0, 2, step=1)
    ring.sent(0, 2, step=1)
    ring.to_send(0)
    ring.join(2, held=[K1], again=True, replicated=K1)
    assert ring.to_send(0) == [K1]
    assert [message["peers"] for message in ring.take(0, "peers")][-1] == [
        (0, "host0", 1000, ""),
        (2, "host2", 1002, ""),
    ]


def test_new_chair_tells_all_what_one_node_was_told_and_answers_those_that_wait_for_an_old_one() -> None:
    ring = Ring(3)
    ring.chair.new_round(6, 0)
    for node in ring.nodes:
        ring.join(node, held=[K1, K2], again=True, replicated=K1 if node == 4 else NEVER)
    assert ("replicated", K1) in ring.ends(2)
    assert ring.to_send(2) == [K2], "of what is there only the newest goes"
    ring.sent(2, step=1)
    assert ring.ends(2) == [("replicated", K1)]
    ring.say(2, op="sent", key=(4, 9), why="")
    assert ring.ends(2) == [("unsent", (4, 9))]


def test_going_back_ends_only_what_is_newer() -> None:
    relay = Relay(on=True)
    assert relay.takes(K2, {0, 2})
    relay.go_back_to(K2)
    assert relay.key == K2
    relay.go_back_to(K1)
    assert relay.key is None
    relay.last = K2
    relay.go_back_to(K1)
    assert relay.last == NEVER
    assert relay.takes(K1, {0, 2})


def test_one_node_alone_and_a_relay_that_is_off_send_nothing() -> None:
    assert not Relay(on=True).takes(K1, {0})
    assert not Relay(on=False).takes(K1, {0, 2})
