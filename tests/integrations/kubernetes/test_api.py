"""Calls, refusals, deadlines and watches against a real API server."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from resilience.integrations.kubernetes import events
from resilience.integrations.kubernetes.api import Api, Conflict, Forbidden, KubernetesError, NotFound, Unreachable
from resilience.integrations.kubernetes.manifests import NAMESPACE, manifests
from resilience.integrations.kubernetes.parts import ADDED, DELETED, MODIFIED, NODES, PODS, Kind
from resilience.integrations.kubernetes.watching import LISTED, Change, Watcher

from tests.integrations.kubernetes.cluster import Cluster, Forwarder
from tests.jobs import stopped, wait_for
from tests.real.kubernetes import ApiServer

pytestmark = pytest.mark.spawns
NOBODY = "system:serviceaccount:default:nobody-in-particular"
MAPS = Kind("", "v1", "configmaps")


def a_map(name: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": "1"}}


def test_things_are_made_read_changed_and_taken_away(cluster: Cluster) -> None:
    api, where = cluster.api, cluster.name
    made = api.create(MAPS, a_map("m"), where)
    assert api.get(MAPS, "m", where)["data"] == {"a": "1"}
    api.patch(MAPS, "m", {"data": {"b": "2"}}, where)
    with pytest.raises(Conflict):  # it has changed since
        api.replace(MAPS, made, where)
    with pytest.raises(Conflict):
        api.create(MAPS, a_map("m"), where)
    with pytest.raises(Conflict):  # there is one of that name, but it is another
        api.delete(MAPS, "m", where, uid="00000000-0000-0000-0000-000000000000")
    api.delete(MAPS, "m", where, uid=made["metadata"]["uid"])
    with pytest.raises(NotFound):
        api.get(MAPS, "m", where)


def test_long_lists_come_page_by_page(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilience.integrations.kubernetes.api.PAGE", 3)
    names = {f"m{number}" for number in range(8)}
    for name in names:
        cluster.api.create(MAPS, a_map(name), cluster.name)
    items, version = cluster.api.list_all(MAPS, cluster.name)
    assert names <= {item["metadata"]["name"] for item in items}
    assert int(version) > 0


def test_server_that_stands_still_is_given_up_after_the_deadline(api_server: ApiServer) -> None:
    api = Api(api_server.client(), timeout_s=0.5)
    with stopped(api_server.pid), pytest.raises(Unreachable, match="does not answer"):
        api.list_all(NODES)
    assert api.list_all(NODES)


def test_server_that_is_not_there_is_unreachable(api_server: ApiServer, forwarder: Forwarder) -> None:
    api = Api(api_server.client(url=forwarder.url))
    assert api.list_all(NODES)
    forwarder.cut()
    with pytest.raises(Unreachable):
        api.list_all(NODES)


# -- permissions ------------------------------------------------------------------------------------------------------


def shipped_permissions() -> list[tuple[str, str, str]]:
    """Every verb, group and resource of the shipped roles that is called; finalizers are asked for by the API server itself."""
    rules = [rule for it in manifests() if it["kind"] in ("Role", "ClusterRole") for rule in it["rules"]]
    return sorted(
        (verb, group, resource)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if not resource.endswith("/finalizers")
    )


@pytest.mark.parametrize(("verb", "group", "resource"), shipped_permissions())
def test_missing_permission_is_named(cluster: Cluster, verb: str, group: str, resource: str) -> None:
    api = Api(cluster.server.client(NOBODY))
    plural, _, sub = resource.partition("/")
    kind = Kind(group, "v1", plural, namespaced=resource != "nodes")
    where = "" if resource == "nodes" else cluster.name
    thing = {"metadata": {"name": "x"}}
    with pytest.raises(Forbidden) as caught:
        if verb == "watch":
            with api.watch(kind, "0", where):
                pass
        elif verb == "create":
            api.create(kind, thing, where, name="x" if sub else "", subresource=sub)
        elif verb == "update":
            api.replace(kind, thing, where)
        elif verb == "patch":
            api.patch(kind, "x", {}, where)
        elif verb == "list":
            api.list_all(kind, where)
        else:
            {"get": api.get, "delete": api.delete}[verb](kind, "x", where)
    said = str(caught.value)
    scope = f'in namespace "{where}"' if where else "in the whole cluster"
    assert f'verb "{verb}", resource "{resource}", API group "{group}", {scope}' in said
    assert f"Ask an administrator of the cluster for a role with this right, bound to {NOBODY}" in said
    assert f"kubectl auth can-i {verb} {resource}" in said
    assert "manifests" not in said, "the shipped roles are bound to the controller's account"


@pytest.mark.parametrize(
    ("namespace", "flag"), [(NAMESPACE, ""), ("ml", " --namespace=ml")], ids=["as shipped", "elsewhere"]
)
def test_account_of_the_shipped_manifests_is_told_how_its_roles_are_applied(
    cluster: Cluster, namespace: str, flag: str
) -> None:
    (account,) = [it for it in manifests() if it["kind"] == "ServiceAccount"]
    who = f"system:serviceaccount:{namespace}:{account['metadata']['name']}"
    with pytest.raises(Forbidden) as caught:
        Api(cluster.server.client(who)).get(Kind("", "v1", "secrets"), "x", cluster.name)
    assert f"resilience kubernetes manifests --only=rbac{flag} | kubectl apply -f -" in str(caught.value)


def test_missing_right_to_record_events_is_said_once_and_other_refusals_each_time(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_LACKING", set())
    other = Cluster(cluster.server, f"{cluster.name}-2")
    for number, namespace in enumerate([cluster.name, cluster.name, other.name]):
        thing = {"metadata": {"name": f"p{number}", "namespace": namespace}}
        events.record(Api(cluster.server.client(NOBODY)), thing, "Reason", "text", 0.0)
    assert caplog.text.count("no Event was recorded") == 1
    assert 'missing permission: verb "create", resource "events"' in caplog.text
    for _ in range(2):
        events.record(cluster.api, {"metadata": {"name": "p", "namespace": "NO SUCH"}}, "Reason", "text", 0.0)
    assert caplog.text.count("no Event was recorded") == 3


def test_token_that_nobody_knows_is_said_to_be_unknown(api_server: ApiServer) -> None:
    client = api_server.client()
    client.configuration.api_key = {"authorization": "Bearer made-up"}
    with pytest.raises(Forbidden, match="does not know who we are"):
        Api(client).list_all(NODES)


@pytest.mark.parametrize("name", ["../pods", "a/b", "..", "a%2fb", "a\nb"])
def test_name_that_can_not_be_one_never_becomes_part_of_an_address(api: Api, name: str) -> None:
    with pytest.raises(KubernetesError, match="is no name of anything"):
        api.get(NODES, name)
    with pytest.raises(KubernetesError, match="is no name of anything"):
        api.list_all(PODS, name)


def test_nothing_has_no_name(api: Api) -> None:
    with pytest.raises(NotFound, match="without a name"):
        api.get(NODES, "")


# -- watching ---------------------------------------------------------------------------------------------------------


class Seen:
    """What a watcher has told, in order."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Change] = queue.SimpleQueue()
        self.all: list[tuple[str, str]] = []

    def look(self) -> list[tuple[str, str]]:
        while not self.queue.empty():
            change = self.queue.get()
            self.all.append((change.verb, change.thing["metadata"]["name"] if change.thing else ""))
        return self.all

    def wait(self, verb: str, name: str = "", times: int = 1) -> None:
        wait_for(lambda: self.look().count((verb, name)) >= times, f"{verb} of {name}, told so far: {self.all}", 60)


@contextmanager
def watching(api: Api, cluster: Cluster) -> Iterator[Seen]:
    seen = Seen()
    watcher = Watcher(api, Kind("", "v1", "pods", "resilience.dev/job"), cluster.name, seen.queue)
    watcher.start()
    try:
        seen.wait(LISTED)
        yield seen
    finally:
        watcher.stop()


def test_watcher_tells_what_is_there_and_then_what_changes_of_the_selected_pods(cluster: Cluster) -> None:
    cluster.pod("before")
    with watching(cluster.api, cluster) as seen:
        assert seen.look() == [(ADDED, "before"), (LISTED, "")]
        cluster.api.create(
            PODS,
            {"metadata": {"name": "stranger"}, "spec": {"containers": [{"name": "a", "image": "b"}]}},
            cluster.name,
        )
        cluster.pod("after")
        cluster.say("after", {"phase": "Running"})
        cluster.gone("before")
        seen.wait(DELETED, "before")
        assert (ADDED, "after") in seen.all
        assert (MODIFIED, "after") in seen.all
        assert not [name for _, name in seen.all if name == "stranger"]


def test_watch_that_broke_goes_on_where_it_was(cluster: Cluster, forwarder: Forwarder) -> None:
    cluster.pod("first")
    with watching(Api(cluster.server.client(url=forwarder.url)), cluster) as seen:
        forwarder.cut()
        cluster.pod("second")
        cluster.gone("first")
        forwarder.mend()
        seen.wait(DELETED, "first")
        seen.wait(ADDED, "second")
        assert seen.all.count((LISTED, "")) == 1, "nothing was forgotten, so nothing is listed again"


def in_a_pod(server: ApiServer, token: Path, url: str) -> Api:
    """The API server as a pod's service account sees it, whose token is read from its file before each call."""
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.config.incluster_config import InClusterConfigLoader

    host, _, port = url.removeprefix("https://").rpartition(":")
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    loader = InClusterConfigLoader(str(token), str(server.authority), environ=environ)
    loader._token_refresh_period = timedelta(0)  # a minute in a pod
    configuration = Configuration()
    loader.load_and_set(configuration)
    return Api(ApiClient(configuration))


@pytest.mark.parametrize("how", ["empty", "missing"])
def test_token_file_that_can_not_be_read_for_a_moment_ends_no_watch(
    cluster: Cluster, forwarder: Forwarder, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    token = tmp_path / "token"
    token.write_text(cluster.server.token)
    with watching(in_a_pod(cluster.server, token, forwarder.url), cluster) as seen:
        token.unlink()
        if how == "empty":
            token.touch()
        forwarder.cut()
        forwarder.mend()
        wait_for(lambda: "the credentials for" in caplog.text, "the watcher to miss its token")
        cluster.pod("later")
        token.write_text(cluster.server.token)
        seen.wait(ADDED, "later")


class OddOnce(Api):
    """Stumbles over itself in its first call."""

    stumbled = False

    def list_all(self, kind: Kind, namespace: str = "") -> tuple[list[dict[str, Any]], str]:
        if not self.stumbled:
            self.stumbled = True
            raise TypeError("nobody has thought of this")
        return super().list_all(kind, namespace)


def test_watcher_goes_on_after_an_error_that_nobody_has_thought_of(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.pod("there")
    with watching(OddOnce(cluster.server.client()), cluster) as seen:
        seen.wait(ADDED, "there")
    assert "nobody has thought of this" in caplog.text


def test_what_changed_while_the_server_was_started_again_and_forgot_is_told_deletions_too(
    cluster: Cluster, forwarder: Forwarder
) -> None:
    cluster.pod("goes")
    cluster.pod("stays")
    with watching(Api(cluster.server.client(url=forwarder.url)), cluster) as seen:
        forwarder.cut()
        cluster.gone("goes")
        cluster.pod("comes")
        cluster.server.restart()  # it has forgotten what changed before it started
        forwarder.mend()
        seen.wait(DELETED, "goes")
        seen.wait(ADDED, "comes")
        cluster.pod("later")
        seen.wait(ADDED, "later")
        assert (DELETED, "stays") not in seen.all


def test_kind_that_is_not_installed_is_named_with_what_is_missing(cluster: Cluster) -> None:
    with pytest.raises(NotFound, match=r"no things of example\.org/v1.*CustomResourceDefinition.*not installed"):
        cluster.api.create(Kind("example.org", "v1", "things"), {"metadata": {"name": "one"}}, cluster.name)


def test_kind_that_is_not_installed_counts_as_looked_at(cluster: Cluster) -> None:
    out: queue.SimpleQueue[Change] = queue.SimpleQueue()
    watcher = Watcher(cluster.api, Kind("example.org", "v1", "things", optional=True), cluster.name, out)
    watcher.start()
    try:
        assert out.get(timeout=30).verb == LISTED
    finally:
        watcher.stop()
