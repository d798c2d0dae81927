"""A script and a configuration as users of ft_launcher bring them along, in a real job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs import WORKLOADS, job

pytestmark = pytest.mark.spawns

CONFIG = """
training:
  seed: 1
  fault_tolerance:
    workload_check_interval: 1.0
    initial_rank_heartbeat_timeout: 60
    rank_heartbeat_timeout: null
    rank_section_timeouts: {setup: 60, epoch: 45}
    safety_factor: 4
    restart_check_interval: 60.0
"""


def test_a_script_for_ft_launcher_calculates_saves_hangs_and_is_restarted(tmp_path: Path) -> None:
    (tmp_path / "ft.yaml").write_text(CONFIG)
    options = ["--nproc-per-node=2", "--max-restarts=2", f"--ft-cfg-path={tmp_path / 'ft.yaml'}"]
    options.append("--ft-learned-timeout-floor=6")
    with job(tmp_path, options, [str(WORKLOADS / "nvrx_style.py")]) as it:
        assert it.wait() == 0, it.log()
        culprit = it.report(0)["culprit"]
        assert (culprit["rank"], culprit["kind"]) == (1, "hang")
        assert "in section 'epoch'" in culprit["message"]
        assert "calculated" in culprit["message"]
        assert "restart_check_interval" in it.log()
        for rank in range(2):
            (line,) = [note for note in it.notes(rank) if note[0] == "1"]
            # Far below the floor by themselves: a calculated timeout of milliseconds would end every later cycle.
            assert all(6.0 <= seconds < 45 for seconds in json.loads(line[1])), line
            state = json.loads((it.progress / f"state_{rank}.json").read_text())
            assert state["learned"]["section:step"][0] >= 16
        it.assert_nothing_left()
