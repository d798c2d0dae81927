"""What was done and what can't be done, as Events of the job or Pod that it is about, and in the log: each once.

Rule: an Event that can't be written is logged and given up: it is a word to people, not a deed.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import datetime, timezone
from typing import Any, Protocol

from resilience.integrations.kubernetes.api import Conflict, KubernetesError
from resilience.integrations.kubernetes.parts import Kind, Thing
from resilience.integrations.kubernetes.podgroups.members import Warning_

_LOG = logging.getLogger("resilience.kubernetes")
EVENTS = Kind("", "v1", "events")
_LONGEST = 1024  # of an Event's message


class Creates(Protocol):
    """What is needed of the API."""

    def create(self, kind: Kind, thing: Thing, namespace: str = "") -> dict[str, Any]:
        """Create a thing."""


class Teller:
    """Tells each thing once: here it is remembered by what it is about, in the cluster by the Event's name."""

    def __init__(self, api: Creates) -> None:
        self._api = api
        self._said: dict[str, set[str]] = {}

    def warn(self, thing: Thing, warning: Warning_) -> None:
        """Say that something can't be."""
        self._say(thing, "Warning", warning.reason, warning.text)

    def note(self, thing: Thing, reason: str, text: str) -> None:
        """Say that something was done."""
        self._say(thing, "Normal", reason, text)

    def forget(self, uid: str) -> None:
        """Forget what was said of a thing that is gone."""
        self._said.pop(uid, None)

    def _say(self, thing: Thing, how: str, reason: str, text: str) -> None:
        metadata = thing["metadata"]
        said = self._said.setdefault(str(metadata["uid"]), set())
        if reason + text in said:
            return
        said.add(reason + text)
        if how == "Warning":
            _LOG.warning("%s %s/%s: %s", thing["kind"], metadata.get("namespace", ""), metadata["name"], text)
        try:
            self._api.create(EVENTS, event(thing, how, reason, text), metadata.get("namespace", ""))
        except Conflict:
            pass  # said before we were started anew
        except KubernetesError as error:
            _LOG.warning("the Event %s of %s could not be written: %s", reason, metadata["name"], error)


def event(thing: Thing, how: str, reason: str, text: str) -> dict[str, Any]:
    """Return an Event whose name says what it is: the same one is never written twice."""
    metadata = thing["metadata"]
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    digest = hashlib.sha256(f"{metadata['uid']} {reason} {text}".encode()).hexdigest()[:16]
    namespace = metadata.get("namespace", "")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name'][:230]}.{digest}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": thing["apiVersion"],
            "kind": thing["kind"],
            "name": metadata["name"],
            "namespace": namespace,
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
        },
        "type": how,
        "reason": reason,
        "message": text[:_LONGEST],
        "source": {"component": "resilience-controller"},
        "reportingComponent": "resilience-controller",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
