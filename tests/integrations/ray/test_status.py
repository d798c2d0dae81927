"""What a person reads of a job on Ray."""

from __future__ import annotations

from dataclasses import replace

import pytest
from resilience.integrations.ray import layout
from resilience.integrations.ray.layout import Node
from resilience.integrations.ray.status import status_of
from resilience.integrations.ray.stumbles import Stumbles, recovered, stumbled

from tests.integrations.ray.world import running, world


def test_running_job_names_its_nodes_racks_and_what_happened() -> None:
    it = running("aabb", 4)
    lost = it.node(3)
    it.kill_node(lost)
    it.run(2)
    status = status_of("llm", it.state)
    assert (status.phase, status.over, status.succeeded, status.exit_code) == ("RUNNING", False, False, None)
    assert [(one.rank, one.group, one.rack, bool(one.node), one.running) for one in status.nodes] == [
        (0, 0, "a", True, True),
        (1, 0, "a", True, True),
        (2, 1, "b", True, True),
        (3, 1, "b", False, False),
    ]
    text = str(status)
    assert "job llm: RUNNING" in text
    assert "node 3 (b) on no node yet" in text
    assert f"node 2 (b) on 127.0.0.1, Ray node {status.nodes[2].node}" in text
    assert "node 3 (127.0.0.1) was lost: its Ray node died" in text


def test_job_that_has_ended_says_how_and_runs_nowhere() -> None:
    it = running("aa", 2, None)
    it.end(77)
    it.run(2)
    status = status_of("llm", it.state)
    assert (status.over, status.succeeded, status.exit_code) == (True, False, 77)
    assert "restarting can't help" in str(status)
    assert not any(one.running for one in status.nodes)


def test_job_that_waits_says_for_what() -> None:
    it = world("a", 2, None)
    it.run(2)
    assert "1 of 2 nodes have room; it waits for the others" in str(status_of("llm", it.state))


def test_job_that_holds_a_node_and_waits_for_another_counts_the_one_it_holds() -> None:
    it = world("", 2, None)
    it.run(2)
    assert it.state.reason.startswith("0 of 2 nodes have room")
    it.nodes["late"] = ""
    it.run(2)
    assert it.state.reason.startswith("1 of 2 nodes have room")
    it.nodes["later"] = ""
    it.run(15)
    assert (it.state.reason, it.running()) == ("", [True, True])


def test_job_whose_free_node_is_not_given_says_that_it_waits_for_that() -> None:
    it = world("aa", 2)
    it.slow = {"n1a"}
    it.run(5)
    assert it.state.reason == "1 of 2 nodes are held; it waits for Ray to give the others"


@pytest.mark.parametrize(("threshold", "where"), [(None, ""), (300.0, " of RACK_ID=a")])
def test_job_that_waits_for_a_lost_node_says_so_until_it_is_there(threshold: float | None, where: str) -> None:
    it = running("aa", 2, threshold)
    it.kill_node(it.node(1))
    it.run(5)
    waits = f"it waits for another node{where} in the place of node 1; 1 of 2 are there"
    assert status_of("llm", it.state).reason == waits
    it.nodes["late"] = "a"
    it.run(15)
    assert (it.state.reason, it.running()) == ("", [True, True])


def test_job_that_waits_because_its_nodes_are_excluded_says_that_and_whether_the_others_train() -> None:
    it = running("aaa", 3, None)
    it.rules = replace(it.rules, min_nodes=1)
    it.end(201, 0, 2)
    it.run(5)
    waits = "it waits for another node in the place of nodes 0, 2; 1 of 3 are there, and 1 are enough; 2 are excluded"
    assert it.state.reason == waits


def test_job_that_waits_does_not_hide_that_its_supervisor_stumbles() -> None:
    it = running("aa", 2, None)
    it.kill_node(it.node(1))
    it.state = stumbled(it.state, Stumbles().and_one_more(OSError("no room"), it.now), it.now)
    it.run(5)
    assert "OSError: no room" in it.state.reason
    it.state = recovered(it.state)
    it.run(1)
    assert "it waits for another node" in it.state.reason


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "the launcher of node 1 (127.0.0.1) ended with 1: rank 3: ValueError: bad batch"),
        (2, "the launcher of node 1 (127.0.0.1) ended with 2: rank 3: ValueError: bad batch"),
        (77, "the launcher of node 1 (127.0.0.1) ended with 77: restarting can't help; rank 3: ValueError: bad batch"),
    ],
)
def test_job_that_failed_says_why_and_not_only_that_it_did(code: int, said: str) -> None:
    it = running("aa", 2, None)
    it.end(code, 1)
    claim = it.state.slots[1].claim
    it.claims[claim] = replace(it.claims[claim], why="rank 3: ValueError: bad batch")
    it.run(2)
    status = status_of("llm", it.state)
    assert status.reason == said
    assert said in "\n".join(status.history)


def test_supervisor_that_is_silent_for_minutes_is_told_unless_the_job_is_over() -> None:
    it = running("aa", 2, None)
    assert (status_of("llm", it.state, 59.0).silent_s, "sign of life" in str(status_of("llm", it.state, 59.0))) == (
        0,
        False,
    )
    assert "job llm: RUNNING, its supervisor gave its last sign of life 90 s ago" in str(
        status_of("llm", it.state, 90.0)
    )
    it.end(77)
    it.run(2)
    assert "sign of life" not in str(status_of("llm", it.state, 90.0))


def test_status_tells_of_nodes_that_are_not_used_again_and_of_groups_that_moved() -> None:
    it = running("aabbcc", 4, threshold=10)
    broken = it.node(3)
    it.end(201, 3)
    it.run(30)
    text = str(status_of("llm", it.state))
    assert f"Ray node {broken} is not used again: ended with 201: driver error" in text
    assert "groups have moved: 1" in text


@pytest.mark.parametrize(
    ("bundle", "labels", "label", "said"),
    [
        ({"cpu": 1.0}, {}, None, "no node of this cluster has any 'cpu'. Did you mean 'CPU'?"),
        ({"CPU": 16.0}, {}, None, "CPU=16 is wanted, and the largest has 4"),
        ({"CPU": 1.0}, {"gpu": "h100"}, None, "no node of this cluster has the label gpu=h100."),
        ({"CPU": 1.0}, {}, "RAK_ID", "no node of this cluster has a label 'RAK_ID'. Did you mean 'RACK_ID'?"),
        ({"CPU": 1.0}, {}, None, ""),
    ],
)
def test_job_that_no_node_could_hold_says_what_is_missing(
    bundle: dict[str, float], labels: dict[str, str], label: str | None, said: str
) -> None:
    nodes = [Node("n1", labels={"RACK_ID": "a"}, room=False, total={"CPU": 4.0, "memory": 1e9})]
    assert said in layout.obstacle(nodes, bundle, labels, label)
    assert bool(layout.obstacle(nodes, bundle, labels, label)) is bool(said)
    assert not layout.obstacle([], bundle, labels, label), "an autoscaler may bring any"


def test_job_that_waits_for_nodes_says_what_each_must_have_and_that_none_has() -> None:
    it = world("a", 1, None)
    it.slow = set(it.nodes)
    it.rules = replace(it.rules, bundle={"CPU": 16.0, "GPU": 8.0}, labels={"gpu": "h100"})
    it.run(2)
    waits = "0 of 1 nodes have room for CPU=16, GPU=8; it waits for the others; "
    assert it.state.reason == waits + "no node of this cluster has the label gpu=h100."
