"""The boards of ``resilience nodecheck``: where nodes that no cycle connects read what the others wrote.

1) (node) comes together with the others in a store
2) (node) ``join(…)``: says who it is, waits until everybody has
3) (node) posts and peeks, as :class:`resilience.nodecheck.exchange.Board` says; a thread writes its beat, and misses the others'

Rule: no call waits for a key. So a call that does not return means that the store does not answer (:class:`TimedStore`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from resilience.nodecheck.exchange import Interrupted

_BEAT_S = 2.0
_LOOK_S = 0.05
_SHOWN = 8
_PER_NODE_S = 0.02  # all nodes read all beats


class Alone:
    """The board of a node that is alone."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """See :class:`Board`."""
        self._keys[key] = text

    def peek(self, key: str) -> str | None:
        """See :class:`Board`."""
        return self._keys.get(key)

    def lost_nodes(self) -> Mapping[int, str]:
        """See :class:`Board`."""
        return {}

    def close(self) -> None:
        """Let go of it."""


class TimedStore:
    """torch's store, of which is known for how long it has not answered. No call waits for a key: that would look the same."""

    def __init__(self, store: Any = None) -> None:
        self.store = store
        self._open: dict[int, float] = {}  # by thread, since when it waits for an answer

    def silent_for(self) -> float:
        """Return for how many seconds the oldest call has been waiting."""
        return max((time.monotonic() - since for since in list(self._open.values())), default=0.0)

    def set(self, key: str, text: str) -> None:
        """Write a key."""
        with self._timed():
            self.store.set(key, text)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        with self._timed():
            return bool(self.store.check(list(keys)))

    def read(self, keys: Sequence[str]) -> list[str]:
        """Read keys that are there."""
        with self._timed():
            return [bytes(value).decode() for value in self.store.multi_get(list(keys))]

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        me = threading.get_ident()
        self._open[me] = time.monotonic()
        try:
            yield
        finally:
            del self._open[me]


class StoreBoard(Alone):
    """A board in torch's store. A thread of its own writes this node's beat and looks at the others'."""

    def __init__(self, store: TimedStore, me: int, names: Sequence[str], silence: float) -> None:
        """All of ``names`` must have written their first beat: :func:`join` sees to it."""
        super().__init__()
        self._store = store
        self._me = me
        self._names = names
        self._silence = silence
        self._lost: dict[int, str] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="resilience-beat", daemon=True)
        self._thread.start()

    def post(self, key: str, text: str) -> None:
        """See :class:`Board`."""
        super().post(key, text)
        self._store.set(key, text)

    def peek(self, key: str) -> str | None:
        """See :class:`Board`."""
        own = super().peek(key)
        return own if own is not None else self._store.read([key])[0] if self._store.check([key]) else None

    def lost_nodes(self) -> Mapping[int, str]:
        """See :class:`Board`."""
        return dict(self._lost)

    def close(self) -> None:
        """Stop the thread: nothing must call the store while the process ends."""
        self._closed.set()
        self._thread.join(_BEAT_S)

    def _beat(self) -> None:
        every = min(self._silence / 4, max(_BEAT_S, len(self._names) * _PER_NODE_S))
        others = [node for node in range(len(self._names)) if node != self._me]
        seen: dict[int, tuple[str, float]] = {}
        count, looked = 0, time.monotonic()
        with contextlib.suppress(RuntimeError):  # a store that is gone: the check itself finds out
            while not self._closed.wait(every):
                count += 1
                self._store.set(f"beat/{self._me}", str(count))
                beats = self._store.read([f"beat/{node}" for node in others])
                now = time.monotonic()
                # We were stopped ourselves: everybody gets another chance.
                paused, looked = now - looked > 4 * every, now
                for node, beat in zip(others, beats, strict=True):
                    last, since = seen.get(node, ("", now))
                    seen[node] = (beat, now if paused or beat != last else since)
                    if now - seen[node][1] > self._silence:
                        self._lost.setdefault(node, f"{self._names[node]} has been silent for {self._silence:g} s")


def join(
    store: TimedStore, me: int, name: str, nodes: int, silence: float, *, known: Mapping[int, str] | None = None
) -> tuple[StoreBoard, tuple[str, ...]]:
    """Write who we are, and wait until everybody has; return the board and everybody's name. Raises :class:`Interrupted` for nodes
    that came and never said a word; ``known`` is what they are called."""
    store.set(f"beat/{me}", "0")
    store.set(f"name/{me}", name)
    keys = [f"name/{node}" for node in range(nodes)]
    deadline = time.monotonic() + silence
    while not store.check(keys):
        if time.monotonic() > deadline:
            silent = [node for node in range(nodes) if not store.check([keys[node]])]
            raise Interrupted(mute(silent, known or {}, silence))
        time.sleep(_LOOK_S)
    names = tuple(store.read(keys))
    return StoreBoard(store, me, names, silence), names


def mute(nodes: Sequence[int], known: Mapping[int, str], silence: float) -> str:
    """Say which nodes came and said no word."""
    who = ", ".join(f"node {node} ({known.get(node, 'without a name')})" for node in nodes[:_SHOWN])
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return f"{who}{more} came and said no word within {silence:g} s: look whether the command still runs there"
