"""Copying behind the next forward and backward: what only an optimizer writes stays as it is until an optimizer writes again.

1) (save) says which tensors that are, has everything else copied at once, and returns
2) (thread) copies them, looks whether anybody wrote to them meanwhile, and has the slot sealed, or not
3) (any optimizer, before its step) waits until the thread is through

The hook of 3) misses writes outside ``Optimizer.step``: schedule-free optimizers, weight clipping, ``.data``, replayed CUDA graphs.
Version counters do not move for fused optimizers, ``.data`` and numpy. So both are looked at, the counters and bytes: three places
of every tensor, other ones each time, or all with ``verify``. What was written to is never sealed.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_LOG = logging.getLogger("resilience.checkpoint")
_CHUNK = 64  # bytes that are compared in each place
_MOST = 4096  # tensors of which places are compared in one save; where there are more they take turns
_STRIDE = 0x9E3779B1  # from save to save the places move by this, so that in time they are everywhere
_running: weakref.WeakSet[Behind] = weakref.WeakSet()


class Behind:
    """A thread that does one thing at a time behind the training's back."""

    def __init__(self) -> None:
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=_work, args=(self._acts, self._idle), name="resilience-copy", daemon=True).start()
        _running.add(self)
        _hook_once()

    def do(self, act: Callable[[], None]) -> None:
        """Have something done. Nothing may be under way."""
        self._idle.clear()
        self._acts.put(act)

    def join(self) -> None:
        """Wait until nothing is under way. If nothing is, that is one look."""
        self._idle.wait()

    def close(self) -> None:
        """Wait, and end the thread."""
        self.join()
        self._acts.put(None)
        _running.discard(self)


def _work(acts: queue.SimpleQueue[Callable[[], None] | None], idle: threading.Event) -> None:
    while (act := acts.get()) is not None:
        try:
            act()
        except Exception:  # noqa: BLE001 - a thread's boundary: the next one must be copied
            _LOG.exception("a copy behind the training failed; its step is not saved.")
        finally:
            act = None  # what it holds must not live until the next one
            idle.set()


class _Hook:
    """The one that all optimizers have before their step."""

    handle: Any = None


def _hook_once() -> None:
    if _Hook.handle is None:
        _Hook.handle = register_optimizer_step_pre_hook(_before_step)


def _before_step(*_: Any) -> None:
    for behind in _running:
        behind.join()


@atexit.register
def _before_the_end() -> None:
    """Wait: a thread that comes back from a copy into an interpreter that is ending takes the process down."""
    for behind in list(_running):
        behind.join()


def written_by_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the identities of the tensors that only these optimizers write, in a step that waits for us."""
    found: set[int] = set()
    for optimizer in optimizers:
        if getattr(type(optimizer).step, "hooked", False):
            found.update(_here(parameter) for group in optimizer.param_groups for parameter in group["params"])
            found.update(_here(value) for entry in optimizer.state.values() for value in entry.values())
    return found


def _here(value: Any) -> int:
    """Return the identity of a tensor, or of what is here of it."""
    return id(getattr(value, "_local_tensor", value))


@dataclass(frozen=True)
class Later:
    """How a copy is made behind the training: of which tensors, by whom, how closely they are watched, and who hears of the end:
    the step, and what is wrong with it, if anything."""

    tensors: Container[int]  # by identity
    behind: Behind
    verify: bool
    done: Callable[[int, str], None]


class Copier:
    """Whether saves are copied behind the training, as ``mode`` asks; if they turn out not to be safe from being written to, they
    no longer are."""

    def __init__(
        self, mode: str, verify: bool, optimizers: Sequence[torch.optim.Optimizer], done: Callable[[int], None]
    ) -> None:
        self._behind = Behind() if mode == "overlap" else None
        self._verify = verify
        self._optimizers = optimizers
        self._done = done
        self._safe = True

    def later(self) -> Later | None:
        """Return how the next save is to be copied; ``None``: before it returns."""
        if self._behind is None or not self._safe:
            return None
        return Later(written_by_optimizers(self._optimizers), self._behind, self._verify, self._heard)

    def _heard(self, step: int, wrong: str) -> None:
        if wrong:
            self._safe = False
            _LOG.warning(
                "step %s is not saved: %s. From now on a save returns only when everything is copied, as with blocking mode.",
                step,
                wrong,
            )
        self._done(step)

    def join(self) -> None:
        """Wait until nothing is being copied."""
        if self._behind is not None:
            self._behind.join()

    def close(self) -> None:
        """Wait, and end."""
        if self._behind is not None:
            self._behind.close()
            self._behind = None


class Watch:
    """Tells which of some tensors was written to since it was made, after they were copied."""

    def __init__(self, names: Sequence[str], sources: Sequence[torch.Tensor], turn: int, everything: bool) -> None:
        self._names, self._sources = names, sources
        self._turn, self._everything = turn, everything
        self._versions = list(map(_version, sources))

    def written(self, targets: Sequence[torch.Tensor]) -> str:
        """Return the name of a tensor that differs from its copy, or whose counter has moved; an empty text if there is none."""
        for name, source, before in zip(self._names, self._sources, self._versions, strict=True):
            if _version(source) != before:
                return name
        number = len(self._sources)
        chosen: Iterable[int] = range(number)
        if number > _MOST and not self._everything:
            first = self._turn * _MOST % number
            chosen = (index % number for index in range(first, first + _MOST))
        for index in chosen:
            if not self._is_same(targets[index], self._sources[index]):
                return self._names[index]
        return ""

    def _is_same(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        with torch.no_grad():
            source = source.detach().resolve_conj().resolve_neg()
            if source.numel() == 0:
                return True
            if self._everything or source.nbytes <= 4 * _CHUNK:
                return _equal(source, target)
            if not source.is_contiguous():  # by rows: their bytes are somewhere
                places = {0, len(source) - 1, self._turn * _STRIDE % len(source)}
                return all(_equal(source[row], target[row]) for row in places)
            one, other = _bytes(source), _bytes(target)
            last = source.nbytes - _CHUNK
            places = {0, last, self._turn * _STRIDE % last}
            return all(_equal(one[at : at + _CHUNK], other[at : at + _CHUNK]) for at in places)


def _equal(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the bytes are the same: as numbers NaN would differ from itself."""
    return bool(torch.equal(_bytes(source).cpu(), _bytes(target)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
