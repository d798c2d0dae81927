"""``FlashCheckpoint`` in a single process, with a real saver: what is saved comes back to the bit, nothing is lost in silence."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import resilience
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.guard import Guard
from resilience.checkpoint.receipt import Level, Receipt
from resilience.checkpoint.stores.claims import DirectoryInUse
from resilience.checkpoint.stores.local import Directory, read_manifest, write_manifest
from resilience.errors import CheckpointError, ConfigError, NothingToRestore, SaveError
from tests.checkpoint.conftest import savers
from tests.jobs import wait_for

pytestmark = pytest.mark.spawns


class Net(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A small model with everything that state dicts have: tied weights, buffers, a frozen parameter, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.seen = 0

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.seen += len(words)
        hidden: torch.Tensor = self.out(self.drop(self.norm(self.embed(words))))
        return hidden

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Training:
    """A model, an optimizer and a schedule, and steps that depend on all of them and on every random state."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        random.seed(7)
        numpy.random.seed(7)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)

    def step(self) -> None:
        words = torch.randint(0, 11, (4 + random.randrange(3),)) + int(numpy.random.randint(0, 1))
        loss = nn.functional.cross_entropy(self.model(words), words)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def things(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def bits(self) -> list[bytes]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        found = [tensor.detach().numpy().tobytes() for tensor in tensors]
        return [*found, repr((self.model.seen, self.schedule.state_dict(), random.random())).encode()]


@pytest.fixture
def home(saver_home: Path, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "checkpoints"


def open_checkpoint(home: Path, training: Training, **options: Any) -> FlashCheckpoint:
    return FlashCheckpoint(home, **{"disk_every": None, **options}, **training.things())


@pytest.mark.parametrize("through", ["memory", "disk"])
def test_training_that_goes_on_from_a_snapshot_ends_like_one_that_was_never_interrupted(
    home: Path, through: str
) -> None:
    straight = Training()
    for _ in range(12):
        straight.step()
    expected = straight.bits()
    broken = Training()
    with open_checkpoint(home, broken) as checkpoint:
        assert checkpoint.restore(allow_fresh_start=True) == 0
        for step in range(6):
            broken.step()
            checkpoint.save(step, wait=60)
        for _ in range(3):
            broken.step()  # lost
        if through == "memory":
            checkpoint.wait(level=Level.COMPLETE)
            assert checkpoint.restore() == 6
            again = broken
        else:
            assert checkpoint.wait().level is Level.DURABLE
    if through == "disk":
        again = Training()
        again.step()
        checkpoint = open_checkpoint(home, again)
        assert checkpoint.restore() == 6
        checkpoint.close()
    for _ in range(6, 12):
        again.step()
    assert again.bits() == expected


def test_what_is_saved_is_a_copy_and_what_is_restored_is_one_too(home: Path) -> None:
    state = {"weights": torch.arange(1000.0), "array": numpy.arange(10), "list": [1, [2]]}
    checkpoint = FlashCheckpoint(home, disk_every=None)
    checkpoint.save_state(3, state)
    state["weights"].fill_(-1)  # right after save()
    state["array"][:] = -1
    state["list"][1].append(9)
    first = checkpoint.load_state()
    assert torch.equal(first["weights"], torch.arange(1000.0))
    assert first["array"].tolist() == list(range(10))
    assert first["list"] == [1, [2]]
    first["weights"].fill_(-2)  # what came back is not the snapshot either
    first["array"][:] = -2
    second = checkpoint.load_state(3)
    assert torch.equal(second["weights"], torch.arange(1000.0))
    assert second["array"].tolist() == list(range(10))
    checkpoint.close()


def test_restored_optimizer_shares_no_memory_with_the_snapshot(home: Path) -> None:
    training = Training()
    training.step()
    with open_checkpoint(home, training) as checkpoint:
        checkpoint.save(0)
        checkpoint.restore()
        before = training.bits()
        for _ in range(5):
            training.step()
        checkpoint.restore()
        assert training.bits() == before


def test_every_structure_gets_a_plan_of_its_own(home: Path) -> None:
    """Adam before its first step, a list that grows, another dtype, another order: never a stale value."""
    states: list[Any] = [
        {"a": torch.ones(3), "b": []},
        {"a": torch.ones(3), "b": [torch.zeros(2)]},
        {"a": torch.ones(3, dtype=torch.float64), "b": [torch.zeros(2), torch.ones(1)]},
        {"b": [torch.full((2,), 5.0)], "a": torch.full((3,), 6.0)},
        {"a": {"b": torch.ones(1), "c": torch.ones(100_000)}},
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
    ]
    checkpoint = FlashCheckpoint(home, disk_every=None)
    for step, state in enumerate(states):
        checkpoint.save_state(step, state)
        checkpoint.wait(level=Level.COMPLETE)
        found = checkpoint.load_state(step)
        assert repr(found) == repr(state)
        assert list(found) == list(state)
    checkpoint.close()


def test_receipt_says_where_a_save_stands(home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=2)
    receipt = checkpoint.save_state(2, {"x": torch.ones(1)})
    assert checkpoint.wait(2, Level.COMPLETE) is receipt
    assert receipt.level is Level.COMPLETE
    durable = checkpoint.save_state(3, {"x": torch.ones(1)})
    assert checkpoint.wait().level is durable.level is Level.DURABLE
    assert "DURABLE" in repr(durable)
    assert checkpoint.latest() == 3
    checkpoint.close()
    assert receipt.level is Level.COMPLETE, "of a slot that is gone the last word stays"


def test_step_that_is_not_due_is_skipped_in_words(home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=None, memory_every=10)
    receipt = checkpoint.save_state(3, {})
    assert (receipt.level, receipt.reason) == (Level.SKIPPED, "not due: every 10 steps")
    assert checkpoint.save_state(19, {}).level is not Level.SKIPPED
    assert checkpoint.save_state(21, {}, disk=True).level is not Level.SKIPPED
    checkpoint.close()


def test_nothing_to_restore_is_an_error_unless_a_fresh_start_was_allowed(home: Path) -> None:
    training = Training()
    with open_checkpoint(home, training) as checkpoint:
        with pytest.raises(NothingToRestore, match="allow_fresh_start=True"):
            checkpoint.restore()
        with pytest.raises(NothingToRestore, match="step 7"):
            checkpoint.restore(7, allow_fresh_start=True)
        assert checkpoint.restore(allow_fresh_start=True) == 0


def test_exit_of_the_block_waits_until_the_last_save_is_on_disk(home: Path) -> None:
    training = Training()
    with open_checkpoint(home, training) as checkpoint:
        for step in range(5):
            training.step()
            checkpoint.save(step, wait=60)
    assert [item.manifest.step for item in Directory(home).stored()] == [4]


def test_checkpoint_of_another_model_is_refused_before_anything_is_changed(home: Path) -> None:
    first = nn.Linear(3, 3)
    with FlashCheckpoint(home, model=first, disk_every=None) as checkpoint:
        checkpoint.save(1)
    other = nn.Linear(3, 4)
    before = other.weight.detach().clone()
    with FlashCheckpoint(home, model=other, disk_every=None) as checkpoint:
        with pytest.raises(CheckpointError, match=r"model.weight is \[4, 3\].*in the checkpoint \[3, 3\]"):
            checkpoint.restore()
        assert torch.equal(other.weight, before)


def test_missing_and_unexpected_parts_are_named_and_can_be_allowed(home: Path) -> None:
    with FlashCheckpoint(home, model=nn.Linear(2, 2), disk_every=None) as checkpoint:
        checkpoint.save(1)
    bigger = nn.Sequential(nn.Linear(2, 2))
    with FlashCheckpoint(home, model=bigger, extra=nn.Linear(1, 1), disk_every=None) as checkpoint:
        with pytest.raises(CheckpointError, match=r"extra was not saved.*0\.bias"):
            checkpoint.restore()
        assert checkpoint.restore(strict=False) == 2


def test_tensor_of_another_shape_is_left_as_it_is_without_strict(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, other = nn.Linear(3, 3), nn.Linear(3, 4)
    with FlashCheckpoint(home, model=first, disk_every=None) as checkpoint:
        checkpoint.save(1)
    before = other.weight.detach().clone()
    with FlashCheckpoint(home, model=other, disk_every=None) as checkpoint:
        assert checkpoint.restore(strict=False) == 2
    assert torch.equal(other.weight, before)
    assert "model.weight" in caplog.text


def test_empty_tensors_alone_survive_on_disk(home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=1)
    checkpoint.save_state(0, {"nothing": torch.empty(0, 5, dtype=torch.int8)})
    checkpoint.close()
    again = FlashCheckpoint(home)
    assert again.load_state()["nothing"].shape == (0, 5)
    again.close()


def test_restored_process_begins_anew_and_old_attempts_do_not_count(home: Path) -> None:
    """Going back within one process: what is saved again at the same steps is new, not what was there before."""
    checkpoint = FlashCheckpoint(home, disk_every=None)
    for step in range(4):
        checkpoint.save_state(step, {"x": step})
        checkpoint.wait(level=Level.COMPLETE)
    assert checkpoint.load_state(2) == {"x": 2}
    for step in (3, 4):
        checkpoint.save_state(step, {"x": -step})
        assert checkpoint.wait(step, Level.COMPLETE).level is Level.COMPLETE
    assert checkpoint.load_state() == {"x": -4}
    checkpoint.close()


def test_weights_alone_can_be_restored(home: Path) -> None:
    training = Training()
    training.step()
    with open_checkpoint(home, training) as checkpoint:
        checkpoint.save(0)
    fresh = Training()
    with open_checkpoint(home, fresh) as checkpoint:
        assert checkpoint.restore(weights_only=True) == 1
    assert torch.equal(fresh.model.embed.weight, training.model.embed.weight)
    assert not fresh.optimizer.state


def test_second_job_in_the_same_directory_is_refused(home: Path) -> None:
    with FlashCheckpoint(home, model=nn.Linear(1, 1)) as checkpoint:
        checkpoint.save(1)
        with pytest.raises(DirectoryInUse, match="another job"):
            Directory(home).claim("another")


def test_value_that_can_not_be_kept_is_refused_with_its_place_and_nothing_breaks(home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=None)
    checkpoint.save_state(1, {"fine": 1})
    with pytest.raises(CheckpointError, match=r"state.bad.0.*register_codec"):
        checkpoint.save_state(2, {"bad": [object()]})
    checkpoint.wait(1, Level.COMPLETE)
    assert checkpoint.load_state() == {"fine": 1}
    checkpoint.save_state(3, {"fine": 3})
    checkpoint.wait(3, Level.COMPLETE)
    assert checkpoint.load_state() == {"fine": 3}
    checkpoint.close()


def test_failure_in_the_background_is_raised_by_the_next_call_and_training_can_go_on(home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=1)
    checkpoint.save_state(1, {"x": torch.ones(4)})
    checkpoint.wait()
    (home / ".partial-00000002").write_text("in the way")  # a folder can't be made here
    checkpoint.save_state(2, {"x": torch.ones(4)})
    with pytest.raises(SaveError, match="step 2 could not be written"):
        checkpoint.wait()
    # The saver may have cleared the way, and be on it again.
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        (home / ".partial-00000002").unlink()
    assert torch.equal(checkpoint.load_state(2)["x"], torch.ones(4)), "it is still in memory"
    with contextlib.suppress(SaveError):  # waiting for it had it tried a second time
        checkpoint.save_state(3, {"x": torch.ones(4)}, wait=60)
    checkpoint.save_state(4, {"x": torch.ones(4)}, wait=60)
    assert checkpoint.wait().level is Level.DURABLE
    checkpoint.close()


def test_failures_are_only_said_up_to_a_limit_if_asked_for(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=1, on_save_error="warn", max_failures=5)
    home.rename(home.with_name("elsewhere"))
    home.write_text("in the way")
    checkpoint.save_state(1, {})
    checkpoint.wait()
    assert "could not be written" in caplog.text
    with pytest.raises(SaveError, match="could not be written"):
        for step in range(2, 8):
            checkpoint.save_state(step, {})
            checkpoint.wait()
    home.unlink()
    home.with_name("elsewhere").rename(home)
    checkpoint.save_state(9, {})
    assert checkpoint.wait().level is Level.DURABLE
    checkpoint.close()


def test_directory_that_somebody_removed_is_made_again(home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=1)
    checkpoint.save_state(1, {"x": 1})
    checkpoint.wait()
    shutil.rmtree(home)
    checkpoint.save_state(2, {"x": 2})
    assert checkpoint.wait().level is Level.DURABLE
    assert [item.manifest.step for item in Directory(home).stored()] == [2]
    checkpoint.close()


def test_dead_saver_does_not_stop_saving_and_is_replaced(home: Path, saver_home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=None)
    checkpoint.save_state(1, {"x": 1})
    checkpoint.wait(level=Level.COMPLETE)
    (pid,) = savers(saver_home)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pid not in savers(saver_home), "the saver to die")
    checkpoint.save_state(2, {"x": 2})  # must not raise or wait
    checkpoint.save_state(3, {"x": 3})
    assert checkpoint.wait(level=Level.DURABLE).level is Level.DURABLE
    assert savers(saver_home) != [pid]
    assert checkpoint.load_state() == {"x": 3}
    checkpoint.close()


def test_stopped_saver_never_blocks_a_save(home: Path, saver_home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=None)
    checkpoint.save_state(0, {"x": 0})
    checkpoint.wait(level=Level.COMPLETE)
    (pid,) = savers(saver_home)
    os.kill(pid, signal.SIGSTOP)
    try:
        receipts = [checkpoint.save_state(step, {"x": step}) for step in range(1, 40)]
        assert receipts[-1].level is Level.SKIPPED
        assert "not known to be sealed by all ranks yet" in receipts[-1].reason
    finally:
        os.kill(pid, signal.SIGCONT)
    assert checkpoint.wait(1, Level.COMPLETE).level is Level.COMPLETE
    checkpoint.close()


def test_save_that_finds_no_room_is_skipped_or_waits_as_asked_and_what_was_due_on_disk_is_owed(
    home: Path, saver_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=10)
    checkpoint.save_state(6, {"x": 6})
    checkpoint.wait(level=Level.COMPLETE)
    (pid,) = savers(saver_home)
    os.kill(pid, signal.SIGSTOP)
    try:
        receipts = {step: checkpoint.save_state(step, {"x": step}) for step in (7, 8, 9, 10)}
        assert receipts[9].level is receipts[10].level is Level.SKIPPED
        assert checkpoint.save_state(11, {"x": 11}, wait=0.05).level is Level.SKIPPED
    finally:
        os.kill(pid, signal.SIGCONT)
    assert checkpoint.save_state(12, {"x": 12}, wait=60).level is not Level.SKIPPED
    assert checkpoint.wait().level is Level.DURABLE
    assert [item.manifest.step for item in Directory(home).stored()] == [12], "step 9 was due, 12 is the next one kept"
    checkpoint.close()
    assert "the last save is not kept" not in caplog.text


def test_close_says_that_the_last_save_is_not_kept(
    home: Path, saver_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=None)
    checkpoint.save_state(0, {"x": 0})
    checkpoint.wait(level=Level.COMPLETE)
    (pid,) = savers(saver_home)
    os.kill(pid, signal.SIGSTOP)
    try:
        for step in (1, 2, 3):
            checkpoint.save_state(step, {"x": step})
    finally:
        os.kill(pid, signal.SIGCONT)
    checkpoint.close()
    assert "the last save is not kept: <save of step 3: SKIPPED" in caplog.text
    assert [item.manifest.step for item in Directory(home).stored()] == [2]


def test_directory_whose_last_writer_is_leaving_is_waited_for(home: Path) -> None:
    earlier = Directory(home)
    earlier.claim("earlier")
    earlier.say_leaving()
    done = threading.Timer(0.5, earlier.close)
    done.start()
    with FlashCheckpoint(home, model=nn.Linear(1, 1)) as checkpoint:
        assert not done.is_alive()
        checkpoint.save(1)
    assert [item.manifest.step for item in Directory(home).stored()] == [1]


def test_misspelt_option_is_an_error_that_names_the_nearest(home: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'disk_every'"):
        FlashCheckpoint(home, disk_evry=10)
    with pytest.raises(ConfigError, match="Did you mean 'model'"):
        FlashCheckpoint(home, model=nn.Linear(1, 1), replicated=["modle"])
    with pytest.raises(ConfigError, match="on_save_error"):
        FlashCheckpoint(home, on_save_error="explode")
    assert not home.exists()


def test_snapshot_that_does_not_fit_is_refused_before_step_0_with_the_figures(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resilience.checkpoint import memory

    monkeypatch.setattr(memory, "available", lambda: (1_000_000, "the control group (0.10 GB)"))
    with pytest.raises(memory.NotEnoughMemory, match=r"needs .* GB for 3 slots.*has 0.00 GB left"):
        FlashCheckpoint(home, model=nn.Linear(1000, 1000))


def test_slots_have_room_for_the_optimizer_before_its_first_step(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(500, 500)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint = FlashCheckpoint(home, model=model, optimizer=optimizer, disk_every=None)
    before = torch.get_rng_state(), [value.clone() for value in model.state_dict().values()]
    assert not optimizer.state, "nothing was materialised"
    model(torch.ones(500)).sum().backward()
    optimizer.step()
    checkpoint.save(0)
    assert "has grown" not in caplog.text
    assert torch.equal(before[0], torch.get_rng_state())
    checkpoint.close()


def test_step_that_is_saved_twice_is_on_disk_as_it_was_the_second_time(home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=1)
    for value in range(5):
        checkpoint.save_state(7, {"x": torch.full((100_000,), float(value))})
    assert checkpoint.wait().level in (Level.DURABLE, Level.SKIPPED)
    checkpoint.wait(7, Level.COMPLETE)
    again = checkpoint.save_state(7, {"x": torch.full((100_000,), 9.0)}, wait=60)
    assert checkpoint.wait().level is again.level is Level.DURABLE
    checkpoint.close()
    later = FlashCheckpoint(home)
    assert later.load_state()["x"][0] == 9.0
    later.close()


def test_step_that_will_not_be_written_is_not_waited_for(home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=None)
    for step in range(3):
        checkpoint.save_state(step, {"x": step})
        checkpoint.wait(level=Level.COMPLETE)
    assert checkpoint.wait(1).level is Level.COMPLETE, "a newer one is there, and only that is written"
    assert checkpoint.wait().level is Level.DURABLE
    checkpoint.close()


class Position:
    """Something of which nobody knows whether it means the same to another number of ranks."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def saved_by_two(home: Path, **things: Any) -> None:
    """Save as one rank, and have it look as if two had, which are alike."""
    with FlashCheckpoint(home, **things) as checkpoint:
        checkpoint.save(1)
    as_if_by_two(home)


def as_if_by_two(home: Path) -> None:
    path = next(home.glob("step-*"))
    found = read_manifest(path)
    (path / "rank-00001.values").write_bytes((path / "rank-00000.values").read_bytes())
    values = (found.values[0], dataclasses.replace(found.values[0], rank=1, name="rank-00001.values"))
    write_manifest(path, dataclasses.replace(found, world=2, values=values))


def test_what_another_number_of_ranks_saved_is_restored(home: Path) -> None:
    saved, model = nn.Linear(1, 1), nn.Linear(1, 1)
    saved_by_two(home, model=saved)
    with FlashCheckpoint(home, model=model) as checkpoint:
        assert checkpoint.restore() == 2
    assert torch.equal(model.weight, saved.weight)


def test_what_may_belong_to_single_ranks_is_refused_when_their_number_changes_unless_that_is_allowed(
    home: Path,
) -> None:
    model, loader = nn.Linear(1, 1), Position(0)
    before = model.weight.clone()
    saved_by_two(home, model=nn.Linear(1, 1), loader=Position(7))
    checkpoint = FlashCheckpoint(home, model=model, loader=loader)
    with pytest.raises(
        CheckpointError, match=r"saved by 2 ranks, and here are 1; loader may be .*replicated=\['loader'\]"
    ):
        checkpoint.restore(allow_fresh_start=True)
    assert torch.equal(model.weight, before), "nothing was changed"
    assert checkpoint.restore(allow_other_world=True) == 2
    assert loader.at == 7
    checkpoint.close()


def test_what_is_declared_the_same_on_all_ranks_is_restored_by_any_number_of_them(home: Path) -> None:
    loader = Position(0)
    saved_by_two(home, loader=Position(7))
    with FlashCheckpoint(home, loader=loader, replicated=["loader"]) as checkpoint:
        assert checkpoint.restore() == 2
    assert loader.at == 7


def test_guard_keeps_nobody_from_going_on_with_another_number_of_ranks(home: Path) -> None:
    """What it knows of the data is of no use to them; that is no reason to refuse the rest."""
    saved, model = nn.Linear(1, 1), nn.Linear(1, 1)
    checkpoint = FlashCheckpoint(home, model=saved)
    Guard(checkpoint)
    checkpoint.save(1)
    checkpoint.close()
    as_if_by_two(home)
    checkpoint = FlashCheckpoint(home, model=model)
    Guard(checkpoint)
    assert checkpoint.restore() == 2
    assert torch.equal(model.weight, saved.weight)
    checkpoint.close()


def test_plain_state_of_another_number_of_ranks_is_refused_unless_that_is_allowed(home: Path) -> None:
    with FlashCheckpoint(home) as checkpoint:
        checkpoint.save_state(1, {"x": torch.ones(2)})
    as_if_by_two(home)
    checkpoint = FlashCheckpoint(home)
    with pytest.raises(CheckpointError, match="saved by 2 ranks, and here are 1; the state may be different"):
        checkpoint.load_state()
    assert checkpoint.load_state(allow_other_world=True)["x"].tolist() == [1, 1]
    checkpoint.close()


def test_process_that_ends_in_good_order_takes_leave_without_close(home: Path) -> None:
    """Whoever only looks at a checkpoint, again and again, must not have it set aside as one that restarts fail from."""
    with FlashCheckpoint(home, model=nn.Linear(1, 1)) as checkpoint:
        checkpoint.save(1)
    script = (
        "import sys, torch, resilience\n"
        f"checkpoint = resilience.FlashCheckpoint({str(home)!r}, model=torch.nn.Linear(1, 1))\n"
        "print(checkpoint.restore())"
    )
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout.strip() == "2", done.stderr


def test_public_name_is_the_class(home: Path) -> None:
    assert resilience.FlashCheckpoint is FlashCheckpoint


@pytest.mark.parametrize("every", [timedelta(milliseconds=300), "auto"])
def test_snapshots_by_the_clock_are_taken_now_and_then(home: Path, every: timedelta | str) -> None:
    failures = timedelta(days=1000)  # so rare that "auto" takes few
    with FlashCheckpoint(home, disk_every=None, memory_every=every, mean_time_between_failures=failures) as checkpoint:
        kept: list[int] = []

        def step() -> bool:
            number = len(receipts)
            receipts.append(checkpoint.save_state(number, {"x": torch.zeros(1000)}))
            if receipts[-1].level is not Level.SKIPPED:
                kept.append(number)
            return len(kept) >= 2

        receipts: list[Receipt] = []
        if every == "auto":
            wait_for(lambda: step() or bool(kept), "a first snapshot")
        else:
            wait_for(step, "two snapshots")
        assert len(receipts) > 2 * len(kept)
        assert receipts[0].level is Level.SKIPPED
        assert "not due" in receipts[0].reason
        assert checkpoint.wait(kept[-1], Level.COMPLETE).level is Level.COMPLETE


def test_directory_that_can_not_be_made_is_refused_in_words(saver_home: Path) -> None:
    with pytest.raises(CheckpointError, match="/proc/nothing/here can't be used for checkpoints: No such file"):
        FlashCheckpoint("/proc/nothing/here", model=nn.Linear(1, 1))


def test_disk_that_has_no_room_for_one_checkpoint_is_said_before_step_0(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("resilience.checkpoint.stores.local.free_bytes", lambda path: 1_000_000)
    with FlashCheckpoint(home, model=nn.Linear(1000, 1000), disk_every=None):
        assert re.search(
            r"checkpoints has 0\.00 GB left, one checkpoint of this node takes about 0\.00 GB", caplog.text
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": "x"}, "keep='x': give a whole number from 1 up"),
        ({"keep": 0}, "keep=0: give a whole number from 1 up"),
        ({"keep_every": -1}, "keep_every=-1"),
        ({"max_failures": 2.5}, "max_failures=2.5"),
        ({"slots": "3"}, "slots='3': give 2 to 8"),
        ({"restore_timeout": "soon"}, "restore_timeout='soon': give seconds"),
        ({"mean_time_between_failures": timedelta(-1)}, "mean_time_between_failures"),
    ],
)
def test_option_that_can_not_be_meant_is_refused_before_anything_is_made(
    home: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        FlashCheckpoint(home, model=nn.Linear(1, 1), **options)
    assert not home.exists()


def test_nonsense_in_a_call_is_refused_at_once(home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=None)
    checkpoint.save_state(1, {})
    with pytest.raises(ConfigError, match="wait=-1: give seconds"):
        checkpoint.save_state(2, {}, wait=-1)
    with pytest.raises(ConfigError, match="Did you mean 'DURABLE'"):
        checkpoint.wait(level="DURABEL")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="must be a whole number from 0 up"):
        checkpoint.load_state("x")  # type: ignore[arg-type]
    checkpoint.close()
    for call in (lambda: checkpoint.save_state(3, {}), checkpoint.load_state, checkpoint.wait, checkpoint.latest):
        with pytest.raises(CheckpointError, match="is closed"):
            call()
