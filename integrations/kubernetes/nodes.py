"""A node out of scheduling, and back: cordoned, tainted and annotated with the reason.

The taint says it to the scheduler and to people who look at the node; the annotations say more. Both are written in one patch, with
the version that was read, so nothing that others write is lost.

Rule: one failure marks once. The node remembers which failures it was marked for, and until when all are settled: an operator who
has put it back in service is not overruled by a failure of before. What ended before a failure that the node was marked for is
settled with it: the node was out then, and whoever put it back did so later.

Hazard: when a node was put back is told by the operator's clock, when a container ended by the node's. A failure within their
difference may be taken for one of before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from resilience.integrations.kubernetes import events
from resilience.integrations.kubernetes.api import Api, Conflict
from resilience.integrations.kubernetes.parts import NODES

from resilience.failover.error_monitor import NodeFault

_LOG = logging.getLogger("resilience.kubernetes")
TAINT = "resilience.dev/faulty"
PREFIX = "resilience.dev/faulty-"
SEEN = f"{PREFIX}seen"
UNTIL = f"{PREFIX}until"  # failures that ended until then are settled
SINCE = f"{PREFIX}since"  # when it was taken out, which may be long after what it was taken out for
_REMEMBERED = 32
_TRIES = 5
_WORD = 63  # of a taint's value


def _let() -> None:
    """Nobody minds."""


@dataclass(frozen=True)
class Failure:
    """What a node is marked for. ``id`` tells it from others, and is the same however often it is looked at.

    ``happened`` is of the node's clock, ``bound``, when the pod was given that node, of the cluster's; 0 where it is not known.
    """

    id: str
    fault: NodeFault
    happened: float = 0.0
    bound: float = 0.0


def mark(api: Api, failure: Failure, *, pod: str = "", now: float = 0.0, brake: Callable[[], None] = _let) -> bool:
    """Take its node out of scheduling for one failure; return whether it was in until then.

    A node that was registered after the failure happened is another machine. The clock of a young node may be behind the cluster's:
    where it is known when the pod was bound, the node must be newer than that too.
    ``brake`` is called before a node is taken out that is in, and may raise. Raises ``NotFound`` where there is no such node.
    """
    now = now or time.time()
    fault, node = failure.fault, failure.fault.node
    digest = hashlib.sha256(failure.id.encode()).hexdigest()[:12]
    for attempt in range(_TRIES):
        try:
            found = api.get(NODES, node)
            if _is_old(found, failure, digest):
                return False
            was_in = not is_out(found)
            if was_in:
                brake()
            marked = api.patch(NODES, node, _marked(found, failure, digest, pod, now))
        except Conflict:
            if attempt == _TRIES - 1:
                raise
            continue
        _LOG.warning(
            "node %s is out of scheduling: %s: %s%s", node, fault.reason, fault.message, f" (pod {pod})" if pod else ""
        )
        told = f"out of scheduling ({fault.reason}): {fault.message}{f' (pod {pod})' if pod else ''}"
        events.record(api, {**marked, "kind": "Node"}, "NodeFaulty", told, now, key=digest)
        return was_in
    return False


def is_out(node: Mapping[str, Any]) -> bool:
    """Whether a node is out of scheduling by a mark of ours."""
    spec = node["spec"]
    return bool(spec.get("unschedulable")) and any(taint.get("key") == TAINT for taint in spec.get("taints") or ())


def taken_out(api: Api) -> dict[str, float]:
    """Return the nodes that are out by a mark of ours, and since when: what a controller that starts anew has to know."""
    found = [node for node in api.list_all(NODES)[0] if is_out(node)]
    return {str(node["metadata"]["name"]): events.seconds(_notes(node).get(SINCE)) for node in found}


def release(api: Api, node: str) -> bool:
    """Put a node back in service; return whether it was marked. What has failed until now is settled."""
    for attempt in range(_TRIES):
        try:
            found = api.get(NODES, node)
            taints = found["spec"].get("taints") or []
            notes = [name for name in _notes(found) if name.startswith(PREFIX) and name not in (SEEN, UNTIL)]
            ours = [taint for taint in taints if taint.get("key") == TAINT]
            if not ours and not notes:
                return False
            change = {
                "metadata": {
                    "resourceVersion": found["metadata"]["resourceVersion"],
                    "annotations": {**dict.fromkeys(notes), UNTIL: events.stamp(time.time())},
                },
                "spec": {"unschedulable": None, "taints": [taint for taint in taints if taint not in ours] or None},
            }
            api.patch(NODES, node, change)
        except Conflict:
            if attempt == _TRIES - 1:
                raise
            continue
        return True
    return False


def _is_old(node: Mapping[str, Any], failure: Failure, digest: str) -> bool:
    """Whether the node knows this failure already, it is settled, or the node is newer than it."""
    if digest in _seen(node):
        return True
    born = events.seconds(node["metadata"].get("creationTimestamp"))
    is_settled = int(failure.happened) <= _settled(node)
    return bool(failure.happened) and (is_settled or born > max(failure.happened, failure.bound) + 1.0)


def _settled(node: Mapping[str, Any]) -> float:
    return events.seconds(_notes(node).get(UNTIL))


def _notes(node: Mapping[str, Any]) -> Mapping[str, str]:
    return node["metadata"].get("annotations") or {}


def _seen(node: Mapping[str, Any]) -> list[str]:
    try:
        found = json.loads(_notes(node).get(SEEN, "[]"))
    except ValueError:
        return []
    return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []


def _marked(node: Mapping[str, Any], failure: Failure, digest: str, pod: str, now: float) -> dict[str, Any]:
    fault = failure.fault
    others = [taint for taint in node["spec"].get("taints") or [] if taint.get("key") != TAINT]
    settled = max(_settled(node), min(failure.happened, now))  # a clock that is ahead settles nothing that is to come
    notes = {
        "reason": fault.reason,
        "message": fault.message,
        "at": events.stamp(fault.at or now),
        "since": (_notes(node).get(SINCE, "") if is_out(node) else "") or events.stamp(now),
        "run": fault.run,
        "pod": pod,
        "until": events.stamp(settled) if settled else "",
        "seen": json.dumps([*_seen(node), digest][-_REMEMBERED:]),
    }
    return {
        "metadata": {
            "resourceVersion": node["metadata"]["resourceVersion"],
            "annotations": {PREFIX + name: value or None for name, value in notes.items()},
        },
        "spec": {
            "unschedulable": True,
            "taints": [*others, {"key": TAINT, "value": word(fault.reason), "effect": "NoSchedule"}],
        },
    }


def word(text: str) -> str:
    """Return a text as a label's or a taint's value may be."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_WORD].strip("._-") or "unknown"
