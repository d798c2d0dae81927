"""Seed 004, "How to implement failure recovery to support new processors": its steps and examples, as they run here.

1. node detection by a GEMM and an all-gather, the default for compatible processors, a task and a name of one's own;
2. a faulty node is marked unschedulable when it fails the detection, or its workers end with 14, 128, 201 or 202;
3. an ``ErrorMonitor`` of one's own does the marking.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.test_strategies import SCRIPT
from tests.jobs import job

pytestmark = pytest.mark.spawns
ROOT = Path(__file__).parent.parent.parent
TUTORIAL = (ROOT / "docs" / "new-accelerator.md").read_text()

MONITOR = '''
from pathlib import Path
from resilience.failover.error_monitor import ErrorMonitor, NodeFault

class Cordon(ErrorMonitor):
    """A user's own: one file for each node that is marked."""

    def mark(self, fault: NodeFault) -> None:
        Path(f"cordoned-{fault.node}").write_text(f"{fault.reason} {fault.code}")
'''


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", TUTORIAL, re.DOTALL)
    assert found
    return found.group(1)


def package(folder: Path) -> dict[str, str]:
    """Install what the tutorial describes; return the environment that finds it."""
    (folder / "xxxx_check.py").write_text(block("python"))
    info = folder / "xxxx_check-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xxxx-check\nVersion: 1.0\n")
    line = re.search(r'^(xxxx) = "(.*)"$', block("toml"), re.MULTILINE)
    assert line
    (info / "entry_points.txt").write_text(f"[resilience.accelerators]\n{line.group(1)} = {line.group(2)}\n")
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_tutorial_adds_a_processor_and_checks_a_node_with_it_by_hand(tmp_path: Path) -> None:
    env = {**os.environ, **package(tmp_path)}
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    command = tmp_path / "resilience"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m resilience "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        ["bash", "-ec", block("bash")], check=False, cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "healthy" in done.stdout
    assert "exit code 0" in done.stdout


def test_network_check_with_the_new_processor_by_its_name(tmp_path: Path) -> None:
    env = package(tmp_path)
    with job(tmp_path / "node", ["--network-check", "--accelerator=xxxx"], SCRIPT, env) as it:
        it.await_steps(0)
        assert "the node check uses the accelerator xxxx: 1 device" in it.log()
        (it.progress / "finish").touch()
        assert it.wait() == 0, it.log()


@pytest.mark.long
def test_network_check_alone_takes_the_default_detection(tmp_path: Path) -> None:
    with job(tmp_path / "node", ["--network-check"], SCRIPT) as it:
        it.await_steps(0)
        assert "the node check uses the accelerator" in it.log()
        (it.progress / "finish").touch()
        assert it.wait() == 0, it.log()


def own_monitor(folder: Path) -> list[str]:
    (folder / "node").mkdir()
    (folder / "node" / "my_cluster.py").write_text(MONITOR)
    return ["--ft-error-monitor=my_cluster::Cordon", "--ft-node-name=gpu-07", f"--ft-termination-log={folder}/message"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (201, "DriverError"),
        pytest.param(14, "InfoROMCorrupted", marks=pytest.mark.long),
        pytest.param(128, "UnknownDevice", marks=pytest.mark.long),
        pytest.param(202, "ResidualProcesses", marks=pytest.mark.long),
    ],
)
def test_worker_that_ends_with_a_code_of_the_hardware_has_its_node_marked_by_ones_own_monitor(
    tmp_path: Path, code: int, reason: str
) -> None:
    with job(tmp_path / "node", [*own_monitor(tmp_path), "--max-restarts=3"], SCRIPT) as it:
        it.await_steps(0)
        it.order(f"exit {code}")
        assert it.wait() == code, it.log()
        assert (tmp_path / "node" / "cordoned-gpu-07").read_text() == f"{reason} {code}"
        message = json.loads((tmp_path / "message").read_text())
        assert (message["fault"]["node"], message["fault"]["code"]) == ("gpu-07", code)
        it.assert_nothing_left()


@pytest.mark.long
def test_other_codes_mark_nobody(tmp_path: Path) -> None:
    with job(tmp_path / "node", [*own_monitor(tmp_path), "--max-restarts=0"], SCRIPT) as it:
        it.await_steps(0)
        it.order("exit 3")
        assert it.wait() == 1, it.log()
        assert not (tmp_path / "node" / "cordoned-gpu-07").exists()
        assert not (tmp_path / "message").exists()


@pytest.mark.long
def test_node_that_fails_its_detection_is_marked_by_ones_own_monitor(tmp_path: Path) -> None:
    options = [*own_monitor(tmp_path), "--network-check", "--accelerator=tests.nodecheck.patients::Patient"]
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "AILMENT": "wrong"}
    with job(tmp_path / "node", options, SCRIPT, env) as it:
        assert it.wait() == 80, it.log()
        assert (tmp_path / "node" / "cordoned-gpu-07").read_text() == "NodeCheckFailed None"
        assert not it.notes(0)
        it.assert_nothing_left()
