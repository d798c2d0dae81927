"""When a step is bad: on traces as training has them, and how far to go back."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from resilience.checkpoint.judgement import Rules, Trouble, Verdict, is_spike, verdict

STEPS = 4000


def language(rng: random.Random) -> Iterator[float]:
    """A language model: from 11 down to 2.5, with the noise of a batch."""
    for step in range(STEPS):
        yield 2.5 + 8.5 * math.exp(-step / 150) + rng.gauss(0, 0.06)


def learning_rate_warm_up(rng: random.Random) -> Iterator[float]:
    """It stands still, then rises by a half while the learning rate does, then falls."""
    for step in range(STEPS):
        hump = 0.5 * math.exp(-(((step - 200) / 60) ** 2))
        yield (7 * math.exp(-max(0, step - 250) / 400) + 1.5) * (1 + hump) * math.exp(rng.gauss(0, 0.03))


def warm_restarts(rng: random.Random) -> Iterator[float]:
    """The learning rate jumps back every 500 steps, and the loss with it, by a third within a few steps."""
    for step in range(STEPS):
        since = step % 500
        jump = 0.35 * (1 - math.exp(-since / 4)) * math.exp(-since / 120) if step >= 500 else 0
        yield (1.2 + 3 * math.exp(-step / 600)) * (1 + jump) * math.exp(rng.gauss(0, 0.02))


def small_batches(rng: random.Random) -> Iterator[float]:
    """A classifier near its end: losses of single samples, over three orders of magnitude."""
    for _ in range(STEPS):
        yield 0.05 * math.exp(rng.gauss(0, 1.0))


def tasks_that_take_turns(rng: random.Random) -> Iterator[float]:
    """Two tasks, one with a loss thirty times the other's, one batch in eight."""
    for _ in range(STEPS):
        yield (3.0 if rng.random() < 0.125 else 0.1) * math.exp(rng.gauss(0, 0.2))


def likelihoods(rng: random.Random) -> Iterator[float]:
    """Losses that cross zero."""
    for step in range(STEPS):
        yield 4 - 9 * (1 - math.exp(-step / 400)) + rng.gauss(0, 0.4)


def heavy_tails(rng: random.Random) -> Iterator[float]:
    """Noise with tails: Laplace, a tenth of the loss."""
    for step in range(STEPS):
        noise = rng.expovariate(1) - rng.expovariate(1)
        yield (2 + 6 * math.exp(-step / 300)) * (1 + 0.1 * max(noise, -8))


def steps_of_a_schedule(rng: random.Random) -> Iterator[float]:
    """A step schedule: the loss drops, and its noise with it."""
    for step in range(STEPS):
        level = 2.0 * 0.4 ** (step // 1000)
        yield level * math.exp(rng.gauss(0, 0.05))


def gradient_norms(rng: random.Random) -> Iterator[float]:
    """Norms: large at first, then noisy by half, with bursts of a few steps."""
    burst = 0.0
    for step in range(STEPS):
        burst = 0.7 * burst if rng.random() > 0.01 else rng.uniform(0, 1.2)
        yield (0.4 + 20 * math.exp(-step / 40)) * math.exp(rng.gauss(0, 0.35) + burst)


def constant(rng: random.Random) -> Iterator[float]:
    """A loss that is what it is."""
    for _ in range(STEPS):
        yield 0.0


TRACES = [
    language,
    learning_rate_warm_up,
    warm_restarts,
    small_batches,
    tasks_that_take_turns,
    likelihoods,
    heavy_tails,
    steps_of_a_schedule,
    gradient_norms,
    constant,
]
Trace = Callable[[random.Random], Iterator[float]]


@pytest.mark.parametrize("trace", TRACES)
def test_no_step_of_a_sound_training_is_bad(trace: Trace) -> None:
    rules = Rules()
    for seed in range(5):
        past: deque[float] = deque(maxlen=rules.window)
        for step, value in enumerate(trace(random.Random(seed))):
            assert verdict({"loss": past}, {"loss": value}, rules) == (Verdict.OK, ""), (seed, step)
            past.append(value)


@pytest.mark.parametrize("times", [4.0, 10.0, 1e6])
@pytest.mark.parametrize("trace", [language, learning_rate_warm_up, warm_restarts, steps_of_a_schedule])
def test_spike_is_found_at_once_wherever_it_comes(trace: Trace, times: float) -> None:
    rules = Rules()
    for seed in range(3):
        past: deque[float] = deque(maxlen=rules.window)
        for step, value in enumerate(trace(random.Random(seed))):
            if step >= 600 and step % 97 == 0 and step % 1000 >= 128:  # after a drop it must top what was before it
                found, why = verdict({"loss": past}, {"loss": value * times}, rules)
                assert found is Verdict.ROLL_BACK, (seed, step)
                assert why.startswith("loss ")
                assert ", of late " in why
            past.append(value)


@pytest.mark.parametrize("trace", [small_batches, heavy_tails, gradient_norms, tasks_that_take_turns, likelihoods])
def test_what_is_beyond_all_noise_is_found_in_noisy_trainings_too(trace: Trace) -> None:
    values = list(trace(random.Random(1)))[-128:]
    assert is_spike(values, 1e7, 10.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_what_is_no_number_is_bad_from_the_first_step_on(value: float, name: str) -> None:
    figures = {"loss": 1.0, "grad_norm": 1.0, name: value}
    assert verdict({}, figures, Rules()) == (Verdict.ROLL_BACK, f"{name} {value:g}")
    assert verdict({}, figures, Rules(spike=None)) == (Verdict.ROLL_BACK, f"{name} {value:g}")
    skipping = Rules(skip_nan=True)
    assert verdict({}, figures, skipping)[0] is Verdict.SKIP
    assert verdict({}, figures, skipping, skipped=16)[0] is Verdict.ROLL_BACK, "not for ever"


def test_spikes_are_looked_for_only_after_the_warm_up_and_if_asked() -> None:
    few, enough = [1.0, 1.1] * 31, [1.0, 1.1] * 32
    assert verdict({"loss": few}, {"loss": 1e9}, Rules())[0] is Verdict.OK
    assert verdict({"loss": enough}, {"loss": 1e9}, Rules())[0] is Verdict.ROLL_BACK
    assert verdict({"loss": enough}, {"loss": 1e9}, Rules(spike=None))[0] is Verdict.OK
    assert verdict({"loss": enough}, {"loss": 1e-9}, Rules())[0] is Verdict.OK, "what falls is never bad"
    assert verdict({"loss": enough}, {"grad_norm": 1e9}, Rules())[0] is Verdict.OK, "each is judged by its own past"


def test_verdicts_of_several_ranks_add_up_to_the_worst() -> None:
    assert max(Verdict.OK, Verdict.SKIP) is Verdict.SKIP
    assert max(Verdict.SKIP, Verdict.ROLL_BACK) is Verdict.ROLL_BACK


def test_same_place_is_one_that_training_has_not_come_past() -> None:
    first = Trouble().bad(25, 25).went_back(24)
    assert (first.row, first.again, first.back_at) == (1, 0, 24)
    second = first.bad(25, 26)
    assert (second.row, second.again) == (2, 1)
    assert second.bad(22, 23).again == 2, "on the way to it counts too"
    further = first.good(26, 32).bad(27, 28)
    assert (further.row, further.again) == (2, 0), "another place, of the same bad stretch"


def test_trouble_is_forgotten_after_enough_good_steps() -> None:
    trouble = Trouble().bad(25, 25)
    assert trouble.good(57, 32) == trouble
    assert trouble.good(58, 32) == Trouble()
    assert Trouble().good(10**6, 32) == Trouble()
