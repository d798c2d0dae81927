"""Say in the cluster what was done and why: Events, which ``kubectl describe`` and ``kubectl get events`` show.

Rule: an Event is for people. One that can't be written is logged, and never holds up or undoes what it tells of. That the right to
is missing is said once: whoever records an Event logs it too.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import datetime, timezone

from resilience.integrations.kubernetes.api import Api, Conflict, Forbidden, KubernetesError
from resilience.integrations.kubernetes.parts import Kind, Thing

_LOG = logging.getLogger("resilience.kubernetes")
EVENTS = Kind("", "v1", "events")
NORMAL, WARNING = "Normal", "Warning"
_TEXT = 1000  # the API server takes 1024
_LACKING: set[str] = set()  # rights that were said to be missing


def stamp(at: float) -> str:
    """Return seconds since 1970 as Kubernetes writes times."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str | None) -> float:
    """Return a time of Kubernetes' in seconds since 1970; 0 where there is none."""
    if not text:
        return 0.0
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def record(
    api: Api, about: Thing, reason: str, message: str, now: float, *, kind: str = WARNING, key: str = ""
) -> None:
    """Record an Event about a thing; what has the same ``key`` is recorded once."""
    meta = about["metadata"]
    namespace = meta.get("namespace") or "default"
    uid = str(meta.get("uid", ""))
    digest = hashlib.sha256(f"{uid}/{reason}/{key or message}".encode()).hexdigest()[:16]
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{meta['name'][:200]}.{digest}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": about.get("apiVersion", "v1"),
            "kind": about.get("kind", ""),
            "name": meta["name"],
            "namespace": meta.get("namespace", ""),
            "uid": uid,
        },
        "reason": reason,
        "message": message[:_TEXT],
        "type": kind,
        "firstTimestamp": stamp(now),
        "lastTimestamp": stamp(now),
        "count": 1,
        "source": {"component": "resilience-controller"},
    }
    try:
        api.create(EVENTS, event, namespace)
    except Conflict:
        return
    except KubernetesError as error:
        right = error.right if isinstance(error, Forbidden) else ""
        if right not in _LACKING:
            _LOG.warning("%s: %s (no Event was recorded: %s)", reason, message, error)
        _LACKING.update(filter(None, [right]))
