"""Elsewhere than on Linux the in-loop calls do nothing, and the launcher says what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.spawns
ELSEWHERE = "import sys; sys.platform = {platform!r}; sys.modules['fcntl'] = None; "


def run(platform: str, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ELSEWHERE.format(platform=platform) + code]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_in_loop_calls_do_nothing_elsewhere(platform: str) -> None:
    code = """
import os
os.environ.update(RESILIENCE_SOCKET="/nowhere", RESILIENCE_LATE_ATTACH="1", RANK="0")
import resilience
with resilience.section("step"), resilience.expect_heartbeats():
    resilience.heartbeat(1)
client = resilience.RankMonitorClient()
client.init_workload_monitoring()
client.send_heartbeat()
client.shutdown_workload_monitoring()
print("fine")
"""
    done = run(platform, code)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_the_launcher_says_that_it_needs_linux(platform: str) -> None:
    done = run(platform, "from resilience.__main__ import main; sys.exit(main(['run', 'train.py']))")
    assert done.returncode == 2
    assert "needs Linux" in done.stderr
    assert platform in done.stderr
    assert "Traceback" not in done.stderr
