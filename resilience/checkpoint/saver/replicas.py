"""What this node keeps for others: copies of their ranks' snapshots, each in memory of its own, sealed when its digests are right.

Of every rank there are at most two: the newest that is REPLICATED, and one that is on its way to be. Whatever is neither makes room
for the next. Several threads come here; every call is short.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from resilience.checkpoint.arena import Slot
from resilience.checkpoint.saver.excerpts import Excerpt
from resilience.checkpoint.shards import aligned

Key = tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    """How many bytes of a shard are what."""

    data: int
    header: int
    values: int

    @property
    def total(self) -> int:
        """Bytes of the memory that holds it: tensors, header, values."""
        return aligned(self.data) + self.header + self.values

    def views(self, slot: Slot) -> tuple[memoryview, memoryview, memoryview]:
        """Return header, values and tensors in the memory that holds them."""
        memory, at = memoryview(slot.map), aligned(self.data)
        middle = at + self.header
        return memory[at:middle], memory[middle : middle + self.values], memory[: self.data]


@dataclass(frozen=True, eq=False)
class Replica:
    """One rank's copy, and what its bytes are to be."""

    key: Key
    rank: int
    serial: int  # of the rank's seal
    sizes: Sizes
    slot: Slot
    sums: list[int] = field(default_factory=list)  # of header and values
    digests: list[str] = field(default_factory=list)  # of the tensors

    def excerpt(self) -> Excerpt:
        """Return it as something that can be sent."""
        header, values, data = self.sizes.views(self.slot)
        return Excerpt(bytes(header), values, data, ((0, self.sizes.data),) if self.sizes.data else ())

    def described(self) -> dict[str, object]:
        """Say where its tensors are, as a rank wants to hear it that opens it."""
        at = aligned(self.sizes.data)
        return {"rank": self.rank, "data": self.sizes.data, "header": [at, self.sizes.header, self.sums[0]]}

    def values(self) -> list[int]:
        """Say where its values are."""
        return [aligned(self.sizes.data) + self.sizes.header, self.sizes.values, self.sums[1]]


class Replicas:
    """All of them. ``room`` says how many bytes more this node may use."""

    def __init__(self, room: Callable[[], tuple[int, str]]) -> None:
        self._room = room
        self._held: dict[int, list[Replica]] = {}  # by rank
        self._spare: dict[int, Slot] = {}  # by rank: memory that is not in use
        self._lock = threading.Lock()
        self._newest: Key = (0, -1)  # REPLICATED

    def has(self, key: Key, rank: int, serial: int) -> bool:
        """Whether this very snapshot is here already."""
        found = self.find(key, rank)
        return found is not None and found.serial == serial

    def find(self, key: Key, rank: int) -> Replica | None:
        """Return a rank's copy of a snapshot."""
        with self._lock:
            return next((item for item in self._held.get(rank, []) if item.key == key), None)

    def listed(self) -> list[tuple[int, int, int]]:
        """Return what is here: generation, step, rank."""
        with self._lock:
            return sorted((*item.key, rank) for rank, items in self._held.items() for item in items)

    def nbytes(self) -> int:
        """Return how much memory all of it takes."""
        with self._lock:
            held = [item.slot for items in self._held.values() for item in items]
            return sum(slot.nbytes for slot in [*held, *self._spare.values()])

    def make_room(self, rank: int, sizes: Sizes) -> Slot:
        """Return memory for a copy; of what is here only what is REPLICATED stays. Raises ``MemoryError`` with the figures."""
        with self._lock:
            for item in [item for item in self._held.get(rank, []) if item.key != self._newest]:
                self._drop(item)
            slot = self._spare.pop(rank, None)
        if slot is not None and slot.nbytes >= sizes.total:
            return slot
        if slot is not None:
            slot.close()
        left, whose = self._room()
        if sizes.total > left:
            raise MemoryError(
                f"a copy of rank {rank} takes {sizes.total / 1e9:.2f} GB, and {whose} has {left / 1e9:.2f} GB left"
            )
        try:
            return Slot.create(sizes.total)
        except OSError as error:
            raise MemoryError(f"{sizes.total / 1e9:.2f} GB for a copy of rank {rank}: {error.strerror}") from error

    def give_back(self, rank: int, slot: Slot) -> None:
        """What was to be received did not come: keep the memory for the next."""
        with self._lock:
            self._put_aside(rank, slot)

    def seal(self, replica: Replica) -> None:
        """Keep a copy whose digests are right."""
        with self._lock:
            for item in [item for item in self._held.get(replica.rank, []) if item.key == replica.key]:
                self._drop(item)
            self._held.setdefault(replica.rank, []).append(replica)

    def settle(self, key: Key) -> None:
        """A snapshot is REPLICATED: what is older is not needed any more."""
        self._newest = max(key, self._newest)
        self._drop_if(lambda item: item.key < key)

    def drop(self, key: Key) -> None:
        """A snapshot did not get to all nodes that should have it."""
        self._drop_if(lambda item: item.key == key != self._newest)

    def go_back_to(self, key: Key | None) -> None:
        """Everything newer is void (``None``: everything)."""
        self._drop_if(lambda item: key is None or item.key > key)
        if key is None or self._newest > key:
            self._newest = (0, -1)

    def close(self) -> None:
        """Let go of everything."""
        self.go_back_to(None)
        with self._lock:
            for slot in self._spare.values():
                slot.close()
            self._spare = {}

    def _drop_if(self, condition: Callable[[Replica], bool]) -> None:
        with self._lock:
            for item in [item for items in self._held.values() for item in items if condition(item)]:
                self._drop(item)

    def _drop(self, item: Replica) -> None:
        self._held[item.rank].remove(item)
        self._put_aside(item.rank, item.slot)

    def _put_aside(self, rank: int, slot: Slot) -> None:
        other = self._spare.pop(rank, None)
        smaller = min(slot, other, key=lambda it: it.nbytes) if other is not None else None
        if smaller is not None:
            smaller.close()
        self._spare[rank] = slot if other is None or smaller is other else other
