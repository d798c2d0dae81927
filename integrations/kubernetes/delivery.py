"""Bring what changes to the parts, one at a time; what a part could not do is brought again later, with a growing pause.

Rule: for each thing a part is only ever owed its newest state. A newer change of the same thing takes the place of what is owed.

Hazard: a part that takes long holds up all others: every call of theirs has a deadline, and there is one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resilience.integrations.kubernetes.api import Unreachable
from resilience.integrations.kubernetes.parts import Kind, Part
from resilience.integrations.kubernetes.pauses import Failure, Pauses
from resilience.integrations.kubernetes.watching import Change

_Key = tuple[str, Kind, str]


class Delivery:
    """What the parts are still owed. ``now`` is in seconds since 1970, and is passed in."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [(part, frozenset(part.kinds())) for part in parts]
        self._owed: dict[_Key, tuple[Change, Failure]] = {}
        self._listed: set[Kind] = set()
        self._ticks: Pauses[str] = Pauses()

    def kinds(self) -> list[Kind]:
        """Return what is to be watched, each once."""
        return list(dict.fromkeys(kind for _, kinds in self._parts for kind in kinds))

    def deliver(self, change: Change, now: float) -> None:
        """Tell every part that asked for it."""
        for part, kinds in self._parts:
            if change.kind in kinds:
                key = (part.name, change.kind, str(change.thing["metadata"]["uid"]))
                _, before = self._owed.pop(key, (change, Failure()))
                self._try(part, key, change, before, now)

    def listed(self, kind: Kind) -> None:
        """Everything of a kind that is there has been told."""
        self._listed.add(kind)

    def again(self, now: float) -> None:
        """Try what is due once more; while the server is away, only one thing at a time: each may take as long as its deadline."""
        by_name = {part.name: part for part, _ in self._parts}
        due = [(key, *it) for key, it in self._owed.items() if it[1].due <= now]
        for key, change, before in sorted(due, key=lambda it: it[2].due):
            del self._owed[key]
            if isinstance(self._try(by_name[key[0]], key, change, before, now), Unreachable):
                return

    def tick(self, now: float) -> None:
        """Tell every part that time has passed, once all that it asked for has been listed. What others lack holds up none."""
        for part, kinds in self._parts:
            if not kinds <= self._listed or not self._ticks.over(part.name, now):
                continue
            error = _attempt(lambda part=part: part.tick(now))  # type: ignore[misc]
            if error is None:
                self._ticks.worked(part.name)
            else:
                self._ticks.failed(part.name, error, now, f"{part.name} could not deal with its round")

    def owes(self) -> int:
        """Return how much could not be done yet."""
        return len(self._owed) + len(self._ticks)

    def _try(self, part: Part, key: _Key, change: Change, before: Failure, now: float) -> Exception | None:
        error = _attempt(lambda: part.changed(change.kind, change.verb, change.thing))
        if error is not None:
            meta = change.thing["metadata"]
            what = f"{part.name} could not deal with {change.kind.plural} {meta.get('namespace', '')}/{meta['name']}"
            self._owed[key] = (change, before.again(error, now, what))
        return error


def _attempt(act: Callable[[], None]) -> Exception | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - a part may be somebody's plugin: the others go on
        return error
    return None
