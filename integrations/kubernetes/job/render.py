"""A complete training job: claim, Service, PodGroup and Job, so that ``kubectl apply -f -`` is all that is left.

1) (Service) gives every Pod a name before it is ready, so that the launchers find Pod 0
2) (PodGroup) has the Pods start together, where a gang scheduler is named: what it asks for exists on no other cluster
3) (Job) is indexed: Pod N is always node N, and one that is replaced takes its predecessor's place

Rule: what a launcher's exit code means to a scheduler (:mod:`resilience.failover.exits`) is written as ``podFailurePolicy``.

Hazard: a Job with such a policy needs ``restartPolicy: Never``. A container that is restarted in place would keep a broken node.
"""

from __future__ import annotations

from typing import Any

from resilience.integrations.flags import unknown_accelerator
from resilience.integrations.kubernetes.job.values import FROM_THE_POD, NO_GANG, JobValues, quantity
from resilience.integrations.kubernetes.placement import away_from_nodes_left
from resilience.integrations.kubernetes.podgroups.jobs import GANG, MIN_MEMBER, PRIORITY, QUEUE, SCHEDULER_NAME
from resilience.integrations.kubernetes.podgroups.schedulers import GangScheduler, Marks, scheduler
from resilience.integrations.values import launcher_flags

from resilience.failover import exits
from resilience.failover.failure import HARDWARE_CODES

JOB_LABEL = "resilience.dev/job"
CONTAINER = "train"
_MARGIN_S = 30  # beyond --ft-stop-grace: ranks are ended, what is complete is written, reports are too
_MIB = 1 << 20

# What Kubernetes is to make of a launcher's end: it fails the Job, replaces the Pod, or replaces it and counts, up to backoffLimit.
# 128 is counted: "unknown device" to us, but also what a container runtime says of a command that the image does not have. 1 is
# counted: a launcher that is told to end before its script told anything of itself ends with it too.
FAIL = (exits.USAGE, exits.ABORTED, exits.SHUT_DOWN)
COUNT = (exits.FAILED, exits.CUT_OFF, 128)
REPLACE = tuple(sorted({*HARDWARE_CODES, exits.NODE_LEFT, exits.PREEMPTED, exits.UNFIT} - {*COUNT}))

# $@ are the container's args: nothing of them is read by the shell. The launcher takes the shell's place, and gets its signals.
_HOST_IS_POD_0 = (
    'host=false; [ "$JOB_COMPLETION_INDEX" = 0 ] && host=true; exec resilience run --rdzv-conf="is_host=$host" "$@"'
)


def render(values: JobValues) -> list[dict[str, Any]]:
    """Return the objects of a job, in the order in which they are to be created."""
    by = None if values.gang == NO_GANG else scheduler(values.gang, values.scheduler_name)
    objects = [_claim(values)] if values.checkpoint_size else []
    if values.nodes > 1:
        objects.append(_service(values))
    if by is not None and not values.controller:
        objects.append(by.resource(values.group()))
    return [*objects, _job(values, by)]


def notes(values: JobValues) -> tuple[str, ...]:
    """Return what is to be said about a job that is otherwise fine."""
    found = []
    if values.gang != NO_GANG:
        found += scheduler(values.gang, values.scheduler_name).notes(values.group())
    if not (values.checkpoint_claim or values.checkpoint_size):
        found.append(
            "there is no volume for checkpoints: they are lost with their Pod. Give checkpoint_claim or checkpoint_size."
        )
    if not values.snapshot_bytes:
        found.append(
            "no memory is set aside for FlashCheckpoint's snapshots: give snapshot_state if the script uses it. It says the figure "
            "before step 0."
        )
    return (*found, *unknown_accelerator(values.accelerator))


def _metadata(values: JobValues, name: str = "", **more: Any) -> dict[str, Any]:
    where = {"namespace": values.namespace} if values.namespace else {}
    return {"name": name or values.name, **where, "labels": _labels(values), **more}


def _labels(values: JobValues) -> dict[str, str]:
    return {"app.kubernetes.io/name": values.name, JOB_LABEL: values.name}


def _claim(values: JobValues) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany" if values.nodes > 1 else "ReadWriteOnce"],
        "resources": {"requests": {"storage": values.checkpoint_size}},
    }
    if values.storage_class:
        spec["storageClassName"] = values.storage_class
    metadata = _metadata(values, f"{values.name}-checkpoints")
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _service(values: JobValues) -> dict[str, Any]:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB_LABEL: values.name},
        "ports": [{"name": "rendezvous", "port": values.port, "targetPort": values.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(values), "spec": spec}


def _job(values: JobValues, by: GangScheduler | None) -> dict[str, Any]:
    metadata = _metadata(values)
    if by is not None and values.controller:
        metadata["labels"][GANG] = by.name
        metadata["annotations"] = _wish(values)
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": values.nodes,
        "parallelism": values.nodes,
        "backoffLimit": 3 * values.nodes if values.backoff_limit < 0 else values.backoff_limit,
        "podFailurePolicy": {"rules": failure_rules()},
        "template": _template(values, by),
    }
    if 0 < values.min_nodes < values.nodes:
        # A Pod that never found a place would otherwise keep a finished job from being complete.
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    for key, seconds in (
        ("activeDeadlineSeconds", values.active_deadline),
        ("ttlSecondsAfterFinished", values.ttl_after_finished),
    ):
        if seconds:
            spec[key] = seconds
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _wish(values: JobValues) -> dict[str, str]:
    told = {QUEUE: values.queue}
    if values.priority >= 0:
        told[PRIORITY] = str(values.priority)
    if values.min_nodes:
        told[MIN_MEMBER] = str(values.min_nodes)
    if values.scheduler_name:
        told[SCHEDULER_NAME] = values.scheduler_name
    return told


def failure_rules() -> list[dict[str, Any]]:
    """Return what Kubernetes does when a Pod fails; the first rule that fits holds."""

    def by_code(action: str, codes: tuple[int, ...]) -> dict[str, Any]:
        told = {"containerName": CONTAINER, "operator": "In", "values": list(codes)}
        return {"action": action, "onExitCodes": told}

    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [evicted, by_code("FailJob", FAIL), by_code("Ignore", REPLACE), by_code("Count", COUNT)]


def _template(values: JobValues, by: GangScheduler | None) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": values.stop_grace + _MARGIN_S,
        "enableServiceLinks": False,
        "affinity": {"nodeAffinity": away_from_nodes_left(values.namespace or "default", values.name)},
    }
    if values.nodes > 1:
        spec["subdomain"] = values.name
        spec["affinity"]["podAntiAffinity"] = _apart(values)
    for key, text in (("priorityClassName", values.priority_class), ("serviceAccountName", values.service_account)):
        if text:
            spec[key] = text
    if not values.service_account:
        spec["automountServiceAccountToken"] = False  # training Pods ask the API server for nothing
    if values.node_selector:
        spec["nodeSelector"] = dict(values.node_selector)
    if values.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in values.image_pull_secrets]
    mounts, volumes = _volumes(values)
    spec["containers"] = [_container(values, mounts)]
    if volumes:
        spec["volumes"] = volumes
    template = {"metadata": {"labels": _labels(values)}, "spec": spec}
    return (by.marks(values.group()) if by is not None else Marks()).onto(template)


def _apart(values: JobValues) -> dict[str, Any]:
    """One Pod per node where there are enough: a launcher is a node to the job."""
    term = {"labelSelector": {"matchLabels": {JOB_LABEL: values.name}}, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"preferredDuringSchedulingIgnoredDuringExecution": preferred}


def _volumes(values: JobValues) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    mounts: list[dict[str, Any]] = []
    volumes: list[dict[str, Any]] = []
    if quantity(values.shm, "shm"):
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": values.shm}})
    claim = values.checkpoint_claim or (f"{values.name}-checkpoints" if values.checkpoint_size else "")
    if claim:
        mounts.append({"name": "checkpoints", "mountPath": values.checkpoint_path})
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}})
    return mounts, volumes


def _container(values: JobValues, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    memory = f"{-(-values.memory_bytes // _MIB)}Mi"
    amounts = {"cpu": values.cpu, "memory": memory}
    if values.gpus_per_node:
        amounts[values.gpu_resource] = str(values.gpus_per_node)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": values.image,
        "imagePullPolicy": values.image_pull_policy,
        "command": _command(values),
        "args": arguments(values),
        "env": _environment(values),
        "resources": {"requests": amounts, "limits": {key: text for key, text in amounts.items() if key != "cpu"}},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if values.nodes > 1:
        container["ports"] = [{"name": "rendezvous", "containerPort": values.port}]
    if mounts:
        container["volumeMounts"] = mounts
    return container


def _command(values: JobValues) -> list[str]:
    if values.nodes == 1:
        return ["resilience", "run"]
    if values.store:
        return ["resilience", "run", "--rdzv-conf=is_host=false"]
    return ["/bin/sh", "-c", _HOST_IS_POD_0, "resilience"]


def arguments(values: JobValues) -> list[str]:
    """Return the launcher's arguments. ``$(NAME)`` is filled in by the kubelet, from the container's environment."""
    flags = launcher_flags(values)
    if values.nodes > 1:
        flags += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={values.store or f'{values.name}-0.{values.name}:{values.port}'}",
            f"--rdzv-id={values.name}-$(JOB_UID)",
            "--local-addr=$(POD_IP)",
        ]
    if values.checkpoint_claim or values.checkpoint_size:
        flags.append(f"--ft-run-dir={values.checkpoint_path.rstrip('/')}/runs/$(POD_NAME)")
    return [*flags, *values.launcher_args, *values.script]


def _environment(values: JobValues) -> list[dict[str, Any]]:
    fields = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in FROM_THE_POD.items()]
    return [*fields, *({"name": name, "value": text} for name, text in values.env.items())]
