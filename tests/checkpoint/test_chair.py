"""What all nodes decide together: rule by rule, and in random order with lines that are cut and savers that die."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from resilience.checkpoint.decisions import Key
from resilience.checkpoint.saver.chair import AHEAD, GONE_S, Chair, Message
from resilience.checkpoint.saver.restoring import DISK, MEMORY, TRIES
from resilience.checkpoint.schedule import Clock, Every
from resilience.checkpoint.slots import COMPLETE, VOID

NEVER = Clock(Every(), 0, 0.0)


class Table:
    """A chair with two nodes of two ranks; what they were told."""

    def __init__(self, nodes: int = 2, disk: Clock | None = None, join: bool = True) -> None:
        self.chair = Chair(NEVER, disk or NEVER)
        self.nodes = [2 * number for number in range(nodes)]
        self.now = 0.0
        self.told: dict[int, list[Message]] = {node: [] for node in self.nodes}
        self.chair.new_round(2 * nodes, 0)
        for node in self.nodes if join else ():
            self.join(node)

    def join(self, node: int, held: list[Key] | None = None, **more: Any) -> None:
        message = {"ranks": 2, "generation": 4, "again": False, "newest": (0, -1), "leased": [], **more}
        self.say(node, op="join", **message, held=[(*key, 1) for key in held or []])

    def say(self, node: int, **message: Any) -> None:
        self.chair.hear(node, message, self.now)
        self.deliver()

    def deliver(self) -> None:
        while self.chair.out:
            node, message = self.chair.out.popleft()
            self.told[node].append(message)

    def take(self, node: int, op: str) -> list[Message]:
        """What a node was told of this kind since the last time."""
        found = [message for message in self.told[node] if message["op"] == op]
        self.told[node] = [message for message in self.told[node] if message["op"] != op]
        return found

    def sealed(self, *nodes: int, step: int, want: bool = False, edition: int = 1, anew: bool = False) -> None:
        for node in nodes:
            self.say(node, op="sealed", key=(5, step), edition=edition, want=want, anew=anew)

    def written(self, *nodes: int, folder: str) -> None:
        for node in nodes:
            self.say(node, op="written", folder=folder, shards=[f"s{node}"], values=[f"v{node}"])

    def verdicts(self, node: int) -> dict[Key, int]:
        return {message["key"]: message["verdict"] for message in self.take(node, "decided")}


def test_cycle_begins_when_all_ranks_of_the_job_are_covered_and_generations_grow() -> None:
    table = Table(join=False)
    table.join(2, generation=7)
    assert (table.chair.missing(), table.told[2]) == (2, [])
    table.join(0, generation=3)
    assert [table.take(node, "begin") for node in (0, 2)] == [[{"op": "begin", "generation": 8}]] * 2


def test_nodes_that_only_lost_their_savers_go_on_in_the_same_generation() -> None:
    table = Table(join=False)
    table.join(0, generation=5, again=True)
    table.join(2, generation=5, again=True)
    assert table.take(2, "begin") == [{"op": "begin", "generation": 5}]


def test_node_of_a_cycle_that_the_chair_has_not_heard_of_is_not_let_in() -> None:
    """Under torchrun it may find the address of the last round; it will find the new one when rank 0 has come."""
    table = Table()
    before = table.chair.generation
    table.take(2, "begin")
    table.join(2, generation=99)
    assert table.take(2, "begin") == []
    assert table.chair.generation == before


def test_snapshot_is_complete_when_the_last_node_has_sealed_it_and_not_before() -> None:
    table = Table()
    table.sealed(0, step=1)
    assert table.verdicts(0) == {}
    table.sealed(2, step=1)
    assert table.verdicts(0) == table.verdicts(2) == {(5, 1): COMPLETE}


def test_snapshot_that_one_node_voids_is_void_everywhere_also_for_who_comes_later() -> None:
    table = Table()
    table.sealed(0, step=1)
    table.say(2, op="void", key=(5, 1))
    assert table.verdicts(0) == {(5, 1): VOID}
    table.say(2, op="void", key=(5, 2))
    table.verdicts(0)
    table.sealed(0, step=2)
    assert table.verdicts(0) == {(5, 2): VOID}


@pytest.mark.parametrize("first", [True, False])
def test_step_that_all_ranks_of_a_node_skipped_is_void_for_those_that_hold_it(first: bool) -> None:
    """Otherwise it would stay pending, and keep a slot for good."""
    table = Table()
    if first:
        table.sealed(0, step=1)
        table.say(2, op="tried", step=2)
    else:
        table.say(2, op="tried", step=2)
        table.sealed(0, step=1)
    assert table.verdicts(0) == {(5, 1): VOID}
    table.sealed(0, 2, step=2)
    assert table.verdicts(0) == {(5, 2): COMPLETE}


def test_seal_of_a_later_step_shows_that_an_earlier_one_was_skipped() -> None:
    table = Table()
    table.sealed(0, step=1)
    table.sealed(2, step=2)
    assert table.verdicts(0) == {(5, 1): VOID}


def test_what_a_lost_cycle_left_is_decided_by_who_still_holds_it() -> None:
    table = Table(join=False)
    table.join(0, held=[(4, 7), (4, 8), (4, 9)])
    table.join(2, held=[(4, 7), (4, 8)])
    assert table.verdicts(0) == {(4, 7): COMPLETE, (4, 8): COMPLETE, (4, 9): VOID}


def test_chair_that_takes_anothers_place_comes_to_the_same_decisions() -> None:
    """The one before told node 0 that step 3 is complete, and died before it told node 2."""
    table = Table(join=False)
    table.join(0, held=[(5, 2), (5, 3)], generation=5, again=True)
    table.join(2, held=[(5, 2), (5, 3)], generation=5, again=True)
    assert table.verdicts(2) == {(5, 2): COMPLETE, (5, 3): COMPLETE}


def test_by_the_clock_a_step_is_armed_that_no_rank_has_come_to() -> None:
    table = Table(join=False)
    table.chair = Chair(Clock(Every(seconds=10), 0, 0.0), NEVER)
    table.chair.new_round(4, 0)
    for node in table.nodes:
        table.join(node)

    def tick(now: float) -> list[Message]:
        table.chair.tick(now)
        table.deliver()
        return table.take(2, "when")

    assert [bool(tick(now)) for now in (9.0, 10.0, 15.0, 20.5)] == [False, True, False, True]
    table.say(0, op="at", step=31, cost_s=0.1)
    assert table.take(0, "arm") == []
    table.say(2, op="at", step=33, cost_s=0.2)
    assert [table.take(node, "arm") for node in (0, 2)] == [[{"op": "arm", "step": 33 + AHEAD}]] * 2


# -- to disk --------------------------------------------------------------------------------------------------------------


def test_snapshot_that_one_node_wants_on_disk_is_written_by_all_and_committed_once() -> None:
    table = Table()
    table.sealed(0, step=3, want=True)
    table.sealed(2, step=3)
    (mine,), (other,) = table.take(0, "decided"), table.take(2, "decided")
    folder = mine["folder"]
    assert other["folder"] == folder != ""
    table.written(0, folder=folder)
    table.written(0, folder=folder)  # said twice: the line was cut meanwhile
    assert table.take(0, "commit") == []
    table.written(2, folder=folder)
    (commit,) = table.take(0, "commit")
    assert (commit["write"].shards, commit["write"].values) == (["s0", "s2"], ["v0", "v2"])
    assert table.take(2, "durable") == []
    table.say(0, op="committed", folder=folder, why="")
    assert [table.take(node, "durable")[0]["key"] for node in (0, 2)] == [(5, 3)] * 2


@pytest.mark.parametrize("at", ["one node", "the commit"])
def test_failure_anywhere_is_told_to_all_and_what_was_written_is_discarded(at: str) -> None:
    table = Table()
    table.sealed(0, 2, step=3, want=True)
    folder = table.take(0, "decided")[0]["folder"]
    table.written(0, folder=folder)
    if at == "one node":
        table.say(2, op="failed", folder=folder, why="disk full")
    else:
        table.written(2, folder=folder)
        assert len(table.take(0, "commit")) == 1
        table.say(0, op="committed", folder=folder, why="disk full")
    assert [table.take(node, "failed")[0]["why"] for node in (0, 2)] == ["disk full"] * 2
    assert table.take(0, "discard") == [{"op": "discard", "folder": folder}]
    table.written(2, folder=folder)
    assert table.take(0, "commit") == [], "what comes too late changes nothing"
    assert table.take(2, "dropped") == [{"op": "dropped", "folder": folder}]


def test_by_the_clock_one_is_written_at_a_time() -> None:
    table = Table(1, Clock(Every(seconds=10), 0, 0.0))
    for second in range(40):
        table.now = float(second)
        table.sealed(0, step=second)
    ordered = [message for message in table.take(0, "decided") if message["folder"]]
    assert [message["key"][1] for message in ordered] == [10], "it is still being written"
    table.written(0, folder=ordered[0]["folder"])
    table.say(0, op="committed", folder=ordered[0]["folder"], why="")
    table.sealed(0, step=40)
    assert table.take(0, "decided")[0]["folder"]


def test_failure_of_a_rank_has_the_newest_that_all_hold_written_once() -> None:
    table = Table()
    table.sealed(0, 2, step=3)
    table.sealed(0, step=4)
    table.say(2, op="secure")
    table.say(0, op="secure")
    assert [message["key"] for message in table.take(2, "write")] == [(5, 3)]


def test_step_that_is_saved_again_while_it_is_written_is_written_again_after_it() -> None:
    table = Table(1)
    table.sealed(0, step=3, want=True)
    (first,) = table.take(0, "decided")
    table.sealed(0, step=3, want=True, edition=2)
    (second,) = table.take(0, "decided")
    assert (bool(first["folder"]), second["folder"]) == (True, "")
    table.written(0, folder=first["folder"])
    table.say(0, op="committed", folder=first["folder"], why="")
    table.sealed(0, step=3, want=True, edition=2, anew=True)  # the book finds that what it wrote is not what is there
    assert table.take(0, "decided")[0]["folder"]


def test_write_of_a_node_that_is_gone_fails_after_a_while_and_not_at_once() -> None:
    table = Table()
    table.sealed(0, 2, step=3, want=True)
    table.written(0, folder=table.take(0, "decided")[0]["folder"])
    table.chair.lost(2, table.now)
    table.now += GONE_S - 1
    table.chair.tick(table.now)
    table.deliver()
    assert table.take(0, "failed") == []
    table.now += 2
    table.chair.tick(table.now)
    table.deliver()
    assert "is gone" in table.take(0, "failed")[0]["why"]


def test_write_of_an_earlier_cycle_that_a_lost_node_was_part_of_is_dropped_and_said_with_its_step() -> None:
    table = Table()
    table.sealed(0, 2, step=1, want=True)
    table.chair.lost(2, 0.0)
    table.chair.new_round(2, 1)
    table.join(0)
    table.chair.tick(GONE_S + 1)
    table.deliver()
    assert [message["op"] for message in table.told[0] if message["op"] in ("failed", "dropped")] == ["dropped"]
    (said,) = table.take(0, "aloud")
    assert "step 1 is not on disk: the node with rank 2 is gone" in said["text"]


@pytest.mark.parametrize(("chair", "peer"), [(True, ()), (False, ("host", 1, ""))], ids=["rank 0's", "the other"])
def test_nodes_that_do_not_all_want_copies_are_told(chair: bool, peer: tuple[Any, ...]) -> None:
    table = Table(join=False)
    table.chair = Chair(NEVER, NEVER, replicate=chair)
    table.chair.new_round(4, 0)
    table.join(0, peer=("host", 2, "") if chair else ())
    table.join(2, peer=peer)
    (said,) = table.take(0, "aloud")
    assert "replicas= is not the same on all nodes" in said["text"]
    assert [message["peers"] for message in table.take(2, "peers")] == ([[(0, "host", 2, "")]] if chair else [])


def test_node_whose_saver_came_back_is_told_again_what_to_write() -> None:
    table = Table()
    table.sealed(0, 2, step=3, want=True)
    folder = table.take(2, "decided")[0]["folder"]
    table.chair.lost(2, table.now)
    table.join(2, held=[(5, 3)], leased=[(5, 3)], generation=5, again=True)
    assert [(message["key"], message["folder"]) for message in table.take(2, "write")] == [((5, 3), folder)]


def test_what_an_earlier_chair_was_about_to_write_is_written() -> None:
    table = Table(join=False)
    for node in table.nodes:
        table.join(node, held=[(5, 3)], leased=[(5, 3)], generation=5, again=True)
    assert [(message["key"], bool(message["folder"])) for message in table.take(2, "decided")] == [((5, 3), True)]


def test_what_is_ordered_after_a_chairs_death_comes_before_what_would_let_go_of_it() -> None:
    """Step 3 was wanted on disk and nobody was told yet that it is complete; step 4 moves W on, and 3 could be overwritten."""
    table = Table(join=False)
    for node in table.nodes:
        table.join(node, held=[(5, 3), (5, 4)], leased=[(5, 3)], generation=5, again=True)
    told = [(message["key"], bool(message["folder"])) for message in table.take(2, "decided")]
    assert told == [((5, 3), True), ((5, 4), False)]
    table.sealed(2, step=3, want=True)  # said again by a node that had not heard: it is the same one
    assert [message["folder"] for message in table.take(2, "decided")] == [""]


def test_everybody_is_let_go_when_the_last_node_says_bye_and_the_newest_is_on_its_way() -> None:
    table = Table()
    table.sealed(0, 2, step=9)
    table.say(0, op="bye")
    assert table.take(0, "done") == []
    table.say(2, op="bye")
    ops = [message["op"] for message in table.told[2]]
    assert ops.index("write") < ops.index("done")


def test_saver_that_is_about_to_end_writes_what_is_complete_and_is_let_go_alone() -> None:
    table = Table()
    table.sealed(0, 2, step=9)
    table.say(2, op="leave")
    ops = [message["op"] for message in table.told[2]]
    assert ops.index("write") < ops.index("done")
    assert len(table.take(0, "write")) == 1
    assert table.take(0, "done") == []
    table.say(0, op="leave")
    assert len(table.take(2, "done")) == 2


# -- restoring ------------------------------------------------------------------------------------------------------------


def ask(
    table: Table, memory: dict[int, list[Key]], disk: list[tuple[int, int, int]] | None = None, **more: Any
) -> None:
    for node in table.nodes:
        question = {"step": None, "fresh": False, "timeout": 60, "memory": memory.get(node, []), "tries": [], **more}
        named = [(*item[:2], f"step-{item[1]}") for item in disk or []]
        table.say(node, op="ask", disk=named, **{"left_out": [], **question})


def test_newest_that_all_nodes_have_is_chosen_and_everybody_goes_when_all_have_it() -> None:
    table = Table()
    ask(table, {0: [(4, 9), (4, 8)], 2: [(4, 8), (4, 7)]}, [(4, 5, 4)])
    assert [table.take(node, "choice")[0]["key"] for node in (0, 2)] == [(4, 8)] * 2
    table.say(0, op="loaded", wrong="")
    assert table.take(0, "go") == []
    table.say(2, op="loaded", wrong="")
    assert [table.take(node, "go")[0]["generation"] for node in (0, 2)] == [6, 6]


def test_next_one_is_offered_to_all_when_it_is_bad_for_one() -> None:
    table = Table()
    ask(table, {0: [(4, 8)], 2: [(4, 8)]}, [(4, 5, 4)])
    table.say(0, op="loaded", wrong="")
    table.say(2, op="loaded", wrong="rank 3: the digest is wrong")
    assert [message["where"] for message in table.take(0, "choice")] == [MEMORY, DISK]
    assert table.take(0, "bad")[0]["why"] == "step 8 (memory) can't be used: rank 3: the digest is wrong"
    for node in table.nodes:
        table.say(node, op="loaded", wrong="rank 0: it is cut short")
    problems = table.take(2, "nothing")[0]["problems"]
    assert [text.partition("used: ")[2] for text in problems] == [
        "rank 3: the digest is wrong",
        "rank 0: it is cut short",
    ]


def test_fresh_start_is_one_only_if_everybody_allows_it() -> None:
    table = Table()
    ask(table, {}, fresh=True)
    assert table.take(0, "nothing")[0]["fresh"]
    ask(table, {})
    assert not table.take(0, "nothing")[0]["fresh"]


def test_checkpoints_that_are_all_damaged_are_no_fresh_start_and_not_all_of_them_are_named() -> None:
    table = Table()
    ask(table, {}, fresh=True, left_out=[f"step-{number}: its digest is wrong" for number in range(2000)])
    (message,) = table.take(2, "nothing")
    assert not message["fresh"]
    assert message["problems"][-1] == "and 1984 more"


def test_checkpoint_that_restarts_failed_from_is_passed_over_and_named() -> None:
    table = Table()
    ask(table, {0: [(4, 9), (4, 8)], 2: [(4, 9), (4, 8)]}, tries=[(4, 9, TRIES)])
    (message,) = table.take(0, "choice")
    assert (message["key"], message["aside"]) == ((4, 8), [(4, 9)])


def test_nodes_that_ask_for_different_steps_are_refused() -> None:
    table = Table()
    for node in table.nodes:
        table.say(node, op="ask", step=node, fresh=False, timeout=60, memory=[], disk=[], tries=[], left_out=[])
    assert "different steps" in table.take(2, "refused")[0]["why"]


def test_restoring_is_called_off_for_all_when_a_node_is_lost_or_late_or_gives_up() -> None:
    for why in ("lost", "late", "quit"):
        table = Table()
        table.say(0, op="ask", step=None, fresh=False, timeout=60, memory=[], disk=[], tries=[], left_out=[])
        if why == "lost":
            table.chair.lost(2, 0.0)
        elif why == "quit":
            table.say(2, op="quit", why="rank 3 ended")
        else:
            table.chair.tick(61.0)
        table.deliver()
        (message,) = table.take(0, "refused")
        assert {"lost": "was lost", "late": "rank 2 did not come", "quit": "rank 3 ended"}[why] in message["why"]


# -- in random order ------------------------------------------------------------------------------------------------------


class Node:
    """A node of the simulation: what its ranks have sealed, and what it was told. Its memory outlives its saver."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.generation = 0
        self.sealed: set[Key] = set()
        self.verdicts: dict[Key, int] = {}
        self.step = 0
        self.open = True  # there is a line
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()

    def newest(self) -> Key:
        return max((key for key, verdict in self.verdicts.items() if verdict == COMPLETE), default=(0, -1))

    def held(self) -> list[Key]:
        return [key for key in self.sealed if key >= self.newest() and self.verdicts.get(key) != VOID]

    def join(self) -> None:
        self.inbox.clear()
        self.outbox.clear()
        self.outbox.append(
            {
                "op": "join",
                "ranks": 1,
                "generation": 1,
                "again": self.generation > 0,
                "newest": self.newest(),
                "held": [(*key, 1) for key in self.held()],
                "leased": [],
            }
        )
        for key in self.held():
            if key not in self.verdicts:
                self.outbox.append({"op": "sealed", "key": key, "edition": 1, "want": False, "anew": False})
        if self.step:
            self.outbox.append({"op": "tried", "step": self.step})

    def save(self, takes: bool) -> None:
        """Its ranks save the next step, or skip it."""
        key = (self.generation, self.step)
        self.step += 1
        if takes:
            self.sealed.add(key)
            self.outbox.append({"op": "sealed", "key": key, "edition": 1, "want": False, "anew": False})
        else:
            self.outbox.append({"op": "tried", "step": self.step})

    def hear(self, message: Message) -> None:
        if message["op"] == "begin":
            self.generation = message["generation"]
        elif message["op"] == "decided" and message["key"] in self.sealed:
            before = self.verdicts.get(message["key"])
            assert before in (None, message["verdict"]), f"{message['key']} was {before}, now {message['verdict']}"
            self.verdicts[message["key"]] = message["verdict"]


@pytest.mark.parametrize("seed", range(60))
def test_nodes_never_hear_different_things_whatever_is_cut_or_dies(seed: int) -> None:
    """COMPLETE only what all hold; nobody hears both COMPLETE and VOID of one snapshot; nothing stays undecided in the end."""
    rng = random.Random(seed)
    nodes = {name: Node(name) for name in range(rng.choice([1, 2, 3, 4]))}

    def new_chair() -> Chair:
        made = Chair(NEVER, NEVER)
        made.new_round(len(nodes), 0)
        for node in nodes.values():
            node.join()
        return made

    def carry(chair: Chair, node: Node) -> None:
        if node.outbox:
            chair.hear(node.name, node.outbox.popleft(), 0.0)
        for name, message in chair.out:
            if nodes[name].open:
                nodes[name].inbox.append(message)
        chair.out.clear()

    chair = new_chair()
    for _ in range(400):
        node = rng.choice(list(nodes.values()))
        roll = rng.random()
        if roll < 0.02:
            chair = new_chair()  # the saver of rank 0's node died
        elif roll < 0.05:
            node.join()  # its line was cut, or its saver died: what was on its way is lost
        elif roll < 0.25 and node.generation and node.step <= min(other.step for other in nodes.values()) + 2:
            node.save(rng.random() < 0.8)
        elif roll < 0.6 and node.inbox:
            node.hear(node.inbox.popleft())
        else:
            carry(chair, node)
    while any(node.outbox or node.inbox for node in nodes.values()):
        for node in nodes.values():
            carry(chair, node)
            while node.inbox:
                node.hear(node.inbox.popleft())
    last = min(node.step for node in nodes.values())
    for node in nodes.values():
        for key in node.sealed:
            if node.verdicts.get(key) == COMPLETE:
                assert all(key in other.sealed for other in nodes.values())
            assert key in node.verdicts or key < node.newest() or key[1] >= last, f"{key} keeps its slot for good"
