"""Who is about to take how much memory on this node: each rank alone may fit where all of them together do not."""

from __future__ import annotations

from collections.abc import Hashable


class Rooms:
    """What ranks announce before they take it. Pure.

    What is left is what the first of them found: those that come while others are at it see less already, and how much of that
    is counted here nobody knows.
    """

    def __init__(self) -> None:
        self._left = 0
        self._wanted: dict[Hashable, int] = {}
        self._at_it: set[Hashable] = set()

    def announce(self, who: Hashable, nbytes: int, left: int) -> tuple[int, int]:
        """Return how much was left before anybody began, and how much of that others want."""
        self._at_it.discard(who)
        if not self._at_it:  # the others are through: what they have taken is no longer left
            self._left, self._wanted = left, {}
        self._at_it.add(who)
        self._wanted[who] = nbytes
        return self._left, sum(self._wanted.values()) - nbytes

    def freed(self, nbytes: int) -> int:
        """So much more is left, for whoever is at it; return it."""
        self._left += nbytes
        return nbytes

    def through(self, who: Hashable) -> None:
        """Somebody has taken what it wanted, or has given up."""
        self._at_it.discard(who)
