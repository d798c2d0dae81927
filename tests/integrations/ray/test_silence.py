"""A supervisor that hangs is told from one that is slow, dead, or being restarted."""

from __future__ import annotations

from collections.abc import Iterator

from resilience.integrations.ray.silence import SIGN_EVERY_S, Silence


def yes() -> bool:
    return True


def moments(silence: Silence, signs: Iterator[float], seconds: int, alive: bool = True) -> list[int]:
    """Watch it second by second; return when it was found to hang."""
    return [now for now in range(seconds) if silence.hangs(next(signs), float(now), lambda: alive)]


def stuck() -> Iterator[float]:
    while True:
        yield 1000.0


def test_supervisor_that_gives_signs_of_life_is_never_ended() -> None:
    assert moments(Silence(0.0), (1000.0 + now // SIGN_EVERY_S for now in range(600)), 600) == []


def test_supervisor_that_hangs_is_found_and_gets_twice_the_time_after_that() -> None:
    assert moments(Silence(0.0), stuck(), 430) == [60, 180, 420]


def test_supervisor_that_ray_restarts_is_left_alone() -> None:
    assert moments(Silence(0.0), stuck(), 600, alive=False) == []


def test_supervisor_that_has_never_given_a_sign_is_left_alone() -> None:
    silence = Silence(0.0)
    assert not any(silence.hangs(None, float(now), yes) for now in range(600))
