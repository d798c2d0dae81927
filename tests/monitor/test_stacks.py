from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from resilience.monitor import proc, stacks
from resilience.pulse.attach import STACK_SIGNAL

pytestmark = pytest.mark.spawns

_READY = "print('ready', flush=True)\n"
_REGISTER = f"""
import faulthandler, sys
faulthandler.register({STACK_SIGNAL}, file=int(sys.argv[1]), all_threads=True, chain=False)
"""
IDLE = "import time\ndef napping():\n    print('ready', flush=True)\n    time.sleep(600)\nnapping()\n"
THREADS = "import threading\ndef helping():\n    threading.Event().wait()\nthreading.Thread(target=helping, daemon=True).start()\n"
REGEX = (
    "import re\ndef matching():\n    print('ready', flush=True)\n    re.match('(a+)+$', 'a' * 64 + 'b')\nmatching()\n"
)
LOOP = "def adding():\n    print('ready', flush=True)\n    sum(range(10**12))\nadding()\n"


@contextmanager
def running(code: str, stacks_fd: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, str(stacks_fd)]
    child = subprocess.Popen(command, pass_fds=[stacks_fd], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def until_state(pid: int, wanted: str) -> None:
    deadline = time.monotonic() + 10
    while (state := proc.state_of(pid)) is None or state.state not in wanted:
        assert time.monotonic() < deadline, state
        time.sleep(0.005)


@pytest.fixture
def stacks_fd() -> Iterator[int]:
    fd = os.memfd_create("stacks", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(("code", "frame"), [(IDLE, "napping"), (REGEX, "matching"), (LOOP, "adding")])
def test_stacks_are_collected_from_an_idle_rank_and_with_the_gil_held_in_c(
    stacks_fd: int, code: str, frame: str
) -> None:
    with running(_REGISTER + code, stacks_fd) as child:
        text = stacks.collect(child.pid, stacks_fd, STACK_SIGNAL, 10.0)
        assert f"in {frame}" in text
        assert "most recent call first" in text
        assert child.poll() is None


def test_stacks_of_all_threads_are_collected(stacks_fd: int) -> None:
    with running(_REGISTER + THREADS + IDLE, stacks_fd) as child:
        text = stacks.collect(child.pid, stacks_fd, STACK_SIGNAL, 10.0)
    assert "in helping" in text
    assert "in napping" in text


def test_stopped_rank_is_continued_and_testifies(stacks_fd: int) -> None:
    with running(_REGISTER + IDLE, stacks_fd) as child:
        child.send_signal(signal.SIGSTOP)
        until_state(child.pid, "T")
        assert "in napping" in stacks.collect(child.pid, stacks_fd, STACK_SIGNAL, 10.0)
        until_state(child.pid, "S")


def test_second_testimony_does_not_repeat_the_first(stacks_fd: int) -> None:
    with running(_REGISTER + IDLE, stacks_fd) as child:
        for _ in range(2):
            text = stacks.collect(child.pid, stacks_fd, STACK_SIGNAL, 10.0)
            assert text.count("in napping") == 1


def test_rank_without_a_handler_is_left_alone_and_the_sentence_says_why(stacks_fd: int) -> None:
    with running(IDLE, stacks_fd) as child:
        text = stacks.collect(child.pid, stacks_fd, STACK_SIGNAL, 10.0)
        assert text.startswith("(no Python stack: it has no handler for the stack signal")
        child.send_signal(signal.SIGCONT)
        assert child.poll() is None
        until_state(child.pid, "S")


def test_rank_that_does_not_answer_in_time_is_said_to_be_silent(stacks_fd: int) -> None:
    blocked = f"import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [{STACK_SIGNAL}])\n"
    with running(_REGISTER + blocked + IDLE, stacks_fd) as child:
        text = stacks.collect(child.pid, stacks_fd, STACK_SIGNAL, 0.2)
    assert text.startswith("(no Python stack: it did not answer the stack signal within 0.2 s)")


def test_dead_rank_has_no_stack(stacks_fd: int) -> None:
    with running(_REGISTER + IDLE, stacks_fd) as child:
        child.kill()
        until_state(child.pid, "Z")
        assert stacks.collect(child.pid, stacks_fd, STACK_SIGNAL, 10.0) == "(no stack: the process is gone)"
        child.wait()
        assert stacks.collect(child.pid, stacks_fd, STACK_SIGNAL, 10.0) == "(no stack: the process is gone)"


def test_endless_stack_is_cut(stacks_fd: int) -> None:
    flood = _REGISTER + THREADS.replace("threading.Thread(target", "for _ in range(400): threading.Thread(target")
    deep = flood.replace("def helping():", "def helping(n=90):\n    if n: return helping(n - 1)")
    with running(deep + IDLE, stacks_fd) as child:
        text = stacks.collect(child.pid, stacks_fd, STACK_SIGNAL, 10.0)
    assert text.endswith("… (cut)")
    assert len(text.encode()) <= stacks.MAX_STACK_BYTES + 20


def test_frames_of_the_trampoline_are_left_out() -> None:
    text = (
        'Current thread 0x1 (most recent call first):\n  File "train.py", line 3 in main\n'
        '  File "/x/resilience/_worker/__main__.py", line 60 in become_script\n'
        '  File "<frozen runpy>", line 88 in _run_code\n  File "<frozen runpy>", line 198 in _run_module_as_main'
    )
    assert stacks.without_trampoline(text) == (
        'Current thread 0x1 (most recent call first):\n  File "train.py", line 3 in main'
    )
