from __future__ import annotations

import itertools

import pytest

from resilience.failover.restart_policy import (
    ANY_FAILED,
    FAILED,
    FINISHED,
    GO_ON,
    GONE,
    MIN_HEALTHY,
    RESTART,
    RUNNING,
    SUCCEEDED,
    standing,
)

STATES = (RUNNING, SUCCEEDED, FAILED, GONE)


@pytest.mark.parametrize("nodes", range(1, 5))
def test_one_failed_node_is_enough_for_a_restart_whatever_the_others_do(nodes: int) -> None:
    for states in itertools.product(STATES, repeat=nodes):
        assert (standing(states, ANY_FAILED, 1) == RESTART) == (FAILED in states), states


@pytest.mark.parametrize("policy", [ANY_FAILED, MIN_HEALTHY])
@pytest.mark.parametrize("nodes", range(1, 5))
def test_job_without_a_failed_node_has_finished_when_nobody_runs_any_more(policy: str, nodes: int) -> None:
    for states in itertools.product((RUNNING, SUCCEEDED, GONE), repeat=nodes):
        assert standing(states, policy, nodes) == (GO_ON if RUNNING in states else FINISHED), states


@pytest.mark.parametrize("min_nodes", range(1, 5))
def test_min_healthy_restarts_as_soon_as_too_few_nodes_are_whole_and_not_before(min_nodes: int) -> None:
    for states in itertools.product(STATES, repeat=4):
        too_few = 4 - states.count(FAILED) < min_nodes
        assert (standing(states, MIN_HEALTHY, min_nodes) == RESTART) == too_few, states


@pytest.mark.parametrize(
    ("states", "min_nodes", "expected"),
    [
        ((RUNNING, FAILED), 1, GO_ON),
        ((RUNNING, FAILED), 2, RESTART),
        ((SUCCEEDED, FAILED), 1, FINISHED),  # the whole ones are done: a parked node holds nobody up
        ((SUCCEEDED, RUNNING, FAILED), 2, GO_ON),
        ((SUCCEEDED, GONE, FAILED), 2, FINISHED),
        ((FAILED, FAILED), 1, RESTART),
        ((GONE,), 1, FINISHED),
    ],
)
def test_min_healthy_goes_on_with_whole_nodes_and_finishes_with_them(
    states: tuple[str, ...], min_nodes: int, expected: str
) -> None:
    assert standing(states, MIN_HEALTHY, min_nodes) == expected


@pytest.mark.parametrize("policy", [ANY_FAILED, MIN_HEALTHY])
def test_order_of_the_nodes_does_not_matter(policy: str) -> None:
    for states in itertools.combinations_with_replacement(STATES, 3):
        found = {standing(order, policy, 2) for order in itertools.permutations(states)}
        assert len(found) == 1, states


def test_states_may_be_read_only_once() -> None:
    assert standing(iter((RUNNING, FAILED)), MIN_HEALTHY, 1) == GO_ON
    assert standing(iter((RUNNING, FAILED)), ANY_FAILED, 1) == RESTART
