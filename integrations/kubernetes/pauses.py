"""Who is to be left alone for a while, since what was tried for them failed: each pauses for itself, and longer each time.

Rule: a failure is said once for each text, however often it is met. Somebody else's change that came in between is nothing to
speak of.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from resilience.integrations.kubernetes.api import Conflict, Forbidden, KubernetesError

_LOG = logging.getLogger("resilience.kubernetes")
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Failure:
    """How often it failed in a row, when it may be tried again, and what was said last."""

    times: int = 0
    due: float = 0.0
    said: str = ""

    def again(self, error: Exception, now: float, what: str) -> Failure:
        """Return what one failure more makes of it, and say it: ``what`` names who could not do what."""
        pause = _PAUSES_S[min(self.times, len(_PAUSES_S) - 1)]
        return Failure(self.times + 1, now + pause, _say(what, error, self.said))


class Pauses(Generic[K]):
    """Failures by whom they concern. ``now`` is in seconds since 1970, and is passed in."""

    def __init__(self) -> None:
        self._failures: dict[K, Failure] = {}

    def __len__(self) -> int:
        """Return how many there are that failed the last time."""
        return len(self._failures)

    def over(self, key: K, now: float) -> bool:
        """Whether it may be tried now."""
        return self._failures.get(key, Failure()).due <= now

    def failed(self, key: K, error: Exception, now: float, what: str) -> None:
        """It did not work: pause."""
        self._failures[key] = self._failures.get(key, Failure()).again(error, now, what)

    def worked(self, key: K) -> None:
        """It did, or need not any more."""
        self._failures.pop(key, None)


def _say(what: str, error: Exception, said: str) -> str:
    text = f"{type(error).__name__}: {error}"
    if text != said and not isinstance(error, Conflict):
        loud = (
            logging.ERROR if isinstance(error, Forbidden) or not isinstance(error, KubernetesError) else logging.WARNING
        )
        trace = None if isinstance(error, KubernetesError) else error
        _LOG.log(loud, "%s, it will be tried again: %s", what, error, exc_info=trace)
    return text
