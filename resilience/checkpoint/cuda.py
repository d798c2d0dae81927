"""Copies from CUDA devices into slots: pinned memory, a stream beside the training's, an event that says when the bytes are there.

NOT RUN ON A GPU SO FAR. It is written from what CUDA and torch document; the order of the calls is tested with a stand-in for
``torch.cuda``, their effect is not. Everything that knows of CUDA in the checkpoint is in this file.

Rule: a copy begins after everything that the training has queued, and is over when :func:`copy` returns. Nobody writes the sources
meanwhile: the training waits, or with ``mode="overlap"`` the next optimizer does, on the host, before it queues anything.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping, Sequence

import torch

_LOG = logging.getLogger("resilience.checkpoint")
Copy = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
_streams: dict[int, torch.cuda.Stream] = {}  # by device


def is_used() -> bool:
    """Whether this process uses CUDA. To ask is all but free, and makes no context on a device that nobody wants."""
    return bool(torch.cuda.is_initialized())


def pin(memory: mmap.mmap) -> None:
    """Have the driver keep mapped memory in place, so that devices can write to it directly. It takes a while, once; without it
    copies work, more slowly."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    error = int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))
    if error:
        _LOG.warning(
            "a slot of %s bytes could not be pinned (CUDA error %s): copies will be slower.", len(memory), error
        )


def unpin(memory: mmap.mmap) -> None:
    """Let the driver go of mapped memory, before it is unmapped."""
    torch.cuda.cudart().cudaHostUnregister(torch.frombuffer(memory, dtype=torch.uint8).data_ptr())


def after_this(sources: Sequence[torch.Tensor]) -> Copy:
    """Return a :func:`copy` for another thread: it begins after everything that this one has queued by now, and nothing later."""
    moments = {}
    for device in {source.get_device() for source in sources if source.is_cuda}:
        moments[device] = torch.cuda.Event()
        moments[device].record(torch.cuda.current_stream(device))
    return lambda targets, sources: copy(targets, sources, moments)


def copy(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    moments: Mapping[int, torch.cuda.Event] | None = None,
) -> None:
    """Copy tensors of any devices into host memory; returns when the bytes are there.

    ``moments``: by device, the event that it may begin after; else it begins after what this thread's stream has queued.
    """
    by_device: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pair = by_device.setdefault(source.get_device() if source.is_cuda else -1, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    host = by_device.pop(-1, None)
    events = [_begin(device, *pair, (moments or {}).get(device)) for device, pair in by_device.items()]
    if host is not None:  # while the devices are busy
        torch._foreach_copy_(*host)
    for event in events:
        event.synchronize()


def _begin(
    device: int, targets: list[torch.Tensor], sources: list[torch.Tensor], moment: torch.cuda.Event | None
) -> torch.cuda.Event:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    if moment is not None:
        stream.wait_event(moment)
    else:
        stream.wait_stream(torch.cuda.current_stream(device))
    event = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch._foreach_copy_(targets, sources, non_blocking=True)
        event.record(stream)
    return event


def read_later(figures: Sequence[torch.Tensor], device: torch.device) -> Callable[[], list[float]]:
    """Have a few numbers copied from a device to the host behind what is queued by now; return what waits for them, and for
    nothing later."""
    target = torch.empty(len(figures), dtype=torch.float64, pin_memory=True)
    numbers = [figure.detach().to(device, torch.float64, non_blocking=True).reshape(()) for figure in figures]
    target.copy_(torch.stack(numbers), non_blocking=True)
    moment = torch.cuda.Event()
    moment.record(torch.cuda.current_stream(device))

    def read() -> list[float]:
        moment.synchronize()
        return [float(value) for value in target]

    return read
