"""Bring what changes to the parts, one at a time; what a part could not do is brought again later, with a growing pause.

Rule: for each thing a part is only ever owed its newest state. A newer change of the same thing takes the place of what is owed.

Hazard: a part that takes long holds up all others: every call of theirs has a deadline, and there is one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resilience.integrations.kubernetes.api import Conflict, Forbidden, KubernetesError, Unreachable
from resilience.integrations.kubernetes.parts import Kind, Part
from resilience.integrations.kubernetes.watching import Change

_LOG = logging.getLogger("resilience.kubernetes")
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass
class _Owed:
    change: Change
    failures: int
    due: float
    said: str = ""


class Delivery:
    """What the parts are still owed. ``now`` is in seconds since 1970, and is passed in."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [(part, frozenset(part.kinds())) for part in parts]
        self._owed: dict[tuple[str, Kind, str], _Owed] = {}
        self._ticks: dict[str, _Owed] = {}

    def kinds(self) -> list[Kind]:
        """Return what is to be watched, each once."""
        return list(dict.fromkeys(kind for _, kinds in self._parts for kind in kinds))

    def deliver(self, change: Change, now: float) -> None:
        """Tell every part that asked for it."""
        for part, kinds in self._parts:
            if change.kind in kinds:
                key = (part.name, change.kind, str(change.thing["metadata"]["uid"]))
                before = self._owed.pop(key, None)
                self._try(
                    part, key, _Owed(change, before.failures if before else 0, now, before.said if before else ""), now
                )

    def again(self, now: float) -> None:
        """Try what is due once more; while the server is away, only one thing at a time: each may take as long as its deadline."""
        by_name = {part.name: part for part, _ in self._parts}
        for key, owed in sorted(
            ((key, it) for key, it in self._owed.items() if it.due <= now), key=lambda it: it[1].due
        ):
            del self._owed[key]
            if isinstance(self._try(by_name[key[0]], key, owed, now), Unreachable):
                return

    def tick(self, now: float) -> None:
        """Tell every part that time has passed."""
        for part, _ in self._parts:
            owed = self._ticks.get(part.name)
            if owed is not None and owed.due > now:
                continue
            error = _attempt(lambda part=part: part.tick(now))  # type: ignore[misc]
            if error is None:
                self._ticks.pop(part.name, None)
                continue
            failures = owed.failures if owed else 0
            said = _say(part.name, "its round", error, owed.said if owed else "")
            change = Change(Kind("", "", ""), "", {})
            self._ticks[part.name] = _Owed(change, failures + 1, now + _pause(failures), said)

    def owes(self) -> int:
        """Return how much could not be done yet."""
        return len(self._owed) + len(self._ticks)

    def _try(self, part: Part, key: tuple[str, Kind, str], owed: _Owed, now: float) -> Exception | None:
        change = owed.change
        error = _attempt(lambda: part.changed(change.kind, change.verb, change.thing))
        if error is not None:
            meta = change.thing["metadata"]
            what = f"{change.kind.plural} {meta.get('namespace', '')}/{meta['name']}"
            said = _say(part.name, what, error, owed.said)
            self._owed[key] = _Owed(change, owed.failures + 1, now + _pause(owed.failures), said)
        return error


def _attempt(act: Callable[[], None]) -> Exception | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - a part may be somebody's plugin: the others go on
        return error
    return None


def _pause(failures: int) -> float:
    return _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]


def _say(part: str, what: str, error: Exception, said: str) -> str:
    """Log a failure once for each text; somebody else's change that came in between is nothing to speak of."""
    text = f"{type(error).__name__}: {error}"
    if text != said and not isinstance(error, Conflict):
        loud = (
            logging.ERROR if isinstance(error, Forbidden) or not isinstance(error, KubernetesError) else logging.WARNING
        )
        trace = None if isinstance(error, KubernetesError) else error
        _LOG.log(loud, "%s could not deal with %s, it will be tried again: %s", part, what, error, exc_info=trace)
    return text
