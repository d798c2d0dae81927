"""What a pod of a training job is in it: which seat it holds, in which group, and whether it has a node. Pure: pods in, words out.

A seat outlives the pods that hold it. A pod that waits for a node has no labels from the scheduler yet: its seat says which group
it is of. Jobs without indices have pods that can't be told apart: each holds a seat by its name, and whichever is next takes over.

Rule: a seat is filled while a pod of it has a node and has not ended. What happens on the node then is the launcher's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resilience.integrations.kubernetes.parts import Thing

from resilience.errors import ConfigError
from resilience.groups.topology import NOWHERE, Place, from_labels

SEAT_LABEL = "resilience.dev/member"
_PREFIXES = (
    "jobset.sigs.k8s.io/replicatedjob-name",
    "jobset.sigs.k8s.io/job-index",
    "training.kubeflow.org/replica-type",
)
_INDICES = (
    SEAT_LABEL,
    "batch.kubernetes.io/job-completion-index",  # a label from 1.28 on, an annotation from 1.21 on
    "training.kubeflow.org/replica-index",
    "apps.kubernetes.io/pod-index",
)
_JOBSET, _JOBSET_UID = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/jobset-uid"
ANONYMOUS = "pod/"  # begins the seats of pods that can't be told apart


@dataclass(frozen=True)
class Member:
    """A pod as the groups see it."""

    uid: str
    name: str
    seat: str
    place: Place
    node: str
    created: str
    owner: Mapping[str, Any] | None  # who makes it again; nobody for a plain pod
    origin: str  # uid of the owner that lives as long as the job; empty where nobody knows that
    phase: str
    leaving: bool
    why: str

    @property
    def filled(self) -> bool:
        """Whether it has a node and has not ended."""
        return bool(self.node) and not self.leaving and self.phase not in ("Failed", "Succeeded")

    @property
    def lives(self) -> bool:
        """Whether it has a node, or waits for one."""
        return self.filled or self.waits

    @property
    def finished(self) -> bool:
        """Whether its work is done."""
        return self.phase == "Succeeded"

    @property
    def waits(self) -> bool:
        """Whether it is there and has no node yet."""
        return not self.node and not self.leaving and self.phase not in ("Failed", "Succeeded")


def member(pod: Thing) -> Member:
    """Read a pod. Labels that can't be meant are no group."""
    meta, status = pod["metadata"], pod.get("status") or {}
    try:
        place = from_labels(meta.get("labels") or {})
    except ConfigError:
        place = NOWHERE
    owner = next((one for one in meta.get("ownerReferences") or () if one.get("controller")), None)
    return Member(
        uid=str(meta["uid"]),
        name=str(meta["name"]),
        seat=_seat(meta, owner),
        place=place,
        node=str(pod.get("spec", {}).get("nodeName") or ""),
        created=str(meta.get("creationTimestamp") or ""),
        owner=owner,
        origin=_origin(meta.get("labels") or {}, owner),
        phase=str(status.get("phase") or "Pending"),
        leaving=bool(meta.get("deletionTimestamp")),
        why=_why(meta, status),
    )


def _seat(meta: Mapping[str, Any], owner: Mapping[str, Any] | None) -> str:
    words = {**(meta.get("annotations") or {}), **(meta.get("labels") or {})}
    index = next((words[name] for name in _INDICES if words.get(name)), "")
    if index:
        return "/".join([*(words[name] for name in _PREFIXES if words.get(name)), str(index)])
    if owner is None or owner.get("kind") == "StatefulSet":  # their pods come again under the same name
        return str(meta["name"])
    return f"{ANONYMOUS}{meta['name']}"


def _origin(labels: Mapping[str, str], owner: Mapping[str, Any] | None) -> str:
    """A JobSet makes its Jobs anew at each of its restarts; older releases do not tell its own uid."""
    if _JOBSET in labels:
        return labels.get(_JOBSET_UID, "")
    return "" if owner is None else str(owner["uid"])


def _why(meta: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Say in a few words what is wrong with a pod, for events and logs."""
    name = meta["name"]
    if meta.get("deletionTimestamp"):
        return f"pod {name} was deleted"
    if status.get("phase") == "Failed":
        codes = [
            str(ended["exitCode"])
            for it in status.get("containerStatuses") or ()
            if (ended := (it.get("state") or {}).get("terminated")) and ended.get("exitCode")
        ]
        said = status.get("reason") or (f"exit code {', '.join(codes)}" if codes else "")
        return f"pod {name} failed{f': {said}' if said else ''}"
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"pod {name} is {condition.get('reason', 'Pending')}: {str(condition.get('message', ''))[:200]}"
    return f"pod {name} has no node"
