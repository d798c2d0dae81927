"""A rank's interpreter waits for threads of native code before it ends; gloo's would abort it otherwise."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.pulse import leaving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the threads of a process are seen in /proc")

PIECE, PIECES = 1 << 24, 32  # bytes; the same memory mapped over and over makes a long string cheaply


class NativeThread:
    """A thread that Python doesn't know: it measures the length of a very long string, then ends."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        memory = os.memfd_create("string")
        os.write(memory, b"x" * PIECE)
        self._size = PIECE * PIECES + mmap.PAGESIZE  # what is not mapped again is zero: the string's end
        self._start = self._libc.mmap(None, self._size, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        for piece in range(PIECES):
            at = self._start + piece * PIECE
            # 0x10: MAP_FIXED.
            assert self._libc.mmap(at, PIECE, mmap.PROT_READ, mmap.MAP_SHARED | 0x10, memory, 0) == at
        os.close(memory)
        self._id = ctypes.c_ulong()
        assert not self._libc.pthread_create(
            ctypes.byref(self._id), None, self._libc.strlen, ctypes.c_void_p(self._start)
        )
        self._joined = False

    def has_ended(self) -> bool:
        self._joined = self._joined or self._libc.pthread_tryjoin_np(self._id, None) == 0
        return self._joined

    def close(self) -> None:
        while not self.has_ended():
            time.sleep(0.001)
        self._libc.munmap(self._start, self._size)


@pytest.fixture
def thread() -> Iterator[NativeThread]:
    thread = NativeThread()
    yield thread
    thread.close()


def test_the_end_waits_for_a_native_thread_that_is_running(
    thread: NativeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.setattr(leaving, "_PATIENCE_S", 60.0)
    assert not thread.has_ended()
    leaving.let_native_threads_rest()
    assert thread.has_ended() or not leaving._native_thread_is_running()


def test_it_does_not_wait_for_ever(thread: NativeThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.setattr(leaving, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(leaving, "_native_thread_is_running", lambda: True)
    leaving.let_native_threads_rest()


def test_it_does_not_wait_where_torch_was_never_imported(thread: NativeThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(leaving, "_native_thread_is_running", lambda: pytest.fail("looked at threads"))
    leaving.let_native_threads_rest()


def test_threads_that_sleep_are_not_waited_for() -> None:
    libc = ctypes.CDLL(None)
    sleeper = ctypes.c_ulong()
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    assert not libc.pthread_create(ctypes.byref(sleeper), None, libc.sleep, ctypes.c_void_p(1))
    new = ({task.name for task in Path("/proc/self/task").iterdir()} - before).pop()
    while leaving._state(new) == "R":  # until it has come to its sleep
        time.sleep(0.001)
    assert leaving._state(new) == "S"
    libc.pthread_join(sleeper, None)
