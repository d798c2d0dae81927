"""One description of a group, as each gang scheduler wants it: the custom resource, what its Pods carry, and what got lost.

Rule: what a scheduler has no word for is said in ``notes``; nothing is dropped silently, nothing is made up.

Hazard: ``schedulerName`` must be in the Pod's template. Labels can be added to a Pod that waits; its scheduler can't be changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilience.integrations.kubernetes.parts import Kind
from resilience.integrations.kubernetes.podgroups.group import DEFAULT_QUEUE, PodGroup, PodGroupError, Role

from resilience.errors import nearest


@dataclass(frozen=True)
class Marks:
    """What a Pod of a group carries: labels and annotations can be added later, the scheduler's name can't."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    scheduler_name: str = ""

    def onto(self, template: Mapping[str, Any]) -> dict[str, Any]:
        """Return a Pod or a Pod's template with these marks."""
        metadata = dict(template.get("metadata") or {})
        for key, more in (("labels", self.labels), ("annotations", self.annotations)):
            if more:
                metadata[key] = {**(metadata.get(key) or {}), **more}
        spec = {**(template.get("spec") or {})}
        if self.scheduler_name:
            spec = {"schedulerName": self.scheduler_name, **{k: v for k, v in spec.items() if k != "schedulerName"}}
        return {**template, "metadata": metadata, "spec": spec}


class GangScheduler(ABC):
    """A scheduler that places groups. ``name`` is what flags call it, ``kind`` its custom resource."""

    name: str
    kind: Kind
    default_scheduler: str
    group_key: tuple[str, str]  # where a Pod says which group it belongs to: labels or annotations, and the key there

    def __init__(self, scheduler_name: str = "") -> None:
        self.scheduler_name = scheduler_name or self.default_scheduler

    @property
    def api_version(self) -> str:
        """Return the resource's apiVersion."""
        return f"{self.kind.group}/{self.kind.version}"

    def resource(self, group: PodGroup) -> dict[str, Any]:
        """Return the group as this scheduler's custom resource."""
        metadata: dict[str, Any] = {"name": group.name}
        if group.namespace:
            metadata["namespace"] = group.namespace
        if group.owner is not None:
            metadata["ownerReferences"] = [group.owner.reference()]
        return {"apiVersion": self.api_version, "kind": "PodGroup", "metadata": metadata, "spec": self.spec(group)}

    @abstractmethod
    def spec(self, group: PodGroup) -> dict[str, Any]:
        """Return the resource's spec."""

    @abstractmethod
    def marks(self, group: PodGroup, role: str = "") -> Marks:
        """Return what a Pod of the group carries; with a role, that role's."""

    def group_of(self, pod: Mapping[str, Any]) -> str:
        """Return the group that a Pod says it belongs to, or an empty string."""
        part, key = self.group_key
        return str((pod["metadata"].get(part) or {}).get(key, ""))

    def notes(self, group: PodGroup) -> tuple[str, ...]:
        """Return what this scheduler can't be told of the group, in sentences."""
        return ()


class T9k(GangScheduler):
    """TensorStack's T9k Scheduler: everything can be said."""

    name = "t9k"
    kind = Kind("scheduler.tensorstack.dev", "v1beta1", "podgroups", optional=True)
    default_scheduler = "t9k-scheduler"
    group_label = "scheduler.tensorstack.dev/group-name"
    group_key = ("labels", group_label)
    role_label = "scheduler.tensorstack.dev/role"
    queue_label = "scheduler.tensorstack.dev/queue"

    def spec(self, group: PodGroup) -> dict[str, Any]:
        spec: dict[str, Any] = {"minMember": group.min_member, "queue": group.queue}
        if group.priority is not None:
            spec["priority"] = group.priority
        if group.roles:
            spec["roles"] = [{"name": role.name, "minMember": role.min_member} for role in group.roles]
        return spec

    def marks(self, group: PodGroup, role: str = "") -> Marks:
        labels = {self.group_label: group.name, self.queue_label: group.queue}
        if role:
            labels[self.role_label] = group.role(role).name
        return Marks(labels, scheduler_name=self.scheduler_name)


class Coscheduling(GangScheduler):
    """The coscheduling plugin of kubernetes-sigs/scheduler-plugins: a name and a number."""

    name = "coscheduling"
    kind = Kind("scheduling.x-k8s.io", "v1alpha1", "podgroups", optional=True)
    default_scheduler = "scheduler-plugins-scheduler"
    group_label = "scheduling.x-k8s.io/pod-group"
    group_key = ("labels", group_label)

    def spec(self, group: PodGroup) -> dict[str, Any]:
        return {"minMember": group.min_member}

    def marks(self, group: PodGroup, role: str = "") -> Marks:
        if role:
            group.role(role)  # raises for one that the group does not have
        return Marks({self.group_label: group.name}, scheduler_name=self.scheduler_name)

    def notes(self, group: PodGroup) -> tuple[str, ...]:
        found = []
        if group.roles:
            found.append(
                f"coscheduling knows no roles: only the {group.min_member} Pods of the whole group are waited for, not "
                + " and ".join(f"{role.min_member} of role {role.name}" for role in group.roles)
                + "."
            )
        if group.queue != DEFAULT_QUEUE:
            found.append(f"coscheduling knows no queues: {group.queue!r} is left out.")
        if group.priority is not None:
            found.append(
                f"coscheduling takes the priority of the Pods: priority {group.priority} is left out. Give all Pods of the "
                "group one priorityClassName."
            )
        return tuple(found)


class Volcano(GangScheduler):
    """Volcano: roles are tasks, the group's name is an annotation, priorities are classes."""

    name = "volcano"
    kind = Kind("scheduling.volcano.sh", "v1beta1", "podgroups", optional=True)
    default_scheduler = "volcano"
    group_annotation = "scheduling.k8s.io/group-name"
    group_key = ("annotations", group_annotation)
    task_annotation = "volcano.sh/task-spec"

    def spec(self, group: PodGroup) -> dict[str, Any]:
        spec: dict[str, Any] = {"minMember": group.min_member, "queue": group.queue}
        if group.roles:
            spec["minTaskMember"] = {role.name: role.min_member for role in group.roles}
        return spec

    def marks(self, group: PodGroup, role: str = "") -> Marks:
        annotations = {self.group_annotation: group.name}
        if role:
            annotations[self.task_annotation] = group.role(role).name
        return Marks(annotations=annotations, scheduler_name=self.scheduler_name)

    def notes(self, group: PodGroup) -> tuple[str, ...]:
        found = []
        if group.priority is not None:
            found.append(
                f"Volcano's priorities are classes: priority {group.priority} is left out. Make a PriorityClass and name it in "
                "the Pods' priorityClassName and in the PodGroup's."
            )
        if group.roles:
            found.append(
                "Volcano knows roles as minTaskMember, in releases that have it, and counts a Pod by its annotation "
                f"{self.task_annotation}: without it a Pod has no role."
            )
        return tuple(found)


SCHEDULERS: Mapping[str, type[GangScheduler]] = {known.name: known for known in (T9k, Coscheduling, Volcano)}


def scheduler(name: str = "t9k", scheduler_name: str = "") -> GangScheduler:
    """Return a gang scheduler by its name; ``scheduler_name`` is what Pods call it, where that is not the usual one."""
    if name not in SCHEDULERS:
        raise PodGroupError(
            f"unknown gang scheduler {name!r}.{nearest(name, SCHEDULERS)} Known: {', '.join(SCHEDULERS)}."
        )
    return SCHEDULERS[name](scheduler_name)


def read(resource: Mapping[str, Any]) -> tuple[PodGroup, GangScheduler]:
    """Return the description behind a custom resource, of whichever scheduler it is; its owner is left out."""
    version, spec = str(resource.get("apiVersion", "")), resource.get("spec") or {}
    by = next((made for known in SCHEDULERS.values() if (made := known()).api_version == version), None)
    if by is None or resource.get("kind") != "PodGroup":
        raise PodGroupError(f"{resource.get('kind')} of {version!r} is no PodGroup that we know.")
    told = spec.get("minTaskMember") or {role["name"]: role["minMember"] for role in spec.get("roles") or ()}
    metadata = resource["metadata"]
    group = PodGroup(
        str(metadata.get("name", "")),
        spec.get("minMember", 0),
        spec.get("queue") or DEFAULT_QUEUE,
        spec.get("priority"),
        tuple(Role(name, number) for name, number in told.items()),
        metadata.get("namespace", ""),
    )
    return group, by
