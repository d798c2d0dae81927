"""Copying behind the next forward and backward: what only an optimizer writes stays as it is until an optimizer writes again.

1) (save) says which tensors that are, has everything else copied at once, and returns
2) (thread) copies them, looks whether anybody wrote to them meanwhile, and has the slot sealed, or not
3) (any optimizer, before its step) waits until the thread is through

The hook of 3) misses writes outside ``Optimizer.step``: schedule-free optimizers, weight clipping, ``.data``, replayed CUDA graphs.
What was written to by those is found by :mod:`watch`, and never sealed. With ``verify`` everything is copied at once, and
the thread compares it in full.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_LOG = logging.getLogger("resilience.checkpoint")
_running: weakref.WeakSet[Behind] = weakref.WeakSet()
_busy: set[Behind] = set()  # may have something under way. Optimizers look here before every step, mostly in vain


class Behind:
    """A thread that does one thing at a time behind the training's back."""

    def __init__(self) -> None:
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=_work, args=(self._acts, self._idle), name="resilience-copy", daemon=True).start()
        _running.add(self)

    def do(self, act: Callable[[], None]) -> None:
        """Have something done. Nothing may be under way."""
        _hook_once()
        self._idle.clear()
        _busy.add(self)
        self._acts.put(act)

    def join(self) -> None:
        """Wait until nothing is under way. If nothing is, that is one look."""
        self._idle.wait()
        _busy.discard(self)

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
    if _busy:
        for behind in list(_busy):
            behind.join()


def _in_child() -> None:
    """A forked child has no such thread: nobody may wait for it."""
    for behind in list(_running):
        behind._idle.set()
    _running.clear()
    _busy.clear()


os.register_at_fork(after_in_child=_in_child)


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
