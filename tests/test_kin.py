"""Processes that run others' code end with who started them, however early that was killed, and with whatever they started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import alive, wait_for

pytestmark = pytest.mark.spawns
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "words",
    [
        ["resilience.nodecheck.process", "hangs::X", "0", "FD"],
        ["resilience.failover.marking", "mark", "hangs::X"],
        ["resilience.failover.extension", "hangs::X", "FD"],
    ],
    ids=["check", "mark", "extension"],
)
def test_process_whose_parent_was_gone_before_it_could_look_ends(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", *(str(theirs.fileno()) if word == "FD" else word for word in words)]
    with ours, theirs:
        parent = subprocess.run(  # it is gone before Python has begun in its child
            ["sh", "-c", 'setsid "$@" $$ >/dev/null 2>&1 & echo $!', "sh", *command],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
            stdout=subprocess.PIPE,
            check=True,
        )
        orphan = int(parent.stdout)
        try:
            wait_for(lambda: not alive(orphan), "the orphan to end", 30)
        finally:
            if alive(orphan):
                os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("ending", ["close", "kill"])
def test_helpers_of_a_check_end_with_it_wherever_they_went(tmp_path: Path, ending: str) -> None:
    helpers, script = tmp_path / "helpers", tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "from resilience.nodecheck.crew import Crew\n"
        "crew = Crew('tests.nodecheck.patients::WithHelpers', os.environ)\n"
        "crew.load()\n"
        "print(*crew.pids(), flush=True)\n"
        "sys.stdin.read()\n"
        "crew.close()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HELPERS": str(helpers), "AILMENT": "hangs"}
    with subprocess.Popen(
        [sys.executable, str(script)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        check = int(launcher.stdout.readline())
        started = [check, *map(int, helpers.read_text().split())]
        assert all(map(alive, started))
        if ending == "kill":
            launcher.kill()
        launcher.stdin.close()
        launcher.wait(60)
    if ending == "close":
        assert not any(map(alive, started))
    else:
        wait_for(lambda: not any(map(alive, started)), "the helpers to end", 30)
