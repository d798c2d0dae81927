"""Losing the launcher that hosts the store, and the store that avoids it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.test_strategies import SCRIPT, finish, training
from tests.jobs import DEADLINE_S, Fleet, alive, stopped, wait_for

pytestmark = pytest.mark.spawns


@contextmanager
def serving() -> Iterator[int]:
    """``resilience store`` on a free port."""
    command = [sys.executable, "-m", "resilience", "store", "--host=127.0.0.1", "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "--rdzv-conf=is_host=false" in line
        yield int(line.split("serving 127.0.0.1:")[1].split(".")[0])
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_killing_the_launcher_that_hosts_the_store_ends_the_others_with_the_code_to_try_again(tmp_path: Path) -> None:
    with training(tmp_path, 2, "1:2", "--max-restarts=3", "--ft-store-silence-timeout=4") as it:
        os.kill(it.nodes[0].pid, signal.SIGKILL)
        assert it.nodes[1].wait() == 75, it.logs()
        assert it.nodes[1].report(0)["culprit"]["kind"] == "node"
        for node in it.nodes:
            node.assert_nothing_left()


@pytest.mark.long
def test_preempted_job_goes_on_in_the_same_store_with_the_same_id(tmp_path: Path) -> None:
    with serving() as port:
        for run in range(2):
            with Fleet(tmp_path / str(run), "2", [], SCRIPT, port=port) as it:
                for _ in range(2):
                    it.add()
                for node in it.nodes:
                    node.await_steps(0)
                os.kill(it.nodes[run].pid, signal.SIGTERM)
                assert [node.wait() for node in it.nodes] == [79, 79], it.logs()
                assert "exit code 79: asked to stop" in it.nodes[0].log()


def test_with_a_store_of_its_own_the_job_survives_the_loss_of_any_launcher(tmp_path: Path) -> None:
    options = ["--max-restarts=9", "--ft-testimony-timeout=2", "--ft-node-silence-timeout=4"]
    with serving() as port, Fleet(tmp_path, "2", options, SCRIPT, port=port) as it:
        for _ in range(2):
            it.add()
        for node in it.nodes:
            node.await_steps(0)
        for cycle in (1, 2):
            os.kill(it.nodes[0 if cycle == 1 else 2].pid, signal.SIGKILL)
            newcomer = it.add()
            for node in (it.nodes[1], newcomer):
                node.await_steps(cycle)
        assert finish([it.nodes[1], it.nodes[3]]) == [0, 0], it.logs()


def test_lone_node_that_stood_still_until_a_spare_took_its_place_trains_no_more(tmp_path: Path) -> None:
    options = ["--ft-node-silence-timeout=2", "--ft-use-infra-group-rank=false"]
    with serving() as port, Fleet(tmp_path, "1", options, SCRIPT, port=port) as it:
        first = it.add()
        first.await_steps(0)
        spare = it.add()
        with stopped(first.pid):
            spare.await_steps(0)
        wait_for(lambda: "was taken out of the job while it was silent" in first.log(), "it to notice")
        wait_for(lambda: "is a spare" in first.log(), "it to wait for a place")
        rank = int(first.notes(0)[0][3])
        assert not alive(rank), "two of one rank would write the same checkpoints"
        assert finish([spare, first]) == [0, 0], it.logs()


@pytest.mark.long
def test_a_store_of_its_own_that_is_killed_ends_all_nodes_with_the_code_to_try_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "resilience", "store", "--host=127.0.0.1", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().split("serving 127.0.0.1:")[1].split(".")[0])
        with Fleet(tmp_path, "2", ["--ft-store-silence-timeout=4"], SCRIPT, port=port) as it:
            for _ in range(2):
                it.add()
            for node in it.nodes:
                node.await_steps(0)
            process.kill()
            assert [node.wait() for node in it.nodes] == [75, 75], it.logs()
            assert "Traceback" not in it.logs()
            for node in it.nodes:
                assert node.report(0)["culprit"]["kind"] == "node"
                node.assert_nothing_left()
