"""The API server, spoken to in plain JSON over the official client's own connections.

The client brings what is hard (kubeconfig, tokens that are renewed, certificates, proxies); its generated calls differ between its
releases, so the paths and the bodies are ours.

Rule: every call has a deadline, and every refusal becomes an error with a name: whoever calls decides what a 404 or a 409 means.

Hazard: a merge patch replaces lists whole. Where a list is changed (taints), the version that was read goes along.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from resilience.integrations.kubernetes.parts import Kind, Thing

from resilience.errors import ResilienceError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

EXTRA = "resilience-sdk[kubernetes]"
CALL_S = 10.0
WATCH_S = 50.0  # the server ends a watch then; one that is silent for longer is dead
PAGE = 500
POOL = 32  # connections that are kept: every kind that is watched holds one
MERGE, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
CONTROLLER, CONTROLLER_NAMESPACE = "resilience-controller", "resilience-system"  # the shipped manifests' account
_NO_SUCH_KIND = "404 page not found"  # the API server's only words for a path that it does not serve
_USER = re.compile(r'User "([^"]+)" cannot ')
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class KubernetesError(ResilienceError):
    """The API server refused, or did not answer. ``status`` is that of HTTP, 0 where there was none."""

    status = 0

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(KubernetesError):  # noqa: N818 - these read as what they are
    """No answer within the deadline, or one that says that the server is not itself (429 and 5xx): the same may work later."""


class Forbidden(KubernetesError):  # noqa: N818
    """A permission is missing; the message names it. ``right`` is which, in whatever namespace; empty for other refusals."""

    def __init__(self, message: str, status: int = 0, right: str = "") -> None:
        super().__init__(message, status)
        self.right = right


class NotFound(KubernetesError):  # noqa: N818
    """There is no such thing, or no such kind."""


class Conflict(KubernetesError):  # noqa: N818
    """It has changed since it was read, or is there already."""


class Gone(KubernetesError):  # noqa: N818
    """What was asked for is too long ago: list again."""


class Api:
    """A connection to one API server, as one user. Threads may share it."""

    def __init__(self, client: ApiClient, timeout_s: float = CALL_S) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._host = str(client.configuration.host).rstrip("/")

    @classmethod
    def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> Api:
        """Connect as a pod does where this is one, else by the kubeconfig. Raises :class:`KubernetesError`."""
        try:
            from kubernetes import client, config  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise KubernetesError(f"the package kubernetes is not installed: pip install '{EXTRA}'") from error
        configuration = client.Configuration()
        configuration.connection_pool_maxsize = POOL
        try:
            if kubeconfig is None and context is None and namespace_of_pod():
                config.load_incluster_config(client_configuration=configuration)
            else:
                config.load_kube_config(kubeconfig, context, client_configuration=configuration)
            return cls(client.ApiClient(configuration))
        except Exception as error:  # whatever the client makes of a file that is no kubeconfig
            known = isinstance(error, config.ConfigException)
            said = str(error).rstrip(".") if known else f"the kubeconfig can't be read: {error!r}"
            raise KubernetesError(
                f"there is no way to a cluster: {said}. Nothing was done. Give --kubeconfig, or run in a pod."
            ) from error

    def within(self, timeout_s: float) -> Api:
        """Return the same connection with another deadline."""
        return Api(self._client, timeout_s)

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()

    # -- the calls --------------------------------------------------------------------------------------------------

    def get(self, kind: Kind, name: str, namespace: str = "") -> dict[str, Any]:
        """Return one thing."""
        if not name:
            raise NotFound(f"{kind.plural}: there is nothing without a name.", 404)
        return self._call("GET", kind, namespace, name)

    def list_all(self, kind: Kind, namespace: str = "") -> tuple[list[dict[str, Any]], str]:
        """Return all things of a kind, page by page, and the resource version that a watch goes on from."""
        query: dict[str, str] = {"limit": str(PAGE)}
        if kind.selector:
            query["labelSelector"] = kind.selector
        items: list[dict[str, Any]] = []
        while True:
            page = self._call("GET", kind, namespace, query=query, verb="list")
            items += page.get("items") or ()
            meta = page.get("metadata") or {}
            if not meta.get("continue"):
                return items, str(meta.get("resourceVersion", ""))
            query["continue"] = meta["continue"]

    def create(
        self, kind: Kind, thing: Thing, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> dict[str, Any]:
        """Create a thing, or a subresource of one. Raises :class:`Conflict` where there is one of that name."""
        return self._call("POST", kind, namespace, name, body=thing, subresource=subresource)

    def replace(self, kind: Kind, thing: Thing, namespace: str = "") -> dict[str, Any]:
        """Write a thing back as it is; with its resource version in it, only where nobody was quicker."""
        return self._call("PUT", kind, namespace, str(thing["metadata"]["name"]), body=thing)

    def patch(
        self, kind: Kind, name: str, change: Any, namespace: str = "", *, form: str = MERGE, subresource: str = ""
    ) -> dict[str, Any]:
        """Change a thing by a merge patch, or by what ``form`` says."""
        return self._call("PATCH", kind, namespace, name, body=change, form=form, subresource=subresource)

    def delete(self, kind: Kind, name: str, namespace: str = "", *, uid: str = "", grace_s: int | None = None) -> None:
        """Delete a thing; with ``uid`` only that one, and not another that has its name by now (:class:`Conflict`)."""
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        self._call("DELETE", kind, namespace, name, body=options)

    @contextlib.contextmanager
    def watch(self, kind: Kind, version: str, namespace: str = "") -> Iterator[Watch]:
        """Open a watch from a resource version on; it ends by itself after a while."""
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(WATCH_S)),
        }
        if kind.selector:
            query["labelSelector"] = kind.selector
        path = _path(kind, namespace)
        response = self._send("GET", path, query, read_s=WATCH_S + self._timeout_s, stream=True)
        try:
            if response.status >= 400:
                raise _refusal(response.status, bytes(response.read()), "watch", kind, namespace)
            yield Watch(response, kind, namespace)
        finally:
            response.close()
            response.release_conn()

    # -- the wire ---------------------------------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        kind: Kind,
        namespace: str = "",
        name: str = "",
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        form: str = "application/json",
        subresource: str = "",
        verb: str = "",
    ) -> dict[str, Any]:
        path = _path(kind, namespace, name, subresource)
        headers = {"Content-Type": form} if body is not None else {}
        data = json.dumps(body).encode() if body is not None else None
        response = self._send(method, path, query or {}, body=data, headers=headers)
        if response.status >= 400:
            done = verb or _VERBS[method]
            raise _refusal(response.status, response.data, done, kind, namespace, name=name, subresource=subresource)
        try:
            found = json.loads(response.data)
        except ValueError as error:
            raise Unreachable(
                f"{self._host}{path} answered something that is not JSON: {response.data[:80]!r}"
            ) from error
        return found if isinstance(found, dict) else {}

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        read_s: float = 0.0,
        stream: bool = False,
    ) -> Any:
        import urllib3  # noqa: PLC0415 - the client's

        url = f"{self._host}{path}" + (f"?{urlencode(query)}" if query else "")
        asked = {
            "Accept": "application/json",
            **self._client.default_headers,
            **(headers or {}),
            **self._credentials(),
        }
        try:
            return self._client.rest_client.pool_manager.request(
                method,
                url,
                body=body,
                headers=asked,
                timeout=urllib3.Timeout(connect=self._timeout_s, read=read_s or self._timeout_s),
                retries=False,
                preload_content=not stream,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"the API server at {self._host} does not answer: {error}") from error

    def _credentials(self) -> dict[str, str]:
        """Return the headers that say who we are, renewed where they have expired."""
        try:
            found = self._client.configuration.auth_settings().values()
        except (
            Exception
        ) as error:  # whatever the client makes of a token file that is being replaced, a plugin that fails
            raise Unreachable(f"the credentials for {self._host} can't be read just now: {error!r}") from error
        return {it["key"]: it["value"] for it in found if it["in"] == "header" and it["value"]}


class Watch:
    """What changes, as it comes. Iterate it; :meth:`end` may be called by another thread."""

    def __init__(self, response: Any, kind: Kind, namespace: str) -> None:
        self._response = response
        self._kind = kind
        self._namespace = namespace

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (verb, thing), bookmarks included; raise :class:`Gone` where the server has forgotten what came in between."""
        import urllib3  # noqa: PLC0415

        rest = b""
        try:
            for chunk in self._response.stream(65536, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise _refusal(int(status.get("code", 0)), line, "watch", self._kind, self._namespace)
                    yield event["type"], event["object"]
        except (urllib3.exceptions.HTTPError, OSError, ValueError, KeyError, AttributeError) as error:
            raise Unreachable(f"the watch of {self._kind.plural} broke off: {error}") from error

    def end(self) -> None:
        """Have whoever iterates find the end; older releases of urllib3 can't be told, and find it at their deadline."""
        with contextlib.suppress(Exception):  # it may have ended meanwhile, in whatever way
            self._response.shutdown()


def _path(kind: Kind, namespace: str = "", name: str = "", subresource: str = "") -> str:
    for word in filter(None, (namespace, name)):
        if "/" in word or "%" in word or word in (".", "..") or not word.isprintable():
            raise KubernetesError(f"{word!r} is no name of anything in a cluster. Nothing was done.")
    where = f"/namespaces/{namespace}" if namespace and kind.namespaced else ""
    return kind.path + where + "/" + "/".join(part for part in (kind.plural, name, subresource) if part)


def _refusal(
    status: int, body: bytes, verb: str, kind: Kind, namespace: str, *, name: str = "", subresource: str = ""
) -> KubernetesError:
    said = _message(body)
    what = f"{kind.plural}{f' {name}' if name else ''}{f' in namespace {namespace}' if namespace else ''}"
    if status == 403 and " cannot " in said:
        resource = f"{kind.plural}/{subresource}" if subresource else kind.plural
        where = f'in namespace "{namespace}"' if namespace and kind.namespaced else "in the whole cluster"
        right = f'verb "{verb}", resource "{resource}", API group "{kind.group}"'
        return Forbidden(
            f"missing permission: {right}, {where}. The API server says: {said}. Nothing was changed. "
            f"{_way_out(said, verb, resource)}",
            status,
            right,
        )
    if status == 401:
        return Forbidden(
            f"the API server does not know who we are ({verb} {what}): {said}. The token may have expired.", status
        )
    if status == 404 and said.strip() == _NO_SUCH_KIND:
        said = (
            f"this cluster has no {kind.plural} of {kind.group or 'the core API'}/{kind.version}: what defines them (a "
            "CustomResourceDefinition, or a newer Kubernetes) is not installed. Nothing was changed"
        )
    text = f"{verb} {what}: {said} ({status})"
    leaves: dict[int, type[KubernetesError]] = {404: NotFound, 409: Conflict, 410: Gone, 403: Forbidden}
    if status == 429 or status >= 500:
        return Unreachable(text, status)
    return leaves.get(status, KubernetesError)(text, status)


def _way_out(said: str, verb: str, resource: str) -> str:
    """Return what to do about a right that is missing. The shipped roles are the shipped account's: they help nobody else."""
    found = _USER.search(said)
    who = found[1] if found else ""
    account = who.split(":")
    if account[:2] == ["system", "serviceaccount"] and account[3:] == [CONTROLLER]:
        # nothing but the roles: the Deployment that runs is somebody's own by now
        own = f" --namespace={account[2]}" if account[2] != CONTROLLER_NAMESPACE else ""
        return f"Apply the shipped roles: resilience kubernetes manifests --only=rbac{own} | kubectl apply -f -"
    return (
        f"Ask an administrator of the cluster for a role with this right, bound to {who or 'whom the kubeconfig names'} "
        f"(`kubectl auth can-i {verb} {resource}` tells when it is there), or use a --kubeconfig of somebody who has it."
    )


def _message(body: bytes) -> str:
    try:
        told = json.loads(body)
        told = told.get("object", told) if isinstance(told, dict) else {}
        return str(told.get("message") or told.get("reason") or body[:200].decode("utf-8", "replace"))
    except (ValueError, AttributeError):
        return body[:200].decode("utf-8", "replace")


_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def namespace_of_pod() -> str:
    """Return the namespace of the pod that this is, or an empty string where it is none (with a service account)."""
    try:
        return (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
