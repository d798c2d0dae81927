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
