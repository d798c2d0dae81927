"""Pods and nodes as the API server holds them, for the tests."""

from __future__ import annotations

from typing import Any

JOB = "resilience.dev/job"


def pod(
    name: str,
    job: str = "train",
    *,
    group: int | None = None,
    rack: str = "",
    node: str = "",
    phase: str = "",
    uid: str = "",
    index: int | None = None,
    owner: dict[str, Any] | None = None,
    code: int | None = None,
    message: str = "",
    **meta: Any,
) -> dict[str, Any]:
    """Return a pod; it runs where it has a node, unless a phase is given."""
    labels = {JOB: job}
    if group is not None:
        labels["scheduling/rack-group"] = str(group)
    if rack:
        labels["scheduling/rack-id"] = rack
    annotations = {} if index is None else {"batch.kubernetes.io/job-completion-index": str(index)}
    made: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "labels": labels,
            "annotations": annotations,
            "uid": uid or name,
            **meta,
        },
        "spec": {"containers": [{"name": "main", "image": "none"}], **({"nodeName": node} if node else {})},
        "status": {"phase": phase or ("Running" if node else "Pending")},
    }
    if owner:
        made["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    if code is not None:
        made["status"] |= ended(code, message)
    return made


def ended(
    code: int, message: str = "", container: str = "containerd://1", at: str = "2030-01-01T00:00:00Z"
) -> dict[str, Any]:
    """Return the status of a pod whose container has ended."""
    how = {"exitCode": code, "finishedAt": at, "containerID": container, **({"message": message} if message else {})}
    state = {"state": {"terminated": how}}
    return {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": [
            {"name": "main", "image": "none", "imageID": "", "ready": False, "restartCount": 0, **state},
        ],
    }


def owned_by(kind: str, name: str, uid: str = "owner") -> dict[str, Any]:
    """Return a reference to an owner."""
    return {"apiVersion": "batch/v1", "kind": kind, "name": name, "uid": uid}
