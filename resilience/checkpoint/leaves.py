"""What need not be encoded again: long tuples that can't change, from one save to the next.

A list, a dict or a set may have been written to since, and to find that out takes as long as to encode it. A tuple of numbers,
texts and such tuples is what it was as long as it is the same object. Texts and bytes are copied as they are, and gain nothing.
"""

from __future__ import annotations

from typing import Any

_FEW = 32  # items: to look it up takes as long as to pack so many
_FIXED = frozenset({type(None), bool, int, float, complex, str, bytes, range})


class Leaves:
    """The bytes of tuples, by identity. They are held, so that no other object can be taken for one of them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int, bytes]] = {}  # by id: whose, its levels, its bytes
        self._seen: dict[int, tuple[Any, int, bytes]] = {}  # since the last turn

    def find(self, node: Any, most: int) -> bytes | None:
        """Return the bytes of a tuple that was there in the save before, if it has at most so many levels."""
        found = self._known.get(id(node))
        if found is None or found[1] > most:
            return None
        self._seen[id(node)] = found
        return found[2]

    def learn(self, node: Any, written: bytes) -> None:
        """Keep the bytes of a tuple, if it can't change and is long enough."""
        if len(node) >= _FEW and (levels := _levels(node)):
            self._seen[id(node)] = node, levels, written

    def turn(self) -> None:
        """A save is through: what it did not have is let go."""
        self._known, self._seen = self._seen, {}


def _levels(node: tuple[Any, ...]) -> int:
    """Return how deep a tuple of what can't change is; 0 for any other."""
    kinds = set(map(type, node)) - _FIXED
    if not kinds:
        return 1
    inner = [_levels(item) for item in node if type(item) is tuple] if kinds == {tuple} else [0]
    return 1 + max(inner) if all(inner) else 0
