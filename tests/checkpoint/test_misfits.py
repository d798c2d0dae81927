"""What is sound and does not fit, and calls that can't be meant: refused in words, with nothing lost."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resilience.checkpoint import encoding
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.receipt import Level
from resilience.checkpoint.restore import MisfitError
from resilience.checkpoint.stores.local import Directory
from resilience.errors import CheckpointError, ConfigError, NothingToRestore
from tests.jobs import wait_for

pytestmark = pytest.mark.spawns


@pytest.fixture
def home(saver_home: Path, tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def steps_in(home: Path) -> list[int]:
    return [item.manifest.step for item in Directory(home).stored()]


def trained(
    *sizes: int, kind: type[torch.optim.Optimizer] = torch.optim.Adam
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a model and its optimizer after one step."""
    model = nn.Sequential(*(nn.Linear(one, other) for one, other in itertools.pairwise(sizes)))
    optimizer = kind(model.parameters(), lr=0.01)
    advance(model, optimizer)
    return model, optimizer


def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first = next(model.parameters())
    model(torch.ones(1, first.shape[1])).sum().backward()
    optimizer.step()


def keep(home: Path, step: int, **things: Any) -> None:
    with FlashCheckpoint(home, **things) as checkpoint:
        if steps_in(home):
            checkpoint.restore(strict=False)
        checkpoint.save(step)


# -- what an earlier run left -----------------------------------------------------------------------------------------


def test_run_that_forgets_to_restore_is_refused_and_what_was_there_stays(home: Path) -> None:
    model, optimizer = trained(2, 2)
    keep(home, 99, model=model, optimizer=optimizer)
    with FlashCheckpoint(home, model=model, optimizer=optimizer, keep=1) as checkpoint:
        with pytest.raises(CheckpointError, match=r"earlier run, up to step 99, .* Nothing was saved\. Call restore"):
            checkpoint.save(0)
        with pytest.raises(CheckpointError, match="earlier run"):
            checkpoint.save_state(0, {})
        assert checkpoint.restore() == 100
        checkpoint.save(100)
    wait_for(lambda: steps_in(home) == [100], "the saver to remove what is not kept")


# -- what does not fit ------------------------------------------------------------------------------------------------


def test_optimizer_of_another_kind_is_refused_and_nothing_is_changed(home: Path) -> None:
    model, optimizer = trained(2, 2)
    keep(home, 1, model=model, optimizer=optimizer)
    other, sgd = trained(2, 2, kind=torch.optim.SGD)
    before = other[0].weight.clone()
    with FlashCheckpoint(home, model=other, optimizer=sgd) as checkpoint:
        with pytest.raises(MisfitError, match=r"optimizer is a torch\.optim\.sgd\.SGD, in the checkpoint a .*Adam"):
            checkpoint.restore()
        assert torch.equal(other[0].weight, before)
        assert checkpoint.restore(strict=False) == 2
        assert torch.equal(other[0].weight, model[0].weight)
        assert sgd.param_groups[0]["lr"] == 0.01
        advance(other, sgd)


@pytest.mark.parametrize("sizes", [(4, 8, 2), (4, 4, 2), (4, 4, 4, 2), (4, 2)])
def test_not_strict_loads_what_fits_of_model_and_optimizer_and_training_goes_on(
    home: Path, sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained(4, 4, 2)
    keep(home, 7, model=model, optimizer=optimizer)
    other, adam = trained(*sizes)
    with FlashCheckpoint(home, model=other, optimizer=adam) as checkpoint:
        if sizes != (4, 4, 2):
            with pytest.raises(MisfitError):
                checkpoint.restore()
        assert checkpoint.restore(strict=False) == 8
        shapes = {name: one.shape for name, one in model.named_parameters()}
        fits = [name for name, one in other.named_parameters() if one.shape == shapes.get(name)]
        for name in fits:
            one, origin = other.get_parameter(name), model.get_parameter(name)
            assert torch.equal(one, origin)
            assert torch.equal(adam.state[one]["exp_avg"], optimizer.state[origin]["exp_avg"]), name
        assert fits or sizes == (4, 2)
        assert ("left as it is" in caplog.text) == (sizes != (4, 4, 2))
        for _ in range(2):
            advance(other, adam)
        checkpoint.save(8)


def test_part_that_is_new_leaves_the_others_as_they_were_saved(home: Path) -> None:
    model, optimizer = trained(2, 2)
    keep(home, 3, model=model, optimizer=optimizer)
    other, adam = trained(2, 2)
    average = torch.optim.swa_utils.AveragedModel(other)
    with FlashCheckpoint(home, model=other, optimizer=adam, average=average) as checkpoint:
        with pytest.raises(MisfitError, match="average was not saved"):
            checkpoint.restore()
        assert checkpoint.restore(strict=False) == 4
        assert torch.equal(adam.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_misfit_ends_at_the_newest_and_does_not_fall_back_to_an_older_one(home: Path) -> None:
    old, new = nn.Linear(2, 2), nn.Linear(3, 3)
    keep(home, 5, model=old)
    keep(home, 9, model=new)
    with FlashCheckpoint(home, model=old) as checkpoint:
        with pytest.raises(
            MisfitError, match=r"step 9 \(disk\) does not fit \(rank 0\): model.*Older ones were not tried"
        ):
            checkpoint.restore()
        assert checkpoint.restore(step=5) == 6
    assert steps_in(home)[0] == 9, "nothing newer was saved, and nothing was removed"


class Fussy:
    """Something that does not take what it gave."""

    def __init__(self, takes: bool) -> None:
        self._takes = takes

    def state_dict(self) -> dict[str, int]:
        return {"at": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self._takes:
            raise AttributeError("where is my worker?")


def test_script_that_can_not_load_a_sound_state_hears_of_its_own_error_and_can_go_on(home: Path) -> None:
    model = nn.Linear(2, 2)
    keep(home, 1, model=model, loader=Fussy(True))
    with FlashCheckpoint(home, model=model, loader=Fussy(False), restore_timeout=30) as checkpoint:
        with pytest.raises(MisfitError, match=r"where is my worker\?\. Some of it may have been loaded") as caught:
            checkpoint.restore()
        assert isinstance(caught.value.__cause__, AttributeError)
        assert checkpoint.restore(weights_only=True) == 2, "at once"


class Impatient(Fussy):
    """Whoever watches it presses Ctrl-C, once."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self._takes:
            self._takes = True
            raise KeyboardInterrupt


def test_restore_that_was_interrupted_can_be_called_again_at_once(home: Path) -> None:
    keep(home, 1, loader=Fussy(True))
    with FlashCheckpoint(home, loader=Impatient(False), restore_timeout=30) as checkpoint:
        with pytest.raises(KeyboardInterrupt):
            checkpoint.restore()
        assert checkpoint.restore() == 2
        checkpoint.save(2)


class Angle:
    """Something that only its codec can make."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees


def test_codec_that_is_not_registered_is_no_damage(home: Path) -> None:
    encoding.register_codec(Angle, lambda angle: angle.degrees, Angle, "tests.Angle")
    try:
        with FlashCheckpoint(home) as checkpoint:
            checkpoint.save_state(1, {"angle": Angle(90.0)})
            assert checkpoint.wait().level is Level.DURABLE
    finally:
        encoding._codecs.pop(Angle)
    with (
        FlashCheckpoint(home) as checkpoint,
        pytest.raises(MisfitError, match=r"no codec 'tests\.Angle' is registered"),
    ):
        checkpoint.load_state()


def test_state_of_the_other_form_is_said_to_be_so(home: Path) -> None:
    keep(home, 1, model=nn.Linear(1, 1))
    with FlashCheckpoint(home) as checkpoint, pytest.raises(MisfitError, match=r"saved by save\(\), and restore\(\)"):
        checkpoint.load_state()


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_model_and_plain_one_have_the_same_names(home: Path, compiled: bool) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    keep(home, 1, model=torch.compile(one, backend="eager") if compiled else one)
    with FlashCheckpoint(home, model=other if compiled else torch.compile(other, backend="eager")) as checkpoint:
        assert checkpoint.restore() == 2
    assert torch.equal(one.weight, other.weight)


# -- calls that can't be meant ----------------------------------------------------------------------------------------


def test_second_checkpoint_of_one_process_in_one_directory_is_refused_while_the_first_is_open(home: Path) -> None:
    first = FlashCheckpoint(home)
    with pytest.raises(ConfigError, match=r"another FlashCheckpoint of this process is open.*close\(\) that one"):
        FlashCheckpoint(home / ".." / "checkpoints")
    first.save_state(1, {"x": 1})
    first.close()
    with FlashCheckpoint(home) as second:
        assert second.load_state() == {"x": 1}


def test_save_in_a_second_thread_while_one_saves_is_refused(home: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    class Slow(Fussy):
        def state_dict(self) -> dict[str, int]:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert go.wait(60)
            return super().state_dict()

    with FlashCheckpoint(home, thing=Slow(True)) as checkpoint:
        other = threading.Thread(target=checkpoint.save, args=(1,))
        other.start()
        assert inside.wait(60)
        with pytest.raises(CheckpointError, match="saving or restoring already: in another thread"):
            checkpoint.save(2)
        go.set()
        other.join()
        checkpoint.save(3, wait=60)
    assert steps_in(home)[0] == 3


def test_step_that_goes_back_is_refused_and_what_is_newest_stays(home: Path) -> None:
    with FlashCheckpoint(home, keep=1) as checkpoint:
        checkpoint.save_state(10, {"x": 10}, wait=60)
        with pytest.raises(CheckpointError, match=r"save\(5\): step 10 was saved before it"):
            checkpoint.save_state(5, {"x": 5})
        checkpoint.save_state(10, {"x": 11}, wait=60)
        assert checkpoint.load_state() == {"x": 11}
        checkpoint.save_state(5, {"x": 5}, wait=60)  # whoever has gone back may
    wait_for(lambda: steps_in(home) == [5], "the saver to remove what is not kept")


@pytest.mark.parametrize("step", [np.int64(4), np.uint8(4), torch.tensor(4)])
def test_step_may_be_a_number_of_numpy_or_torch(home: Path, step: Any) -> None:
    with FlashCheckpoint(home) as checkpoint:
        checkpoint.save_state(step, {})
    assert steps_in(home) == [4]


@pytest.mark.parametrize("step", [1 << 62, -1, True, 1.0, "1", None, np.float32(1)])
def test_step_that_is_none_is_refused(home: Path, step: Any) -> None:
    with FlashCheckpoint(home) as checkpoint, pytest.raises(CheckpointError, match="must be a whole number from 0 up"):
        checkpoint.save_state(step, {})


def test_missing_step_is_not_answered_with_advice_that_does_not_help(home: Path) -> None:
    with FlashCheckpoint(home) as checkpoint, pytest.raises(NothingToRestore) as caught:
        checkpoint.restore(step=4, allow_fresh_start=True)
    assert "allow_fresh_start" not in str(caught.value)


def test_leaving_by_an_exception_leaves_no_descriptor(home: Path) -> None:
    def leave(number: int) -> None:
        with pytest.raises(KeyError), FlashCheckpoint(home / str(number)) as checkpoint:
            checkpoint.save_state(1, {"x": torch.ones(3)})
            raise KeyError

    leave(0)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for number in range(1, 5):
        leave(number)
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_options_that_can_not_be_meant_are_refused(home: Path) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"replicated='model': give a list of names, \['model'\]"):
        FlashCheckpoint(home, model=model, replicated="model")
    for name in ("rng", "verify"):
        wrong: dict[str, Any] = {name: "yes"}
        with pytest.raises(ConfigError, match=f"{name}=a str: give True or False"):
            FlashCheckpoint(home, model=model, **wrong)
