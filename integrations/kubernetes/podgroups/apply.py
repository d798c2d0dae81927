"""Groups in a real cluster, by a person's command or by the controller: made first, then Pods join.

Rule: everything here may be done twice. What is there and right is left alone; what somebody else changed in between is read again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from resilience.integrations.kubernetes.api import Api, Conflict, KubernetesError, NotFound
from resilience.integrations.kubernetes.parts import PODS, Thing
from resilience.integrations.kubernetes.podgroups.group import PodGroup, PodGroupError
from resilience.integrations.kubernetes.podgroups.members import GIVEN, MADE, MAKER, Complaint, compare, joined
from resilience.integrations.kubernetes.podgroups.schedulers import GangScheduler

CREATED, UPDATED, UNCHANGED = "created", "updated", "unchanged"
_TRIES = 4  # somebody else may create, change or delete it meanwhile, a few times


class Later(KubernetesError):  # noqa: N818 - reads as what it is
    """It can't be done now, and the same may work later."""


class Refused(PodGroupError):  # noqa: N818
    """It was left alone. ``warning`` says why."""

    def __init__(self, warning: Complaint) -> None:
        self.warning = warning
        super().__init__(warning.text)


def ensure(api: Api, group: PodGroup, by: GangScheduler, *, by_hand: bool = False) -> tuple[str, Thing]:
    """Have a group in the cluster as it is described; without a namespace it is in ``default``.

    Returns what was done, and the group as it is.
    """
    group = dataclasses.replace(group, namespace=group.namespace or "default")
    wanted = by.resource(group)
    if not by_hand:
        wanted["metadata"]["annotations"] = {MADE: MAKER}
    for _ in range(_TRIES):
        try:
            return CREATED, api.create(by.kind, wanted, group.namespace)
        except Conflict:
            pass
        except NotFound as error:
            raise _absent(by, error) from error
        try:
            found = api.get(by.kind, group.name, group.namespace)
            verdict = compare(found, wanted, by_hand=by_hand)
            if verdict.warning is not None:
                raise Refused(verdict.warning)
            if verdict.stale:
                raise Later(
                    f"PodGroup {group.name!r} is still that of a job that was deleted. It is made anew when the cluster's garbage "
                    "collector has removed it."
                )
            if verdict.patch is None:
                return UNCHANGED, found
            return UPDATED, api.patch(by.kind, group.name, verdict.patch, group.namespace)
        except (Conflict, NotFound):
            continue
    raise Later(f"PodGroup {group.name!r} was changed by somebody else {_TRIES} times meanwhile.")


def _absent(by: GangScheduler, error: Exception) -> Later:
    if 'namespaces "' in str(error):
        return Later(f"there is no such namespace ({error}). Nothing was created.")
    hint = " `resilience kubernetes podgroup crd` prints it." if by.name == "t9k" else ""
    return Later(
        f"the cluster has no {by.kind.plural}.{by.kind.group}/{by.kind.version}, or no such namespace ({error}). Nothing was "
        f"created. Install the scheduler's custom resource definition.{hint}"
    )


def join(api: Api, group: PodGroup, by: GangScheduler, pod: str, role: str = "") -> str:
    """Label a Pod that waits, so that it belongs to a group; raise ``GroupIsFixed`` where it is in another one."""
    change = admission(api, group, by, pod, role)
    if change is None:
        return UNCHANGED
    api.patch(PODS, pod, change, group.namespace)
    return UPDATED


def admission(api: Api, group: PodGroup, by: GangScheduler, pod: str, role: str = "") -> dict[str, Any] | None:
    """Return what a Pod needs to belong to a group, nothing where it does; raise where it can't. Nothing is changed by it."""
    found = api.get(PODS, pod, group.namespace)
    marks = joined(found, group, by, role)
    scheduler = (found.get("spec") or {}).get("schedulerName") or "default-scheduler"
    if scheduler != by.scheduler_name:
        raise PodGroupError(
            f"Pod {pod} waits for {scheduler!r}, and a Pod's scheduler can't be changed: nothing was labelled. Delete it and "
            f"create it again with schedulerName: {by.scheduler_name}."
        )
    metadata = found["metadata"]
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    wanted = {**marks.annotations, GIVEN: group.name}
    if all(labels.get(key) == value for key, value in marks.labels.items()) and wanted.items() <= annotations.items():
        return None
    same = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
    return {"metadata": {**same, "labels": dict(marks.labels), "annotations": wanted}}
