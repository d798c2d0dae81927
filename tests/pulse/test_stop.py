"""``stop_requested``, from the rank's side: its page is private, and the test plays the launcher."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from resilience.pulse import stop as stops
from resilience.pulse.page import (
    W_ENDING,
    W_STOP_ARMED,
    W_STOP_ASKED,
    W_STOP_CALLS,
    W_STOP_DECIDED,
    W_STOP_TAKEN,
    W_STOP_WAITING,
    Page,
)
from resilience.pulse.stop import Stop

BOTH = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give the signals back as they were."""
    before = {signum: signal.getsignal(signum) for signum in BOTH}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def page() -> Iterator[Page]:
    fresh = Page.private()
    yield fresh
    fresh.close()


class Time:
    """Stands in for the module: a clock that only sleeping moves; ``meanwhile`` is what happens during a sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps = 0
        self.meanwhile: Callable[[int], None] = lambda sleeps: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1
        self.meanwhile(self.sleeps)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(stops, "time", fake)
    return fake


def called(stop: Stop, times: int) -> list[bool]:
    return [stop.requested() for _ in range(times)]


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", BOTH)
def test_signal_leaves_a_mark_and_the_process_lives(page: Page, signum: int) -> None:
    stop = Stop(page, alone=True)
    assert called(stop, 3) == [False] * 3
    signal.raise_signal(signum)
    assert page.words[W_STOP_ASKED] == signum
    assert called(stop, 2) == [True, True]


@pytest.mark.parametrize("signum", BOTH)
def test_handler_that_the_user_had_is_called_as_well(page: Page, signum: int) -> None:
    seen: list[tuple[int, bool, int]] = []

    def mine(number: int, frame: FrameType | None) -> None:
        seen.append((number, frame is not None, page.words[W_STOP_ASKED]))

    signal.signal(signum, mine)
    stop = Stop(page, alone=True)
    stop.requested()
    signal.raise_signal(signum)
    assert seen == [(signum, True, signum)]
    assert stop.requested()


def test_handler_of_the_user_that_raises_leaves_the_mark_all_the_same(page: Page) -> None:
    def mine(number: int, frame: FrameType | None) -> None:
        raise InterruptedError("stop the epoch")

    signal.signal(signal.SIGUSR1, mine)
    stop = Stop(page, alone=True)
    stop.requested()
    with pytest.raises(InterruptedError, match="stop the epoch"):
        signal.raise_signal(signal.SIGUSR1)
    assert stop.requested()


def test_signal_that_the_user_ignored_is_a_request_too(page: Page) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop = Stop(page, alone=True)
    stop.requested()
    signal.raise_signal(signal.SIGTERM)
    assert stop.requested()


def test_handlers_are_taken_with_the_first_call_and_not_before(page: Page) -> None:
    before = [signal.getsignal(signum) for signum in BOTH]
    stop = Stop(page, alone=True)
    assert [signal.getsignal(signum) for signum in BOTH] == before
    stop.requested()
    assert all(callable(signal.getsignal(signum)) for signum in BOTH)


def test_handler_that_the_user_sets_after_the_first_call_stays(page: Page) -> None:
    seen: list[int] = []
    stop = Stop(page, alone=True)
    stop.requested()
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    called(stop, 3)
    signal.raise_signal(signal.SIGTERM)
    assert seen == [signal.SIGTERM]
    assert page.words[W_STOP_ASKED] == 0


def test_call_from_another_thread_counts_and_leaves_the_signals_alone(page: Page) -> None:
    stop = Stop(page, alone=True)
    before = [signal.getsignal(signum) for signum in BOTH]
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(stop.requested()))
    thread.start()
    thread.join(10)
    assert answers == [False]
    assert page.words[W_STOP_CALLS] == 1
    assert [signal.getsignal(signum) for signum in BOTH] == before


# -- alone or not -----------------------------------------------------------------------------------------------------


def test_rank_with_others_does_not_stop_at_its_own_signal(page: Page) -> None:
    stop = Stop(page, alone=False)
    stop.requested()
    signal.raise_signal(signal.SIGTERM)
    assert page.words[W_STOP_ASKED] == signal.SIGTERM, "its launcher has to hear of it"
    assert called(stop, 5) == [False] * 5


@pytest.mark.parametrize("alone", [True, False])
def test_without_a_request_nothing_but_the_count_is_written(page: Page, alone: bool) -> None:
    stop = Stop(page, alone)
    before = page.words.tolist()
    assert called(stop, 100) == [False] * 100
    before[W_STOP_CALLS] = 100
    assert page.words.tolist() == before


# -- armed and decided ------------------------------------------------------------------------------------------------


def test_rank_stops_at_the_step_that_was_decided_and_tells_it(page: Page, time: Time) -> None:
    stop = Stop(page, alone=False)
    called(stop, 3)
    page.words[W_STOP_ARMED] = page.words[W_STOP_DECIDED] = 6
    assert called(stop, 3) == [False, False, True]
    assert (page.words[W_STOP_CALLS], page.words[W_STOP_TAKEN]) == (6, 6)
    assert time.sleeps == 0, "there was nothing to wait for"


def test_rank_that_comes_to_an_armed_step_waits_for_the_decision(page: Page, time: Time) -> None:
    stop = Stop(page, alone=False)
    called(stop, 2)
    page.words[W_STOP_ARMED] = 3
    waiting: list[tuple[int, int]] = []

    def decide(sleeps: int) -> None:
        waiting.append((page.words[W_STOP_CALLS], page.words[W_STOP_WAITING]))
        if sleeps == 20:
            page.words[W_STOP_DECIDED] = 3

    time.meanwhile = decide
    assert stop.requested()
    assert set(waiting) == {(3, 3)}, "the launcher sees that it is there, and that it waits"
    assert (time.sleeps, page.words[W_STOP_TAKEN]) == (20, 3)


def test_rank_below_an_armed_step_does_not_wait(page: Page, time: Time) -> None:
    stop = Stop(page, alone=False)
    page.words[W_STOP_ARMED] = 10
    assert called(stop, 9) == [False] * 9
    assert (time.sleeps, page.words[W_STOP_WAITING]) == (0, 0)


def test_later_step_lets_a_rank_that_waits_go_on_to_it(page: Page, time: Time) -> None:
    stop = Stop(page, alone=False)
    page.words[W_STOP_ARMED] = 1

    def choose_another(sleeps: int) -> None:
        page.words[W_STOP_ARMED] = 3

    time.meanwhile = choose_another
    assert stop.requested() is False
    assert time.sleeps == 1
    assert stop.requested() is False
    page.words[W_STOP_DECIDED] = 3
    assert stop.requested()
    assert page.words[W_STOP_TAKEN] == 3


def test_signal_does_not_stop_a_lone_rank_before_the_step_that_is_armed(page: Page, time: Time) -> None:
    stop = Stop(page, alone=True)
    stop.requested()
    page.words[W_STOP_ARMED] = page.words[W_STOP_DECIDED] = 4
    signal.raise_signal(signal.SIGTERM)
    assert called(stop, 3) == [False, False, True]


def test_rank_that_stopped_stays_stopped_when_it_asks_again(page: Page, time: Time) -> None:
    stop = Stop(page, alone=False)
    page.words[W_STOP_ARMED] = page.words[W_STOP_DECIDED] = 2
    assert called(stop, 4) == [False, True, True, True]


def test_rank_loses_its_patience_when_nobody_decides(page: Page, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "PATIENCE_S", 0.5)
    stop = Stop(page, alone=False)
    page.words[W_STOP_ARMED] = 1
    began = time.now
    assert stop.requested() is False
    assert 0.5 < time.now - began < 0.51
    assert page.words[W_STOP_TAKEN] == 0


def test_decision_in_the_last_moment_of_its_patience_is_obeyed(
    page: Page, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "PATIENCE_S", 0.5)
    stop = Stop(page, alone=False)
    page.words[W_STOP_ARMED] = 1

    def decide_late(sleeps: int) -> None:
        time.now += 1.0  # the process was stopped for a while; its launcher was not
        page.words[W_STOP_DECIDED] = 1

    time.meanwhile = decide_late
    assert stop.requested()


def test_rank_that_lost_its_patience_does_not_look_as_if_it_still_waited(page: Page, time: Time) -> None:
    # Its launcher would confirm that it has not passed the step, and the others would stop without it.
    stop = Stop(page, alone=False)
    page.words[W_STOP_ARMED] = 1
    assert stop.requested() is False
    assert (page.words[W_STOP_CALLS], page.words[W_STOP_WAITING]) != (1, 1)


# -- the end ----------------------------------------------------------------------------------------------------------

_ENDING = """
import os, signal, sys
from resilience.pulse.page import W_ENDING, W_STOP_ASKED, Page
from resilience.pulse.stop import Stop

signum = signal.Signals[sys.argv[1]]
if sys.argv[2] == "handler":
    signal.signal(signum, lambda number, frame: (print("mine", flush=True), os._exit(9)))
elif sys.argv[2] == "ignored":
    signal.signal(signum, signal.SIG_IGN)
page = Page.private()
stop = Stop(page, alone=False)
stop.requested()
signal.raise_signal(signum)
print("asked", page.words[W_STOP_ASKED] == signum, flush=True)
page.words[W_STOP_ASKED] = 0
page.words[W_ENDING] = 1
signal.raise_signal(signum)
print("alive", page.words[W_STOP_ASKED], flush=True)
"""


def run(script: str, *arguments: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], check=False, capture_output=True, text=True, timeout=60
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.split("\n")[:-1]


@pytest.mark.spawns
@pytest.mark.parametrize("signum", BOTH)
def test_signal_of_a_launcher_that_ends_the_rank_ends_it(signum: signal.Signals) -> None:
    assert run(_ENDING, signum.name, "default") == (-signum, ["asked True"])


@pytest.mark.spawns
def test_handler_of_the_user_is_what_meets_the_launchers_last_signal() -> None:
    assert run(_ENDING.replace('sys.argv[2] == "handler"', "False"), "SIGTERM", "handler")[0] == -signal.SIGTERM
    code, said = run(_ENDING, "SIGTERM", "handler")
    assert (code, said[-1]) == (9, "mine")


@pytest.mark.spawns
def test_rank_that_ignored_the_signal_ignores_the_launchers_too() -> None:
    assert run(_ENDING, "SIGTERM", "ignored") == (0, ["asked True", "alive 0"])


# -- fork -------------------------------------------------------------------------------------------------------------

_FORK = """
import os, signal, sys, threading
import resilience
from resilience.pulse import client
from resilience.pulse.page import W_STOP_ASKED, W_STOP_CALLS

def mine(number, frame):
    print("mine", os.getpid() == parent, flush=True)

parent = os.getpid()
signal.signal(signal.SIGUSR1, mine)
resilience.stop_requested()
ours = [signal.getsignal(it) for it in (signal.SIGTERM, signal.SIGUSR1)]
words = client._here.pulse.page.words

def fork_and_look():
    pid = os.fork()
    if pid == 0:
        found = [signal.getsignal(it) for it in (signal.SIGTERM, signal.SIGUSR1)]
        signal.raise_signal(signal.SIGUSR1)
        print("restored", found == [signal.SIG_DFL, mine], resilience.stop_requested(), flush=True)
        signal.raise_signal(signal.SIGTERM)
        os._exit(17)
    print("ended by", -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

if sys.argv[1] == "thread":
    thread = threading.Thread(target=fork_and_look)
    thread.start()
    thread.join()
else:
    fork_and_look()
print("untouched", words[W_STOP_ASKED], words[W_STOP_CALLS], flush=True)
print("kept", [signal.getsignal(it) for it in (signal.SIGTERM, signal.SIGUSR1)] == ours, flush=True)
signal.raise_signal(signal.SIGTERM)
print("stops", resilience.stop_requested(), flush=True)
"""


@pytest.mark.spawns
@pytest.mark.parametrize("by", ["main", "thread"])
def test_forked_child_has_its_old_handlers_back_and_the_parent_keeps_ours(by: str) -> None:
    code, said = run(_FORK, by)
    assert code == 0
    assert said == [
        "mine False",
        "restored True False",
        f"ended by {int(signal.SIGTERM)}",
        "untouched 0 1",
        "kept True",
        "stops True",
    ]


_FORK_AFTER_THE_USER = """
import os, signal
from resilience.pulse.page import Page
from resilience.pulse.stop import Stop

stop = Stop(Page.private(), alone=True)
stop.requested()
def mine(number, frame): pass
signal.signal(signal.SIGTERM, mine)
stop.forget()
print(signal.getsignal(signal.SIGTERM) is mine, signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)
"""


@pytest.mark.spawns
def test_forked_child_keeps_a_handler_that_the_user_set_after_ours() -> None:
    assert run(_FORK_AFTER_THE_USER) == (0, ["True True"])


# -- without a launcher -----------------------------------------------------------------------------------------------

_PLAIN = """
import os, signal
import resilience
print(resilience.stop_requested())
os.kill(os.getpid(), signal.SIGTERM)
print(resilience.stop_requested())
"""


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("world", "outcome"),
    [("1", (0, ["False", "True"])), ("", (0, ["False", "True"])), ("2", (-signal.SIGTERM, ["False"]))],
)
def test_without_a_launcher_a_signal_stops_one_process_and_ends_several_as_it_would_without_us(
    monkeypatch: pytest.MonkeyPatch, world: str, outcome: tuple[int, list[str]]
) -> None:
    for name in ("RESILIENCE_SOCKET", "RESILIENCE_LATE_ATTACH", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    assert run(_PLAIN) == outcome


def test_word_that_announces_the_end_is_not_a_request(page: Page) -> None:
    stop = Stop(page, alone=True)
    stop.requested()
    page.words[W_ENDING] = 1
    assert stop.requested() is False


def test_rank_with_others_and_no_launcher_leaves_signals_to_whoever_had_them() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = Stop(Page.private(), alone=False, deaf=True)
    assert not stop.requested()
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_that_somebody_took_are_taken_back_and_handlers_are_called_once(page: Page) -> None:
    heard: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("first"))
    stop = Stop(page, alone=True)
    assert not stop.requested()
    signal.signal(signal.SIGTERM, lambda *_: heard.append("framework"))
    for _ in range(2):
        stop.listen()
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["framework"]
    assert stop.requested()
