"""The other way round: heartbeats, sections and flash checkpoints inside a function of Ray Train's."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests import jobs
from tests.jobs import WORKLOADS
from tests.real.ray_training import Site

pytestmark = pytest.mark.timeout(900)


def test_function_of_ray_train_that_fails_goes_on_from_its_flash_checkpoint(site: Site) -> None:
    site.cluster.some(3)
    script, alone, trained = str(WORKLOADS / "ray_train_loop.py"), site.folder / "alone", site.folder / "trained"
    trained.mkdir()
    command = [sys.executable, "-m", "tests.workloads.ray_train_loop", site.cluster.address, str(trained), "12", "7"]
    with jobs.job(alone, ["--nproc-per-node=2"], [script, "none", str(alone), "12", "-1"]) as undisturbed:
        done = subprocess.run(
            command, check=False, cwd=WORKLOADS.parent.parent, capture_output=True, text=True, timeout=300
        )
        assert undisturbed.wait() == 0, undisturbed.log()
    assert done.returncode == 0, done.stderr[-4000:]
    begun = [line.split() for line in (trained / "starts_1").read_text().splitlines()]
    assert [int(line[0]) for line in begun] == [0, 8]
    assert begun[0][1:] == ["1", "2"]
    assert (trained / "final").read_text() == (alone / "final").read_text()


@pytest.mark.rare
def test_page_s_block_for_ray_train_runs_as_it_is_pasted(site: Site) -> None:
    site.cluster.some(3)
    page = (WORKLOADS.parent.parent / "docs" / "ray.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(# with pip install 'ray\[train\]'.*?)```", page, re.DOTALL)
    (site.folder / "train_on_ray.py").write_text(block)
    done = subprocess.run(
        [sys.executable, "train_on_ray.py"],
        check=False,
        cwd=site.folder,
        env={**os.environ, "RAY_ADDRESS": site.cluster.address},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (site.folder / "checkpoints_ray_train").is_dir()
