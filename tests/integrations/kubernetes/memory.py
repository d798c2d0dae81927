"""A cluster in memory, for tests of what is decided: objects by kind, namespace and name, with the API server's refusals.

What a real API server makes of it is tested in ``test_podgroups_cluster.py``.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

pytest.importorskip("resilience.integrations.kubernetes.api", reason="not installed here: resilience.integrations")

from resilience.integrations.kubernetes.api import Conflict, NotFound
from resilience.integrations.kubernetes.parts import ADDED, DELETED, MODIFIED, Kind


def merged(old: Any, change: Any) -> Any:
    """Return what a JSON merge patch makes of a value."""
    if not isinstance(change, dict):
        return change
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class MemoryCluster:
    """Takes the place of an ``Api``. ``writes`` is what was written to it: verb, plural and name."""

    def __init__(self) -> None:
        self.things: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.part: Any = None
        self.absent: set[str] = set()  # plurals of kinds that are not installed
        self._count = itertools.count(1)

    def key(self, kind: Kind, namespace: str, name: str) -> tuple[str, str, str, str]:
        return (kind.group, kind.plural, namespace, name)

    def get(self, kind: Kind, name: str, namespace: str = "") -> dict[str, Any]:
        try:
            return copy.deepcopy(self.things[self.key(kind, namespace, name)])
        except KeyError:
            raise NotFound(f"{kind.plural} {name} not found", 404) from None

    def create(self, kind: Kind, thing: Any, namespace: str = "") -> dict[str, Any]:
        key = self.key(kind, namespace, thing["metadata"]["name"])
        if kind.plural in self.absent:
            raise NotFound("the server could not find the requested resource", 404)
        if key in self.things:
            raise Conflict(f"{kind.plural} {key[3]} already exists", 409)
        number = next(self._count)
        made = copy.deepcopy(dict(thing))
        made["metadata"] = {
            "uid": f"uid-{number}",
            "resourceVersion": str(number),
            "namespace": namespace,
            **made["metadata"],
        }
        self.things[key] = made
        self.writes.append(("create", kind.plural, key[3]))
        self._told(kind, ADDED, made)
        return copy.deepcopy(made)

    def patch(self, kind: Kind, name: str, change: Any, namespace: str = "") -> dict[str, Any]:
        old = self.get(kind, name, namespace)
        for precondition in ("uid", "resourceVersion"):
            wanted = (change.get("metadata") or {}).get(precondition)
            if wanted is not None and wanted != old["metadata"][precondition]:
                raise Conflict(f"{kind.plural} {name}: {precondition} differs", 409)
        made = merged(old, change)
        made["metadata"]["resourceVersion"] = str(next(self._count))
        self.things[self.key(kind, namespace, name)] = made
        self.writes.append(("patch", kind.plural, name))
        self._told(kind, MODIFIED, made)
        return copy.deepcopy(made)

    def delete(self, kind: Kind, name: str, namespace: str = "") -> None:
        gone = self.things.pop(self.key(kind, namespace, name))
        self._told(kind, DELETED, gone)

    def _told(self, kind: Kind, verb: str, thing: dict[str, Any]) -> None:
        """Tell the part, as the controller would: it compares kinds, so it gets the one that it asked for."""
        if self.part is None:
            return
        for asked in self.part.kinds():
            if (asked.group, asked.plural) == (kind.group, kind.plural) and _selects(asked, thing):
                self.part.changed(asked, verb, copy.deepcopy(thing))

    def attach(self, part: Any) -> None:
        """Have a part listen: it is told of everything that is there, as after a restart."""
        self.part = part
        for (group, plural, _, _), thing in list(self.things.items()):
            self._told(Kind(group, "", plural), ADDED, thing)

    def events(self, reason: str = "") -> list[dict[str, Any]]:
        """Return the Events that were recorded."""
        found = [thing for (_, plural, _, _), thing in self.things.items() if plural == "events"]
        return [event for event in found if not reason or event["reason"] == reason]


def _selects(kind: Kind, thing: dict[str, Any]) -> bool:
    return not kind.selector or kind.selector in (thing["metadata"].get("labels") or {})
