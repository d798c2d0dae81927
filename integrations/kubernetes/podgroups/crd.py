"""T9k's PodGroup as a custom resource definition, for clusters that have none and for tests.

Derived from the documented fields: a structural schema in which an API server refuses what :mod:`.group` refuses. T9k's own
installation brings its own definition; that one is to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilience.integrations.kubernetes.podgroups.schedulers import T9k

_VALUE = "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_COUNT = {"type": "integer", "format": "int32", "minimum": 1}
_TALLY = {"type": "integer", "format": "int32", "minimum": 0}
_TEXT = {"type": "string"}
_NAME = {"type": "string", "minLength": 1, "maxLength": 63, "pattern": _VALUE}
_ROLE = {"type": "object", "required": ["name", "minMember"], "properties": {"name": _NAME, "minMember": _COUNT}}

SPEC: Mapping[str, Any] = {
    "type": "object",
    "required": ["minMember"],
    "properties": {
        "minMember": {**_COUNT, "description": "So many Pods must have joined, and find room, before any is placed."},
        "queue": {**_NAME, "default": "default", "description": "The queue whose resources the Pods use."},
        "priority": {
            "type": "integer",
            "format": "int32",
            "minimum": 0,
            "maximum": 100,
            "description": "Larger first.",
        },
        "roles": {
            "type": "array",
            "items": _ROLE,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "description": "So many Pods of each role must be there too.",
        },
        "topologyPolicy": _TEXT,
    },
}
_CONDITION = {
    "type": "object",
    "required": ["type", "status"],
    "properties": {
        **dict.fromkeys(("type", "transitionID", "reason", "message"), _TEXT),
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
    },
}
STATUS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "conditions": {"type": "array", "items": _CONDITION},
        "allocated": {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}},
        **dict.fromkeys(("pending", "running", "succeeded", "failed", "unknown"), _TALLY),
    },
}


def definition(
    group: str, version: str, kind: str, properties: Mapping[str, Any], columns: tuple[tuple[str, str, str], ...] = ()
) -> dict[str, Any]:
    """Return a namespaced custom resource definition with one version and a status of its own."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "required": ["spec"], "properties": dict(properties)}
    shown = [{"name": name, "type": type_, "jsonPath": path} for name, type_, path in columns]
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()},
            "versions": [{**served, **({"additionalPrinterColumns": shown} if shown else {})}],
        },
    }


def pod_group() -> dict[str, Any]:
    """Return the definition of T9k's PodGroup."""
    columns = (
        ("MinMember", "integer", ".spec.minMember"),
        ("Queue", "string", ".spec.queue"),
        ("Priority", "integer", ".spec.priority"),
        ("Running", "integer", ".status.running"),
    )
    return definition(T9k.kind.group, T9k.kind.version, "PodGroup", {"spec": SPEC, "status": STATUS}, columns)
