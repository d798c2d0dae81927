"""A script of NVRx's users under our launcher: timeouts are calculated and kept, and its policy ends the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs import WORKLOADS, job

pytestmark = [pytest.mark.spawns, pytest.mark.long]
TWO = ["--nproc-per-node=2", "--max-restarts=3"]


def test_script_of_nvrx_keeps_its_timeouts_and_its_policy_ends_the_job(tmp_path: Path) -> None:
    script, mark = str(WORKLOADS / "lightning_nvrx.py"), tmp_path / "finished"
    env = {"FAULT_TOL_FINISHED_FLAG_FILE": str(mark)}
    with job(tmp_path / "a", TWO, [script, str(tmp_path)], env) as it:
        assert it.wait(120) == 0, it.log()
    assert mark.exists()
    state = json.loads((tmp_path / "ft" / "_ft_state_.json").read_text())
    assert state["learned"], "what was seen is kept for the next job"
    assert any("step" in name for name in state["calculated"])
    mark.unlink()
    with job(tmp_path / "b", TWO, [script, str(tmp_path), "20"], env) as it:
        assert it.wait(120) == 78, it.log()
        assert it.report(0)["culprit"]["rank"] == 1
        assert "because of a bad batch" in it.log()
        assert "restarted" not in it.log()
        it.assert_nothing_left()
    assert mark.exists(), "no other job is to follow"
