"""Snapshots outlive whoever is killed; training that goes on from one ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilience.checkpoint.stores.local import Directory
from tests.jobs import WORKLOADS, Job, alive, children, command_line, job, wait_for

pytestmark = pytest.mark.spawns
TWO = ["--nproc-per-node=2", "--max-restarts=2"]
SNAPSHOTS = str(WORKLOADS / "snapshots.py")


def savers_of(it: Job) -> list[int]:
    return [pid for pid in it.family() if "checkpoint/saver" in command_line(pid)]


def saver_of(it: Job) -> int:
    found: list[int] = wait_for(lambda: savers_of(it), "the saver")
    return found[0]


def environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def finals(it: Job) -> list[str]:
    return [(it.progress / f"final_{rank}").read_text() for rank in range(2)]


def steps_on_disk(folder: Path) -> list[int]:
    return [item.manifest.step for item in Directory(folder).stored()]


def restored(it: Job, rank: int = 0) -> list[str]:
    return [note[1] for note in it.notes(rank) if note[1].startswith(("restored", "fresh", "BAD"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """How the DDP training ends when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with job(folder, TWO, [str(WORKLOADS / "ddp_flash.py"), str(folder / "ck"), "24"]) as it:
        assert it.wait() == 0, it.log()
        return finals(it)


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        ("kill", "blocking"),
        pytest.param("kill", "overlap", marks=pytest.mark.long),
        pytest.param("raise", "blocking", marks=pytest.mark.rare),
    ],
)
def test_ddp_training_with_a_fault_ends_bit_for_bit_like_one_without(
    tmp_path: Path, undisturbed: list[str], fault: str, mode: str
) -> None:
    script = [str(WORKLOADS / "ddp_flash.py"), str(tmp_path / "ck"), "24", fault, "1", "13"]
    with job(tmp_path, TWO, script, {"MODE": mode}) as it:
        assert it.wait() == 0, it.log()
        assert "the job goes on from step 13 (memory)" in it.log()
        assert (it.progress / "starts_0").read_text().split() == ["0", "14"]
        assert finals(it) == undisturbed
        it.assert_nothing_left()


@pytest.mark.long
def test_ddp_training_goes_on_from_disk_in_a_new_job_bit_for_bit(tmp_path: Path, undisturbed: list[str]) -> None:
    script = str(WORKLOADS / "ddp_flash.py")
    with job(tmp_path / "a", TWO, [script, str(tmp_path / "ck"), "11"]) as it:
        assert it.wait() == 0, it.log()
    assert steps_on_disk(tmp_path / "ck") == [10]
    with job(tmp_path / "b", TWO, [script, str(tmp_path / "ck"), "24"]) as it:
        assert it.wait() == 0, it.log()
        assert (it.progress / "starts_1").read_text().split() == ["11"]
        assert finals(it) == undisturbed


@pytest.mark.long
def test_plain_torchrun_gives_the_same_and_leaves_no_saver(tmp_path: Path, undisturbed: list[str]) -> None:
    progress = tmp_path / "progress"
    progress.mkdir()
    environment = {**os.environ, "PROGRESS": str(progress), "OMP_NUM_THREADS": "1"}
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it torchrun's restarts fail on stale keys
    script = [str(WORKLOADS / "ddp_flash.py"), str(tmp_path / "ck"), "24", "kill", "1", "13"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    command += [f"--log-dir={tmp_path / 'logs'}", *script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [(progress / f"final_{rank}").read_text() for rank in range(2)] == undisturbed
    assert (progress / "starts_0").read_text().split() == ["0", "14"]

    def savers() -> list[int]:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        mark = f"PROGRESS={progress}".encode()
        return [pid for pid in pids if alive(pid) and mark in environment_of(pid)]

    wait_for(lambda: not savers(), "the saver to end", 60)


def test_snapshot_survives_rank_and_saver_killed_together(tmp_path: Path) -> None:
    script = [SNAPSHOTS, str(tmp_path / "ck"), "500", "64"]
    with job(tmp_path, TWO, script, {"DISK_EVERY": "1000"}) as it:
        it.await_step(0, "complete", 10)
        saver = saver_of(it)
        rank = next(pid for pid in children(it.pid) if "snapshots.py" in command_line(pid))
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (saver, rank):
                os.kill(pid, number)
        assert it.wait() == 0, it.log()
        assert "a new one was started and goes on with what is in memory" in it.log()
        assert "(memory)" in it.log()
        (first, second) = restored(it)
        assert (first, second[:9]) == ("fresh", "restored-")
        assert int(second[9:]) >= 10
        it.assert_nothing_left()


def test_saver_alone_makes_durable_what_was_complete_when_the_launcher_is_killed(tmp_path: Path) -> None:
    script = [SNAPSHOTS, str(tmp_path / "ck"), "100000", "64"]
    with job(tmp_path, TWO, script, {"DISK_EVERY": "1000000"}) as it:
        it.await_step(0, "complete", 10)
        os.kill(it.pid, signal.SIGKILL)
        wait_for(lambda: not it.family(), "everybody to end, the saver last", 60)
        step = steps_on_disk(tmp_path / "ck")[0]  # there may be two: the ranks do not die at the same moment
        acknowledged = [int(note[1][9:]) for rank in range(2) for note in it.notes(rank) if "complete-" in note[1]]
        assert step >= max(acknowledged)


@pytest.mark.long
def test_saver_that_has_hardly_begun_has_the_memory_when_the_launcher_is_killed_too(tmp_path: Path) -> None:
    script = [SNAPSHOTS, str(tmp_path / "ck"), "100000", "64"]
    with job(tmp_path, TWO, script, {"DISK_EVERY": "1000000"}) as it:
        it.await_step(0, "complete", 10)
        first = saver_of(it)
        os.kill(first, signal.SIGKILL)
        second = wait_for(lambda: next((pid for pid in savers_of(it) if pid != first), None), "another saver")
        os.kill(second, signal.SIGSTOP)  # as on a busy host: it imports, and has read nothing yet
        os.kill(it.pid, signal.SIGKILL)
        wait_for(lambda: it.family() == [second], "all others to be gone", 60)
        os.kill(second, signal.SIGCONT)
        wait_for(lambda: not it.family(), "everybody to end, the saver last", 60)
        acknowledged = [int(note[1][9:]) for rank in range(2) for note in it.notes(rank) if "complete-" in note[1]]
        assert steps_on_disk(tmp_path / "ck")[0] >= max(acknowledged)


@pytest.mark.long
def test_checkpoint_that_two_restarts_failed_from_is_set_aside(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "poisoned.py"), str(tmp_path / "ck")]
    options = ["--nproc-per-node=1", "--max-restarts=9"]
    with job(tmp_path, options, script) as it:
        assert it.wait() == 0, it.log()
        starts = [int(line) for line in (it.progress / "starts").read_text().split()]
        assert starts == [0, 6, 6, 5], "from step 5 twice, then from the one before it"
        assert "step 5 is set aside" in it.log()


@pytest.mark.long
def test_second_job_in_one_directory_is_refused_and_says_who_has_it(tmp_path: Path) -> None:
    script = [SNAPSHOTS, str(tmp_path / "ck"), "100000"]
    with job(tmp_path / "a", ["--nproc-per-node=1"], script) as first:
        first.await_step(0, "complete", 3)
        with job(tmp_path / "b", ["--nproc-per-node=1"], script) as second:
            assert second.wait() == 1
            assert "another job writes its checkpoints here" in second.report(0)["culprit"]["message"]
        first.await_steps(0, len(first.steps(0)) + 5)


def test_rank_that_took_leave_without_saving_is_not_waited_for(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "one_saves.py"), str(tmp_path / "ck"), "0"]
    with job(tmp_path, TWO, script) as it:
        assert it.wait() == 0, it.log()
        assert "left with <save of step 3: FAILED, another rank did not save this step>" in it.log()
        assert steps_on_disk(tmp_path / "ck") == []


@pytest.mark.rare
def test_rank_that_does_not_save_is_named(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "one_saves.py"), str(tmp_path / "ck"), "45"]
    with job(tmp_path, TWO, script) as it:
        wait_for(lambda: "rank 1 does not save what other ranks have" in it.log(), "the saver to name it")
        assert it.wait() == 0, it.log()
