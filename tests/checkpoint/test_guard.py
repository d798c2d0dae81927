"""A guard over a training of one process: what goes bad is undone, and what did it does not come again."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import resilience
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.guard import Guard, GuardError
from resilience.checkpoint.stores.local import Directory
from resilience.errors import CheckpointError, ConfigError

END = 30


class Loader:
    """Shuffled batches, for ever; some of them are bad. Its position is part of its state."""

    def __init__(self, bad: dict[int, float] | None = None, without: tuple[int, ...] = ()) -> None:
        self.bad, self.without = bad or {}, without
        self.rng = random.Random(5)
        self.number = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            batch = torch.linspace(-1, 1, 32).view(8, 4) * self.rng.uniform(0.5, 1.5)
            self.number += 1
            if self.number - 1 not in self.without:
                yield batch * self.bad.get(self.number - 1, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]
        self.rng.setstate(state["rng"])


class Training:
    """Something with dropout, batch norm, momentum and a schedule."""

    def __init__(self, loader: Loader, model: nn.Module | None = None) -> None:
        torch.manual_seed(3)
        usual = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 1))
        self.model = model or usual
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)
        self.loader = loader
        self.steps: list[int] = []

    def things(self) -> dict[str, Any]:
        found = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        return {**found, "loader": self.loader}

    def backward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.model(batch) * batch.abs().amax()).square().mean()
        loss.backward()
        return loss

    def update(self, step: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.steps.append(step)

    def bits(self) -> list[bytes]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        found = [tensor.detach().numpy().tobytes() for tensor in tensors]
        return [*found, repr((self.schedule.state_dict(), self.loader.state_dict(), float(torch.rand(1)))).encode()]


def straight(*without: int, end: int = END) -> list[bytes]:
    """How it ends where these batches never were."""
    training = Training(Loader(without=without))
    for step, batch in zip(range(end), training.loader, strict=False):
        training.backward(batch)
        training.update(step)
    return training.bits()


@pytest.fixture
def home(saver_home: Path, tmp_path: Path) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models: on a busy machine threads that wait for each other take seconds
    yield tmp_path / "checkpoints"
    torch.set_num_threads(threads)


def guarded(
    home: Path, training: Training, end: int = END, options: dict[str, Any] | None = None, **guarding: Any
) -> Guard:
    with FlashCheckpoint(home, **{"disk_every": None, **(options or {})}, **training.things()) as checkpoint:
        guard = Guard(checkpoint, **guarding)
        start = checkpoint.restore(allow_fresh_start=True)
        for step, batch in guard.steps(training.loader, start, end):
            loss = training.backward(batch)
            norm = nn.utils.clip_grad_norm_(training.model.parameters(), 1e9)
            if guard.bad(loss, norm):
                continue
            training.update(step)
            checkpoint.save(step, wait=60)
    return guard


def test_it_has_a_public_name() -> None:
    assert resilience.Guard is Guard


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "overlap", "verify": True}, {"memory_every": 4}, {"slots": 2, "disk_every": 3}],
    ids=["blocking", "overlap", "every fourth", "two slots"],
)
def test_training_ends_bit_for_bit_as_if_the_bad_batch_had_never_been_there(
    home: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(Loader({13: math.nan}))
    guarded(home, training, options=options)
    assert training.bits() == straight(13)
    assert sorted(set(training.steps)) == list(range(END))
    assert "step 13, batch 13 (rank 0: loss nan, grad_norm nan) is bad" in caplog.text
    assert "batch 13 is left out; rollback 1 of at most 3 in a row" in caplog.text


@pytest.mark.parametrize("bad", [{13: 1e4}, {13: math.inf, 14: math.nan, 25: math.nan}])
def test_spikes_and_several_bad_batches_are_left_out_too(home: Path, bad: dict[int, float]) -> None:
    training = Training(Loader(bad))
    guarded(home, training, warmup=8, options={"slots": 4})
    numbers = range(12, 15) if len(bad) == 3 else (13,)  # the second one in the same place takes its neighbour along
    assert training.bits() == straight(*numbers, *(key for key in bad if key > 14))


def test_without_a_bad_batch_nothing_is_different(home: Path) -> None:
    training = Training(Loader())
    guarded(home, training)
    assert training.bits() == straight()
    assert training.steps == list(range(END))


def test_lagged_judgement_goes_back_behind_the_step_that_was_saved_bad(home: Path) -> None:
    for number, at in enumerate((13, END - 1)):  # the last step of all is judged too
        training = Training(Loader({at: math.nan}))
        guarded(home / str(number), training, lagged=True, options={"disk_every": 1, "keep": 50})
        assert training.bits() == straight(at)
        stored = [item.manifest.step for item in Directory(home / str(number)).stored()]
        assert stored[0] == END - 1


def test_data_that_is_kept_is_tried_once_more_and_then_left_out(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    passing = Loader({13: math.nan})
    training = Training(passing)
    heal = passing.load_state_dict

    def heals(state: dict[str, Any]) -> None:
        passing.bad = {}  # as a bit that flipped on its way
        heal(state)

    passing.load_state_dict = heals  # type: ignore[method-assign]
    guarded(home / "a", training, data="keep")
    assert training.bits() == straight()
    assert "the data is tried once more" in caplog.text
    training = Training(Loader({13: math.nan}))
    guarded(home / "b", training, data="keep")
    assert training.bits() == straight(13)


def test_update_alone_can_be_left_out_where_a_gradient_scaler_looks_for_its_scale(home: Path) -> None:
    # Nothing in it but what the update writes.
    training = Training(Loader({0: math.inf, 13: math.nan}), nn.Linear(4, 1))
    guarded(home, training, on_nan="skip")
    assert training.steps == list(range(END))
    assert all(bool(parameter.isfinite().all()) for parameter in training.model.parameters())
    assert training.loader.number == END + 2


def test_bad_step_before_anything_is_saved_is_only_left_out(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(Loader({0: math.nan}), nn.Linear(4, 1))
    guarded(home, training)
    assert training.steps == list(range(END))
    assert "its update is left out" in caplog.text


def test_several_bad_steps_before_anything_is_saved_are_only_left_out(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(Loader({0: math.nan, 1: math.nan, 2: math.inf}), nn.Linear(4, 1))
    guarded(home, training)
    assert training.steps == list(range(END))
    assert training.loader.number == END + 3
    assert "left out, since nothing is saved yet to go back to, time 3 of at most 3." in caplog.text
    assert all(bool(parameter.isfinite().all()) for parameter in training.model.parameters())


@pytest.mark.parametrize("most", [1, 3])
def test_training_that_is_bad_from_the_start_ends_with_an_error_that_says_so(home: Path, most: int) -> None:
    training = Training(Loader(dict.fromkeys(range(100), math.nan)), nn.Linear(4, 1))
    with pytest.raises(GuardError) as caught:
        guarded(home, training, max_rollbacks=most)
    assert training.steps == []
    assert (
        f"step 0, batch {most} (rank 0: loss nan, grad_norm nan), after {most} times that nothing was saved yet"
        in str(caught.value)
    )
    assert str(caught.value).count("nothing is saved yet") == most
    assert "What is saved" not in str(caught.value)


def test_training_that_stays_bad_ends_with_an_error_that_names_everything(home: Path) -> None:
    training = Training(Loader(dict.fromkeys(range(13, 100), math.nan)))
    with pytest.raises(GuardError) as caught:
        guarded(home, training, options={"slots": 4})
    text = str(caught.value)
    assert "after 3 rollbacks in a row (rank 0 on " in text
    assert "step 13, batch 13 (rank 0: loss nan, grad_norm nan): back to step 12" in text
    assert ": back to step 11" in text
    assert ": back to step 10" in text
    assert "What is saved is the last good step." in text
    again = Training(Loader())
    with FlashCheckpoint(home, disk_every=None, slots=4, **again.things()) as checkpoint:
        assert checkpoint.restore() == 11, "what is saved is good"


def test_nothing_older_to_go_back_to_is_an_error_that_names_what_there_is(home: Path) -> None:
    training = Training(Loader({1: math.nan, 2: math.nan}))
    with pytest.raises(GuardError, match=r"nothing older to go back to: .*There is step 0 \(memory\)"):
        guarded(home, training)


def test_what_did_harm_is_known_after_a_restart_too(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(Loader({13: math.nan, 20: math.nan}))
    guarded(home, training, end=16, options={"disk_every": 4, "keep": 9})
    caplog.clear()
    again = Training(Loader({13: math.nan, 20: math.nan}))
    with FlashCheckpoint(home, disk_every=None, **again.things()) as checkpoint:
        guard = Guard(checkpoint)
        start = checkpoint.restore()
        assert start == 16
        start = checkpoint.rollback(before=12)  # to before the bad one: it does not come again
        for step, batch in guard.steps(again.loader, start, END):
            if guard.bad(again.backward(batch)):
                continue
            again.update(step)
            checkpoint.save(step, wait=60)
    assert again.bits() == straight(13, 20)
    assert "step 19, batch 20" in caplog.text
    assert "batch 13 " not in caplog.text


def test_guard_can_be_switched_on_and_off_between_runs(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    for end, on, bad in ((6, False, 99), (12, True, 6), (16, False, 99), (END, True, 18)):
        training = Training(Loader({bad: math.nan}))
        if on:
            guarded(home, training, end=end)
        else:
            with FlashCheckpoint(home, disk_every=None, **training.things()) as checkpoint:
                start = checkpoint.restore(allow_fresh_start=True)
                for step, batch in zip(range(start, end), training.loader, strict=False):
                    training.backward(batch)
                    training.update(step)
                    checkpoint.save(step, wait=60)
    assert training.bits() == straight(6, 18)
    assert "left as it is" not in caplog.text


def test_rollback_by_hand_in_the_loop_is_followed(home: Path) -> None:
    training = Training(Loader())
    done = False
    with FlashCheckpoint(home, disk_every=None, **training.things()) as checkpoint:
        guard = Guard(checkpoint)
        for step, batch in guard.steps(training.loader, checkpoint.restore(allow_fresh_start=True), END):
            if step == 9 and not done:
                assert checkpoint.rollback(steps=1) == 8
                done = True
                continue
            training.backward(batch)
            training.update(step)
            checkpoint.save(step, wait=60)
    assert training.steps == [*range(9), *range(8, END)]
    assert training.bits() == straight()


def test_reordered_data_goes_on_without_the_step_that_was_bad(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Ordered(Loader):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch
            if epoch:
                self.bad = {}  # in another order the batch is another one

    training = Training(Ordered({13: math.nan}))
    guarded(home, training, data="reorder")
    assert training.bits() == straight()
    assert "the data comes in another order" in caplog.text


def test_what_can_not_be_meant_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FlashCheckpoint(home / "empty") as empty, pytest.raises(ConfigError, match="has nothing to go back to"):
        Guard(empty)
    with FlashCheckpoint(home / "full", **Training(Loader()).things()) as checkpoint:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"data": "skp"}, "Did you mean 'skip'"),
            ({"on_nan": "ignore"}, "give one of rollback, skip"),
            ({"spike": 0}, "more than 0, or None"),
            ({"window": 0}, "from 1 up"),
            ({"max_rollbacks": True}, "from 1 up"),
            ({"window": 8}, "is more than window=8"),
            ({"on_nan": "skip", "lagged": True}, "can no longer be left out"),
        ]
        for options, match in wrong:
            with pytest.raises(ConfigError, match=match):
                Guard(checkpoint, **options)
        with monkeypatch.context() as patch:
            patch.setenv("RANK", "0")
            patch.setenv("WORLD_SIZE", "2")
            with pytest.raises(ConfigError, match="2 ranks have to decide together"):
                Guard(checkpoint)
            guard = Guard(checkpoint, group=False)  # they give the same figures
        with pytest.raises(CheckpointError, match="belongs in the loop"):
            guard.bad(1.0)
        with pytest.raises(ConfigError, match="has a guard already"):
            Guard(checkpoint)
        checkpoint.restore(allow_fresh_start=True)
        next(iter(guard.steps([1.0], 0, 1)))
        with pytest.raises(ConfigError, match="nothing to judge"):
            guard.bad()


@pytest.mark.parametrize("lagged", [False, True])
def test_what_is_no_single_number_is_refused_in_words(home: Path, lagged: bool) -> None:
    with FlashCheckpoint(home, **Training(Loader()).things()) as checkpoint:
        guard = Guard(checkpoint, lagged=lagged)
        checkpoint.restore(allow_fresh_start=True)
        next(iter(guard.steps([1.0], 0, 1)))
        wrong: list[tuple[Any, str]] = [
            (torch.ones(3), r"loss=…\) was given a tensor of shape \[3\] and torch.float32"),
            (torch.ones(0), r"a tensor of shape \[0\]"),
            (torch.tensor(1j), "torch.complex64"),
            ("1.0", "a str, which is no single real number"),
            (1j, "a complex"),
            ([1.0], "a list"),
            (np.ones(3), "a ndarray"),
            (10**400, "an? int .*too large"),
        ]
        for value, match in wrong:
            with pytest.raises(ConfigError, match=match):
                guard.bad(value)
            with pytest.raises(ConfigError, match=r"guard.bad\(grad_norm=…\)"):
                guard.bad(1.0, value)
        for value in (
            1,
            True,
            np.float32(1),
            torch.ones(1, 1),
            torch.tensor(1, dtype=torch.bfloat16, requires_grad=False),
        ):
            assert not guard.bad(value)


def test_its_words_are_warnings_where_it_was_seen(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    guarded(home, Training(Loader({13: math.nan})))
    told = [record for record in caplog.records if "is bad" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING]
