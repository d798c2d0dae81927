"""The bell is heard, and nobody ever waits for himself."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from resilience.launcher.bell import Bell

INTERRUPTED = """
import signal
import time

from resilience.launcher.bell import Bell

bell, rings = Bell(), 0


def ring(*_):
    global rings
    rings += 1
    bell.ring()


signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
while rings < 5_000:
    bell.wait(60)
signal.setitimer(signal.ITIMER_REAL, 0)
print("done")
"""


def test_ring_before_the_wait_is_heard_once_however_often_it_rang() -> None:
    bell = Bell()
    for _ in range(3):
        bell.ring()
    bell.wait(600)
    before = time.monotonic()
    bell.wait(0.05)
    assert time.monotonic() - before >= 0.05


def test_ring_of_another_thread_ends_the_wait() -> None:
    bell = Bell()
    ringer = threading.Timer(0.05, bell.ring)
    ringer.start()
    bell.wait(600)
    ringer.join()


@pytest.mark.spawns
def test_ring_in_a_signal_handler_that_interrupts_the_wait_anywhere_is_heard() -> None:
    """With a ``threading.Event`` it takes a few hundred signals until one of them waits for itself."""
    found = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, check=False
    )
    assert (found.stdout, found.stderr) == ("done\n", "")
