"""SIGTERM and SIGUSR1 become an agreed stop: all ranks of all nodes leave at the same step, with a code to requeue on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.test_strategies import training
from tests.jobs import WORKLOADS, Fleet, Job, job, wait_for
from tests.ports import free_port

pytestmark = pytest.mark.spawns


def stopped_at(node: Job) -> list[str]:
    return [note[1] for rank in range(8) for note in node.notes(rank) if note[1].startswith("stopped")]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.rare)])
def test_signal_to_one_launcher_stops_all_ranks_of_all_nodes_together(tmp_path: Path, number: signal.Signals) -> None:
    with training(tmp_path, 2, "2", "--max-restarts=3", "--nproc-per-node=2") as it:
        os.kill(it.nodes[1].pid, number)
        assert [node.wait() for node in it.nodes] == [79, 79], it.logs()
        places = [place for node in it.nodes for place in stopped_at(node)]
        assert len(places) == 4, it.logs()
        assert number.name in it.nodes[0].log()
        for node in it.nodes:
            assert not (node.run_dir / "cycles").exists()
            node.assert_nothing_left()


@pytest.mark.parametrize("dt", ["0.001", pytest.param("0.3", marks=pytest.mark.rare)])
def test_all_ranks_stop_at_the_same_step_however_fast_they_are(tmp_path: Path, dt: str) -> None:
    script = [str(WORKLOADS / "lockstep.py"), "100000"]
    with job(tmp_path, ["--nproc-per-node=3"], script, {"DT": dt}) as it:
        it.await_steps(0, 6)
        os.kill(it.pid, signal.SIGTERM)
        assert it.wait() == 79, it.log()
        places = stopped_at(it)
        assert len(places) == 3
        assert len(set(places)) == 1, places


@pytest.mark.long
def test_job_that_goes_on_counts_its_cycles_on_and_overwrites_no_log(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "lockstep.py"), "100000"]
    meeting = ["--rdzv-backend=c10d", "--rdzv-id=again", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    for killed, goes_on in ((0, 1), (2, 3)):
        with job(tmp_path, ["--max-restarts=1", *meeting], script) as it:
            it.await_steps(killed)
            os.kill(int(it.notes(0)[-1][3]), signal.SIGKILL)
            it.await_steps(goes_on)
            os.kill(it.pid, signal.SIGTERM)
            assert it.wait() == 79, it.log()
            logs = sorted(path.name for path in (it.run_dir / "logs").iterdir())
            assert logs == [f"cycle_{cycle}" for cycle in range(goes_on + 1)]
            assert (it.run_dir / "cycles" / f"{killed}.json").exists()


def test_signal_to_a_rank_stops_all_and_the_handler_that_was_there_is_called(tmp_path: Path) -> None:
    with job(tmp_path, ["--nproc-per-node=2"], [str(WORKLOADS / "lockstep.py"), "100000"]) as it:
        it.await_steps(0, 6)
        os.kill(int(it.notes(1)[-1][3]), signal.SIGUSR1)
        assert it.wait() == 79, it.log()
        assert len(set(stopped_at(it))) == 1
        assert [note[1] for note in it.notes(1)].count("user-handler") == 1


def test_ranks_that_do_not_leave_in_time_are_ended(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "lockstep.py"), "100000"]
    with job(tmp_path, ["--nproc-per-node=2", "--ft-stop-grace=3"], script, {"STAY": "1"}) as it:
        it.await_steps(0, 6)
        os.kill(it.pid, signal.SIGTERM)
        assert it.wait() == 79, it.log()
        assert it.report(0)["action"] == "preempted"
        it.assert_nothing_left()


@pytest.mark.long
def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "lockstep.py"), "100000"]
    with job(tmp_path, ["--nproc-per-node=2", "--ft-stop-grace=600"], script, {"STAY": "1"}) as it:
        it.await_steps(0, 6)
        os.kill(it.pid, signal.SIGTERM)
        it.await_note(0, "stopped")
        os.kill(it.pid, signal.SIGTERM)
        assert it.wait() == 79, it.log()
        it.assert_nothing_left()


def test_restart_after_a_failure_is_not_slowed_down_by_the_ranks_own_handlers(tmp_path: Path) -> None:
    """The launcher ends the other ranks with SIGTERM: that is no request to stop, and must not wait for SIGKILL."""
    with job(tmp_path, ["--nproc-per-node=2", "--max-restarts=1", "--shutdown-timeout=600"], fleet_script()) as it:
        it.await_steps(0)
        it.order("raise x", 1)
        it.await_steps(1)
        (it.progress / "finish").touch()
        assert it.wait() == 0, it.log()


def fleet_script() -> list[str]:
    return [str(WORKLOADS / "fleet.py"), "100000"]


def test_failure_while_stopping_restarts_nothing(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "lockstep.py"), "100000"]
    with job(tmp_path, ["--nproc-per-node=2", "--max-restarts=3"], script, {"STAY": "raise"}) as it:
        it.await_steps(0, 6)
        os.kill(it.pid, signal.SIGTERM)
        assert it.wait() == 79, it.log()
        assert it.report(0)["culprit"]["message"] == "ValueError: could not save"
        assert not (it.run_dir / "logs" / "cycle_1").exists()


def test_launcher_that_is_lost_while_all_leave_is_named_and_not_a_rank_that_has_left(tmp_path: Path) -> None:
    with training(tmp_path, 2, "2", "--ft-stop-grace=5", "--ft-rank-term-timeout=2") as it:
        left, lost = it.nodes
        lost.order("deaf")
        wait_for(lambda: any(note[1] == "obeys-deaf" for rank in range(2) for note in lost.notes(rank)), "it to obey")
        os.kill(left.pid, signal.SIGTERM)
        wait_for(lambda: stopped_at(left), lambda: f"the other one to leave\n{it.logs()}")
        os.kill(lost.pid, signal.SIGKILL)
        assert left.wait() == 79, it.logs()
        culprit = left.report(0)["culprit"]
        assert (culprit["kind"], culprit["node"]) == ("node", 1), culprit
        assert "it probably died first" in culprit["message"]


def test_signal_before_the_first_call_is_a_preemption_too_and_the_next_one_is_agreed_on(tmp_path: Path) -> None:
    """Node 1 is asked while all ranks still start: it leaves. Node 0 goes on, and is asked later."""
    with Fleet(tmp_path, "1:2", ["--max-restarts=3"], fleet_script()) as it:
        it.env = {"SLEEPS_IN_CYCLE": "1"}
        it.add().await_steps(0)
        slow = it.add()
        slow.await_note(1, "world-2", cycle=1)
        it.nodes[0].await_note(0, "world-2", cycle=1)
        os.kill(slow.pid, signal.SIGTERM)
        assert slow.wait() == 79, it.logs()
        it.nodes[0].await_steps(2)
        os.kill(it.nodes[0].pid, signal.SIGTERM)
        assert it.nodes[0].wait() == 79, it.logs()
        assert stopped_at(it.nodes[0]), "it was agreed on"


@pytest.mark.long
def test_signal_while_ranks_are_ended_after_a_failure_starts_nothing_again(tmp_path: Path) -> None:
    options = ["--nproc-per-node=2", "--max-restarts=3", "--shutdown-timeout=8"]
    with job(tmp_path, options, fleet_script(), {"IGNORES_TERM": "1"}) as it:
        it.await_note(0, "step-3")
        it.await_note(1, "step-3")
        it.order("raise x", 1)
        it.report(0)
        os.kill(it.pid, signal.SIGTERM)
        assert it.wait() == 79, it.log()
        assert not (it.run_dir / "logs" / "cycle_1").exists()


@pytest.mark.long
def test_node_that_was_done_before_the_stop_ends_with_the_same_code(tmp_path: Path) -> None:
    with training(tmp_path, 2, "2") as it:
        (it.nodes[1].progress / "finish").touch()
        wait_for(lambda: "waiting for the other nodes" in it.nodes[1].log(), "node 1 to be done")
        os.kill(it.nodes[0].pid, signal.SIGTERM)
        assert [node.wait() for node in it.nodes] == [79, 79], it.logs()
