"""What all nodes are writing to disk, and what they have written, as the chair knows it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from resilience.checkpoint.decisions import Key


@dataclass
class Write:
    """A snapshot that is being written by all nodes."""

    key: Key
    world: int
    cycle: int
    began: float
    waiting: set[int]
    shards: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    left_behind: bool = False  # the job went back behind it


class Writes(dict[str, Write]):
    """What is being written, by folder. ``mark``: of this chair's folders, for a node may still write for one that is no more."""

    def __init__(self, mark: str = "") -> None:
        super().__init__()
        self.durable: set[Key] = set()
        self._mark, self._number = mark, 0

    def order(self, key: Key, world: int, cycle: int, now: float, nodes: Collection[int]) -> str:
        """Have a snapshot written by all nodes; return the folder."""
        self._number += 1
        folder = f"{key[1]:08d}"
        if len(nodes) > 1 or folder in self:  # the job may have gone back behind one that is under way
            folder += f"-{self._mark}{self._number}"
        self[folder] = Write(key, world, cycle, now, set(nodes))
        return folder

    def has(self, key: Key) -> bool:
        """Whether a snapshot is being written."""
        return any(write.key == key for write in self.values())

    def awaited(self, node: int) -> list[str]:
        """Return the folders that a node is yet to write its part into."""
        return [folder for folder, write in self.items() if node in write.waiting]

    def committed(self, folder: str) -> Write:
        """Take note that all of a snapshot is on disk."""
        write = self.pop(folder)
        self.durable = {key for key in self.durable if key[0] >= write.key[0] - 1} | {write.key}
        return write

    def leave_behind(self, key: Key) -> set[Key]:
        """The job goes back to a snapshot: what is newer is void. Return what of that is on disk; what is not yet is marked."""
        for write in self.values():
            write.left_behind = write.left_behind or write.key > key
        return {known for known in self.durable if known > key}
