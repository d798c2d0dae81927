"""The README's blocks run as pasted, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import job, wait_for

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.spawns
def test_the_loop_runs_as_pasted_with_the_command_below_it(tmp_path: Path) -> None:
    python, bash = (re.search(rf"```{kind}\n(.*?)```", README, re.DOTALL) for kind in ("python", "bash"))
    assert python
    assert bash
    (tmp_path / "train.py").write_text(python.group(1))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-ec", bash.group(1)], check=False, cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ranks 0, 1 of 2 started" in done.stderr
    assert list((tmp_path / "state" / "resilience" / "runs").iterdir())
    (tmp_path / "alone").mkdir()  # other world sizes are not supported yet
    alone = subprocess.run(
        [sys.executable, "../train.py"], check=False, cwd=tmp_path / "alone", capture_output=True, text=True
    )
    assert alone.returncode == 0, alone.stderr


@pytest.mark.spawns
def test_the_loop_loses_no_step_when_it_is_preempted(tmp_path: Path) -> None:
    python = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert python
    told = "resilience.heartbeat(step)\n            open('steps', 'a').write(f'{step}\\n')"
    script = tmp_path / "train.py"
    script.write_text(
        python[1].replace("range(start, 100)", "range(start, 1000000)").replace("resilience.heartbeat(step)", told)
    )
    assert "'steps'" in script.read_text()
    steps = tmp_path / "steps"
    runs = []
    for _ in range(2):
        with job(tmp_path, ["--nproc-per-node=2"], [str(script)]) as it:
            wait_for(lambda: steps.exists() and len(steps.read_text().split()) > 60, it.log)
            it.process.send_signal(signal.SIGTERM)
            assert it.wait() == 79, it.log()
        runs.append([int(step) for step in steps.read_text().split()])
        steps.unlink()
    assert min(runs[1]) == max(runs[0]) + 1


@pytest.mark.spawns
def test_the_lightning_script_runs_as_pasted_with_the_command_below_it(tmp_path: Path) -> None:
    found = re.search(r"```python\n(# train_lightning\.py.*?)```\s+```bash\n(.*?)```", README, re.DOTALL)
    assert found
    (tmp_path / "train_lightning.py").write_text(found.group(1))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    command = ["bash", "-ec", found.group(2)]
    done = subprocess.run(command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "ranks 0, 1 of 2 started" in done.stderr
    assert list((tmp_path / "checkpoints_lightning").glob("step-*"))


@pytest.mark.parametrize("page", sorted(path.name for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]))
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page if page == "README.md" else ROOT / "docs" / page
    for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{page}: {target}"


def test_tests_that_the_page_on_checkpoints_names_are_there() -> None:
    page = (ROOT / "docs" / "checkpoint.md").read_text()
    named = re.findall(r"\| `([\w/]+\.py)::(\w+)` \|", page)
    assert len(named) == 22
    for file, test in named:
        path = ROOT / file if "/" in file else ROOT / "tests" / "checkpoint" / file
        assert f"def {test}(" in path.read_text(), f"{file}::{test}"
