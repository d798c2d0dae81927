from __future__ import annotations

import signal

from resilience.monitor.ladder import Ladder
from tests.fakes import S, at


def climb(ladder: Ladder, *seconds: float) -> list[int | None]:
    """Return the signal that is due at each moment."""
    sent: list[int | None] = []
    for moment in seconds:
        signum, ladder = ladder.due(at(moment))
        sent.append(signum)
    return sent


def test_first_signal_comes_at_once_and_once() -> None:
    assert climb(Ladder(signal.SIGTERM, 10 * S), 0, 0.1, 5, 9.9) == [signal.SIGTERM, None, None, None]


def test_sigkill_comes_after_the_grace_and_not_before() -> None:
    assert climb(Ladder(signal.SIGTERM, 10 * S), 100, 109.999, 110) == [signal.SIGTERM, None, signal.SIGKILL]


def test_sigkill_is_repeated_once_a_second() -> None:
    sent = climb(Ladder(signal.SIGTERM, 10 * S), 0, 10, 10.5, 11, 11.9, 12)
    assert sent == [signal.SIGTERM, signal.SIGKILL, None, signal.SIGKILL, None, signal.SIGKILL]


def test_ladder_that_starts_with_sigkill_has_no_grace() -> None:
    assert climb(Ladder(signal.SIGKILL, 10 * S), 0, 0.5, 1.0) == [signal.SIGKILL, None, signal.SIGKILL]


def test_other_first_signals_are_sent_as_they_are() -> None:
    assert climb(Ladder(signal.SIGINT, S), 0, 1) == [signal.SIGINT, signal.SIGKILL]


def test_next_rung_is_known_beforehand() -> None:
    ladder = Ladder(signal.SIGTERM, 10 * S)
    assert ladder.next_ns() == 0
    _, asked = ladder.due(at(5))
    assert asked.next_ns() == at(15)
    _, killed = asked.due(at(15))
    assert killed.next_ns() == at(16)
    assert killed.due(at(16) - 1)[0] is None
    assert killed.due(at(16))[0] == signal.SIGKILL


def test_late_look_sends_what_is_due_and_does_not_catch_up() -> None:
    assert climb(Ladder(signal.SIGTERM, 10 * S), 0, 1000, 1000.1) == [signal.SIGTERM, signal.SIGKILL, None]
