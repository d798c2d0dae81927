"""What the checkpoint workloads share: a model of a given size, a plain copy of it, a raw write, an empty page cache.

Rule: imports torch and nothing else that is heavy; must work in the virtual environment of a peer.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

GIB = 1 << 30
TENSORS = 64
_WIDTH = 256
_CHUNK = 16 << 20


def model_of(nbytes: int, tensors: int, flat: torch.Tensor | None = None) -> torch.nn.Module:
    """Return a model of so many parameters, ``nbytes`` in all; over one piece of memory if ``flat`` is given."""
    rows = nbytes // (4 * _WIDTH * tensors)
    size = rows * _WIDTH
    found = [filled(size) if flat is None else flat[number * size : (number + 1) * size] for number in range(tensors)]
    return torch.nn.ParameterDict(
        {f"layer{number}": torch.nn.Parameter(data.view(rows, _WIDTH)) for number, data in enumerate(found)}
    )


def filled(numbers: int) -> torch.Tensor:
    """Return random numbers, cheaply: a block of them over and over."""
    block = torch.rand(1 << 20)
    made = torch.empty(numbers)
    for part in made.split(block.numel()):
        part.copy_(block[: part.numel()])
    return made


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """Return everything that a snapshot of them has to copy."""
    found = [parameter.detach() for parameter in model.parameters()]
    for entry in optimizer.state.values() if optimizer is not None else ():
        found += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return found


def timed(act: Callable[[], object]) -> float:
    """Return how long something takes, in seconds."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


class Memcpy:
    """A plain copy of the same tensors, one after the other, into memory that was touched before."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self._sources = list(sources)
        self._targets = [torch.empty_like(source).copy_(source) for source in self._sources]

    def __call__(self) -> None:
        """Copy."""
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)


class RawWrite:
    """The same bytes out of touched, aligned memory: direct writes of 16 MiB, then fsync; buffered where there is no direct."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._room = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        torch.frombuffer(self._room, dtype=torch.uint8).fill_(7)

    def __call__(self) -> None:
        """Write."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
        except OSError:
            fd = os.open(self._path, flags, 0o600)
        try:
            view, at = memoryview(self._room), 0
            while at < len(view):
                at += os.pwrite(fd, view[at : at + _CHUNK], at)
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink()


def sync(path: Path) -> None:
    """Have a file, or every file below a folder, on the disk, and then out of the page cache: nobody pays for the one before."""
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
