"""The example under the launcher: a rank is killed, one hangs, the job is preempted; it ends as if nothing had happened."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import WORKLOADS, Job, job, wait_for

pytestmark = pytest.mark.spawns
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "lightning_train.py")
TWO = ["--nproc-per-node=2", "--max-restarts=3"]


def logged(folder: Path) -> dict[tuple[str, str], str]:
    """Everything that was logged in all lives of a job, by step and name. What was logged twice must be the same."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted(
        folder.glob("logs/lightning_logs/version_*/metrics.csv"), key=lambda path: int(path.parent.name[8:])
    ):
        with path.open() as file:
            for row in csv.DictReader(file):
                if "step" not in row:  # the file is being written anew
                    break
                for name, value in row.items():
                    if value:
                        assert found.setdefault((row["step"], name), value) == value, f"step {row['step']}: {name}"
    return found


def final(folder: Path) -> dict[str, Any]:
    weights: dict[str, Any] = torch.load(folder / "final.pt", weights_only=True)
    return weights


def assert_same(folder: Path, other: Path) -> None:
    ours, theirs = final(folder), final(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert logged(folder) == logged(other)


def run(folder: Path, options: list[str], env: dict[str, str] | None = None) -> Any:
    return job(folder / "job", options, [EXAMPLE, str(folder)], env)


def goes_on(it: Job) -> list[tuple[int, str]]:
    return [(int(step), where) for step, where in re.findall(r"the job goes on from step (\d+) \((\w+)", it.log())]


@pytest.mark.long
def test_a_kill_a_hang_and_a_preemption_in_the_middle_of_an_epoch_change_nothing(tmp_path: Path) -> None:
    straight, folder = tmp_path / "straight", tmp_path / "broken"
    with run(straight, TWO) as it:
        assert it.wait(120) == 0, it.log()
        assert "40 steps on 2 ranks" in it.log()
    faults = "kill:rank=1,step=5;hang:rank=0,step=12,cycle=1;slow:rank=0,step=16,seconds=0.5,cycle=2"
    with run(folder, [*TWO, "--ft-rank-section-timeouts=step:4"], {"RESILIENCE_SIMULATED_FAULT": faults}) as it:
        wait_for(lambda: ("16", "loss_step") in logged(folder), "step 16", 150)
        killed, hung = it.report(0)["culprit"], it.report(1)["culprit"]
        assert (killed["rank"], killed["kind"]) == (1, "signal")
        assert (hung["rank"], hung["kind"]) == (0, "hang")
        assert "in section 'step'" in hung["message"]
        os.kill(it.pid, signal.SIGTERM)
        assert it.wait() == 79, it.log()
        (first, where), (second, also) = goes_on(it)
        assert (where, also) == ("memory", "memory")
        assert 2 <= first <= 4  # ten steps in an epoch
        assert 10 <= second <= 11
        it.assert_nothing_left()
    left = max(int(step) for step, name in logged(folder) if name == "loss_step")
    assert 16 <= left < 39, "in the middle"
    with run(folder, TWO) as it:
        assert it.wait(150) == 0, it.log()
        assert goes_on(it) == [(left, "disk")]
    assert_same(folder, straight)


@pytest.mark.long
def test_under_plain_python_sigterm_stops_between_two_batches_and_the_next_process_goes_on(tmp_path: Path) -> None:
    def start(folder: Path, fault: str = "") -> subprocess.Popen[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIENCE_SIMULATED_FAULT": fault}
        command = [sys.executable, EXAMPLE, str(folder)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    straight, broken = start(tmp_path / "straight"), start(tmp_path / "broken", "slow:rank=0,step=33,seconds=0.3")
    wait_for(lambda: ("33", "loss_step") in logged(tmp_path / "broken"), "step 33", 120)
    broken.send_signal(signal.SIGTERM)
    told, _ = broken.communicate(timeout=60)
    assert broken.returncode == 79, told
    assert "Start it again to go on" in told
    again = start(tmp_path / "broken")
    for process in (straight, again):
        told, _ = process.communicate(timeout=120)
        assert process.returncode == 0, told
    assert max(int(step) for step, _ in logged(tmp_path / "broken")) == 79
    assert_same(tmp_path / "broken", tmp_path / "straight")


@pytest.mark.rare
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_ranks_that_lightning_starts_itself_have_snapshots_too(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "tmp").mkdir()  # torch leaves an error file of a spawned rank that is killed
    env = {**os.environ, "OMP_NUM_THREADS": "1", "STRATEGY": strategy, "DEVICES": "2", "TMPDIR": str(tmp_path / "tmp")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        env.pop(name, None)

    def life(fault: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(WORKLOADS / "lightning_alone.py"), str(tmp_path)]
        told = {**env, "RESILIENCE_SIMULATED_FAULT": fault}
        return subprocess.run(command, env=told, check=False, capture_output=True, text=True, timeout=150)

    first = life("slow:rank=0,step=8,seconds=0.4;kill:rank=1,step=13")  # slow, so that the disk keeps up
    assert first.returncode != 0
    second = life("")
    assert second.returncode == 0, second.stderr
    assert re.search(r"the job goes on from step (11|12) ", second.stderr), second.stderr
    assert {path.name for path in tmp_path.glob("rank-*-of-2-after-20")} == {
        "rank-0-of-2-after-20",
        "rank-1-of-2-after-20",
    }


def test_a_loader_that_hangs_is_found_outside_any_section_and_its_line_is_in_the_stack(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "lightning_loader_hangs.py"), str(tmp_path)]
    options = ["--nproc-per-node=1", "--max-restarts=1", "--ft-rank-out-of-section-timeout=4"]
    with job(tmp_path / "job", options, script) as it:
        assert it.wait(120) == 0, it.log()
        culprit = it.report(0)["culprit"]
        assert (culprit["kind"], culprit["step"]) == ("hang", 11)
        assert "outside any section" in culprit["message"]
        assert "in __getitem__" in it.log()
        assert "20 steps" in it.log()


def test_trainer_that_knows_nothing_of_the_other_ranks_is_refused_before_step_0(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "lightning_alone.py"), str(tmp_path)]
    with job(tmp_path / "job", ["--nproc-per-node=2"], script, {"STRATEGY": "auto", "DEVICES": "1"}) as it:
        assert it.wait(120) != 0
        assert "the job has 2 ranks and this trainer 1" in it.report(0)["culprit"]["message"]
    assert not list(tmp_path.glob("rank-*"))
