"""What every test gets: nothing of it may outlive it.

Whatever a test starts inherits a variable that names this session, so a grandchild whose parent was killed is found too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import jobs

MARK = "TESTS_SESSION"
_GRACE_S = 5.0  # what was told to end may need a moment on a busy machine


def children() -> dict[int, str]:
    """Return the live children of this process: pid and command line."""
    pids: set[int] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids.update(int(word) for word in listing.read_text().split())
    return {pid: command for pid in pids if (command := _command_of(pid)) is not None}


def descendants() -> dict[int, str]:
    """Return every live process that carries this session's mark, orphans included: pid and command line."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            if pid != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                command = _command_of(pid)
                if command is not None:
                    found[pid] = command
    return found


def _command_of(pid: int) -> str | None:
    """Return the command line of a live process; ``None`` for a dead one."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return None
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return None


@pytest.fixture(scope="session", autouse=True)
def session_mark() -> Iterator[None]:
    """Name this session in the environment, for whatever the tests start; clear up after those that were killed."""
    jobs.sweep()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as below `make test &`: launchers would be deaf to it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[MARK] = uuid.uuid4().hex
    yield
    del os.environ[MARK]


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, session_mark: None) -> Iterator[None]:
    """Fail a test that leaves a process behind, and end that process; or the folder of a job."""
    spawns = request.node.get_closest_marker("spawns") is not None
    look = descendants if spawns else children
    before, homes = set(look()), jobs.homes() if spawns else set()
    yield
    deadline = time.monotonic() + _GRACE_S
    while (left := {pid: what for pid, what in look().items() if pid not in before}) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes were left behind: {left}"
    if spawns:
        assert jobs.homes() <= homes, f"folders of jobs were left behind: {jobs.homes() - homes}"
