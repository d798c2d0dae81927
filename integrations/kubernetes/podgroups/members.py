"""What is to be done about one Pod, or about one group that is there already: pure, from what the API server showed.

Rule: a Pod has one group for life. The one that we gave it is noted in an annotation; where its label says another one later, the
label is put back and it is said how a Pod gets into another group.

Hazard: a Pod that an own controller made keeps the scheduler of its template. Labels alone keep no gang together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resilience.integrations.kubernetes.parts import Thing
from resilience.integrations.kubernetes.podgroups.group import DEFAULT_QUEUE, GroupIsFixed, PodGroup
from resilience.integrations.kubernetes.podgroups.jobs import KINDS, T9K_GROUP, Wish
from resilience.integrations.kubernetes.podgroups.schedulers import GangScheduler, Marks, Volcano

GIVEN = "resilience.dev/pod-group"  # annotation of a Pod: the group that it was given
MADE = "resilience.dev/made-by"  # annotation of a group: this controller keeps it as the job says
MAKER = "podgroups"
_NOTES = (GIVEN, Volcano.group_annotation, Volcano.task_annotation)  # all that is kept of a Pod's annotations
_COMPONENT = "tensorstack.dev/component"
_SET_NAME, _SET_JOB = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/replicatedjob-name"


@dataclass(frozen=True)
class Complaint:
    """Something to tell: one word, and a sentence with the way out."""

    reason: str
    text: str


@dataclass(frozen=True)
class Finding:
    """What to change (a merge patch), and what to tell."""

    patch: Mapping[str, Any] | None = None
    warning: Complaint | None = None


def look(pod: Thing, wanted: Wish) -> Finding:
    """Return what is to be done about a Pod of a job."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    if metadata.get("deletionTimestamp") or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return Finding()
    group, by = wanted.group, wanted.scheduler
    name, now = metadata["name"], by.group_of(pod)
    given = (metadata.get("annotations") or {}).get(GIVEN, "")
    if given == group.name and now != given:
        error = GroupIsFixed(name, given, now) if now else None
        text = (
            str(error) if error else f"the label that says that Pod {name} belongs to PodGroup {given!r} was removed."
        )
        return Finding(_patch(pod, group, by), Complaint("GroupIsFixed", f"{text} The label was put back."))
    if now and now != group.name:
        text = (
            f"Pod {name} says that it belongs to PodGroup {now!r}, but its job's group is {group.name!r}: it was left alone and "
            "does not count there. Take the label out of the job's Pod template, and delete the Pod."
        )
        return Finding(warning=Complaint("OtherGroup", text))
    return Finding(_patch(pod, group, by), None if spec.get("nodeName") else _scheduler(spec, group, by))


def _scheduler(spec: Mapping[str, Any], group: PodGroup, by: GangScheduler) -> Complaint | None:
    found = spec.get("schedulerName") or "default-scheduler"
    if found == by.scheduler_name:
        return None
    text = (
        f"Pods of PodGroup {group.name!r} wait for {found!r}, which does not know the group: they may start one by one. A Pod's "
        f"scheduler can't be changed: put schedulerName: {by.scheduler_name} into the job's Pod template and create the job again."
    )
    return Complaint("WrongScheduler", text)


def _patch(pod: Thing, group: PodGroup, by: GangScheduler) -> Mapping[str, Any] | None:
    """Return the patch that gives a Pod its group's marks; None where it has them. It fits this Pod only, not its successor.

    A queue or a role that the Pod has already is kept: those can't be changed either.
    """
    marks = by.marks(group, role_of(pod, group))
    metadata = pod["metadata"]
    wanted = {"labels": dict(marks.labels), "annotations": {**marks.annotations, GIVEN: group.name}}
    lacking = {
        part: {
            key: value
            for key, value in entries.items()
            if key not in (has := metadata.get(part) or {}) or ((part, key) == by.group_key and has[key] != value)
        }
        for part, entries in wanted.items()
    }
    change: dict[str, Any] = {part: entries for part, entries in lacking.items() if entries}
    return {"metadata": {"uid": metadata["uid"], **change}} if change else None


def role_of(pod: Thing, group: PodGroup) -> str:
    """Return the role of a Pod in its group, as far as its labels tell; empty where the group has none such."""
    role = (pod["metadata"].get("labels") or {}).get(_SET_JOB, "")
    return role if any(known.name == role for known in group.roles) else ""


def job_of(pod: Thing) -> tuple[str, tuple[str, str, str]]:
    """Return who a Pod belongs to: the uid of a job that controls it, and (kind, namespace, name) of one that its labels name.

    T9k's controllers label a Pod with the kind of its job in small letters; JobSet's with the set's name. Either may stand
    between a Pod and its job, as a Job does between a Pod and a JobSet.
    """
    metadata = pod["metadata"]
    labels, namespace = metadata.get("labels") or {}, metadata.get("namespace", "")
    owners = [
        ref for ref in metadata.get("ownerReferences") or () if ref.get("controller") and ref.get("kind") in KINDS
    ]
    uid = str(owners[0]["uid"]) if owners else ""
    component = labels.get(_COMPONENT, "")
    for known in KINDS.values():
        word = known.name.lower()
        if known.kind.group == T9K_GROUP and component == word and labels.get(word):
            return uid, (known.name, namespace, labels[word])
    if labels.get(_SET_NAME):
        return uid, ("JobSet", namespace, labels[_SET_NAME])
    return uid, ("", "", "")


@dataclass(frozen=True)
class Verdict:
    """What is to be done about a group that is there: nothing, a patch, wait (``stale``), or leave it alone and tell."""

    patch: Mapping[str, Any] | None = None
    stale: bool = False
    warning: Complaint | None = None


def compare(existing: Thing, wanted: Thing, *, by_hand: bool = False) -> Verdict:
    """Compare a group that is there with the one that is wanted. ``by_hand``: a person asked, so it is theirs to change."""
    metadata = existing["metadata"]
    name = metadata["name"]
    if metadata.get("deletionTimestamp"):
        return Verdict(stale=True)
    ours = _owner(wanted)
    theirs = _owner(existing)
    if theirs and ours and theirs["uid"] != ours["uid"]:
        if (theirs["kind"], theirs["name"]) == (ours["kind"], ours["name"]):
            return Verdict(stale=True)  # of a job of that name that was deleted: the garbage collector is on its way
        text = (
            f"PodGroup {name!r} belongs to {theirs['kind']} {theirs['name']}: {ours['kind']} {ours['name']} can't have a group of "
            "that name, and its Pods were not labelled. Give one of the two jobs another name."
        )
        return Verdict(warning=Complaint("GroupOfAnother", text))
    has, wants = existing.get("spec") or {}, wanted["spec"]
    different = _different(has, wants)
    if not different:
        return Verdict()
    if not by_hand and (metadata.get("annotations") or {}).get(MADE) != MAKER:
        words = ", ".join(f"{key} is {has.get(key)!r}, not {wants.get(key)!r}" for key in different)
        text = (
            f"PodGroup {name!r} differs from what its job asks for ({words}), but somebody else made it: it was left as it is. "
            "Delete it to have it made anew."
        )
        return Verdict(warning=Complaint("GroupOfAnother", text))
    return Verdict(patch={"metadata": {"uid": metadata["uid"]}, "spec": _replacing(has, wants)})


def _owner(group: Thing) -> Mapping[str, Any] | None:
    references = group["metadata"].get("ownerReferences") or ()
    return next((ref for ref in references if ref.get("controller")), None)


_UNSAID: Mapping[str, Any] = {"minMember": 0, "queue": DEFAULT_QUEUE, "priority": 0, "roles": [], "minTaskMember": {}}


def _different(existing: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return what a group says otherwise; what it says besides, a topology for instance, is nobody's business."""
    return [key for key, default in _UNSAID.items() if (existing.get(key) or default) != (wanted.get(key) or default)]


def _replacing(existing: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    gone = {key: None for key in _UNSAID if key in existing and key not in wanted}
    return {**wanted, **gone}


def slim(pod: Thing) -> Thing:
    """Return what is kept of a Pod: a cluster has many."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    keys = (
        "name",
        "namespace",
        "uid",
        "labels",
        "annotations",
        "ownerReferences",
        "deletionTimestamp",
        "resourceVersion",
    )
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {key: metadata[key] for key in keys if key in metadata},
        "spec": {key: spec[key] for key in ("schedulerName", "nodeName") if key in spec},
        "status": {"phase": (pod.get("status") or {}).get("phase", "")},
    }


def joined(pod: Thing, group: PodGroup, by: GangScheduler, role: str = "") -> Marks:
    """Return what a Pod needs to join a group by hand; raise :class:`GroupIsFixed` where it is in another one."""
    now = by.group_of(pod)
    if now and now != group.name:
        raise GroupIsFixed(str(pod["metadata"]["name"]), now, group.name)
    return by.marks(group, role)
