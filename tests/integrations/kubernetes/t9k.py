"""The eight kinds of T9k's jobs, one of each, as its public documentation writes them; and their definitions for a test's cluster.

The definitions are for tests only: they check what kinds share (``spec.scheduler``, ``spec.elastic``) and keep the rest.
"""

from __future__ import annotations

import copy
from typing import Any

from resilience.integrations.kubernetes.podgroups import crd
from resilience.integrations.kubernetes.podgroups.jobs import KINDS, T9K_GROUP, T9K_KINDS, T9K_VERSION

POD: dict[str, Any] = {"spec": {"containers": [{"name": "worker", "image": "example"}]}}
SPECS: dict[str, tuple[dict[str, Any], int]] = {
    "TensorFlowTrainingJob": (
        {
            "replicaSpecs": [
                {"type": "worker", "replicas": 4, "template": POD},
                {"type": "ps", "replicas": 2, "template": POD},
            ]
        },
        6,
    ),
    "PyTorchTrainingJob": (
        {
            "replicaSpecs": [
                {"type": "master", "replicas": 1, "template": POD},
                {"type": "worker", "replicas": 3, "template": POD},
            ]
        },
        4,
    ),
    "XGBoostTrainingJob": (
        {"replicaSpecs": [{"type": "master", "template": POD}, {"type": "worker", "replicas": 2}]},
        3,
    ),
    "GenericJob": ({"replicaSpecs": [{"type": "worker", "replicas": 4}, {"type": "ps", "replicas": 1}]}, 5),
    "MPIJob": ({"worker": {"replicas": 5, "cmd": ["./walk"], "template": POD}, "mca": {"btl": "^openib"}}, 5),
    "ColossalAIJob": (
        {"launcher": {"image": "example"}, "worker": {"replicas": 2, "procPerWorker": 1, "template": POD}},
        2,
    ),
    "DeepSpeedJob": ({"config": {"slotsPerWorker": 1}, "worker": {"replicas": 4, "template": POD}}, 4),
    "BeamJob": (
        {
            "flinkClusterTemplate": {
                "spec": {"jobManager": {"accessScope": "Cluster"}, "taskManager": {"replicas": 2}}
            },
            "jobTemplate": {"spec": {"template": POD}},
        },
        3,
    ),
}


def job(
    kind: str, name: str = "job-sample", *, queue: str | None = "default", priority: int | None = 10
) -> dict[str, Any]:
    """Return a job of a kind that asks for a group."""
    policy = {key: value for key, value in (("queue", queue), ("priority", priority)) if value is not None}
    spec = {"scheduler": {"t9kScheduler": policy}, **SPECS[kind][0]}
    return {
        "apiVersion": KINDS[kind].api_version,
        "kind": kind,
        "metadata": {"name": name},
        "spec": copy.deepcopy(spec),
    }


def definitions() -> list[dict[str, Any]]:
    """Return the definitions of all eight kinds."""
    count = {"type": "integer", "minimum": 1}
    policy = {
        "type": "object",
        "properties": {"queue": {"type": "string"}, "priority": {"type": "integer", "minimum": 0, "maximum": 100}},
    }
    scheduler = {"type": "object", "properties": {"t9kScheduler": policy}}
    elastic = {
        "type": "object",
        "properties": {
            "enabled": {"type": "boolean"},
            **dict.fromkeys(("minReplicas", "maxReplicas", "expectedReplicas"), count),
        },
    }
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    found = []
    for known in T9K_KINDS:
        parts = {"scheduler": scheduler, **({"elastic": elastic} if known.elastic else {})}
        spec = {**anything, "properties": parts}
        found.append(crd.definition(T9K_GROUP, T9K_VERSION, known.name, {"spec": spec, "status": anything}))
    return found
