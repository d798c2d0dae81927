"""Save and restore a state in one process and tell what each took: ``snapshot GIGABYTES KIND FOLDER``.

``KIND``: ``peers`` (a model; also by everybody else, and what they wrote stays in ``FOLDER``), ``model`` (ours alone), ``adam``
(ours alone, a model with its optimizer) or ``overlap`` (the same, copied behind a backward). Every figure comes with that of a
plain copy right before and after it.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads.state import GIB, TENSORS, Memcpy, RawWrite, model_of, sync, tensors_of, timed
from benchmarks.workloads.voice import say
from resilience import FlashCheckpoint
from resilience.checkpoint.receipt import Level

_LATER = 12
_DURABLE = 2
_RESTORES = 3
_SETTLE_S = 1.5  # after a failure a rank is back no sooner: the saver has computed the digests meanwhile


class Subject:
    """A state of a given size, and the means to copy it."""

    def __init__(self, nbytes: int, kind: str) -> None:
        self.model = model_of(nbytes // 3 if kind in ("adam", "overlap") else nbytes, TENSORS)
        self.things: dict[str, Any] = {"model": self.model}
        optimizer = None
        if kind in ("adam", "overlap"):
            optimizer = self.things["optimizer"] = torch.optim.Adam(self.model.parameters())
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        self.tensors = tensors_of(self.model, optimizer)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.memcpy = Memcpy(self.tensors)


def complete(checkpoint: FlashCheckpoint, step: int) -> None:
    """Wait until a save may be followed by the next one."""
    receipt = checkpoint.wait(step, Level.COMPLETE, timeout=60.0)
    assert receipt.level.reaches(Level.COMPLETE), receipt


def stalls(checkpoint: FlashCheckpoint, memcpy: Memcpy, count: int, first_step: int = 0) -> Iterator[list[float]]:
    """Yield what a save took, and a plain copy before and after it."""
    before = timed(memcpy)
    for step in range(first_step, first_step + count):
        took = timed(lambda: checkpoint.save(step))  # noqa: B023 - called at once
        after = timed(memcpy)
        complete(checkpoint, step)
        yield [took, before, after]
        before = after


def durable(checkpoint: FlashCheckpoint, raw: RawWrite, step: int) -> list[float]:
    """Return how long a save takes to be on disk, a raw write before and after it, and how long the call alone took."""
    before = timed(raw)
    raw.remove()

    stalled = []

    def save() -> None:
        stalled.append(timed(lambda: checkpoint.save(step, disk=True)))
        receipt = checkpoint.wait(step, timeout=120.0)
        assert receipt.level == Level.DURABLE, receipt

    took = timed(save)
    after = timed(raw)
    raw.remove()
    return [took, before, after, *stalled]


def restores(checkpoint: FlashCheckpoint, subject: Subject, step: int, pause: float) -> list[float]:
    """Return how long a restore from memory takes, and a plain copy before and after it."""
    first, last = subject.tensors[0].clone(), subject.tensors[-1].clone()
    checkpoint.save(step)
    complete(checkpoint, step)
    for tensor in (subject.tensors[0], subject.tensors[-1]):
        tensor.zero_()
    time.sleep(pause)
    before = timed(subject.memcpy)
    took = timed(checkpoint.restore)
    subject.tensors = tensors_of(subject.model, subject.things.get("optimizer"))
    assert torch.equal(subject.tensors[0], first), "the first tensor is not what was saved"
    assert torch.equal(subject.tensors[-1], last), "the last tensor is not what was saved"
    return [took, before, timed(subject.memcpy)]


def ours(subject: Subject, folder: Path) -> None:
    """Measure ``FlashCheckpoint``."""
    with FlashCheckpoint(folder / "flash", disk_every=None, slots=2, **subject.things) as checkpoint:
        found = list(stalls(checkpoint, subject.memcpy, 1 + _LATER))
        say("stall", who="ours, first", pairs=found[:1])
        say("stall", who="ours", pairs=found[1:])
        raw = RawWrite(folder / "raw", subject.nbytes)
        say("durable", pairs=[durable(checkpoint, raw, 100 + number) for number in range(_DURABLE)])
        for first, how, pause in ((200, "settled", _SETTLE_S), (250, "at once", 0.0)):
            found = [restores(checkpoint, subject, first + number, pause) for number in range(_RESTORES)]
            say("memory", how=how, pairs=found)
        checkpoint.save(300, disk=True)


def behind(subject: Subject, folder: Path) -> None:
    """Measure ``mode="overlap"``: what the call takes, and what the next optimizer waits after as much work as three copies."""
    optimizer, waits = subject.things["optimizer"], []
    with FlashCheckpoint(folder / "flash", mode="overlap", disk_every=None, slots=2, **subject.things) as checkpoint:
        found = []
        for step in range(1 + _LATER):
            before = timed(subject.memcpy)
            took = timed(lambda: checkpoint.save(step))  # noqa: B023 - called at once
            time.sleep(3 * before)  # a forward and a backward on a device, or on other cores
            waits.append([timed(optimizer.step), before, before])  # without gradients: nothing but the wait
            found.append([took, before, timed(subject.memcpy)])
            complete(checkpoint, step)
    say("stall", who="overlap, first", pairs=found[:1])
    say("stall", who="overlap", pairs=found[1:])
    say("stall", who="overlap, the next optimizer", pairs=waits[1:])


def theirs(subject: Subject, folder: Path) -> None:
    """Measure everybody else: what the call takes, with a plain copy before and after, and until its bytes are on disk."""
    for who, path, save, again in _peers(subject, folder):
        for _ in range(again):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
            before = timed(subject.memcpy)
            pending: list[Any] = []
            took = timed(lambda: pending.append(save()))  # noqa: B023 - called at once
            finishing = timed(pending[0].result) if hasattr(pending[0], "result") else 0.0
            until_disk = took + finishing + timed(lambda: sync(path))  # noqa: B023
            say("stall", who=who, pairs=[[took, before, timed(subject.memcpy)]], durable=until_disk)


def _peers(subject: Subject, folder: Path) -> Iterator[tuple[str, Path, Callable[[], Any], int]]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    state = subject.model.state_dict()
    again = 2 if subject.nbytes < 2 * GIB else 1
    yield "torch.save", folder / "torch.pt", lambda: torch.save(state, folder / "torch.pt"), again
    try:
        from safetensors.torch import save_file
    except ImportError:
        pass
    else:
        yield "safetensors save_file", folder / "st", lambda: save_file(state, folder / "st"), again
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield "dcp.save", folder / "dcp", lambda: dcp.save({"model": state}, checkpoint_id=folder / "dcp"), again
    target = folder / "dcp_async"
    yield "dcp.async_save", target, lambda: dcp.async_save({"model": state}, checkpoint_id=target), again
    shutil.rmtree(target)
    (folder / "st").unlink(missing_ok=True)
    dist.destroy_process_group()


def main() -> None:
    """Measure and tell."""
    kind, folder = sys.argv[2], Path(sys.argv[3])
    subject = Subject(int(float(sys.argv[1]) * GIB), kind)
    (behind if kind == "overlap" else ours)(subject, folder)
    if kind == "peers":
        theirs(subject, folder)
    say("measured", nbytes=subject.nbytes)


if __name__ == "__main__":
    main()
