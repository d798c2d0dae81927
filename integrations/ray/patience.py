"""How long an actor may leave a question unanswered: an actor that hangs is not dead to Ray, so nobody but its asker notices.

Rule: silence counts only while Ray holds the actor for alive, twice in a row: one that waits for its node, or is being restarted,
answers when it is there. So does the asker's own absence not count. One that Ray holds for dead will never answer.
"""

from __future__ import annotations

from collections.abc import Callable

ALIVE, DEAD = "ALIVE", "DEAD"
TWICE_S = 35.0  # an answer takes 20 s where there is nothing new


class Patience:
    """Questions that are open, by whom they were put to."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._suspected: set[int] = set()

    def asked(self, whom: int, now: float) -> None:
        """Note that a question was put."""
        self._since.setdefault(whom, now)

    def answered(self, whom: int) -> None:
        """Note that there was an answer, of whatever kind."""
        self._since.pop(whom, None)
        self._suspected.discard(whom)

    def is_over(self, whom: int, now: float, stands: Callable[[], str]) -> str:
        """Return why no answer is awaited any more; nothing while one is. ``stands`` asks Ray how it holds the actor, in Ray's own
        words, and is called once in a while."""
        if now - self._since.get(whom, now) < TWICE_S:
            return ""
        self._since[whom] = now
        held_for = stands()
        if held_for == DEAD:
            return "Ray holds it for dead"
        if held_for != ALIVE:
            self._suspected.discard(whom)
            return ""
        if whom in self._suspected:
            return f"it has not answered for {2 * TWICE_S:g} s"
        self._suspected.add(whom)
        return ""
