from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from resilience.failover import policy
from resilience.failover.failure import EXCEPTION, EXIT, OOM, SIGNAL, RankFailure, examine
from resilience.failover.history import History, Past
from resilience.failover.policy import Decision, FailureState, decide
from resilience.failover.strategy import FailoverStrategy as Strategy

HARDWARE = (14, 128, 201, 202)
HANG = "hang"


def failed(**changes: Any) -> Past:
    """Return a failed cycle: an exception at step 10 on node a, with ``changes``."""
    usual: dict[str, Any] = {
        "cycle": 1,
        "kind": EXCEPTION,
        "signature": "ValueError|bad batch|train.py:step",
        "node": "a",
        "rank": 0,
        "exit_code": 1,
        "step": 10,
    }
    return Past(**{**usual, **changes})


def after(*failures: Past) -> History:
    """Return the history of a job that was restarted after each of ``failures``, all of which count."""
    history = History()
    for number, failure in enumerate(failures):
        history = history.after(dataclasses.replace(failure, cycle=number), restarted=True)
    return history


def state(now: Past | None = None, *before: Past, **changes: Any) -> FailureState:
    """Return the state of an adopted job with restarts left that failed ``before`` and has failed ``now``."""
    usual: dict[str, Any] = {"history": after(*before), "max_restarts": 100, "adopted": True}
    return FailureState(now or failed(), **{**usual, **changes})


def signature_of(message: str, kind: str = "ValueError", line: int = 30) -> str:
    return raised(message, kind, line).signature


def raised(message: str, kind: str = "ValueError", line: int = 30) -> RankFailure:
    """Return what a rank that raised leaves behind, read from its log as the launcher reads it."""
    said = f"{kind}: {message}" if message else kind
    log = f'Traceback (most recent call last):\n  File "/job/train.py", line {line}, in step\n{said}\n'
    return examine(0, 1, 0, log=log)


# -- a script that never began ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("began", [True, False])
def test_restarts_are_suggested_only_where_something_has_run(began: bool) -> None:
    chosen = decide(state(max_restarts=0, began=began))
    assert chosen.restart is False
    assert ("--max-restarts=N" in chosen.reason) is began


def test_script_that_never_began_is_not_tried_a_third_time_though_it_tells_no_step() -> None:
    twice = failed(kind=EXIT, signature="exit 2|", exit_code=2, step=None)
    assert decide(state(twice, twice, adopted=False, began=False)).strategy is Strategy.ABORTION_FAILOVER
    assert decide(state(twice, twice, adopted=False)).strategy is Strategy.NORMAL_FAILOVER
    assert decide(state(twice, adopted=False, began=False)).strategy is Strategy.NORMAL_FAILOVER


# -- a broken device --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", HARDWARE)
def test_exit_code_of_a_broken_device_replaces_the_node(code: int) -> None:
    chosen = decide(state(failed(kind=EXIT, exit_code=code)))
    assert (chosen.strategy, chosen.restart) == (Strategy.NODE_FAILOVER, True)
    assert str(code) in chosen.reason


@pytest.mark.parametrize("code", HARDWARE)
def test_error_code_of_a_broken_device_replaces_the_node_whatever_the_exit_code(code: int) -> None:
    for exit_code in (1, None, -6):
        chosen = decide(state(failed(exit_code=exit_code), error_code=code))
        assert chosen.strategy is Strategy.NODE_FAILOVER, exit_code


@pytest.mark.parametrize("code", [0, 1, 2, 13, 15, 127, 129, 137, 200, 203, -14, -9, None])
def test_no_other_code_means_a_broken_device(code: int | None) -> None:
    assert policy.hardware_code(state(failed(kind=EXIT, exit_code=code), error_code=code)) is None


def test_broken_device_twice_replaces_the_node_again_and_does_not_end_the_job() -> None:
    broken = failed(kind=EXIT, exit_code=201, signature="exit 201|", step=None)
    assert decide(state(broken, broken)).strategy is Strategy.NODE_FAILOVER


def test_broken_device_replaces_the_node_although_no_restarts_are_left() -> None:
    chosen = decide(state(failed(exit_code=202), max_restarts=0))
    assert (chosen.strategy, chosen.restart) == (Strategy.NODE_FAILOVER, True)


# -- the same failure twice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [10, 9, 0])
def test_same_failure_twice_without_progress_ends_the_job(step: int) -> None:
    chosen = decide(state(failed(step=step), failed()))
    assert chosen.strategy is Strategy.ABORTION_FAILOVER
    assert "cycle 0" in chosen.reason
    assert f"step {step}" in chosen.reason


def test_same_failure_twice_with_progress_in_between_is_restarted() -> None:
    chosen = decide(state(failed(step=11), failed()))
    assert (chosen.strategy, chosen.restart) == (Strategy.NORMAL_FAILOVER, True)


def test_same_failure_at_a_step_that_only_an_earlier_cycle_had_passed_ends_the_job() -> None:
    other = failed(signature="KeyError|x|train.py:step", step=50)
    assert decide(state(failed(step=20), other, failed(step=10))).strategy is Strategy.ABORTION_FAILOVER


def test_other_failure_in_between_makes_it_no_repetition() -> None:
    assert policy.same_failure_twice(state(failed(), failed(), failed(signature="KeyError|x|train.py:step"))) is None


def test_first_failure_is_no_repetition() -> None:
    assert policy.same_failure_twice(state()) is None


def test_failures_without_a_signature_are_never_the_same() -> None:
    assert policy.same_failure_twice(state(failed(signature=""), failed(signature=""))) is None


def test_echo_of_another_ranks_failure_is_never_the_same_failure() -> None:
    assert policy.same_failure_twice(state(failed(), failed(), echo=True)) is None


def test_same_failure_before_the_first_step_twice_ends_the_job() -> None:
    chosen = policy.same_failure_twice(state(failed(step=None), failed(step=None)))
    assert chosen is not None
    assert chosen.strategy is Strategy.ABORTION_FAILOVER
    assert "before the first step" in chosen.reason


@pytest.mark.parametrize("kind", [EXCEPTION, SIGNAL, HANG, OOM, EXIT])
def test_failure_before_the_first_step_and_the_same_one_far_into_training_is_no_repetition(kind: str) -> None:
    early, late = failed(kind=kind, step=None), failed(kind=kind, step=5000)
    chosen = decide(state(late, early))
    assert (chosen.strategy, chosen.restart) == (Strategy.NORMAL_FAILOVER, True), chosen.reason


def test_same_failure_on_another_node_without_progress_ends_the_job() -> None:
    assert decide(state(failed(node="b", rank=9), failed())).strategy is Strategy.ABORTION_FAILOVER


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("index 17 is out of bounds for 16", "index 4711 is out of bounds for 8"),
        ("bad tensor at 0x7f00dead", "bad tensor at 0x55"),
        ("shard 3: loss is nan", "shard 12: loss is nan"),
    ],
)
def test_digits_in_a_message_do_not_make_it_another_failure(first: str, second: str) -> None:
    again = state(failed(signature=signature_of(second, line=31)), failed(signature=signature_of(first)))
    assert decide(again).strategy is Strategy.ABORTION_FAILOVER


@pytest.mark.parametrize(
    "other", [signature_of("loss is inf"), signature_of("loss is nan", "KeyError"), signature_of("")]
)
def test_other_words_or_another_type_make_it_another_failure(other: str) -> None:
    again = state(failed(signature=signature_of("loss is nan")), failed(signature=other))
    assert decide(again).strategy is Strategy.NORMAL_FAILOVER


def test_sigkill_from_outside_with_unknown_step_is_not_the_same_failure() -> None:
    shot = examine(0, -9, 0)
    killed = failed(kind=shot.kind, signature=shot.signature, exit_code=-9, step=None)
    chosen = decide(state(killed, killed, killed))
    assert (shot.kind, chosen.strategy, chosen.restart) == (SIGNAL, Strategy.NORMAL_FAILOVER, True)


def test_same_signal_at_the_same_known_step_ends_the_job() -> None:
    crashed = failed(kind=SIGNAL, signature="signal -11|step", exit_code=-11, step=10)
    assert decide(state(crashed, crashed)).strategy is Strategy.ABORTION_FAILOVER


def test_hang_at_the_same_place_twice_ends_the_job() -> None:
    hung = failed(kind=HANG, signature="hang|load", exit_code=None, step=None)
    assert decide(state(hung, hung)).strategy is Strategy.ABORTION_FAILOVER


# -- a script that does not call us -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [EXCEPTION, SIGNAL, OOM, EXIT])
def test_script_that_does_not_call_us_only_has_the_budget(kind: str) -> None:
    unknown = failed(kind=kind, step=None)
    for restarts in range(3):
        chosen = decide(state(unknown, *[unknown] * restarts, adopted=False, max_restarts=3))
        assert (chosen.strategy, chosen.restart) == (Strategy.NORMAL_FAILOVER, True), restarts
    spent = decide(state(unknown, *[unknown] * 3, adopted=False, max_restarts=3))
    assert (spent.strategy, spent.restart) == (Strategy.NORMAL_FAILOVER, False)


# -- before the first step --------------------------------------------------------------------------------------------


def test_error_before_the_first_step_is_retried_once() -> None:
    first, second = failed(step=None, signature="KeyError|x|"), failed(step=None, signature="TypeError|y|")
    assert decide(state(first)) == policy.restart(state())
    again = decide(state(second, first))
    assert again.strategy is Strategy.ABORTION_FAILOVER
    assert "before its first step for the second time" in again.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"adopted": False},
        {"echo": True},
        {"now": failed(kind=SIGNAL, step=None)},
        {"now": failed(signature="other", step=0)},
    ],
)
def test_only_a_users_error_before_the_first_step_is_one(changes: dict[str, Any]) -> None:
    now = failed(signature="TypeError|y|", step=None)
    twice = state(now, failed(step=None))
    assert policy.user_error_before_the_first_step(twice) is not None, "else this test can't fail"
    assert policy.user_error_before_the_first_step(dataclasses.replace(twice, **changes)) is None


@pytest.mark.parametrize("before", [failed(kind=SIGNAL, step=None), failed(kind=OOM, step=None), failed(step=0)])
def test_what_failed_before_has_to_be_a_users_error_before_the_first_step_too(before: Past) -> None:
    now = failed(signature="TypeError|y|", step=None)
    assert policy.user_error_before_the_first_step(state(now, before)) is None


def test_error_before_the_first_step_after_training_had_begun_is_not_blamed_on_the_script() -> None:
    # The job has trained before: the code can be run, so what is wrong may pass.
    trained, lost = failed(kind=SIGNAL, step=50), failed(step=None, signature="OSError|no such mount|")
    chosen = decide(state(failed(step=None, signature="OSError|stale handle|"), trained, lost))
    assert (chosen.strategy, chosen.restart) == (Strategy.NORMAL_FAILOVER, True)


# -- memory -----------------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = [
    examine(0, -9, 0, oom="out of memory: ended by the kernel's OOM killer"),
    raised("CUDA out of memory. Tried to allocate 20 MiB", "torch.OutOfMemoryError"),
    raised("Cannot allocate memory", "OSError"),
    raised("", "MemoryError"),
]


@pytest.mark.parametrize("how", OUT_OF_MEMORY, ids=lambda how: str(how.message)[:40])
@pytest.mark.parametrize("step", [10, None])
def test_memory_that_runs_out_is_retried_once_and_said_as_such(how: RankFailure, step: int | None) -> None:
    out = failed(kind=how.kind, signature=how.signature, exit_code=how.exit_code, step=step)
    first = decide(state(out))
    assert (how.kind, first.strategy, first.restart) == (OOM, Strategy.NORMAL_FAILOVER, True)
    assert "out of memory" in first.reason
    assert decide(state(out, out)).strategy is Strategy.ABORTION_FAILOVER


def test_memory_that_runs_out_at_a_later_step_is_retried() -> None:
    out = failed(kind=OOM, signature="oom -9|step")
    assert decide(state(dataclasses.replace(out, step=11), out)).strategy is Strategy.NORMAL_FAILOVER


def test_nothing_else_is_said_to_be_memory() -> None:
    assert policy.out_of_memory(state(failed(kind=SIGNAL, exit_code=-9))) is None


def test_memory_that_runs_out_with_no_restarts_left_ends_the_job() -> None:
    assert not decide(state(failed(kind=OOM), max_restarts=0)).restart


# -- budgets ----------------------------------------------------------------------------------------------------------


def other(number: int, **changes: Any) -> Past:
    """Return a failure unlike any other."""
    return failed(**{"signature": "e" * (number + 1), "kind": SIGNAL, **changes})


def test_no_restarts_allowed_ends_the_job_and_says_which_flag_would_help() -> None:
    chosen = decide(state(max_restarts=0))
    assert chosen.restart is False
    assert "--max-restarts" in chosen.reason


@pytest.mark.parametrize("allowed", [1, 2, 5])
def test_job_is_restarted_as_often_as_allowed_and_not_once_more(allowed: int) -> None:
    chosen = [
        decide(state(other(number), *map(other, range(number)), max_restarts=allowed)).restart
        for number in range(allowed + 1)
    ]
    assert chosen == [True] * allowed + [False]


def test_spent_budget_says_how_many_restarts_were_used() -> None:
    chosen = decide(state(other(3), other(0), other(1), other(2), max_restarts=3))
    assert "all 3 restarts are used without getting further" in chosen.reason
    never = decide(state(*[other(number, step=None) for number in range(4)], max_restarts=3))
    assert "all 3 restarts are used" in never.reason
    assert "further" not in never.reason, "nobody told how far it got"


def test_progress_renews_the_budget_of_the_job() -> None:
    before = [other(number) for number in range(3)]
    assert decide(state(other(3, step=11), *before, max_restarts=3)).restart
    assert not decide(state(other(3, step=10), *before, max_restarts=3)).restart


def test_first_step_after_failures_before_it_renews_the_budget() -> None:
    before = [other(number, step=None) for number in range(3)]
    assert decide(state(other(3, step=0), *before, max_restarts=3)).restart


def test_node_that_was_restarted_in_place_often_enough_is_replaced() -> None:
    before = [other(0, node="a"), other(1, node="b"), other(2, node="a")]
    chosen = decide(state(other(3, node="a"), *before, max_node_restarts=2))
    assert chosen.strategy is Strategy.NODE_FAILOVER
    assert "2 restarts in place of node a" in chosen.reason
    assert decide(state(other(3, node="b"), *before, max_node_restarts=2)).strategy is Strategy.NORMAL_FAILOVER


def test_progress_renews_the_budget_of_the_node() -> None:
    before = [other(0), other(1)]
    assert policy.budget_of_the_node(state(other(2), *before, max_node_restarts=2)) is not None
    assert policy.budget_of_the_node(state(other(2, step=11), *before, max_node_restarts=2)) is None


def test_node_without_a_limit_is_never_replaced_for_its_restarts() -> None:
    assert policy.budget_of_the_node(state(other(50), *map(other, range(50)))) is None


def test_job_without_restarts_left_ends_and_does_not_replace_the_node() -> None:
    chosen = decide(state(other(2), other(0), other(1), max_restarts=2, max_node_restarts=1))
    assert chosen.restart is False


def test_node_that_never_may_be_restarted_in_place_is_replaced_at_once() -> None:
    assert decide(state(max_node_restarts=0)).strategy is Strategy.NODE_FAILOVER


# -- the extension's word ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [Strategy.NODE_FAILOVER, Strategy.GLOBAL_FAILOVER, Strategy.ABORTION_FAILOVER])
def test_extension_goes_before_the_rules(asked: Strategy) -> None:
    by_rules = [state(), state(failed(exit_code=201)), state(failed(), failed())]
    for each in by_rules:
        chosen = decide(each, asked, "mine::Mine")
        assert (chosen.strategy, chosen.restart) == (asked, True)
        assert "mine::Mine" in chosen.reason


def test_extension_that_says_normal_leaves_it_to_the_rules() -> None:
    for each in (state(), state(failed(exit_code=201)), state(failed(), failed()), state(max_restarts=0)):
        assert decide(each, Strategy.NORMAL, "mine::Mine") == decide(each)


def test_global_restart_with_a_spent_budget_stops() -> None:
    chosen = decide(state(max_restarts=0), Strategy.GLOBAL_FAILOVER, "mine::Mine")
    assert chosen.restart is False
    assert "--max-restarts is 0" in chosen.reason


@pytest.mark.parametrize("asked", [Strategy.NODE_FAILOVER, Strategy.ABORTION_FAILOVER])
def test_what_needs_no_restart_is_done_with_a_spent_budget_too(asked: Strategy) -> None:
    assert decide(state(max_restarts=0), asked, "mine::Mine") == Decision(asked, f"mine::Mine asks for {asked.value}")


# -- whole jobs -------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A job that goes from failure to failure, as the court would take it through them."""

    max_restarts: int
    history: History = History()
    cycle: int = 0
    max_node_restarts: int | None = None

    def fails(self, failure: Past, asked: Strategy = Strategy.NORMAL_FAILOVER) -> Decision:
        """Decide on a failure and remember it."""
        now = dataclasses.replace(failure, cycle=self.cycle)
        chosen = decide(
            FailureState(
                now, self.history, self.max_restarts, self.max_node_restarts, adopted=failure.step is not None
            ),
            asked,
        )
        counts = chosen.strategy in (Strategy.NORMAL_FAILOVER, Strategy.GLOBAL_FAILOVER)
        self.history = self.history.after(now, restarted=chosen.restart, counts=counts)
        self.cycle += 1
        return chosen


def lives(job: Job, fails: Callable[[int], Past], at_most: int = 2000) -> int:
    """Return how often a job is restarted before it ends."""
    for restarts in range(at_most):
        chosen = job.fails(fails(restarts))
        if not chosen.restart or chosen.strategy is Strategy.ABORTION_FAILOVER:
            return restarts
    return at_most


@pytest.mark.parametrize("allowed", [1, 3])
def test_job_that_always_gets_further_never_runs_out_of_restarts(allowed: int) -> None:
    job = Job(allowed)
    assert lives(job, lambda number: failed(step=number)) == 2000
    assert job.history.total == 2000


@pytest.mark.parametrize("allowed", [0, 1, 3, 40])
def test_job_that_never_gets_further_ends_after_its_restarts(allowed: int) -> None:
    # Every failure differs from the one before, so that only the budget can end it.
    assert lives(Job(allowed), lambda number: other(number % 7)) == allowed


def test_job_that_never_tells_a_step_ends_after_its_restarts_although_all_its_failures_are_alike() -> None:
    assert lives(Job(5), lambda number: failed(step=None)) == 5


def test_job_that_falls_back_to_its_checkpoint_every_time_ends_after_its_restarts() -> None:
    assert lives(Job(6), lambda number: other(number % 7, step=(100, 70, 99, 100)[number % 4])) == 6


@pytest.mark.parametrize("seed", range(5))
def test_budget_is_the_jobs_whatever_node_fails(seed: int) -> None:
    rng = random.Random(seed)
    assert lives(Job(8), lambda number: other(number % 7, node=rng.choice("abcdefgh"))) == 8


@pytest.mark.parametrize("seed", range(20))
def test_job_ends_exactly_when_its_restarts_since_the_last_progress_are_used(seed: int) -> None:
    rng = random.Random(seed)
    best, since = -1, 0
    job = Job(4)
    for number in range(500):
        step = rng.randrange(max(0, best - 5), best + 3)
        if step > best:
            best, since = step, 0
        chosen = job.fails(other(number % 7, step=step, node=rng.choice("ab")))
        assert chosen.restart == (since < 4), (number, step, best, since)
        if not chosen.restart:
            return
        since += 1
    pytest.fail("the job went on for ever: this seed shows nothing")


def test_replaced_nodes_take_nothing_from_the_budget_of_the_job() -> None:
    job = Job(1)
    for number in range(50):
        chosen = job.fails(other(number % 7, kind=EXIT, exit_code=201, node=f"n{number}"))
        assert chosen.strategy is Strategy.NODE_FAILOVER
    assert job.fails(other(1)).restart
    assert not job.fails(other(2)).restart
