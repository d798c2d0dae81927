"""Signals while the nodes come together: a main thread that can't take them does not keep the launcher from ending."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from resilience.launcher import signals
from resilience.launcher.signals import Prompt

SOON = 30.0  # seconds after which a test gives up; nothing takes that long


class Ended:
    """What ``Prompt`` ends in these tests: nothing."""

    def __init__(self) -> None:
        self.by: list[signal.Signals] = []
        self.happened = threading.Event()

    def __call__(self, signum: signal.Signals) -> None:
        self.by.append(signum)
        self.happened.set()


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def prompt(ended: Ended) -> Iterator[Prompt]:
    made = Prompt(ended)
    yield made
    close(made)


def close(prompt: Prompt) -> None:
    """Have everything heard that was said, and the thread end."""
    prompt.close()
    for thread in threading.enumerate():
        if thread.name == "resilience-signals":
            thread.join(SOON)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers that do nothing, as seen from outside: those of a main thread that is in C++ do not even run."""
    before = {number: signal.getsignal(number) for number in (*signals._ENDING, signal.SIGINT, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, lambda *_: None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("signum", [*signals._ENDING, signal.SIGINT])
def test_signal_that_the_main_thread_does_not_take_ends_the_launcher(
    signum: signal.Signals, prompt: Prompt, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_HANDLER_S", 0.01)
    with prompt.heed():
        os.kill(os.getpid(), signum)
        assert ended.happened.wait(SOON)
    assert ended.by == [signum]


def test_main_thread_that_takes_the_signal_is_left_to_end_by_itself(prompt: Prompt, ended: Ended) -> None:
    def end(signum: int, frame: FrameType | None) -> None:
        raise InterruptedError

    signal.signal(signal.SIGTERM, end)
    with pytest.raises(InterruptedError), prompt.heed():
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(SOON)
    close(prompt)
    assert ended.by == []


def test_signal_that_is_for_the_workers_ends_nothing(
    prompt: Prompt, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_HANDLER_S", 0.0)
    with prompt.heed():
        os.kill(os.getpid(), signal.SIGUSR2)
    close(prompt)
    assert ended.by == []


def test_signal_before_and_after_is_not_heard(prompt: Prompt, ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_HANDLER_S", 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    with prompt.heed():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    close(prompt)
    assert ended.by == []
    assert signal.set_wakeup_fd(-1) == -1


def test_launcher_that_is_being_ended_does_not_go_on_beside_it(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_HANDLER_S", 0.01)
    begun, go_on = threading.Event(), threading.Event()

    def end(signum: signal.Signals) -> None:
        begun.set()
        go_on.wait(SOON)
        ended(signum)

    prompt = Prompt(end)
    threading.Timer(0.2, go_on.set).start()
    with prompt.heed():
        os.kill(os.getpid(), signal.SIGTERM)
        assert begun.wait(SOON)
    assert ended.by == [signal.SIGTERM]  # it waited
    close(prompt)
