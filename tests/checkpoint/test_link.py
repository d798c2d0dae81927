"""The line to the saver: an answer is never taken for that to another question, whatever ends the wait for it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.link import Link, Place
from resilience.checkpoint.receipt import Level
from resilience.errors import LinkError
from resilience.pulse import channel
from tests.checkpoint.conftest import savers
from tests.jobs import stopped

PLACE = Place(0, 1, 0, 1, 0, "x")


class Stopped(BaseException):
    """What a signal handler raises, Ctrl-C for one."""


@contextmanager
def interrupted() -> Iterator[None]:
    """A signal handler raises, a moment later."""

    def raise_it(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Stopped):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def checkpoint(tmp_path: Path, saver_home: Path) -> Iterator[FlashCheckpoint]:
    made = FlashCheckpoint(tmp_path / "checkpoints", model=torch.nn.Linear(2, 2), disk_every=None)
    for step in range(3):
        made.save(step, wait=30)
    made.wait(level=Level.COMPLETE)
    yield made
    made.close()


@pytest.mark.spawns
@pytest.mark.parametrize("fresh", [False, True])
def test_restore_after_a_wait_that_was_interrupted_has_its_own_answer(
    checkpoint: FlashCheckpoint, saver_home: Path, fresh: bool
) -> None:
    (saver,) = savers(saver_home)
    with stopped(saver), interrupted():
        checkpoint.wait()
    assert checkpoint.restore(allow_fresh_start=fresh) == 3
    assert savers(saver_home) == [saver]  # the same one


@pytest.mark.spawns
def test_wait_after_a_wait_that_was_interrupted_has_its_own_answer(
    checkpoint: FlashCheckpoint, saver_home: Path
) -> None:
    (saver,) = savers(saver_home)
    for _ in range(2):
        with stopped(saver), interrupted():
            checkpoint.wait()
    checkpoint.save(3, wait=30)
    assert checkpoint.wait().level is Level.DURABLE
    assert checkpoint.restore() == 4


@pytest.fixture
def line() -> Iterator[tuple[Link, socket.socket]]:
    """A line, and the other end of it."""
    link = Link("/nowhere", PLACE, {})
    ours, theirs = channel.pair()
    link._sock = ours
    yield link, theirs
    link.close()
    theirs.close()


def test_question_whose_answer_is_late_hangs_up(line: tuple[Link, socket.socket]) -> None:
    link, saver = line
    with pytest.raises(LinkError, match="did not answer within"):
        link.ask({"op": "bye"}, timeout=0.01)
    assert channel.receive(saver) == ({"op": "bye"}, [])
    assert channel.receive(saver) is None


def test_question_in_whose_midst_the_saver_ends_says_so(line: tuple[Link, socket.socket]) -> None:
    link, saver = line

    def end() -> None:
        channel.receive(saver)
        saver.close()

    threading.Thread(target=end).start()
    with pytest.raises(LinkError, match="ended in the middle"):
        link.ask({"op": "bye"})
    assert link._sock is None


def test_line_that_is_closed_stays_closed(line: tuple[Link, socket.socket]) -> None:
    link, _ = line
    with pytest.raises(LinkError):
        link.ask({"op": "bye"}, timeout=0.01)
    link.close()
    with pytest.raises(LinkError, match="the saver is gone"):
        link.ask({"op": "bye"})


def test_child_hangs_up_although_a_thread_of_its_parents_was_asking_and_the_parent_does_not(
    line: tuple[Link, socket.socket],
) -> None:
    link, saver = line
    assert link._sock is not None
    parents, wake = link._sock.dup(), os.eventfd(0)
    link.wake = os.dup(wake)
    held = threading.Event()
    over = threading.Event()

    def ask() -> None:
        with link._turn:
            held.set()
            over.wait(30)

    thread = threading.Thread(target=ask)
    thread.start()
    assert held.wait(30)
    try:
        link.forget()  # what a child does with its copies
        with pytest.raises(LinkError, match="the saver is gone"):
            link.ask({"op": "bye"})
        channel.send(parents, {"op": "here"})
        assert channel.receive(saver) == ({"op": "here"}, [])  # closed, not shut down
    finally:
        over.set()
        thread.join()
        parents.close()
        os.close(wake)
