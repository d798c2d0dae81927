"""``--ft-restart-policy=min-healthy``: the workers of whole nodes go on untouched as long as there are enough of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.test_strategies import finish, training
from tests.jobs import wait_for

pytestmark = pytest.mark.spawns
POLICY = "--ft-restart-policy=min-healthy"


def test_healthy_nodes_go_on_untouched_and_the_job_ends_well_for_all(tmp_path: Path) -> None:
    with training(tmp_path, 3, "2:3", "--max-restarts=3", POLICY) as it:
        it.nodes[2].order("raise one is enough")
        wait_for(lambda: "so the others go on" in it.nodes[2].log(), "the failed node to say that it waits")
        for node in it.nodes[:2]:
            node.await_steps(0, len(node.steps(0)) + 20)
        assert it.nodes[2].process.poll() is None
        assert it.nodes[2].report(0)["action"] == "wait"
        pids = {note[3] for node in it.nodes[:2] for rank in range(3) for note in node.notes(rank)}
        assert len(pids) == 2, "nobody was restarted"
        assert finish(it.nodes) == [0, 0, 0], it.logs()
        for node in it.nodes:
            node.assert_nothing_left()


@pytest.mark.long
def test_node_that_fails_waits_without_any_budget_and_the_others_hear_of_it(tmp_path: Path) -> None:
    with training(tmp_path, 2, "1:2", POLICY) as it:  # --max-restarts is 0
        it.nodes[1].order("raise alone")
        wait_for(lambda: "so the others go on" in it.nodes[1].log(), "the failed node to say that it waits")
        wait_for(lambda: "failed; this node goes on" in it.nodes[0].log(), "the other one to hear of it")
        assert finish(it.nodes[:1]) == [0], it.logs()
        assert it.nodes[1].wait() == 0, it.logs()
        assert it.nodes[1].report(0)["culprit"]["message"] == "ValueError: alone"


def test_too_few_healthy_nodes_restart_everybody_and_it_counts_once(tmp_path: Path) -> None:
    with training(tmp_path, 3, "2:3", "--max-restarts=3", POLICY) as it:
        it.nodes[2].order("raise first")
        wait_for(lambda: "so the others go on" in it.nodes[2].log(), "the failed node to say that it waits")
        it.nodes[1].order("raise second")
        for node in it.nodes:
            node.await_steps(1)
        assert "(1 of 3 restarts used)" in it.nodes[0].report(0)["action_detail"]
        assert finish(it.nodes) == [0, 0, 0], it.logs()


@pytest.mark.long
def test_lost_node_is_taken_note_of_and_the_others_go_on(tmp_path: Path) -> None:
    with training(tmp_path, 3, "2:3", "--max-restarts=3", POLICY, "--ft-node-silence-timeout=3") as it:
        os.kill(it.nodes[2].pid, signal.SIGKILL)
        wait_for(lambda: any("they go on" in node.log() for node in it.nodes[:2]), "somebody to notice")
        for node in it.nodes[:2]:
            node.await_steps(0, len(node.steps(0)) + 20)
        assert finish(it.nodes[:2]) == [0, 0], it.logs()


@pytest.mark.long
def test_hardware_code_makes_its_node_leave_without_disturbing_the_others(tmp_path: Path) -> None:
    with training(tmp_path, 3, "2:3", "--max-restarts=3", POLICY) as it:
        it.nodes[2].order("exit 202")
        assert it.nodes[2].wait() == 202, it.logs()
        for node in it.nodes[:2]:
            node.await_steps(0, len(node.steps(0)) + 20)
        assert finish(it.nodes[:2]) == [0, 0], it.logs()


@pytest.mark.long
@pytest.mark.parametrize("leaver", [0, pytest.param(1, marks=pytest.mark.rare)])
def test_stop_is_agreed_on_by_those_that_are_left(tmp_path: Path, leaver: int) -> None:
    with training(tmp_path, 2, "1:2", POLICY) as it:
        gone, stays = it.nodes[leaver], it.nodes[1 - leaver]
        gone.order("exit 201")
        wait_for(lambda: "they go on" in stays.log(), "the other one to know")
        os.kill(stays.pid, signal.SIGTERM)
        assert stays.wait() == 79, it.logs()
        assert gone.wait() == 201, it.logs()  # the one that holds the store stays for the others
        assert "all ranks stop together" in stays.log()
        assert not (stays.run_dir / "cycles").exists(), "nobody had to be ended"


@pytest.mark.long
def test_old_failure_of_a_parked_node_does_not_hide_a_broken_device(tmp_path: Path) -> None:
    with training(tmp_path, 2, "1:2", "--max-restarts=3", POLICY) as it:
        it.nodes[0].order("raise long ago")
        wait_for(lambda: "so the others go on" in it.nodes[0].log(), "the failed node to say that it waits")
        it.nodes[1].order("exit 201")
        assert it.nodes[1].wait() == 201, it.logs()
        assert it.nodes[1].report(0)["culprit"]["exit_code"] == 201
        it.nodes[0].await_steps(1)
        assert finish(it.nodes[:1]) == [0], it.logs()
