"""The order of the calls that copy from a device. That they do what CUDA says was not tried: there is none here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from resilience.checkpoint import cuda


class OnDevice:
    """Stands in for a tensor on a device."""

    is_cuda = True

    def __init__(self, device: int) -> None:
        self._device = device

    def get_device(self) -> int:
        return self._device


class FakeCuda:
    """Writes down what is asked of ``torch.cuda``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.inside = ""

    def current_stream(self, device: int) -> str:
        return f"training{device}"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.inside = stream.name
        yield
        self.inside = ""

    def make_stream(self, device: int) -> Any:
        calls = self.calls

        class Stream:
            name = f"side{device}"

            def wait_stream(self, other: str) -> None:
                calls.append(("wait", self.name, other))

            def wait_event(self, event: Any) -> None:
                calls.append(("wait", self.name, f"moment of {event.stream}"))

        return Stream()

    def make_event(self) -> Any:
        calls = self.calls

        class Event:
            def record(self, stream: Any) -> None:
                self.stream = getattr(stream, "name", stream)
                calls.append(("record", self.stream))

            def synchronize(self) -> None:
                calls.append(("synchronize", self.stream))

        return Event()

    def copy(self, targets: list[Any], sources: list[Any], non_blocking: bool = False) -> None:
        self.calls.append(("copy", self.inside, targets, non_blocking))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", made.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", made.make_event)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(torch, "_foreach_copy_", made.copy)
    monkeypatch.setattr(cuda, "_streams", {})
    return made


def test_copy_waits_for_the_training_and_is_waited_for_on_every_device(fake: FakeCuda) -> None:
    sources: list[Any] = [OnDevice(0), torch.zeros(1), OnDevice(1), OnDevice(0)]
    targets: list[Any] = ["a", "b", "c", "d"]
    cuda.copy(targets, sources)
    assert fake.calls == [
        ("wait", "side0", "training0"),
        ("copy", "side0", ["a", "d"], True),
        ("record", "side0"),
        ("wait", "side1", "training1"),
        ("copy", "side1", ["c"], True),
        ("record", "side1"),
        ("copy", "", ["b"], False),
        ("synchronize", "side0"),
        ("synchronize", "side1"),
    ]


def test_copy_of_another_thread_begins_after_the_moment_at_which_it_was_asked_for(fake: FakeCuda) -> None:
    sources: list[Any] = [OnDevice(1), torch.zeros(1)]
    later = cuda.after_this(sources)
    assert fake.calls == [("record", "training1")]
    fake.calls.clear()
    later(["a", "b"], sources)
    assert fake.calls == [
        ("wait", "side1", "moment of training1"),
        ("copy", "side1", ["a"], True),
        ("record", "side1"),
        ("copy", "", ["b"], False),
        ("synchronize", "side1"),
    ]


def test_tensors_of_the_host_alone_are_copied_at_once(fake: FakeCuda) -> None:
    cuda.copy([torch.zeros(1)], [torch.ones(1)])
    assert [call[0] for call in fake.calls] == ["copy"]


def test_process_without_a_context_does_not_get_one() -> None:
    assert cuda.is_used() is False


def test_figures_that_are_read_later_wait_for_what_was_queued_then_and_for_nothing_after_it(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def pageable(*size: int, pin_memory: bool, **more: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*size, **more)

    monkeypatch.setattr(torch, "empty", pageable)
    read = cuda.read_later([torch.tensor(1.5), torch.tensor([2.5])], torch.device("cpu"))
    assert fake.calls == [("record", "trainingcpu")]
    assert read() == [1.5, 2.5]
    assert fake.calls[1:] == [("synchronize", "trainingcpu")]
