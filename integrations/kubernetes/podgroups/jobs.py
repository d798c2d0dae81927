"""From a job to its group: where each kind of job keeps its replicas, and what it says of scheduling.

T9k's eight kinds ask for a group with ``spec.scheduler.t9kScheduler``. ``batch/v1`` Jobs and JobSets, which have no such field, ask
with the label ``resilience.dev/gang`` (a scheduler's name), and annotations for queue and priority.

Rule: only replicas that are written as such count. A launcher that a controller adds on its own (MPIJob, ColossalAIJob), and what
BeamJob starts once its cluster runs, may come after the others are ready: a group that counted it would wait for itself.

Hazard: ``spec.elastic`` belongs to two kinds. On any other it is somebody's mistake; it is not followed, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from resilience.integrations.kubernetes.parts import Kind, Thing
from resilience.integrations.kubernetes.podgroups.group import (
    DEFAULT_QUEUE,
    Owner,
    PodGroup,
    PodGroupError,
    Role,
    whole,
)
from resilience.integrations.kubernetes.podgroups.schedulers import GangScheduler, scheduler

from resilience.errors import nearest

T9K_GROUP, T9K_VERSION = "batch.tensorstack.dev", "v1beta1"
GANG = "resilience.dev/gang"  # label of a Job or JobSet: the gang scheduler that is to place it
QUEUE = "resilience.dev/gang-queue"
PRIORITY = "resilience.dev/gang-priority"
MIN_MEMBER = "resilience.dev/gang-min-member"
SCHEDULER_NAME = "resilience.dev/gang-scheduler-name"

Replicas = Mapping[str, int]  # by role


@dataclass(frozen=True)
class JobKind:
    """A kind of job: how the API server calls it, where its replicas are, and whether it may be elastic."""

    name: str
    kind: Kind
    replicas: Callable[[Mapping[str, Any], str], Replicas]
    elastic: bool = False

    @property
    def api_version(self) -> str:
        """Return the apiVersion of its objects."""
        return f"{self.kind.group}/{self.kind.version}"


@dataclass(frozen=True)
class Wish:
    """What a job asks for: a group, by a scheduler, and what is to be said about it."""

    group: PodGroup
    scheduler: GangScheduler
    notes: tuple[str, ...] = ()


def wish(job: Thing) -> Wish | None:
    """Return the group that a job asks for; None where it asks for none. Raise where what it says can't be meant."""
    known = kind_of(job)
    name = f"{known.name} {_part(job, 'metadata', known.name).get('name', '?')}"
    spec = _part(job, "spec", name)
    if known.kind.group == T9K_GROUP:
        policy = _part(spec, "scheduler", name, "spec.").get("t9kScheduler")
        if policy is None:
            return None
        policy = _object(policy, f"{name}: spec.scheduler.t9kScheduler")
        number, notes = _members(known, spec, name)
        queue, priority = policy.get("queue") or DEFAULT_QUEUE, policy.get("priority")
        return Wish(_group(job, known, number, queue=queue, priority=priority), scheduler("t9k"), notes)
    return _labelled(job, known, spec, name)


def kind_of(job: Thing) -> JobKind:
    """Return the kind of a job; raise for one that is not known."""
    word, version = str(job.get("kind", "")), str(job.get("apiVersion", ""))
    known = KINDS.get(word)
    if known is None:
        raise PodGroupError(f"kind {word!r} is no job that we know.{nearest(word, KINDS)} Known: {', '.join(KINDS)}.")
    if version and version != known.api_version:
        raise PodGroupError(f"{word} of apiVersion {version!r} is not known: only {known.api_version}.")
    return known


def finished(job: Thing) -> bool:
    """Whether a job is over: its group is then left as it is."""
    status = job.get("status")
    if not isinstance(status, Mapping):
        return False
    if status.get("phase") in ("Succeeded", "Failed"):
        return True
    listed = status.get("conditions")
    told = [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []
    over = ("Complete", "Completed", "Failed", "Succeeded")
    return any(item.get("type") in over and item.get("status") == "True" for item in told)


def _labelled(job: Thing, known: JobKind, spec: Mapping[str, Any], name: str) -> Wish | None:
    """Return the wish of a Job or a JobSet: it stands in labels and annotations."""
    metadata = _part(job, "metadata", name)
    which = _part(metadata, "labels", name, "metadata.").get(GANG)
    if not which:
        return None
    told = _part(metadata, "annotations", name, "metadata.")
    replicas = known.replicas(spec, name)
    most = sum(replicas.values())
    least = _number(told, MIN_MEMBER, name)
    if least is not None and least > most:
        raise PodGroupError(f"{name}: {MIN_MEMBER} is {least}, but it has only {most} Pods: they would wait for ever.")
    roles = tuple(Role(role, count) for role, count in replicas.items() if role and least is None)
    group = _group(
        job,
        known,
        most if least is None else least,
        queue=told.get(QUEUE) or DEFAULT_QUEUE,
        priority=_number(told, PRIORITY, name),
        roles=roles,
    )
    by = scheduler(str(which), str(told.get(SCHEDULER_NAME) or ""))
    return Wish(group, by, by.notes(group))


def _number(told: Mapping[str, str], key: str, name: str) -> int | None:
    text = told.get(key)
    if text is None:
        return None
    number = whole(str(text))
    if number is None:
        raise PodGroupError(f"{name}: annotation {key} is {text!r:.80}, not a whole number.")
    return number


def _members(known: JobKind, spec: Mapping[str, Any], name: str) -> tuple[int, tuple[str, ...]]:
    """Return how many Pods of a T9k job must be there, and what is to be said."""
    elastic = _part(spec, "elastic", name, "spec.")
    if not elastic.get("enabled"):
        return _sum(known, spec, name), ()
    if not known.elastic:
        able = " and ".join(kind.name for kind in KINDS.values() if kind.elastic)
        note = f"{name}: spec.elastic is left out of account: only {able} can be elastic. All replicas are waited for."
        return _sum(known, spec, name), (note,)
    least, most = elastic.get("minReplicas"), elastic.get("maxReplicas")
    number = _whole(least, f"{name}: spec.elastic.minReplicas", 1)
    if most is not None and number > _whole(most, f"{name}: spec.elastic.maxReplicas", 1):
        raise PodGroupError(f"{name}: spec.elastic.minReplicas, {number}, is above maxReplicas, {most}.")
    return number, ()


def _sum(known: JobKind, spec: Mapping[str, Any], name: str) -> int:
    total = sum(known.replicas(spec, name).values())
    if total < 1:
        raise PodGroupError(f"{name} has no replicas: there is nothing to wait for.")
    return total


def _group(job: Thing, known: JobKind, number: int, **more: Any) -> PodGroup:
    metadata = job.get("metadata") or {}
    name, uid = metadata.get("name", ""), metadata.get("uid", "")
    owner = Owner(known.api_version, known.name, name, uid) if uid else None  # a job in a file has none yet
    return PodGroup(name, number, namespace=metadata.get("namespace", ""), owner=owner, **more)


def _object(found: object, what: str) -> Mapping[str, Any]:
    """Return what is an object. A custom resource without a schema may hold anything anywhere."""
    if not isinstance(found, Mapping):
        raise PodGroupError(f"{what} is {found!r:.80}, not an object.")
    return found


def _part(thing: Mapping[str, Any], key: str, name: str, where: str = "") -> Mapping[str, Any]:
    """Return an object within another; an empty one where there is none."""
    return _object(thing.get(key) or {}, f"{name}: {where}{key}")


def _whole(number: object, what: str, least: int) -> int:
    if type(number) is not int or number < least:
        raise PodGroupError(f"{what} is {number!r:.80}: it must be a whole number of at least {least}.")
    return number


def _specs(spec: Mapping[str, Any], name: str) -> Replicas:
    """``spec.replicaSpecs[*]``: each with a type and a number of replicas, one if it does not say."""
    listed = spec.get("replicaSpecs")
    if not isinstance(listed, list) or not listed:
        raise PodGroupError(f"{name} has no spec.replicaSpecs: its replicas stand there.")
    found: dict[str, int] = {}
    for at, item in enumerate(listed):
        where = f"{name}: spec.replicaSpecs[{at}]"
        number = _whole(_object(item, where).get("replicas", 1), f"{where}.replicas", 0)
        role = str(item.get("type", ""))
        found[role] = found.get(role, 0) + number
    return found


def _worker(spec: Mapping[str, Any], name: str) -> Replicas:
    """``spec.worker.replicas``, one if it does not say."""
    worker = spec.get("worker")
    if not isinstance(worker, Mapping):
        raise PodGroupError(f"{name} has no spec.worker: its replicas stand there.")
    return {"worker": _whole(worker.get("replicas", 1), f"{name}: spec.worker.replicas", 0)}


def _worker_or_specs(spec: Mapping[str, Any], name: str) -> Replicas:
    """MPIJob has been documented both ways: ``spec.worker`` in one release, ``spec.replicaSpecs`` in another."""
    return _specs(spec, name) if spec.get("replicaSpecs") else _worker(spec, name)


def _flink(spec: Mapping[str, Any], name: str) -> Replicas:
    """BeamJob: the job manager and the task managers of its Flink cluster; the Job that submits comes when they run."""
    cluster = _part(spec, "flinkClusterTemplate", name, "spec.").get("spec")
    if not isinstance(cluster, Mapping):
        raise PodGroupError(f"{name} has no spec.flinkClusterTemplate.spec: its replicas stand there.")
    found = {}
    for part, key in (("jobmanager", "jobManager"), ("taskmanager", "taskManager")):
        number = _part(cluster, key, name, "spec.flinkClusterTemplate.spec.").get("replicas", 1)
        found[part] = _whole(number, f"{name}: spec.flinkClusterTemplate.spec.{key}.replicas", 0)
    return found


def _parallel(spec: Mapping[str, Any], name: str) -> Replicas:
    """``batch/v1`` Job: so many Pods run at a time."""
    parallel = _whole(spec.get("parallelism", 1), f"{name}: spec.parallelism", 0)
    completions = spec.get("completions")
    if completions is not None:
        parallel = min(parallel, _whole(completions, f"{name}: spec.completions", 0))
    return {"": parallel}


def _replicated(spec: Mapping[str, Any], name: str) -> Replicas:
    """JobSet: each replicated Job is a role."""
    listed = spec.get("replicatedJobs")
    if not isinstance(listed, list) or not listed:
        raise PodGroupError(f"{name} has no spec.replicatedJobs.")
    found = {}
    for at, item in enumerate(listed):
        where = f"{name}: spec.replicatedJobs[{at}]"
        template = _part(_object(item, where), "template", where)
        inner = _parallel(_part(template, "spec", where, "template."), where)[""]
        found[str(item.get("name", ""))] = inner * _whole(item.get("replicas", 1), f"{where}.replicas", 0)
    return found


def _t9k(name: str, replicas: Callable[[Mapping[str, Any], str], Replicas], elastic: bool = False) -> JobKind:
    kind = Kind(T9K_GROUP, T9K_VERSION, f"{name.lower()}s", optional=True)
    return JobKind(name, kind, replicas, elastic)


T9K_KINDS = (
    _t9k("TensorFlowTrainingJob", _specs),
    _t9k("PyTorchTrainingJob", _specs, elastic=True),
    _t9k("XGBoostTrainingJob", _specs),
    _t9k("GenericJob", _specs),
    _t9k("MPIJob", _worker_or_specs),
    _t9k("ColossalAIJob", _worker),
    _t9k("DeepSpeedJob", _worker, elastic=True),
    _t9k("BeamJob", _flink),
)
JOB = JobKind("Job", Kind("batch", "v1", "jobs", selector=GANG), _parallel)
JOB_SET = JobKind("JobSet", Kind("jobset.x-k8s.io", "v1alpha2", "jobsets", selector=GANG, optional=True), _replicated)
KINDS: Mapping[str, JobKind] = {known.name: known for known in (*T9K_KINDS, JOB, JOB_SET)}
