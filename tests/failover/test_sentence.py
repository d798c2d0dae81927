from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from resilience.failover import exits
from resilience.failover.failure import HARDWARE_CODES
from resilience.failover.history import Past
from resilience.failover.policy import Decision, FailureState, decide
from resilience.failover.sentence import (
    ABORT,
    EXCLUDE_THIS_NODE,
    FINISHED,
    NODE,
    PREEMPTED,
    RESTART,
    SHUTDOWN,
    SHUTDOWN_WORKLOAD,
    STOP,
    WAIT,
    Scene,
    Sentence,
    broken_devices,
    interrupted,
    on_request,
    preempted,
    pronounce,
    stranded,
    together,
    waits,
    with_broken,
)
from resilience.failover.strategy import FailoverStrategy as Strategy

SCENE = Scene(node=2, host="gpu-07", exit_code=1, error_code=None, used=1, max_restarts=3)


def scene(**changes: Any) -> Scene:
    return dataclasses.replace(SCENE, **changes)


def asked(name: str) -> dict[str, Any]:
    return {"rank": 5, "action": name, "description": "ECC errors"}


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Strategy.NORMAL_FAILOVER, (RESTART, 0, None, True)),
        (Strategy.GLOBAL_FAILOVER, (RESTART, 0, None, True)),
        (Strategy.NODE_FAILOVER, (NODE, 76, 2, False)),
        (Strategy.ABORTION_FAILOVER, (ABORT, 77, None, False)),
    ],
)
def test_every_strategy_has_one_action_and_a_spent_budget_stops_instead(
    strategy: Strategy, expected: tuple[str, int, int | None, bool], restart: bool
) -> None:
    done = pronounce(Decision(strategy, "because", restart), SCENE)
    found = (done.action, done.exit_code, done.leaver, done.counts)
    assert found == (expected if restart else (STOP, 1, None, False))
    assert done.strategy == strategy.value
    assert done.excluded is False
    assert "because" in done.detail


@pytest.mark.parametrize("code", sorted(HARDWARE_CODES))
def test_hardware_code_passes_through_when_its_node_leaves(code: int) -> None:
    for where in ({"exit_code": code}, {"exit_code": 1, "error_code": code}, {"exit_code": None, "error_code": code}):
        done = pronounce(Decision(Strategy.NODE_FAILOVER, "broken"), scene(**where))
        assert (done.action, done.exit_code, done.leaver) == (NODE, code, 2), where
        assert f"exit code {code}" in done.detail


@pytest.mark.parametrize("code", [None, 1, -9, 75, 76, 77, 203])
def test_any_other_code_leaves_as_76(code: int | None) -> None:
    done = pronounce(Decision(Strategy.NODE_FAILOVER, "budget"), scene(exit_code=code, error_code=code))
    assert done.exit_code == exits.NODE_LEFT


def test_exit_code_of_two_hardware_codes_is_the_one_that_the_worker_ended_with() -> None:
    assert pronounce(Decision(Strategy.NODE_FAILOVER, "x"), scene(exit_code=14, error_code=201)).exit_code == 14


@pytest.mark.parametrize("strategy", [Strategy.NORMAL_FAILOVER, Strategy.GLOBAL_FAILOVER, Strategy.ABORTION_FAILOVER])
def test_hardware_code_of_a_worker_is_not_the_exit_code_of_nodes_that_stay(strategy: Strategy) -> None:
    done = pronounce(Decision(strategy, "asked for"), scene(exit_code=201))
    assert (done.leaver, done.exit_code in HARDWARE_CODES) == (None, False)


def test_node_that_leaves_is_named_with_its_host() -> None:
    assert "node 2 (gpu-07) leaves the job" in pronounce(Decision(Strategy.NODE_FAILOVER, "x"), SCENE).detail


BROKEN = {1: ("gpu-06", 201), 2: ("gpu-07", 14)}


def test_every_node_with_a_broken_device_leaves_with_its_own_code() -> None:
    chosen = pronounce(Decision(Strategy.NODE_FAILOVER, "broken"), scene(exit_code=14))
    done = with_broken(chosen, BROKEN)
    assert (done.action, done.leaver, done.exit_code, done.also) == (NODE, 2, 14, (1,))
    assert done.codes == {"1": 201, "2": 14}
    assert "node 1 (gpu-06) leaves the job with exit code 201, driver error" in done.detail


def test_nodes_with_broken_devices_leave_whoever_is_to_blame_and_the_restart_of_the_others_counts() -> None:
    done = with_broken(pronounce(Decision(Strategy.NORMAL_FAILOVER, "x"), scene(node=0)), BROKEN)
    assert (done.action, done.leaver, done.exit_code, done.also, done.counts) == (NODE, 1, 201, (2,), True)


@pytest.mark.parametrize(
    "decision",
    [
        Decision(Strategy.GLOBAL_FAILOVER, "asked for"),
        Decision(Strategy.ABORTION_FAILOVER, "asked for"),
        Decision(Strategy.NORMAL_FAILOVER, "spent", restart=False),
    ],
)
def test_broken_devices_are_only_noted_where_nobody_leaves(decision: Decision) -> None:
    chosen = pronounce(decision, SCENE)
    done = with_broken(chosen, BROKEN)
    assert (done.action, done.leaver, done.also) == (chosen.action, None, ())
    assert done.codes == {"1": 201, "2": 14}


def test_code_of_a_broken_device_is_that_of_the_exit_before_that_of_the_error() -> None:
    told: dict[int, list[dict[str, Any]]] = {
        0: [{"exit_code": 1, "error_code": None}, {"exit_code": 1, "error_code": 202}],
        1: [{"exit_code": -9, "error_code": 202}, {"exit_code": 201, "error_code": None}],
        2: [{"exit_code": 1}],
        3: [],
    }
    assert broken_devices(told) == {0: 202, 1: 201}


def test_node_that_leaves_a_static_rendezvous_takes_the_others_along_and_it_is_said() -> None:
    done = stranded(pronounce(Decision(Strategy.NODE_FAILOVER, "broken"), scene(exit_code=201, fixed=True)))
    assert (done.action, done.leaver, done.exit_code, done.strands) == (NODE, 2, 201, True)
    assert "the other nodes end with exit code 75" in done.detail
    assert "go on without it or wait" not in done.detail
    restart = pronounce(Decision(Strategy.NORMAL_FAILOVER, "x"), SCENE)
    assert stranded(restart) == restart


def test_restart_says_how_many_of_the_restarts_are_used() -> None:
    assert "2 of 3 restarts used" in pronounce(Decision(Strategy.NORMAL_FAILOVER, "x"), SCENE).detail
    everywhere = pronounce(Decision(Strategy.GLOBAL_FAILOVER, "x"), scene(used=0)).detail
    assert "the workers of every node are restarted (1 of 3 restarts used)" in everywhere


def test_reason_that_says_nothing_new_is_not_said_twice() -> None:
    plain = decide(FailureState(Past(0, "exit", ""), max_restarts=3))
    assert pronounce(plain, scene(used=0)).detail == "all workers are restarted (1 of 3 restarts used)"


def test_request_to_exclude_a_node_takes_it_out_for_good_and_costs_nothing() -> None:
    done = on_request(asked(EXCLUDE_THIS_NODE), 1, "gpu-03")
    assert (done.action, done.exit_code, done.leaver, done.excluded, done.counts) == (NODE, 76, 1, True, False)
    assert done.restarts
    for words in ("node 1 (gpu-03)", "rank 5", "ECC errors", "76"):
        assert words in done.detail


def test_node_that_leaves_by_strategy_may_come_back() -> None:
    assert pronounce(Decision(Strategy.NODE_FAILOVER, "x"), SCENE).excluded is False


def test_request_to_shut_down_ends_the_job_everywhere_with_the_same_code() -> None:
    done = on_request(asked(SHUTDOWN_WORKLOAD), 1, "gpu-03")
    assert (done.action, done.exit_code, done.leaver, done.restarts) == (SHUTDOWN, 78, None, False)
    assert "rank 5" in done.detail
    assert "ECC errors" in done.detail


def test_preempted_job_is_not_restarted_and_says_who_wanted_it() -> None:
    done = preempted("SIGTERM to the launcher on gpu-03")
    assert (done.action, done.exit_code, done.leaver, done.restarts, done.counts) == (PREEMPTED, 79, None, False, False)
    assert "SIGTERM to the launcher on gpu-03" in done.detail


def test_node_that_waits_costs_nothing_and_holds_nobody_up() -> None:
    chosen = pronounce(Decision(Strategy.NORMAL_FAILOVER, "x"), SCENE)
    done = waits(chosen, whole=3, min_nodes=2)
    assert (done.action, done.leaver, done.counts, done.restarts) == (WAIT, None, False, False)
    assert done.strategy == chosen.strategy
    assert "3 nodes are whole" in done.detail
    assert "asks for 2" in done.detail


@pytest.mark.parametrize("action", [RESTART, NODE, STOP, ABORT, SHUTDOWN, FINISHED, PREEMPTED, WAIT])
def test_job_goes_on_after_a_restart_and_after_a_node_left_only(action: str) -> None:
    assert Sentence(action, "").restarts == (action in (RESTART, NODE))


def test_codes_that_a_scheduler_acts_on_are_those_that_are_documented_and_all_different() -> None:
    ours = {
        exits.FINISHED: 0,
        exits.FAILED: 1,
        exits.USAGE: 2,
        exits.CUT_OFF: 75,
        exits.NODE_LEFT: 76,
        exits.ABORTED: 77,
        exits.SHUT_DOWN: 78,
        exits.PREEMPTED: 79,
    }
    assert all(ours[code] == code for code in ours)
    assert len(ours) == 8
    assert not set(ours) & set(HARDWARE_CODES)


def test_nodes_that_ask_to_be_excluded_at_once_keep_their_reasons() -> None:
    def asks(node: int, why: str) -> Sentence:
        return on_request({"rank": node, "action": "ExcludeThisNode", "description": why}, node, f"host-{node}")

    both = together(asks(0, "too hot"), [(asks(2, "ECC errors"), 2)])
    assert (both.leaver, both.also, both.excluded) == (0, (2,), True)
    assert "too hot" in both.detail
    assert "node 2 (host-2) is excluded" in both.detail
    assert "ECC errors" in both.detail


def test_node_that_asked_to_be_excluded_while_the_job_stops_may_not_come_back() -> None:
    assert (preempted("why").leaver, preempted("why").excluded) == (None, False)
    assert (preempted("why", 3).leaver, preempted("why", 3).excluded, preempted("why", 3).exit_code) == (3, True, 79)


def test_signal_in_the_middle_of_an_incident_ends_as_a_preemption_or_as_under_torchrun() -> None:
    assert (interrupted("SIGTERM", True).action, interrupted("SIGTERM", True).exit_code) == ("preempted", 79)
    assert (interrupted("SIGTERM", False).action, interrupted("SIGTERM", False).exit_code) == ("stop", 1)
