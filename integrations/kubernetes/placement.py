"""How a group is kept together, and away from the rack it leaves. Pure: manifests in, manifests out.

Pods can't be told after they were made where not to go, and the templates of Jobs can't be changed. So the nodes are told: those
of the old rack get a label for the job, and the pods (or the templates they are made of) require nodes without it:

    affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
        {matchExpressions: [{key: avoid.resilience.dev/NAMESPACE.JOB, operator: DoesNotExist}]}]}}}

Plain pods are made again by us: they get that, and affinity to one another by the rack's label, with what they had.

Rule: what a pod required stays required, but for what held it in the old rack.

Hazard: nodes are everybody's, and a pod's labels are whatever its tenant writes. Only the nodes that a job's pods ran on, and their
neighbours by the nodes' own labels, are told to be avoided; and by a word that no other namespace's job has.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from resilience.integrations.kubernetes.nodes import word
from resilience.integrations.kubernetes.parts import Thing

from resilience.groups.topology import NAME_LABEL

AVOID = "avoid.resilience.dev/"
GROUP_LABEL = "resilience.dev/group"
MOVED_TAINT = "resilience.dev/moved-from"
_LONGEST = 63  # of a label's name
_DIGEST = 12
_HARD = "requiredDuringSchedulingIgnoredDuringExecution"


def job_word(namespace: str, job: str) -> str:
    """Return a job's name among those of all namespaces, as a label may have it. Namespaces have no dots, so none can take
    another's; one that is too long ends in a digest."""
    whole = f"{namespace}.{job}"
    if len(whole) <= _LONGEST:
        return word(whole)
    digest = hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST]
    return f"{word(whole)[: _LONGEST - _DIGEST - 1]}-{digest}"


def avoid_key(namespace: str, job: str) -> str:
    """Return the label by which a job's pods know the nodes that they are to stay away from."""
    return AVOID + job_word(namespace, job)


def nodes_left(ran_on: Collection[str], claimed: Collection[str], racks: Mapping[str, str]) -> list[str]:
    """Return the nodes that a group leaves: those its pods ran on, and the others of a rack that its pods claim to be in, if one of
    those nodes says so too. ``racks``: by node, the rack that the node's own label names."""
    real = {racks[node] for node in ran_on if node in racks} & set(claimed)
    return sorted({*ran_on, *(node for node, rack in racks.items() if rack in real)})


def away_from_nodes_left(namespace: str, job: str) -> dict[str, Any]:
    """Return the node affinity that a template needs for its pods to stay away from a rack that their group has left."""
    return {_HARD: {"nodeSelectorTerms": [_away({}, avoid_key(namespace, job))]}}


def avoids(pod: Thing, namespace: str, job: str) -> bool:
    """Whether a pod stays away from nodes with the job's label: every alternative that it allows has to."""
    terms = _terms(pod.get("spec") or {})
    key = avoid_key(namespace, job)
    return bool(terms) and all(
        any(it.get("key") == key and it.get("operator") == "DoesNotExist" for it in term.get("matchExpressions") or ())
        for term in terms
    )


def manifest(pod: Thing) -> dict[str, Any]:
    """Return what is needed to make a plain pod again."""
    meta = pod["metadata"]
    kept = {
        name: copy.deepcopy(meta[name]) for name in ("name", "namespace", "labels", "annotations") if meta.get(name)
    }
    spec = copy.deepcopy(dict(pod["spec"]))
    for name in ("nodeName", "ephemeralContainers"):
        spec.pop(name, None)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": kept, "spec": spec}


def elsewhere(pod: Thing, namespace: str, job_label: str, group: str, rack_label: str) -> dict[str, Any]:
    """Return the manifest of a plain pod that goes with its group to another rack. ``rack_label`` is that of nodes; where they have
    none, an empty one, the group is only kept away from its old nodes."""
    made = manifest(pod)
    labels = made["metadata"].setdefault("labels", {})
    job = str(labels[job_label])
    labels.pop(NAME_LABEL, None)  # where it is now: the scheduler says so anew
    labels[GROUP_LABEL] = word(group)
    spec = made["spec"]
    if rack_label:
        _unpin(spec, rack_label)
    affinity = spec.setdefault("affinity", {})
    hard = affinity.setdefault("nodeAffinity", {}).setdefault(_HARD, {"nodeSelectorTerms": []})
    key = avoid_key(namespace, job)
    hard["nodeSelectorTerms"] = [_away(term, key) for term in hard["nodeSelectorTerms"] or [{}]]
    if rack_label:
        together = affinity.setdefault("podAffinity", {}).setdefault(_HARD, [])
        ours = {job_label: job, GROUP_LABEL: labels[GROUP_LABEL]}
        term = {"labelSelector": {"matchLabels": ours}, "topologyKey": rack_label}
        if term not in together:
            together.append(term)
    return made


def _away(term: dict[str, Any], key: str) -> dict[str, Any]:
    found = [it for it in term.get("matchExpressions") or () if it.get("key") != key]
    return {**term, "matchExpressions": [*found, {"key": key, "operator": "DoesNotExist"}]}


def _unpin(spec: dict[str, Any], rack_label: str) -> None:
    """Take away what holds a pod in one rack."""
    (spec.get("nodeSelector") or {}).pop(rack_label, None)
    for term in _terms(spec):
        held = [
            it for it in term.get("matchExpressions") or () if it.get("key") != rack_label or it.get("operator") != "In"
        ]
        term["matchExpressions"] = held


def _terms(spec: Any) -> list[dict[str, Any]]:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    return list((affinity.get(_HARD) or {}).get("nodeSelectorTerms") or [])
