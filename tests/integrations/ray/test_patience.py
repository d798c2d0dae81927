"""Actors that hang, and what a job calls its own."""

from __future__ import annotations

import pytest
from resilience.integrations.ray.names import claim_name, is_claim_of
from resilience.integrations.ray.patience import ALIVE, DEAD, TWICE_S, Patience


def silent(patience: Patience, begin: float, end: float, stands: str) -> str:
    """Why it is given up while time passes."""
    moments = [begin + 0.5 * number for number in range(int((end - begin) / 0.5))]
    return next(filter(None, (patience.is_over(1, now, lambda: stands) for now in moments)), "")


def test_actor_that_hangs_is_given_up_though_ray_holds_it_for_alive() -> None:
    patience = Patience()
    patience.asked(1, 0.0)
    assert not silent(patience, 0.0, 2 * TWICE_S - 1, ALIVE)
    assert silent(patience, 2 * TWICE_S - 1, 2 * TWICE_S + 2, ALIVE)


def test_actor_that_answers_is_never_given_up() -> None:
    patience = Patience()
    for number in range(20):
        patience.asked(1, number * 20.0)
        assert not silent(patience, number * 20.0, (number + 1) * 20.0, ALIVE)
        patience.answered(1)
    assert not silent(patience, 400.0, 1000.0, ALIVE)  # nothing was asked


def test_actor_that_waits_for_its_node_for_an_hour_has_time_to_answer_when_it_is_there() -> None:
    patience = Patience()
    patience.asked(1, 0.0)
    assert not silent(patience, 0.0, 3600.0, "PENDING_CREATION")
    assert not silent(patience, 3600.0, 3600.0 + TWICE_S, ALIVE)


def test_actor_that_ray_holds_for_dead_is_given_up_and_not_awaited_as_one_that_is_restarted() -> None:
    patience = Patience()
    patience.asked(1, 0.0)
    assert silent(patience, 0.0, TWICE_S + 1, DEAD) == "Ray holds it for dead"
    patience = Patience()
    patience.asked(1, 0.0)
    assert silent(patience, 0.0, 3600.0, "RESTARTING") == ""


def test_asker_that_was_away_itself_gives_nobody_up_for_that() -> None:
    patience = Patience()
    patience.asked(1, 0.0)
    assert not patience.is_over(1, 5000.0, lambda: ALIVE)
    patience.answered(1)
    assert not patience.is_over(1, 5000.5, lambda: ALIVE)


@pytest.mark.parametrize(
    "name", ["boom/mine", "boom/0a1b2c3d/1", "resilience/boom/mine", "resilience/boom2/0a1b2c3d/1", "boom"]
)
def test_name_that_somebody_else_may_have_is_not_the_jobs(name: str) -> None:
    assert not is_claim_of("boom", name)


def test_claims_and_stores_of_any_submission_are_the_jobs() -> None:
    assert is_claim_of("boom", claim_name("boom", "0a1b2c3d", 7))
    assert is_claim_of("boom", claim_name("boom", "ffffffff", "store-2"))
