"""Copies behind the next forward and backward: always what was there when save() was called, or no snapshot at all."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resilience.checkpoint import stager, watch
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.receipt import Level
from resilience.checkpoint.watch import Watch
from resilience.errors import ConfigError

pytestmark = pytest.mark.spawns
ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(saver_home: Path, tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


class Gate:
    """Holds every copy behind the training when its bytes are there, until it is opened; or already before, until it may begin."""

    def __init__(self) -> None:
        self.copied, self.open, self.begin = threading.Event(), threading.Event(), threading.Event()
        self.begin.set()

    def shut(self) -> None:
        self.copied.clear()
        self.open.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, plain = Gate(), stager.copy

    def held(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        behind = threading.current_thread().name == "resilience-copy"
        assert not behind or gate.begin.wait(60)
        plain(targets, sources)
        if behind:
            gate.copied.set()
            assert gate.open.wait(60)

    monkeypatch.setattr(stager, "copy", held)
    yield gate
    gate.begin.set()
    gate.open.set()


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def backward(model: nn.Module, seed: int) -> None:
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def state_of(**things: Any) -> dict[str, Any]:
    return copy.deepcopy({name: thing.state_dict() for name, thing in things.items()})


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


# -- what is saved is what was there ----------------------------------------------------------------------------------

Steps = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for part in range(3):
        backward(model, seed * 10 + part)
    optimizer.step()
    optimizer.zero_grad()


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4, 6)).sum()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda parameters: torch.optim.Adam(parameters, foreach=False),
    "foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "fused": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("steps", [usual, accumulated, scaled])
@pytest.mark.parametrize("maker", MAKERS)
def test_what_is_saved_is_what_was_there_whatever_the_next_step_does(home: Path, maker: str, steps: Steps) -> None:
    model = net()
    optimizer = MAKERS[maker](model.parameters())
    things = {"model": model, "optimizer": optimizer}
    with FlashCheckpoint(home, mode="overlap", disk_every=None, **things) as checkpoint:
        for step in range(4):
            steps(model, optimizer, step)
            receipt = checkpoint.save(step, wait=60)
            there = state_of(**things)
            steps(model, optimizer, 100 + step)
            assert checkpoint.wait(level=Level.COMPLETE).level is Level.COMPLETE, receipt
            assert not equal(state_of(**things), there)
            checkpoint.restore()
            assert equal(state_of(**things), there)


def test_buffers_averages_and_what_no_optimizer_has_are_copied_before_save_returns(home: Path, gate: Gate) -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    things = {"model": model, "optimizer": optimizer, "average": average}
    gate.open.set()
    with FlashCheckpoint(home, mode="overlap", disk_every=None, **things) as checkpoint:
        usual(model, optimizer, 0)
        gate.shut()
        checkpoint.save(0)
        there = state_of(**things)
        assert gate.copied.wait(60)
        model(torch.ones(4, 6))  # BatchNorm's statistics
        average.update_parameters(model)
        with torch.no_grad():
            model[0].weight.add_(1.0)
        gate.open.set()
        assert checkpoint.wait(level=Level.COMPLETE).level is Level.COMPLETE
        checkpoint.restore()
        assert equal(state_of(**things), there)


def test_two_optimizers_each_wait_for_the_copy(home: Path) -> None:
    model = net()
    first = torch.optim.Adam(model[0].parameters())
    second = torch.optim.SGD(model[3].parameters(), lr=0.5)
    things = {"model": model, "first": first, "second": second}
    with FlashCheckpoint(home, mode="overlap", disk_every=None, **things) as checkpoint:
        for step in range(4):
            usual(model, first, step)
            usual(model, second, step)
            checkpoint.save(step, wait=60)
            there = state_of(**things)
            usual(model, second if step % 2 else first, step)
            assert checkpoint.wait(level=Level.COMPLETE).level is Level.COMPLETE
            checkpoint.restore()
            assert equal(state_of(**things), there)


def test_optimizer_that_steps_inside_backward_waits_too(home: Path) -> None:
    model = nn.Linear(6, 1)
    optimizers = {}
    for name, parameter in model.named_parameters():
        optimizers[name] = torch.optim.SGD([parameter], lr=0.1)

        def advance(parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizers[name]) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(advance)
    with FlashCheckpoint(home, mode="overlap", disk_every=None, model=model, **optimizers) as checkpoint:
        for step in range(3):
            backward(model, step)
            checkpoint.save(step, wait=60)
            there = state_of(model=model)
            backward(model, 100 + step)
            assert checkpoint.wait(level=Level.COMPLETE).level is Level.COMPLETE
            assert not equal(state_of(model=model), there)
            checkpoint.restore()
            assert equal(state_of(model=model), there)


def test_compiled_model_is_saved_like_any_other(home: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    compiled = torch.compile(model, backend="eager")
    with FlashCheckpoint(home, mode="overlap", disk_every=None, model=compiled, optimizer=optimizer) as checkpoint:
        for step in range(3):
            usual(compiled, optimizer, step)
            checkpoint.save(step, wait=60)
            there = state_of(model=model)
            usual(compiled, optimizer, 50 + step)
            assert checkpoint.wait(level=Level.COMPLETE).level is Level.COMPLETE
            checkpoint.restore()
            assert equal(state_of(model=model), there)


# -- who waits for whom -----------------------------------------------------------------------------------------------


def test_save_returns_while_the_copy_is_made_and_the_receipt_says_so(home: Path, gate: Gate) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlashCheckpoint(home, mode="overlap", disk_every=None, model=model, optimizer=optimizer) as checkpoint:
        receipt = checkpoint.save(0)
        assert gate.copied.wait(60)
        assert str(receipt.level) == "COPYING"
        assert checkpoint.latest() is None
        backward(model, 0)  # goes on
        gate.open.set()
        assert checkpoint.wait(level=Level.COMPLETE) is receipt
        assert receipt.level is Level.COMPLETE


def test_optimizer_writes_nothing_before_the_copy_is_over(home: Path, gate: Gate) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlashCheckpoint(home, mode="overlap", disk_every=None, model=model, optimizer=optimizer) as checkpoint:
        backward(model, 0)
        checkpoint.save(0)
        assert gate.copied.wait(60)
        before = state_of(model=model)
        stepping = threading.Thread(target=optimizer.step)
        stepping.start()
        stepping.join(0.2)
        assert stepping.is_alive()
        assert equal(state_of(model=model), before)
        gate.open.set()
        stepping.join(60)
        assert not equal(state_of(model=model), before)


def test_next_save_waits_for_the_one_before_it(home: Path, gate: Gate) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlashCheckpoint(home, mode="overlap", disk_every=None, model=model, optimizer=optimizer) as checkpoint:
        first = checkpoint.save(0)
        assert gate.copied.wait(60)
        threading.Timer(0.1, gate.open.set).start()
        second = checkpoint.save(1, wait=60)
        assert first.level is not Level.COPYING
        checkpoint.wait()
        assert second.level is Level.DURABLE


def test_plain_state_is_copied_before_save_state_returns(home: Path, gate: Gate) -> None:
    with FlashCheckpoint(home, mode="overlap", disk_every=None) as checkpoint:
        assert checkpoint.save_state(0, {"x": torch.ones(3)}).level in (Level.STAGED, Level.COMPLETE)
        assert not gate.copied.is_set()


# -- code that writes where it should not -----------------------------------------------------------------------------


def by_hand(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-0.01, 0.01)


def by_data(weight: nn.Parameter) -> None:
    weight.data[0, 0] = 7.0  # no counter moves for that


def by_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[:] = 7.0


@pytest.mark.parametrize("write", [by_hand, by_data, by_numpy])
def test_save_whose_tensors_are_written_meanwhile_fails_and_names_one_and_later_ones_are_right(
    home: Path, gate: Gate, write: Callable[[nn.Parameter], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlashCheckpoint(home, mode="overlap", model=model, optimizer=optimizer) as checkpoint:
        gate.open.set()
        checkpoint.save(0)
        first = state_of(model=model)
        checkpoint.wait(level=Level.COMPLETE)
        gate.shut()
        receipt = checkpoint.save(1, wait=60)
        assert gate.copied.wait(60)
        write(model[0].weight)
        gate.open.set()
        assert checkpoint.wait() is receipt
        assert receipt.level is Level.FAILED
        assert "model.0.weight was written to while it was copied" in receipt.reason
        assert "as with blocking mode" in caplog.text
        checkpoint.restore()
        assert equal(state_of(model=model), first)
        gate.shut()
        later = checkpoint.save(2, wait=60)
        write(model[0].weight)
        assert not gate.copied.is_set(), "nothing is copied behind this script any more"
        assert checkpoint.wait().level is Level.DURABLE, later


@pytest.mark.parametrize("write", [by_hand, by_data, by_numpy])
def test_write_that_comes_before_the_copy_is_found_too(
    home: Path, gate: Gate, write: Callable[[nn.Parameter], None]
) -> None:
    """The copy is like the tensor then, and neither is what was saved."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlashCheckpoint(home, mode="overlap", model=model, optimizer=optimizer) as checkpoint:
        gate.begin.clear()
        gate.open.set()
        receipt = checkpoint.save(0)
        write(model[0].weight)
        gate.begin.set()
        checkpoint.wait()
        assert receipt.level is Level.FAILED
        assert "model.0.weight was written to while it was copied" in receipt.reason


@pytest.mark.parametrize("write", [by_data, by_numpy])
def test_verifying_save_is_copied_before_anybody_can_write(home: Path, write: Callable[[nn.Parameter], None]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlashCheckpoint(home, mode="overlap", verify=True, model=model, optimizer=optimizer) as checkpoint:
        there = state_of(model=model)
        receipt = checkpoint.save(0)
        write(model[0].weight)
        checkpoint.wait()
        if receipt.level is not Level.FAILED:  # it was compared before
            checkpoint.restore()
            assert equal(state_of(model=model), there)


def test_copy_that_fails_is_a_failed_save_and_training_goes_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = stager.copy

    def broken(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if threading.current_thread().name == "resilience-copy":
            raise RuntimeError("the device is gone")
        plain(targets, sources)

    monkeypatch.setattr(stager, "copy", broken)
    with FlashCheckpoint(home, mode="overlap", model=model, optimizer=optimizer) as checkpoint:
        checkpoint.save(0)
        assert checkpoint.wait(level=Level.COMPLETE).reason == "RuntimeError: the device is gone"
        usual(model, optimizer, 0)
        checkpoint.save(1, wait=60)
        assert checkpoint.wait().level is Level.DURABLE


def test_mode_that_is_none_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'overlap'"):
        FlashCheckpoint(home, mode="overlapp")


# -- the watch --------------------------------------------------------------------------------------------------------


def test_watch_finds_every_change_if_all_bytes_are_compared() -> None:
    tensors = [
        torch.zeros(1000),
        torch.zeros(10, 10, 10).transpose(0, 2),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(3),
    ]
    names = list("abcde")
    for index, tensor in enumerate(tensors):
        for position in range(0, tensor.numel(), 37):
            copies = [one.clone(memory_format=torch.contiguous_format) for one in tensors]  # as slots are
            look = Watch(names, tensors, 5, everything=True)
            assert look.written(copies) == ""
            copies[index].view(-1)[position] = float("nan")
            assert look.written(copies) == names[index]


def test_watch_takes_nan_for_itself_and_other_bits_for_another() -> None:
    tensor = torch.full((100,), float("nan"))
    assert Watch(["x"], [tensor], 0, everything=True).written([tensor.clone()]) == ""
    other = tensor.clone()
    other.view(torch.int32)[50] += 1
    assert Watch(["x"], [tensor], 0, everything=True).written([other]) == "x"


def test_places_that_are_compared_are_everywhere_in_time() -> None:
    tensor = torch.zeros(4096)
    changed = tensor.clone()
    changed[2000:2064] = 1.0
    found = [turn for turn in range(400) if Watch(["x"], [tensor], turn, everything=False).written([changed])]
    assert found


def test_many_tensors_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_MOST", 3)
    tensors = [torch.zeros(2) for _ in range(10)]
    copies = [tensor.clone() for tensor in tensors]
    copies[7][0] = 1.0
    names = [f"t{number}" for number in range(10)]
    found = [Watch(names, tensors, turn, everything=False).written(copies) for turn in range(10)]
    assert set(found) == {"", "t7"}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1000),
        torch.zeros(40, 10).t(),
        torch.zeros(()),
        torch.zeros(3),
        torch.zeros(50, dtype=torch.cfloat).conj(),
    ],
    ids=["straight", "across", "one number", "few", "conjugated"],
)
def test_watch_finds_what_was_written_before_the_copy(tensor: torch.Tensor) -> None:
    look = Watch(["x"], [tensor], 3, everything=False)
    assert look.written([tensor.clone(memory_format=torch.contiguous_format).resolve_conj()]) == ""
    tensor.data.fill_(7.0)
    assert look.written([tensor.clone(memory_format=torch.contiguous_format).resolve_conj()]) == "x"


_FORKS = """
import os, sys, threading, torch
from resilience.checkpoint import stager
from resilience.checkpoint.flash import FlashCheckpoint
plain, forked = stager.copy, threading.Event()
def slow(targets, sources):
    if threading.current_thread().name == "resilience-copy":
        forked.wait()
    plain(targets, sources)
stager.copy = slow
model = torch.nn.Linear(10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with FlashCheckpoint(sys.argv[1], mode="overlap", model=model, optimizer=optimizer) as checkpoint:
    checkpoint.save(0)
    child = os.fork()
    if not child:
        optimizer.step()
        sys.exit(7)
    forked.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_child_that_is_forked_while_a_copy_is_made_waits_for_nobody(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, str(home)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


_ENDS = """
import sys, torch
from resilience.checkpoint import stager
from resilience.checkpoint.flash import FlashCheckpoint
import time
plain = stager.copy
def slow(targets, sources):
    plain(targets, sources)
    time.sleep(0.5)
    plain(targets, sources)
stager.copy = slow
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = FlashCheckpoint(sys.argv[1], mode="overlap", model=model, optimizer=optimizer)
checkpoint.save(0)
raise KeyError("the script fails while the copy is made")
"""


def test_script_that_fails_while_a_copy_is_made_ends_as_scripts_do(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS, str(home)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "KeyError: 'the script fails" in done.stderr
    assert "terminate called" not in done.stderr
