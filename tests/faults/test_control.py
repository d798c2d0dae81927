"""Workload control: requests are acted on at once, with the same result on every node."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.test_strategies import finish, training
from tests.jobs import wait_for

pytestmark = pytest.mark.spawns


def test_shutdown_ends_every_node_at_once_with_the_same_code(tmp_path: Path) -> None:
    with training(tmp_path, 3, "3", "--max-restarts=3") as it:
        it.nodes[1].order("control ShutdownWorkload")
        assert [node.wait() for node in it.nodes] == [78, 78, 78], it.logs()
        for node in it.nodes:
            report = node.report(0)
            assert (report["action"], report["culprit"]["kind"]) == ("shutdown", "request")
            assert "told by the test" in report["action_detail"]
            node.assert_nothing_left()


@pytest.mark.long
def test_shutdown_on_a_single_node(tmp_path: Path) -> None:
    with training(tmp_path, 1, "1", "--max-restarts=3") as it:
        it.nodes[0].order("control ShutdownWorkload")
        assert it.nodes[0].wait() == 78, it.logs()


@pytest.mark.long
def test_continue_is_logged_and_changes_nothing(tmp_path: Path) -> None:
    with training(tmp_path, 2, "2", "--max-restarts=3") as it:
        it.nodes[1].order("control Continue")
        wait_for(lambda: "asks for Continue" in it.nodes[1].log(), "the line in the log")
        before = len(it.nodes[0].steps(0))
        it.nodes[0].await_steps(0, before + 10)
        assert finish(it.nodes) == [0, 0], it.logs()
        assert not (it.nodes[0].run_dir / "cycles").exists()


@pytest.mark.long
def test_excluded_node_leaves_at_once_and_may_not_come_back_not_even_after_restarts(tmp_path: Path) -> None:
    with training(tmp_path, 3, "2:3", "--max-restarts=3") as it:
        it.nodes[2].order("control ExcludeThisNode")
        assert it.nodes[2].wait() == 76, it.logs()
        for node in it.nodes[:2]:
            node.await_steps(1)
        assert it.nodes[0].report(0)["action"] == "node"
        it.nodes[1].order("raise something else")
        for node in it.nodes[:2]:
            node.await_steps(2)
        assert "(1 of 3 restarts used)" in it.nodes[0].report(1)["action_detail"], "the exclusion was not counted"
        again = it.add("--ft-node-name=n2")
        assert again.wait() == 76, it.logs()
        assert "n2 is excluded from the job" in again.log()
        assert finish(it.nodes[:2]) == [0, 0], it.logs()


@pytest.mark.long
def test_excluded_node_is_replaced_by_a_spare(tmp_path: Path) -> None:
    with training(tmp_path, 3, "2", "--max-restarts=3") as it:
        it.nodes[1].order("control ExcludeThisNode")
        assert it.nodes[1].wait() == 76, it.logs()
        for node in (it.nodes[0], it.nodes[2]):
            node.await_steps(1)
        assert finish([it.nodes[0], it.nodes[2]]) == [0, 0], it.logs()


@pytest.mark.long
def test_both_nodes_ask_to_be_excluded_and_both_are(tmp_path: Path) -> None:
    with training(tmp_path, 2, "1:2", "--max-restarts=3") as it:
        for node in it.nodes:
            node.order("control ExcludeThisNode")
        assert it.nodes[1].wait() == 76, it.logs()
        assert it.nodes[0].wait() == 76, it.logs()


@pytest.mark.long
def test_shutdown_is_stronger_than_exclusion_and_its_report_blames_nobody_else(tmp_path: Path) -> None:
    with training(tmp_path, 1, "1", "--nproc-per-node=2", "--ft-testimony-timeout=2") as it:
        node = it.nodes[0]
        for rank, action in enumerate(["ExcludeThisNode", "ShutdownWorkload"]):
            node.order(f"control {action}", rank)
        code = node.wait()
        report = node.report(0)
        # The first may be acted on already.
        assert (code, report["action"]) in ((78, "shutdown"), (76, "node")), it.logs()
        assert report["victims"] == []


def test_shutdown_goes_before_a_stop_that_is_under_way(tmp_path: Path) -> None:
    with training(tmp_path, 1, "1", "--nproc-per-node=2", "--ft-stop-grace=60") as it:
        node = it.nodes[0]
        # So that the stop stays under way, and rank 1 does not leave alone.
        for rank, what in enumerate(("hang", "deaf")):
            node.order(what, rank)
            node.await_note(rank, f"obeys-{what}")
        os.kill(node.pid, signal.SIGTERM)
        wait_for(lambda: "a stop is asked for" in node.log(), "the stop")
        node.order("control ShutdownWorkload", 1)
        assert node.wait() == 78, it.logs()
        assert node.report(0)["culprit"]["kind"] == "request"


def test_exclusion_during_a_stop_lets_all_ranks_leave_together_and_the_node_ends_as_excluded(tmp_path: Path) -> None:
    with training(tmp_path, 1, "1", "--nproc-per-node=2") as it:
        node = it.nodes[0]
        os.kill(node.pid, signal.SIGTERM)
        wait_for(lambda: "a stop is asked for" in node.log(), "the stop")
        node.order("control ExcludeThisNode", 1)
        assert node.wait() in (76, 79), it.logs()  # 79: it had left before it could ask
        stopped = [note[1] for rank in range(2) for note in node.notes(rank) if note[1].startswith("stopped")]
        assert len(stopped) == 2, it.logs()
        assert not (node.run_dir / "cycles").exists()


def test_long_description_is_cut_and_the_request_done(tmp_path: Path) -> None:
    with training(tmp_path, 1, "1") as it:
        it.nodes[0].order("long-request 300000")
        assert it.nodes[0].wait() == 78, it.logs()
