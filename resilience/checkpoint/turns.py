"""Whose turn it is: one checkpoint per directory in a process, one call at a time, steps that grow, and no save over what an
earlier run left behind before it was looked at."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from resilience.checkpoint import stores
from resilience.checkpoint.stores import Url, Where
from resilience.errors import CheckpointError, ConfigError

_LOG = logging.getLogger("resilience.checkpoint")
_LARGEST = 1 << 62  # steps are kept in words of 64 bits, one more than themselves
_open: weakref.WeakValueDictionary[tuple[int, str], Stay] = weakref.WeakValueDictionary()  # by process and directory


class Stay:
    """A checkpoint's time on its directory, from its opening to its end, in the process that opened it.

    Raises :class:`ConfigError` while another one of this process is there: both would write into the same memory.
    """

    def __init__(self, directory: Where, checkpoint: Any) -> None:
        self.is_over, self._pid = False, os.getpid()
        key = (self._pid, str(directory) if isinstance(directory, Url) else os.path.realpath(directory))
        other = _open.get(key)
        if other is not None and not other.is_over:
            raise ConfigError(
                f"{directory}: another FlashCheckpoint of this process is open on it. Nothing was set up. close() that one first, "
                "or give each a directory of its own."
            )
        self._leave = _leave_at_exit(checkpoint)
        _open[key] = self

    def check(self) -> None:
        """Raise if it is over, or that of the process that this one was forked from."""
        if self.is_over or os.getpid() != self._pid:
            raise CheckpointError("this FlashCheckpoint is closed, or belongs to another process.")

    def end(self) -> bool:
        """End it; return whether there is anybody to take leave of: not a second time, and not in a process that was forked."""
        if self.is_over:
            return False
        self.is_over = True
        atexit.unregister(self._leave)
        return os.getpid() == self._pid


def _leave_at_exit(checkpoint: Any) -> Callable[[], None]:
    """Have a process that ends in good order without ``close()`` take leave all the same; one that raised does not."""
    known = weakref.ref(checkpoint)

    def leave() -> None:
        left = known()
        if left is not None and getattr(sys, "last_value", None) is None:
            left.close()

    atexit.register(leave)
    return leave


def earlier_step(directory: Where, in_memory: Sequence[int]) -> int | None:
    """Return the newest step that an earlier run has left, if any. Where the disk can't be looked at, what is in memory will do."""
    try:
        stored = stores.opened(directory).stored()
    except (CheckpointError, OSError) as error:
        if not in_memory:
            raise
        _LOG.warning("%s What is in memory can be gone on from.", error)
        return max(in_memory)
    return stored[0].manifest.step if stored else None


class Turns:
    """Calls that may change what is saved, one after the other."""

    def __init__(self, directory: Where, earlier: int | None) -> None:
        self._directory = directory
        self._earlier = earlier  # the newest step on disk that nobody has looked at
        self._last = -1
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        # Not waited for: a signal handler would wait for the code that it interrupts.
        if not self._lock.acquire(blocking=False):
            raise CheckpointError(
                "this FlashCheckpoint is saving or restoring already: in another thread, or in the code that this signal handler "
                "interrupts. Nothing was done. Call it from one place."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def begin(self) -> None:
        """A snapshot was gone on from, or everybody begins afresh: any step may come next."""
        self._earlier, self._last = None, -1

    def check(self, step: int) -> None:
        """Raise if a step can't be saved now."""
        if self._earlier is not None:
            raise CheckpointError(
                f"{self._directory} has checkpoints of an earlier run, up to step {self._earlier}, and this one has not gone on "
                "from them: saving would end in their removal. Nothing was saved. Call restore(allow_fresh_start=True) or "
                "load_state() first; to begin anew, give an empty directory."
            )
        if step < self._last:
            raise CheckpointError(
                f"save({step}): step {self._last} was saved before it, and the largest step counts as the newest. Nothing was "
                "saved. Count steps over all epochs; to go back, rollback() or restore(step=N)."
            )

    def saved(self, step: int) -> None:
        """A step is in memory."""
        self._last = step


def whole_step(call: str, step: Any) -> int:
    """Return a step as a plain number, numpy's too. Raises :class:`CheckpointError` for what is none."""
    try:
        found = -1 if isinstance(step, bool) else step.__index__()
    except (AttributeError, TypeError):
        found = -1
    if not 0 <= found < _LARGEST:
        raise CheckpointError(f"{call}({step!r}): the step must be a whole number from 0 up.")
    return int(found)
