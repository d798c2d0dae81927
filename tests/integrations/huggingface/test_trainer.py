"""A Hugging Face Trainer under the launcher: killed, it goes on from its own checkpoint; preempted, all ranks stop together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.jobs import job, wait_for

pytestmark = [pytest.mark.spawns, pytest.mark.long]
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "huggingface_train.py")
TWO = ["--nproc-per-node=2", "--max-restarts=2"]


def final(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / "final.pt", weights_only=True)
    return weights


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


def test_killed_and_preempted_it_goes_on_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    mark = {"FAULT_TOL_FINISHED_FLAG_FILE": str(tmp_path / "finished")}
    with job(tmp_path / "a", TWO, [EXAMPLE, str(tmp_path / "straight")]) as it:
        assert it.wait(120) == 0, it.log()
        assert "60 steps on 2 ranks" in it.log()
    out = tmp_path / "broken"
    faults = "kill:rank=1,step=12;slow:rank=0,step=22,seconds=0.4,cycle=1"
    with job(tmp_path / "b", TWO, [EXAMPLE, str(out)], {**mark, "RESILIENCE_SIMULATED_FAULT": faults}) as it:
        wait_for(lambda: 20 in steps_saved(out), "step 20", 120)
        killed = it.report(0)["culprit"]
        assert (killed["rank"], killed["kind"], killed["step"]) == (1, "signal", 11)
        assert [item["name"] for item in killed["sections"]] == ["step"]
        wait_for((out / "checkpoint-20" / "trainer_state.json").exists, "step 20 as a whole")
        os.kill(it.pid, signal.SIGTERM)
        assert it.wait() == 79, it.log()
    assert max(steps_saved(out)) >= 20
    assert not (tmp_path / "finished").exists()
    with job(tmp_path / "c", TWO, [EXAMPLE, str(out)], mark) as it:
        assert it.wait(120) == 0, it.log()
    assert (tmp_path / "finished").exists()
    straight, broken = final(tmp_path / "straight"), final(out)
    assert all(torch.equal(tensor, broken[name]) for name, tensor in straight.items())
