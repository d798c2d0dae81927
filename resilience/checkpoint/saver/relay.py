"""When a snapshot goes to other nodes, and whether it has arrived everywhere: the chair's part of replication. Pure.

One is under way at a time; when it has ended the newest COMPLETE one is next, so that nothing queues up. It is REPLICATED when
every node has said that its copies are with others, digests checked, and not before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

Key = tuple[int, int]
NEVER: Key = (0, -1)
DIFFERENT = (
    "replicas= is not the same on all nodes: copies go between those that have it, and no step is REPLICATED if rank 0's has not. "
    "Give all ranks the same."
)


class Relay:
    """What is under way. ``on``: whether anything is to be."""

    def __init__(self, on: bool = False) -> None:
        self.on = on
        self.last: Key = NEVER  # the newest that is REPLICATED
        self.key: Key | None = None  # under way
        self._waiting: set[int] = set()
        self._passed: Key = NEVER  # the newest that need not be tried again
        self._why = ""

    def new_round(self) -> None:
        """All nodes come anew: what was under way is not any more."""
        self.key, self._waiting, self._passed, self.last = None, set(), NEVER, NEVER

    def differs(self, keeps: Sequence[bool]) -> bool:
        """Whether some of several nodes want copies and others do not: ``keeps`` says which do."""
        return len(keeps) > 1 and set(keeps) != {self.on}

    def heard(self, key: Key) -> None:
        """A node came, and knows this one to be REPLICATED. What it kept for others may be gone: even the newest goes again."""
        self.last, self._passed = max(self.last, key), NEVER

    def go_back_to(self, key: Key) -> None:
        """Everything newer is void."""
        if self.key is not None and self.key > key:
            self.key, self._waiting = None, set()
        self._passed = self.key or NEVER
        if self.last > key:
            self.last = NEVER

    def takes(self, key: Key, nodes: Collection[int]) -> bool:
        """Whether a snapshot that is COMPLETE goes out now; then it is under way."""
        if not self.on or self.key is not None or len(nodes) < 2 or key <= self._passed:
            return False
        self.key, self._waiting, self._passed, self._why = key, set(nodes), key, ""
        return True

    def sent(self, node: int, key: Key, why: str) -> tuple[str, str] | None:
        """A node is through with it, or could not (and why). Returns what all are to hear, when it is the last one."""
        if key != self.key or node not in self._waiting:
            return None
        self._waiting.discard(node)
        self._why = self._why or why
        if self._waiting:
            return None
        self.key = None
        if self._why:
            return "unsent", self._why
        self.last = max(self.last, key)
        return "replicated", ""

    def lost(self) -> Key | None:
        """A node can't be heard any more, and what it has been given may be gone: return what is given up for that."""
        given_up, self.key, self._waiting = self.key, None, set()
        return given_up
