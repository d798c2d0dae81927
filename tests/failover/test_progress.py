"""How far a node has come, for whoever starts the job again after its launcher was killed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from resilience.failover import progress
from resilience.failover.progress import Keeper
from tests.jobs import job, train, wait_for


def test_highest_step_of_all_nodes_is_read(tmp_path: Path) -> None:
    assert progress.read(tmp_path) == -1
    for node, step in (("n1", 7), ("n2", 40), ("n3", 12)):
        progress.write(tmp_path / "progress" / node, step)
    assert progress.read(tmp_path) == 40


def test_odd_files_are_no_progress(tmp_path: Path) -> None:
    progress.write(tmp_path / "progress" / "n1", 3)
    for number, text in enumerate(("", "-4", "9" * 400, "٣", "\udc80x", "1e9")):
        (tmp_path / "progress" / f"odd{number}").write_bytes(f"{text}\n{text}".encode("utf-8", "surrogateescape"))
    (tmp_path / "progress" / "folder").mkdir()
    assert progress.read(tmp_path) == 3
    assert progress.begun(tmp_path) == -1


def test_cycle_that_left_logs_or_a_report_has_begun(tmp_path: Path) -> None:
    assert progress.begun(tmp_path) == -1
    for folder in ("logs/cycle_2", "logs/cycle_x", "cycles"):
        (tmp_path / folder).mkdir(parents=True)
    assert progress.begun(tmp_path) == 2
    (tmp_path / "cycles" / "3.json").touch()
    (tmp_path / "cycles" / ".9.12.partial").touch()
    assert progress.begun(tmp_path) == 3
    progress.write(tmp_path / "progress" / "n1", step=70, cycle=5)
    assert progress.begun(tmp_path) == 5


def test_shorter_number_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    progress.write(tmp_path / "progress" / "n1", 1000)
    progress.write(tmp_path / "progress" / "n1", 7)
    assert progress.read(tmp_path) == 7


def test_step_is_there_while_the_launcher_runs_and_falls_back_with_no_restart(tmp_path: Path) -> None:
    steps: list[int | None] = [None]
    keeper = Keeper(tmp_path, "rack/n1", lambda: steps[0])
    try:
        steps[0] = 40
        wait_for(lambda: progress.read(tmp_path) == 40, "the step")
        steps[0] = 12
    finally:
        keeper.close()
    assert progress.read(tmp_path) == 40


def test_cycle_is_there_before_its_first_step(tmp_path: Path) -> None:
    now: tuple[int | None, int] = (None, -1)
    keeper = Keeper(tmp_path, "n1", lambda: now[0], lambda: now[1])
    try:
        now = (None, 0)
        wait_for(lambda: progress.begun(tmp_path) == 0, "the cycle")
        assert progress.read(tmp_path) == -1
        now = (40, 0)
        wait_for(lambda: progress.read(tmp_path) == 40, "the step")
        now = (12, 1)
        wait_for(lambda: progress.begun(tmp_path) == 1, "the next cycle")
    finally:
        keeper.close()
    assert progress.read(tmp_path) == 40


def test_disk_that_refuses_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "progress").write_text("no folder")
    asked = threading.Event()
    keeper = Keeper(tmp_path, "n1", lambda: asked.set() or 3)  # type: ignore[func-returns-value]
    assert asked.wait(30)
    keeper.close()
    assert not keeper._thread.is_alive()


@pytest.mark.spawns
def test_killed_launcher_leaves_how_far_it_came(tmp_path: Path) -> None:
    with job(tmp_path, ["--nproc-per-node=1"], train(100000)) as it:
        wait_for(lambda: progress.read(it.run_dir) >= 10, lambda: f"ten steps\n{it.log()}")
        os.kill(it.pid, signal.SIGKILL)
        it.wait()
        assert progress.read(it.run_dir) >= 10
        assert not (it.run_dir / "cycles").exists()


@pytest.mark.spawns
@pytest.mark.long
def test_cycles_are_told_of_though_torch_keeps_the_logs(tmp_path: Path) -> None:
    flags = ["--nproc-per-node=1", "--max-restarts=1", f"--log-dir={tmp_path / 'logs'}", "--redirects=3"]
    with job(tmp_path, flags, train(100000)) as it:
        wait_for(lambda: progress.begun(it.run_dir) == 0, lambda: f"the first cycle\n{it.log()}")
        it.await_steps(0)
        os.kill(int(it.notes(0)[-1][3]), signal.SIGKILL)
        wait_for(lambda: progress.begun(it.run_dir) == 1, lambda: f"the next cycle\n{it.log()}")
        assert not (it.run_dir / "logs").exists()
