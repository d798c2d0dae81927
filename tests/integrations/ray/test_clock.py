"""A clock that is set back makes no wait longer than it is meant to be."""

from __future__ import annotations

from dataclasses import replace

from resilience.integrations.ray.claims import FENCED_S, PINNED_S
from resilience.integrations.ray.clock import not_ahead
from resilience.integrations.ray.plan import MARGIN_S
from resilience.integrations.ray.start import AVOIDED_S, START_S
from resilience.integrations.ray.state import Phase

from tests.integrations.ray.world import running, world

BACK_S = 900.0


def test_stop_that_is_not_heeded_ends_the_launchers_after_its_grace_though_the_clock_was_set_back() -> None:
    it = running("aa", 2, None)
    it.stop = True
    it.run(5)
    it.now -= BACK_S
    it.run(it.rules.stop_grace_s + MARGIN_S + 2)
    assert it.state.phase is Phase.STOPPED


def test_end_waits_for_a_lost_nodes_launcher_no_longer_than_it_may_run_though_the_clock_was_set_back() -> None:
    it = running("aaa", 2, None)
    it.kill_node(it.node(1))
    it.run(3)
    it.now -= BACK_S
    it.end(0)
    it.run(FENCED_S + 2)
    assert it.state.phase is Phase.SUCCEEDED


def test_node_that_is_not_given_is_not_insisted_on_though_the_clock_was_set_back() -> None:
    it = world("aaa", 2, None)
    it.slow = {"n1a"}
    it.tick()
    it.now -= BACK_S
    it.run(2 * PINNED_S + 15)
    it.slow, it.nodes = set(), {"n0a": "a", "n2a": "a"}
    it.run(30)
    assert all(it.running())


def test_actor_that_does_not_come_up_is_given_up_though_the_clock_was_set_back() -> None:
    it = world("aaa", 2, None)
    it.stuck = {"n1a"}
    it.run(5)
    it.now -= BACK_S
    it.run(START_S + 5)
    assert all(it.running())


def test_group_moves_at_its_threshold_though_the_clock_was_set_back() -> None:
    it = running("aabb", 2, size=2)
    it.kill_node(it.node(1))
    it.run(10)
    it.now -= BACK_S
    it.run(295, step=5)
    assert it.racks() == ["a", ""]
    it.run(20)
    assert it.racks() == ["b", "b"]


def test_node_is_avoided_no_longer_than_it_should_be_though_the_clock_was_set_back() -> None:
    it = running("aa", 2, None)
    it.state = replace(it.state, avoided={"n9": it.now + AVOIDED_S})
    it.now -= 10 * BACK_S
    it.run(AVOIDED_S + 10, step=10)
    assert not it.state.avoided


def test_state_of_a_job_whose_clock_is_right_stays_as_it_is() -> None:
    it = running("aab", 2)
    it.kill_node(it.node(1))
    it.run(3)
    assert not_ahead(it.state, it.now) == it.state
