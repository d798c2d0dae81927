"""Freezes, pauses, small limits and scripts that do odd things: no false alarm, no false success, nobody deaf."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.test_nodes import SCRIPT, nodes
from tests.jobs import WORKLOADS, Job, job, train, wait_for

pytestmark = pytest.mark.spawns
ODD = str(WORKLOADS / "odd.py")
ONE = ["--nproc-per-node=1", "--max-restarts=1"]


def freeze(pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)  # the length of the pause is what is tested
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)


def quiet(it: Job) -> None:
    assert it.wait() == 0, it.log()
    assert not (it.run_dir / "cycles").exists(), it.log()
    it.assert_nothing_left()


def test_a_hung_rank_that_leaves_with_0_at_our_signal_is_no_success(tmp_path: Path) -> None:
    with job(tmp_path, [*ONE, "--ft-rank-section-timeouts=step:1.5"], [ODD, "leaves-with-0"]) as it:
        assert it.wait() == 0, it.log()
        assert it.report(0)["culprit"]["kind"] == "hang"
        it.await_note(0, "end", cycle=1)


def test_a_launcher_whose_parent_ignored_its_children_does_not_take_a_failure_for_success(tmp_path: Path) -> None:
    """The kernel forgets how a child ended whose parent ignores SIGCHLD, and whoever asks is told 0."""
    deaf = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"

    def by_a_deaf_parent(command: list[str]) -> list[str]:
        return [command[0], "-c", deaf, *command]

    with job(tmp_path, ["--nproc-per-node=1"], [str(WORKLOADS / "always_fails.py")], wrap=by_a_deaf_parent) as it:
        assert it.wait() == 1, it.log()
        assert it.report(0)["culprit"]["kind"] == "exception"
        it.assert_nothing_left()


@pytest.mark.parametrize("seconds", [6, pytest.param(18, marks=pytest.mark.rare)])
@pytest.mark.long
def test_a_job_that_is_frozen_as_a_whole_and_thawed_goes_on(tmp_path: Path, seconds: int) -> None:
    options = ["--nproc-per-node=2", "--ft-rank-section-timeouts=step:4", "--ft-rank-heartbeat-timeout=4"]
    with job(tmp_path, options, [ODD, "beat", "6"]) as it:
        it.await_note(0, "step")
        freeze(it.family(), seconds)
        quiet(it)
        assert "replaced" not in it.log()


@pytest.mark.long
def test_a_launcher_that_is_paused_longer_than_its_watchdog_waits_goes_on(tmp_path: Path) -> None:
    with job(tmp_path, [*ONE, "--ft-store-silence-timeout=3"], [ODD, "beat", "9"]) as it:
        it.await_note(0, "step")
        freeze([it.pid], 6)
        quiet(it)


@pytest.mark.long
def test_a_goodbye_that_takes_longer_than_the_watchdog_waits_is_waited_for(tmp_path: Path) -> None:
    options = ["--nproc-per-node=2", "--max-restarts=1", "--shutdown-timeout=20", "--ft-store-silence-timeout=3"]
    with job(tmp_path, options, [ODD, "slow-goodbye"]) as it:
        assert it.wait() == 0, it.log()
        assert it.report(0)["culprit"]["rank"] == 1


@pytest.mark.parametrize("what", ["exec", pytest.param("beat", marks=pytest.mark.rare)])
def test_a_script_is_watched_with_few_descriptors_and_after_it_replaced_itself(tmp_path: Path, what: str) -> None:
    def with_few(command: list[str]) -> list[str]:
        return ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *command]

    options = [*ONE, "--ft-initial-rank-heartbeat-timeout=5"]
    with job(tmp_path, options, [ODD, what, "7"], wrap=with_few) as it:
        quiet(it)


def test_training_in_another_thread_goes_on_after_the_main_one_returned(tmp_path: Path) -> None:
    with job(tmp_path, [*ONE, "--ft-rank-exit-timeout=2"], [ODD, "other-thread"]) as it:
        quiet(it)


@pytest.mark.long
def test_a_socket_that_was_cleaned_away_is_back_for_the_next_cycle(tmp_path: Path) -> None:
    options = ["--nproc-per-node=2", "--max-restarts=1", "--ft-initial-rank-heartbeat-timeout=10"]
    with job(tmp_path, options, train(400, "load:kill", 1, 150)) as it:
        it.await_note(1, "step-5")
        (sock,) = it.tmp.rglob("socket")
        sock.unlink()
        wait_for(sock.exists, "the socket to be there again")
        assert it.wait() == 0, it.log()


@pytest.mark.long
def test_when_the_store_dies_with_its_launcher_the_others_say_so_and_end_with_75(tmp_path: Path) -> None:
    options = ["--max-restarts=1", "--ft-store-silence-timeout=5"]
    with nodes(tmp_path, 2, options, [SCRIPT, "100000", "none", "0"]) as both:
        wait_for(lambda: all(any(n[1] == "step-10" for it in both for n in it.notes(r)) for r in range(2)), "ten steps")
        os.kill(both[0].pid, signal.SIGKILL)
        assert both[1].wait() == 75, both[1].log()
        assert both[1].report(0)["culprit"]["kind"] == "node"
        both[1].assert_nothing_left()
