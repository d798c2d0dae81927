"""The controller as a process, with the shipped account and roles, against a real API server."""

from __future__ import annotations

import copy
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from resilience.integrations.kubernetes import controller, health
from resilience.integrations.kubernetes.api import Api, Conflict
from resilience.integrations.kubernetes.election import LEASES, Election
from resilience.integrations.kubernetes.faulty import uncordon
from resilience.integrations.kubernetes.manifests import main as print_manifests
from resilience.integrations.kubernetes.manifests import manifests
from resilience.integrations.kubernetes.parts import NODES, Kind

from resilience.errors import ResilienceError
from tests.integrations.kubernetes.cluster import Cluster
from tests.integrations.kubernetes.pods import ended
from tests.integrations.kubernetes.test_faulty_nodes import await_mark, is_marked
from tests.jobs import wait_for

pytestmark = pytest.mark.spawns
ACCOUNT = "resilience-controller"
PLURALS = {
    "Namespace": Kind("", "v1", "namespaces", namespaced=False),
    "ServiceAccount": Kind("", "v1", "serviceaccounts"),
    "ClusterRole": Kind("rbac.authorization.k8s.io", "v1", "clusterroles", namespaced=False),
    "ClusterRoleBinding": Kind("rbac.authorization.k8s.io", "v1", "clusterrolebindings", namespaced=False),
    "Role": Kind("rbac.authorization.k8s.io", "v1", "roles"),
    "RoleBinding": Kind("rbac.authorization.k8s.io", "v1", "rolebindings"),
    "Deployment": Kind("apps", "v1", "deployments"),
}


def install(cluster: Cluster, without: tuple[str, str] | None = None) -> str:
    """Apply the shipped manifests to the test's namespace, perhaps without one permission; return the account's token."""
    for document in manifests(cluster.name):
        made = copy.deepcopy(document)
        if made["kind"] in ("ClusterRole", "ClusterRoleBinding"):  # other tests have theirs at the same time
            made["metadata"]["name"] += f"-{cluster.name}"
            if "roleRef" in made:
                made["roleRef"]["name"] += f"-{cluster.name}"
        for rule in made.get("rules", ()):
            if without is not None and without[1] in rule["resources"]:
                rule["verbs"] = [verb for verb in rule["verbs"] if verb != without[0]]
        made["rules"] = [rule for rule in made["rules"] if rule["verbs"]] if "rules" in made else None
        made = {key: value for key, value in made.items() if value is not None}
        try:
            cluster.api.create(PLURALS[made["kind"]], made, cluster.name)
        except Conflict:
            assert made["kind"] == "Namespace"
    return cluster.server.account_token(cluster.name, ACCOUNT)


def test_shipped_role_suffices_for_everything_the_controller_does(cluster: Cluster, tmp_path: Path) -> None:
    token = install(cluster)
    config = cluster.server.kubeconfig(tmp_path / "config", token)
    nodes = [cluster.node(name, rack="r") for name in ("a", "b", "c")]
    running = cluster.controller(tmp_path / "c", "--group-threshold=1", kubeconfig=config)
    for number, node in enumerate(nodes[:2]):
        cluster.pod(f"w{number}", group=0, rack=f"{cluster.name}-r", node=node)
    cluster.pod("x", node=nodes[2])
    cluster.say("x", ended(14))
    await_mark(cluster, nodes[2])
    wait_for(
        lambda: "waits" not in running.log() and state_of(cluster),
        lambda: f"the members to be known\n{running.log()}",
        60,
    )
    cluster.say("w1", ended(1))

    def moved() -> bool:
        cluster.let_go()
        return {"w0", "w1"} <= {
            name for name, it in cluster.pods().items() if "resilience.dev/group" in it["metadata"]["labels"]
        }

    wait_for(moved, "the group to be made again", 60)
    assert "missing permission" not in running.log(), running.log()
    assert "ERROR" not in running.log(), running.log()
    assert "waiting to lead" not in running.log(), "there is no other replica"


def state_of(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.api.list_all(Kind("", "v1", "configmaps", "resilience.dev/state=groups"), cluster.name)[0]


@pytest.mark.parametrize("without", [("patch", "nodes"), ("watch", "pods"), ("update", "leases")], ids=str)
def test_permission_that_is_missing_is_named_in_the_controllers_log(
    cluster: Cluster, tmp_path: Path, without: tuple[str, str]
) -> None:
    config = cluster.server.kubeconfig(tmp_path / "config", install(cluster, without))
    node = cluster.node("a")
    cluster.pod("x", node=node)
    cluster.say("x", ended(14))
    running = cluster.controller(tmp_path / "c", kubeconfig=config)
    wanted = f'missing permission: verb "{without[0]}", resource "{without[1]}"'
    wait_for(lambda: wanted in running.log(), lambda: f"{wanted} in the log:\n{running.log()}", 60)


def test_groups_are_looked_after_where_another_part_may_not_list_what_it_needs(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = cluster.server.kubeconfig(tmp_path / "config", install(cluster, ("list", "jobs")))
    cluster.pod("w0", group=0, rack=f"{cluster.name}-r", node=cluster.node("a", rack="r"))
    running = cluster.controller(tmp_path / "c", kubeconfig=config)
    wait_for(lambda: 'resource "jobs"' in running.log(), lambda: f"the refusal\n{running.log()}", 60)
    wait_for(lambda: state_of(cluster), lambda: f"the member to be known\n{running.log()}", 60)


@pytest.mark.long
def test_second_replica_waits_and_takes_over_when_the_first_is_told_to_end_or_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    nodes = [cluster.node(name) for name in ("a", "b", "c")]
    running = [cluster.controller(tmp_path / "0", "--lease-seconds=3")]
    wait_for(lambda: "leads" in running[0].log(), "the first to lead", 60)
    running += [cluster.controller(tmp_path / name, "--lease-seconds=3") for name in ("1",)]
    wait_for(lambda: "waiting to lead" in running[1].log(), "the second to wait", 60)

    def fails(number: int) -> None:
        cluster.pod(f"p{number}", node=nodes[number])
        cluster.say(f"p{number}", ended(14))
        await_mark(cluster, nodes[number])

    fails(0)
    assert "out of scheduling" in running[0].log()
    running[0].process.send_signal(signal.SIGTERM)
    assert running[0].process.wait(20) == 0
    fails(1)
    assert "leads" in running[1].log()
    assert "out of scheduling" in running[1].log()
    running.append(cluster.controller(tmp_path / "2", "--lease-seconds=3"))
    running[1].kill()
    fails(2)
    assert "out of scheduling" in running[2].log()


def test_failure_that_happened_while_no_controller_ran_is_found_by_listing(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.node("a")
    cluster.pod("p", node=node)
    cluster.say("p", ended(14))
    assert not is_marked(cluster.get_node(node))
    cluster.controller(tmp_path, "--no-leader-election")
    await_mark(cluster, node)


def test_replica_that_lost_its_lease_stops_acting(cluster: Cluster) -> None:
    ours, theirs = (Election(cluster.api, cluster.name, "lease", me, lease_s=60.0) for me in ("a", "b"))
    assert ours.try_once()
    assert not theirs.try_once()
    lease = cluster.api.get(LEASES, "lease", cluster.name)
    lease["spec"]["holderIdentity"] = "b"
    cluster.api.replace(LEASES, lease, cluster.name)
    assert not ours.try_once()
    assert theirs.try_once()
    theirs.release()
    assert cluster.api.get(LEASES, "lease", cluster.name)["spec"]["holderIdentity"] == ""
    assert ours.try_once()


def test_controller_that_cant_renew_ends_so_that_no_two_act(cluster: Cluster, forwarder: Any) -> None:
    api = Api(cluster.server.client(url=forwarder.url), timeout_s=1.0)
    election = Election(api, cluster.name, "lease", "me", lease_s=6.0)
    loop, stop = controller.Controller(api, [], cluster.name, election), threading.Event()
    ended_with: list[int] = []
    thread = threading.Thread(target=lambda: ended_with.append(loop.run(stop)))
    thread.start()
    try:
        wait_for(election.leading, "it to lead", 30)
        forwarder.cut()
        thread.join(60)
    finally:
        stop.set()
        thread.join(30)
    assert ended_with == [controller.LOST_LEASE]


def test_replica_that_ends_does_not_lead_once_more_while_its_watchers_stop(cluster: Cluster, forwarder: Any) -> None:
    api = Api(cluster.server.client(url=forwarder.url), timeout_s=1.0)
    election = Election(api, cluster.name, "lease", "me", lease_s=6.0)
    loop = controller.Controller(api, [], cluster.name, election)
    led: list[bool] = []

    class Slow:
        def lives(self) -> bool:
            return True

        def stop(self, patience_s: float) -> None:
            """The server is there again, and there is time to see whether the lease is taken."""
            forwarder.mend()
            wait_for(lambda: election.leading() or not election._thread.is_alive(), "it to lead or to give up", 30)
            led.append(election.leading())

    loop._watchers.append(Slow())
    thread = threading.Thread(target=loop.run, args=(threading.Event(),))
    thread.start()
    wait_for(election.leading, "it to lead", 30)
    forwarder.cut()
    thread.join(60)
    assert led == [False]


def test_parts_are_told_whether_this_replica_leads(cluster: Cluster) -> None:
    election = Election(cluster.api, cluster.name, "lease", "me", lease_s=60.0)
    options = controller._options(controller.parser().parse_args([]), election)
    assert not options.leading()
    assert election.try_once()
    assert options.leading()
    assert controller.Options().leading(), "without an election there is one replica only"


# -- what needs no server ---------------------------------------------------------------------------------------------


class Leaves(Api):
    """Takes its thread along, as nothing should."""

    def __init__(self) -> None:
        pass

    def list_all(self, kind: Kind, namespace: str = "") -> tuple[list[dict[str, Any]], str]:
        raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_controller_is_not_well_when_one_of_its_watchers_is_gone() -> None:
    api, stop = Leaves(), threading.Event()
    made = controller.Controller(api, controller.build(["faulty-nodes"], api, controller.Options()))
    assert made.well()
    running = threading.Thread(target=made.run, args=(stop,))
    running.start()
    try:
        wait_for(lambda: not made.well(), "the loss of the watcher to be known")
    finally:
        stop.set()
        running.join(60)
    assert not running.is_alive()


def test_health_is_served_on_loopback_and_says_when_the_loop_stands_still() -> None:
    well = [True]
    with health.serving("0", lambda: well[0]) as port:
        url = f"http://127.0.0.1:{port}/healthz"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.read() == b"ok\n"
        well[0] = False
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url, timeout=10)
        assert caught.value.code == 503
        caught.value.close()
    with pytest.raises(Exception, match="not a port"), health.serving("host:x", lambda: True):
        pass


def test_part_that_is_misspelt_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("kubernetes")
    config = tmp_path / "config"
    cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config.write_text(
        yaml.safe_dump(
            {"clusters": [cluster], "users": [{"name": "u", "user": {}}], "contexts": [context], "current-context": "c"}
        )
    )
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert controller.main([f"--kubeconfig={config}", "--parts=faulty-node"]) == 2
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
    assert "Did you mean 'faulty-nodes'?" in capsys.readouterr().err


def test_manifests_are_printed_for_a_namespace_and_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_manifests(["--namespace=ml", "--image=registry/x:1", "--arg=--group-threshold=60"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    documents = list(yaml.safe_load_all(printed.out))
    assert {it["metadata"].get("namespace", "ml") for it in documents} == {"ml"}
    (deployment,) = [it for it in documents if it["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/x:1"
    assert container["args"][-1] == "--group-threshold=60"
    bound = [subject["namespace"] for it in documents for subject in it.get("subjects", ())]
    assert bound == ["ml", "ml"]


def test_manifests_without_an_image_say_which_one_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_manifests([]) == 0
    printed = capsys.readouterr()
    assert list(yaml.safe_load_all(printed.out)) == manifests()
    (note,) = printed.err.splitlines()
    assert "note: no image was named: the Deployment has resilience:latest" in note
    assert "Give --image=YOURS, one that has resilience-sdk[kubernetes] in it." in note


def test_roles_alone_can_be_applied_to_a_controller_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_manifests(["--only=rbac", "--namespace=ml"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "", "no image is in it"
    documents = list(yaml.safe_load_all(printed.out))
    roles = [it for it in manifests("ml") if "rbac.authorization.k8s.io" in it["apiVersion"]]
    assert documents == roles
    assert len(roles) == 4


@pytest.mark.parametrize("text", ["[", "[]", "hello", "5", "\x00", ""], ids=repr)
def test_kubeconfig_that_is_none_is_an_error_in_a_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kubernetes")
    config = tmp_path / "config"
    config.write_text(text)
    assert uncordon(["node", f"--kubeconfig={config}"]) == 2
    assert "there is no way to a cluster" in capsys.readouterr().err


def test_training_pods_get_no_right_to_change_nodes() -> None:
    roles = [it for it in manifests() if it["kind"] in ("Role", "ClusterRole")]
    assert [it["metadata"]["name"] for it in roles] == [ACCOUNT, ACCOUNT]
    for role in roles:
        assert "*" not in str(role["rules"])
        assert "secrets" not in str(role["rules"])
    assert NODES.plural not in str([it["rules"] for it in roles if it["kind"] == "Role"])


def test_no_part_at_all_is_refused() -> None:
    with pytest.raises(ResilienceError, match=r"--parts is empty: nothing would be done\. There are: .*groups"):
        controller.build([], cast(Api, None), controller.Options())


@pytest.mark.parametrize(
    "flag",
    [
        "--pod-selector=!!bad",
        "--pod-selector=",
        "--pod-selector=a=b,c d",
        "--namespace=../../x",
        "--namespace=A",
        "--state-namespace=a.b",
        "--lease-name=A/B",
        "--lease-seconds=0.01",
        "--lease-seconds=nan",
        "--job-label=a b c",
        "--rack-label=a b c",
        "--max-group-failovers=-1",
        "--group-threshold=0",
    ],
)
def test_flags_that_can_not_be_meant_are_refused_before_anything_is_asked(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (controller.main, lambda argv: print_manifests([f"--arg={argv[0]}"])):
        with pytest.raises(SystemExit) as caught:
            command([flag])
        assert caught.value.code == 2
        assert f"argument {flag.partition('=')[0]}:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "selector", ["job", "!job", "a=b", "a==b,c!=d", "a in (b, c),d", "app.io/x notin (y)", "resilience.dev/job", "a="]
)
def test_selectors_that_kubernetes_takes_are_taken(selector: str) -> None:
    assert controller.parser().parse_args([f"--pod-selector={selector}"]).pod_selector == selector


@pytest.mark.parametrize(
    "flag", ["--replicas=-1", "--replicas=two", "--namespace=A B", "--image=a b", "--image=", "--arg=--nonsense"]
)
def test_manifests_that_could_not_be_applied_are_not_printed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        print_manifests([flag])
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


def test_manifests_are_not_printed_for_a_part_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ResilienceError, match=r"there is no part 'podgrups'\. Did you mean 'podgroups'\?"):
        print_manifests(["--image=x", "--arg=--parts=podgrups"])
    assert capsys.readouterr().out == ""
