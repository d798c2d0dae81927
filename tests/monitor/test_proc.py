from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from resilience.monitor import proc

pytestmark = pytest.mark.spawns


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[str]]:
    """A process that leads a session with two more in it: one in its group, one in a group of its own."""
    code = (
        "import os, subprocess, sys\n"
        "nap = [sys.executable, '-S', '-c', 'import time; time.sleep(600)']\n"
        "a = subprocess.Popen(nap)\n"
        "b = subprocess.Popen(nap, preexec_fn=os.setpgrp)\n"
        "print(a.pid, b.pid, flush=True)\n"
        "a.wait()\nb.wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    yield process
    for pid in [*proc.session_members(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL) if proc.state_of(pid) else None
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def told(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def gone(pid: int) -> bool:
    state = proc.state_of(pid)
    return state is None or state.state == "Z"


def until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_state_of_this_process_is_what_the_kernel_says() -> None:
    state = proc.state_of(os.getpid())
    assert state is not None
    assert (state.group, state.session) == (os.getpgrp(), os.getsid(0))
    assert state.state == "R"
    assert state.started_ticks > 0


def test_name_with_brackets_and_blanks_does_not_confuse_the_state() -> None:
    name = "import ctypes; ctypes.CDLL(None).prctl(15, b') S 1 2 (x)')"
    code = f"{name}\nprint('ready', flush=True)\nimport time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    state = proc.state_of(child.pid)
    child.kill()
    child.wait()
    child.stdout.close()
    assert state is not None
    assert (state.group, state.session) == (child.pid, child.pid)


def test_process_that_is_gone_has_no_state() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    child.wait()
    assert proc.state_of(child.pid) is None
    assert not proc.catches(child.pid, signal.SIGUSR1)
    assert proc.kernel_stack(child.pid) == ""


def test_handlers_are_seen() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    assert proc.catches(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert not proc.catches(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_signal_reaches_the_group_and_not_the_rest_of_the_session(leader: subprocess.Popen[str]) -> None:
    same_group, other_group = told(leader)
    state = proc.state_of(leader.pid)
    assert state is not None
    proc.signal_group(leader.pid, state.started_ticks, signal.SIGKILL)
    until_gone(leader.pid, same_group)
    assert not gone(other_group)


def test_pid_that_was_given_to_a_stranger_is_left_alone(leader: subprocess.Popen[str]) -> None:
    pids = told(leader)
    state = proc.state_of(leader.pid)
    assert state is not None
    proc.signal_group(leader.pid, state.started_ticks - 1, signal.SIGKILL)
    proc.sweep_session(leader.pid, state.started_ticks - 1)
    assert not any(gone(pid) for pid in [leader.pid, *pids])


def test_what_a_dead_rank_left_in_its_session_is_ended(leader: subprocess.Popen[str]) -> None:
    pids = told(leader)
    state = proc.state_of(leader.pid)
    assert state is not None
    leader.kill()
    until_gone(leader.pid)
    assert sorted(proc.session_members(leader.pid)) == sorted(pids)
    proc.sweep_session(leader.pid, state.started_ticks)
    until_gone(*pids)
