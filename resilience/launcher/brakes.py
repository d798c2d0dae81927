"""The launcher's hands on the stop words of its ranks' pages; see :class:`stopping.Ranks` for what is done with them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from resilience.launcher.post import Post
from resilience.pulse.page import (
    W_ENDING,
    W_STOP_ARMED,
    W_STOP_ASKED,
    W_STOP_CALLS,
    W_STOP_CONFIRMED,
    W_STOP_DECIDED,
    W_STOP_TAKEN,
    W_STOP_WAITING,
)


class Brakes:
    """All ranks of this node. The lock is the hub's: it renews the pages."""

    def __init__(self, posts: Sequence[Post], lock: threading.Condition) -> None:
        self._posts = posts
        self._lock = lock

    def stop_asked(self) -> int:
        """Return the signal with which a rank was asked to stop, or 0."""
        return max(self._read(W_STOP_ASKED), default=0)

    def stop_calls(self) -> list[int]:
        """Return how often each rank has called ``stop_requested``."""
        return self._read(W_STOP_CALLS)

    def arm_stop(self, step: int) -> None:
        """Let ranks that reach ``step`` wait for the decision."""
        self._write(W_STOP_ARMED, step)

    def confirm_stop(self, step: int) -> None:
        """Let ranks know that the others count on them to stop at ``step``."""
        self._write(W_STOP_CONFIRMED, step)

    def decide_stop(self, step: int) -> None:
        """Let ranks stop at ``step``."""
        self._write(W_STOP_DECIDED, step)

    def passed(self, step: int) -> bool:
        """Whether a rank was past ``step`` when it was armed: it made that call, and does not wait in it."""
        pairs = zip(self._read(W_STOP_CALLS), self._read(W_STOP_WAITING), strict=True)
        return any(calls >= step and waiting != step for calls, waiting in pairs)

    def stop_taken(self) -> bool:
        """Whether a rank has left its loop because of the stop."""
        return any(self._read(W_STOP_TAKEN))

    def announce_the_end(self) -> None:
        """Say that the signal that follows is no request to stop."""
        self._write(W_ENDING, 1)

    def _read(self, word: int) -> list[int]:
        with self._lock:
            return [post.page.words[word] for post in self._posts if post.page is not None]

    def _write(self, word: int, value: int) -> None:
        with self._lock:
            for post in self._posts:
                if post.page is not None:
                    post.page.words[word] = value
