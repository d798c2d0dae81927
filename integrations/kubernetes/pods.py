"""Have one pod go, or come: what the API server's answers to that mean.

Rule: an answer is taken for what it says. A conflict is no proof that a pod is there: quotas have conflicts of their own, and a pod
that is on its way out still has its name.

Hazard: what tells them apart is the server's text. A text that is not known is an error, and whoever called tries again.
"""

from __future__ import annotations

from typing import Any

from resilience.integrations.kubernetes.api import Api, KubernetesError
from resilience.integrations.kubernetes.parts import PODS, Thing


class NamespaceGone(KubernetesError):  # noqa: N818 - it reads as what it is
    """Nothing can be made in a namespace any more: it is deleted, or about to be."""


def make(api: Api, pod: Thing, namespace: str) -> bool:
    """Make a pod; return whether it was not there yet. Raises :class:`NamespaceGone` where none will ever be."""
    try:
        api.create(PODS, pod, namespace)
    except KubernetesError as error:
        if is_there(error):
            return False
        if is_gone(error, namespace):
            raise NamespaceGone(str(error), error.status) from error
        raise
    return True


def is_there(error: KubernetesError) -> bool:
    """Whether nothing was made since there is one of that name, to stay."""
    said = str(error)
    return error.status == 409 and "already exists" in said and "is being deleted" not in said


def is_gone(error: KubernetesError, namespace: str) -> bool:
    """Whether nothing was made since the namespace is gone or ends."""
    said = str(error)
    if error.status == 404:
        return f'namespaces "{namespace}" not found' in said
    return error.status == 403 and f"in namespace {namespace} because it is being terminated" in said


def evict(api: Api, namespace: str, name: str, uid: str, grace_s: int | None = None) -> None:
    """Evict one pod, and not another of its name. Servers before 1.22 know the older form only."""
    options: dict[str, Any] = {"preconditions": {"uid": uid}}
    if grace_s is not None:
        options["gracePeriodSeconds"] = grace_s
    for version in ("policy/v1", "policy/v1beta1"):
        body = {
            "apiVersion": version,
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": options,
        }
        try:
            api.create(PODS, body, namespace, name=name, subresource="eviction")
            return
        except KubernetesError as error:
            if version == "policy/v1beta1" or error.status not in (400, 404, 422) or "Eviction" not in str(error):
                raise
