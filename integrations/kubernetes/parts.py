"""The duties of the controller: each is told what changes in the cluster, and acts.

1) (controller) calls ``kinds()`` once, and lists and watches every kind that a part names
2) (controller) calls ``changed(kind, verb, thing)`` for everything that is listed, and then for every change; where the server has
   forgotten what came in between it lists again, so a part is told the same thing twice, and of things that are gone as ``DELETED``
3) (controller) calls ``tick(now)`` about once a second, once the first lists of what this part named are through

All three come from one thread. A part that raises is told the same thing again later, with a growing pause: what it does must be
idempotent. Things are plain JSON, as the API server sends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Thing = Mapping[str, Any]

ADDED, MODIFIED, DELETED = "ADDED", "MODIFIED", "DELETED"


@dataclass(frozen=True)
class Kind:
    """What is watched: a resource by its plural, perhaps only with some labels. ``group`` is empty for Kubernetes' core."""

    group: str
    version: str
    plural: str
    selector: str = ""
    optional: bool = False  # its custom resource may not be installed: then it is looked for again now and then
    namespaced: bool = True

    @property
    def path(self) -> str:
        """Return where the API server serves it."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


PODS = Kind("", "v1", "pods")
NODES = Kind("", "v1", "nodes", namespaced=False)


class Part(Protocol):
    """A duty. See above for who calls what."""

    name: str

    def kinds(self) -> Sequence[Kind]:
        """Return what this part wants to be told of."""

    def changed(self, kind: Kind, verb: str, thing: Thing) -> None:
        """Something is there, has changed, or is gone."""

    def tick(self, now: float) -> None:
        """Time has passed; ``now`` is in seconds since 1970."""
