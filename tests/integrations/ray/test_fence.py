"""A launcher on a Ray node that was given up: nobody can tell it, so its actor sees for itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from resilience.integrations.ray import fence, node
from resilience.integrations.ray.fence import Raylet, Verdict
from resilience.integrations.ray.node import NodeAgent
from resilience.integrations.ray.process import Order

from tests.jobs import alive, wait_for


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of a raylet, whose parent does not reap it."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setenv("RAY_RAYLET_PID", str(process.pid))
    yield process
    process.kill()
    process.wait()


def test_raylet_that_is_stopped_a_zombie_or_gone_is_told_from_one_that_runs(raylet: subprocess.Popen[bytes]) -> None:
    assert (fence.raylet_pid(), fence.raylet(raylet.pid)) == (raylet.pid, Raylet.RUNS)
    raylet.send_signal(signal.SIGSTOP)
    wait_for(lambda: fence.raylet(raylet.pid) is Raylet.STOPPED, "it to be seen stopped")
    raylet.kill()
    wait_for(lambda: fence.raylet(raylet.pid) is Raylet.GONE, "the zombie to be seen")
    assert Path(f"/proc/{raylet.pid}").exists()
    raylet.wait()
    assert fence.raylet(raylet.pid) is Raylet.GONE
    assert fence.raylet_pid() is None  # one that was never to be seen from here says nothing
    assert fence.raylet(None) is Raylet.RUNS


@pytest.mark.parametrize(
    ("stands", "silent_s", "given_up", "expected"),
    [
        (Raylet.RUNS, 1.0, True, Verdict.GO_ON),
        (Raylet.RUNS, 26.0, False, Verdict.GO_ON),  # the supervisor is being restarted
        (Raylet.RUNS, 26.0, True, Verdict.LOST),
        (Raylet.STOPPED, 1.0, False, Verdict.GO_ON),
        (Raylet.STOPPED, 1.0, True, Verdict.LOST),
        (Raylet.GONE, 1.0, False, Verdict.LOST),
        (Raylet.RUNS, 901.0, False, Verdict.ORPHANED),
    ],
)
def test_launcher_ends_where_its_node_was_given_up_or_its_job_has_no_supervisor(
    stands: Raylet, silent_s: float, given_up: bool, expected: Verdict
) -> None:
    assert fence.verdict(stands, silent_s, lambda: given_up) is expected


def test_launcher_whose_supervisor_hangs_goes_on_however_long_and_has_it_restarted() -> None:
    assert fence.verdict(Raylet.RUNS, 899.0, lambda: False, lambda: True) is Verdict.GO_ON
    assert fence.verdict(Raylet.RUNS, 9000.0, lambda: False, lambda: True) is Verdict.UNASKED
    assert fence.verdict(Raylet.RUNS, 9000.0, lambda: True, lambda: True) is Verdict.LOST


@pytest.mark.spawns
@pytest.mark.parametrize(("heeds", "code"), [(True, 0), (False, -signal.SIGKILL)])
def test_launcher_whose_job_has_no_supervisor_is_asked_to_stop_and_killed_only_if_it_does_not(
    heeds: bool,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_agent: Callable[[], NodeAgent],
) -> None:
    left: list[Verdict] = []
    monkeypatch.setattr(fence, "leave", left.append)
    monkeypatch.setattr(node, "_LOOK_S", 0.05)
    monkeypatch.setattr(node, "MARGIN_S", 60.0 if heeds else -24.0)  # beyond 25 s
    agent = new_agent()
    action = "lambda *_: sys.exit(0)" if heeds else "signal.SIG_IGN"
    program = (
        f"import pathlib, signal, sys, time; signal.signal(15, {action}); pathlib.Path('runs').touch(); time.sleep(600)"
    )
    agent._keeper.give(Order(1, (sys.executable, "-c", program), dict(os.environ), str(tmp_path)))
    wait_for((tmp_path / "runs").exists, "it to run")
    monkeypatch.setattr(fence, "verdict", lambda *_: Verdict.ORPHANED)
    wait_for(lambda: left, "the actor to leave")
    assert left[0] is Verdict.ORPHANED
    wait_for(lambda: agent._keeper.look(-1, 0)[2] == code, f"its end with {code}")


@pytest.mark.spawns
def test_launcher_ends_when_the_raylet_of_its_node_is_killed(
    raylet: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_agent: Callable[[], NodeAgent],
) -> None:
    left: list[Verdict] = []
    monkeypatch.setattr(fence, "leave", left.append)
    script = tmp_path / "script.py"
    script.write_text("import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)\n")
    agent = new_agent()
    agent.order(1, [f"--ft-run-dir={tmp_path / 'run'}", str(script)], {}, str(tmp_path), False)
    note = tmp_path / "pid"
    rank = int(wait_for(lambda: note.exists() and note.read_text(), "the rank to start"))
    raylet.kill()
    wait_for(lambda: agent.report()["code"] == -signal.SIGKILL, "the launcher to be ended")
    wait_for(lambda: not alive(rank), "its rank to end with it")
    wait_for(lambda: Verdict.LOST in left, "the actor to leave")


def test_actor_that_could_not_give_its_place_back_tries_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], new_agent: Callable[[], NodeAgent]
) -> None:
    tries: list[Verdict] = []

    def leave(why: Verdict) -> None:
        tries.append(why)
        if len(tries) == 1:
            raise ConnectionError("the cluster's store is out of reach")

    monkeypatch.setattr(node, "_LOOK_S", 0.01)
    monkeypatch.setattr(fence, "leave", leave)
    monkeypatch.setattr(fence, "verdict", lambda *_: Verdict.ORPHANED)
    new_agent()
    wait_for(lambda: len(tries) >= 3, "it to try again, also after a try that changed nothing")
    assert set(tries) == {Verdict.ORPHANED}
    assert "out of reach" in capfd.readouterr().err
