"""Actors that have a node and do not come up: another node is taken, and the job says what it waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from resilience.integrations.ray.start import AVOIDED_S, START_S, setup_s
from resilience.integrations.ray.state import Phase, State
from resilience.integrations.ray.stumbles import Stumbles, listening_again, stumbled

from tests.integrations.ray.world import World, running, world


def stuck_on_its_second(racks: str, nodes: int = 2) -> World:
    it = world(racks, nodes, None)
    it.stuck = {"n1a"}
    it.run(3)
    assert (it.state.phase, it.node(1)) == (Phase.RUNNING, "n1a")
    return it


def test_node_whose_workers_hang_when_they_start_is_left_for_a_spare_and_avoided() -> None:
    it = stuck_on_its_second("aaa")
    it.run(START_S - 10)
    assert it.running() == [True, False]
    it.run(15)
    assert it.running() == [True, True]
    assert it.node(1) == "n2a"
    (line,) = [line for line in it.state.lines if "was lost" in line]
    assert "node 1 (127.0.0.1) was lost: Ray has not brought its actor up within 180 s" in line
    assert "on node n1a" in line
    assert "avoided for 30 minutes" in line
    assert it.state.failures == 0


def test_status_says_which_actor_is_awaited_and_later_why_another_node_is() -> None:
    it = stuck_on_its_second("aa")
    it.run(20)
    assert it.state.reason == ""
    assert it.run(20).reason == "Ray has not brought up the actor of node 1 yet"
    it.run(START_S)
    assert it.state.reason.startswith("it waits for another node in the place of node 1; 1 of 2 are there")
    assert it.state.reason.endswith("; avoided for actors that did not come up: 1 node")
    assert it.avoids[it.state.slots[1].claim] == {"n0a", "n1a"}, "Ray, and an autoscaler, look for another one"
    it.nodes["late"] = "a"
    it.run(5)
    assert (it.running(), it.state.reason) == ([True, True], "")


def test_node_that_was_avoided_long_enough_is_tried_again() -> None:
    it = stuck_on_its_second("aa")
    it.run(START_S + 5)
    assert it.node(1) == ""
    it.stuck = set()
    it.run(AVOIDED_S - 60, step=5)
    assert it.node(1) == ""
    it.run(90)
    assert it.running() == [True, True]
    assert not it.state.avoided


def test_node_that_is_avoided_is_not_among_those_that_a_job_gathers() -> None:
    it = world("aaa", 2, None)
    it.state = State(avoided={"n0a": it.now + 600})
    it.run(3)
    assert [slot.node for slot in it.state.slots] == ["n1a", "n2a"]
    assert all(it.running())


def test_claim_that_ray_put_on_a_node_that_is_avoided_by_now_is_made_anew() -> None:
    it = world("aa", 2, None)
    it.slow = {"n1a"}
    it.run(2)
    it.state = replace(it.state, avoided={"n1a": it.now + 600})
    it.slow = set()
    it.nodes["late"] = "a"
    it.run(30)
    assert [slot.node for slot in it.state.slots] == ["n0a", "late"]


def test_actors_that_are_slow_everywhere_do_not_cost_the_job_all_of_its_nodes() -> None:
    it = world("a" * 8, 8, None)
    it.stuck = set(it.nodes)
    it.run(3)
    it.run(START_S + 60)
    assert sum(bool(slot.node) for slot in it.state.slots) == 7


def test_actor_that_is_out_of_reach_again_and_again_is_given_up_once_that_has_lasted() -> None:
    it = running("aaa", 2, None)
    for _ in range(3):  # a moment each time: then it is heard again
        it.silence(1)
        it.run(60)
        claim = it.state.slots[1].claim
        it.claims[claim] = replace(it.claims[claim], life=it.state.slots[1].life, launch=it.state.slots[1].launch)
        it.run(2)
    assert all(it.running())
    it.silence(1)
    it.run(START_S + 5)
    assert all(it.running())
    assert it.node(1) == "n2a"


def test_node_on_which_a_launcher_never_ends_and_so_the_next_never_starts_is_left_for_a_spare() -> None:
    it = running("aaa", 2, None)
    it.deaf = {"n1a"}
    it.end(-9, 1)
    it.run(40)
    assert it.state.reason == "the actor has not started the launcher of node 1 yet"
    it.run(START_S)
    assert (it.running(), it.node(1)) == ([True, True], "n2a")
    (line,) = [line for line in it.state.lines if "was lost" in line]
    assert "its actor has not started its launcher within 180 s (the one before it may not have ended" in line


def test_actor_that_is_not_heard_of_while_the_job_stops_is_not_replaced() -> None:
    it = running("aaa", 2, None)
    it.rules = replace(it.rules, stop_grace_s=600.0)
    it.stop = True
    it.tick()
    it.silence(1)
    it.run(START_S + 60)
    assert it.state.phase is Phase.STOPPING
    assert not it.state.avoided


def test_silence_while_the_supervisor_itself_stumbles_is_not_that_of_the_actors() -> None:
    it = running("aaa", 2, None)
    it.silence(0)
    for number in range(10):
        it.silence(1)
        it.run(START_S / 2)
        it.state = stumbled(it.state, Stumbles().and_one_more(ValueError(f"try {number}"), it.now), it.now)
    assert [slot.node for slot in it.state.slots] == ["n0a", "n1a"]
    assert not any(slot.mute_at for slot in listening_again(it.state).slots)


@pytest.mark.parametrize(
    ("runtime_env", "seconds"),
    [
        ({}, 0.0),
        ({"env_vars": {"A": "1"}}, 0.0),
        ({"pip": ["x"]}, 600.0),
        ({"working_dir": "gcs://x.zip", "config": {"setup_timeout_seconds": 60}}, 60.0),
        ({"pip": ["x"], "config": {"setup_timeout_seconds": -1}}, float("inf")),
    ],
)
def test_actor_whose_packages_ray_must_install_first_has_the_time_for_it(
    runtime_env: dict[str, object], seconds: float
) -> None:
    assert setup_s(runtime_env) == seconds
