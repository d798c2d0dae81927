"""Faulty nodes on a real API server: marked once, with the reason, whatever fails in between, and given back by people."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from resilience.integrations.kubernetes import events, nodes
from resilience.integrations.kubernetes.api import Api, KubernetesError
from resilience.integrations.kubernetes.cli import main
from resilience.integrations.kubernetes.controller import Controller
from resilience.integrations.kubernetes.faulty import FaultyNodes, KubernetesErrorMonitor
from resilience.integrations.kubernetes.nodes import Failure
from resilience.integrations.kubernetes.parts import ADDED, NODES, PODS, Kind

from resilience.failover.error_monitor import NodeFault
from resilience.failover.marking import Marker, leave_message
from resilience.launcher.agreement import Node
from resilience.launcher.fitness import consequences
from resilience.nodecheck.judging import Alone, judge
from resilience.nodecheck.pairing import Evidence
from tests.integrations.kubernetes.cluster import Cluster, Forwarder
from tests.integrations.kubernetes.pods import ended, pod
from tests.jobs import wait_for

pytestmark = pytest.mark.spawns
SELECTOR = "resilience.dev/job"
TAINT = "resilience.dev/faulty"


@contextmanager
def controlled(cluster: Cluster, api: Api | None = None) -> Iterator[None]:
    """Have a controller run in this process."""
    stop = threading.Event()
    made = Controller(api or cluster.api, [FaultyNodes(api or cluster.api, SELECTOR)], cluster.name)
    thread = threading.Thread(target=made.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def is_marked(node: dict[str, Any]) -> bool:
    return bool(node["spec"].get("unschedulable")) and TAINT in [it["key"] for it in node["spec"].get("taints") or ()]


def await_mark(cluster: Cluster, node: str) -> dict[str, Any]:
    wait_for(lambda: is_marked(cluster.get_node(node)), f"{node} to be marked", 60)
    return cluster.get_node(node)


def look_at(cluster: Cluster, part: FaultyNodes) -> None:
    """Tell a part of every pod, as a controller does that starts anew."""
    (kind,) = part.kinds()
    for thing in cluster.api.list_all(kind, cluster.name)[0]:
        part.changed(kind, ADDED, thing)


def test_node_whose_worker_ends_with_a_code_of_the_hardware_is_cordoned_tainted_annotated_and_told_of(
    cluster: Cluster,
) -> None:
    node, other = cluster.node("a", taints=[{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]), cluster.node("b")
    cluster.pod("p", node=node)
    cluster.pod("q", node=other)
    with controlled(cluster):
        cluster.say("p", ended(14))
        found = await_mark(cluster, node)
        assert {(it["key"], it.get("value")) for it in found["spec"]["taints"]} == {
            ("gpu", "yes"),
            (TAINT, "InfoROMCorrupted"),
        }
        notes = found["metadata"]["annotations"]
        assert notes["resilience.dev/faulty-reason"] == "InfoROMCorrupted"
        assert "infoROM corrupted" in notes["resilience.dev/faulty-message"]
        assert notes["resilience.dev/faulty-pod"] == f"{cluster.name}/p"
        assert notes["resilience.dev/faulty-at"] == "2030-01-01T00:00:00Z"
        told = wait_for(
            lambda: [it for it in cluster.events("default") if it["involvedObject"]["name"] == node], "the Event", 30
        )
        assert [it["reason"] for it in told] == ["NodeFaulty"]
    assert not is_marked(cluster.get_node(other))


def test_pod_gets_only_its_own_node_marked_whatever_its_message_claims(cluster: Cluster) -> None:
    own, other = cluster.node("own"), cluster.node("other")
    cluster.pod("p", node=own)
    cluster.say(
        "p", ended(80, NodeFault(other, "NodeCheckFailed", "all-gather with n3 timed out", run="run-7").as_message())
    )
    look_at(cluster, FaultyNodes(cluster.api, SELECTOR))
    found = cluster.get_node(own)
    assert is_marked(found)
    assert found["metadata"]["annotations"]["resilience.dev/faulty-run"] == "run-7"
    assert not is_marked(cluster.get_node(other))


def test_nodes_of_a_job_in_which_every_node_fails_its_check_by_itself_are_not_marked(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The exit codes and messages are those of the launchers' own ruling; one that fails among sound ones is marked."""
    caplog.set_level("INFO")
    for job, sick in (("all", (0, 1, 2)), ("one", (1,))):
        told = {at: Alone("" if at not in sick else "the product is wrong", "cpu", 1, True) for at in range(3)}
        ruling = judge(3, told, Evidence((0, 1, 2), ()), 1)
        for at in range(3):
            end = consequences(ruling, [Node(f"n{it}", (it,)) for it in range(3)], at, False, run="r", cycle=0, at=4e9)
            cluster.pod(f"{job}-{at}", node=cluster.node(f"{job}-{at}"))
            if end.outcome is not None:
                log = tmp_path / f"{job}-{at}"
                if end.fault is not None:
                    leave_message(end.fault, str(log))
                said = log.read_text(encoding="utf-8") if log.exists() else ""
                cluster.say(f"{job}-{at}", ended(end.outcome.exit_code, said))
    part = FaultyNodes(cluster.api, SELECTOR)
    look_at(cluster, part)
    look_at(cluster, part)
    marked = [
        it for it in ("all-0", "all-1", "all-2", "one-0", "one-1", "one-2")
        if is_marked(cluster.get_node(f"{cluster.name}-{it}"))
    ]  # fmt: skip
    assert marked == ["one-1"]
    assert caplog.text.count("is not marked") == 3


def test_pods_without_the_label_are_not_heard(cluster: Cluster) -> None:
    node = cluster.node("a")
    cluster.pod("p", node=node)
    cluster.api.patch(PODS, "p", {"metadata": {"labels": {SELECTOR: None}}}, cluster.name)
    cluster.say("p", ended(14))
    look_at(cluster, FaultyNodes(cluster.api, SELECTOR))
    assert not is_marked(cluster.get_node(node))


def test_marking_is_done_once_however_often_and_by_whomever_it_is_told(cluster: Cluster) -> None:
    node = cluster.node("a")
    cluster.pod("p", node=node)
    cluster.say("p", ended(201))
    part = FaultyNodes(cluster.api, SELECTOR)
    look_at(cluster, part)
    version = cluster.get_node(node)["metadata"]["resourceVersion"]
    look_at(cluster, part)
    look_at(cluster, FaultyNodes(cluster.api, SELECTOR))
    assert cluster.get_node(node)["metadata"]["resourceVersion"] == version


def test_operator_who_puts_a_node_back_is_not_overruled_by_the_same_failure_but_by_a_new_one(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    node = cluster.node("a", taints=[{"key": "gpu", "effect": "NoSchedule"}])
    cluster.pod("p", node=node)
    cluster.say("p", ended(202))
    look_at(cluster, FaultyNodes(cluster.api, SELECTOR))
    config = cluster.server.kubeconfig(tmp_path_factory.mktemp("kube") / "config")
    assert main(["uncordon", node, f"--kubeconfig={config}"]) == 0
    assert "in service again" in capsys.readouterr().out
    back = cluster.get_node(node)
    assert not is_marked(back)
    assert [it["key"] for it in back["spec"]["taints"]] == ["gpu"]
    look_at(cluster, FaultyNodes(cluster.api, SELECTOR))  # a controller that was started anew
    assert not is_marked(cluster.get_node(node))
    cluster.pod("q", node=node)
    cluster.say("q", ended(202))
    look_at(cluster, FaultyNodes(cluster.api, SELECTOR))
    assert is_marked(cluster.get_node(node))


def test_name_that_the_cluster_does_not_know_keeps_no_other_node_out_of_service(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marked, other = cluster.node("a"), cluster.node("b")
    nodes.mark(cluster.api, Failure("id", NodeFault(marked, "DriverError", "x")))
    config = cluster.server.kubeconfig(tmp_path / "config")
    assert main(["uncordon", "nosuch", other, marked, f"--kubeconfig={config}"]) == 2
    shown = capsys.readouterr()
    assert f"{marked}: in service again" in shown.out
    assert f"{other}: was not marked by us" in shown.out
    assert "nosuch: the cluster has no node of that name" in shown.err
    assert not is_marked(cluster.get_node(marked))


def test_plain_kubectl_uncordon_is_respected_too(cluster: Cluster) -> None:
    node = cluster.node("a")
    cluster.pod("p", node=node)
    cluster.say("p", ended(14))
    look_at(cluster, FaultyNodes(cluster.api, SELECTOR))
    cluster.api.patch(NODES, node, {"spec": {"unschedulable": False}})
    look_at(cluster, FaultyNodes(cluster.api, SELECTOR))
    assert not cluster.get_node(node)["spec"].get("unschedulable")


@pytest.mark.parametrize("plainly", [False, True], ids=["resilience kubernetes uncordon", "kubectl uncordon"])
def test_operator_is_not_overruled_however_many_failures_there_were(cluster: Cluster, plainly: bool) -> None:
    node = cluster.node("a")
    fault, now = NodeFault(node, "DriverError", "x"), time.time()
    for number in range(34):  # more than a node remembers by name
        nodes.mark(cluster.api, Failure(f"failure {number}", fault, happened=now))
    if plainly:
        cluster.api.patch(NODES, node, {"spec": {"unschedulable": None}})
    else:
        assert nodes.release(cluster.api, node)
    for number in range(34):
        assert not nodes.mark(cluster.api, Failure(f"failure {number}", fault, happened=now))
    assert not is_marked(cluster.get_node(node))
    assert nodes.mark(cluster.api, Failure("a new one", fault, happened=time.time() + 60.0))


def test_failure_that_nobody_had_seen_before_the_node_was_put_back_is_settled_and_a_clock_that_is_ahead_settles_nothing(
    cluster: Cluster,
) -> None:
    node = cluster.node("a")
    fault, now = NodeFault(node, "DriverError", "x"), time.time()
    assert nodes.mark(cluster.api, Failure("first", fault, happened=now + 3600.0))
    unseen = now - 0.5
    assert nodes.release(cluster.api, node)
    assert not nodes.mark(cluster.api, Failure("unseen", fault, happened=unseen))
    assert nodes.mark(cluster.api, Failure("later", fault, happened=now + 60.0))


def test_failure_of_before_the_node_was_registered_is_of_another_machine(cluster: Cluster) -> None:
    node = cluster.node("a")
    cluster.pod("p", node=node)
    cluster.say("p", ended(14, at="2001-01-01T00:00:00Z"))
    look_at(cluster, FaultyNodes(cluster.api, SELECTOR))
    assert not is_marked(cluster.get_node(node))


@pytest.mark.long
def test_mark_is_not_lost_while_the_api_server_is_away(
    cluster: Cluster, forwarder: Forwarder, caplog: pytest.LogCaptureFixture
) -> None:
    node = cluster.node("a")
    cluster.pod("p", node=node)
    api = Api(cluster.server.client(url=forwarder.url))
    with controlled(cluster, api):
        forwarder.cut()
        cluster.say("p", ended(128))
        cluster.server.restart()
        assert not is_marked(cluster.get_node(node))
        forwarder.mend()
        await_mark(cluster, node)


def test_mark_that_could_not_be_made_is_tried_again_and_logged(
    cluster: Cluster, forwarder: Forwarder, caplog: pytest.LogCaptureFixture
) -> None:
    """The pod is seen, and then the server goes away, before the mark."""
    node = cluster.node("a")
    api = Api(cluster.server.client(url=forwarder.url))

    class Late(FaultyNodes):
        def changed(self, kind: Kind, verb: str, thing: Any) -> None:
            if not caplog.records and thing.get("status", {}).get("phase") == "Failed":
                forwarder.cut()
            super().changed(kind, verb, thing)

    stop = threading.Event()
    thread = threading.Thread(target=Controller(api, [Late(api, SELECTOR)], cluster.name).run, args=(stop,))
    thread.start()
    try:
        cluster.pod("p", node=node)
        cluster.say("p", ended(14))
        wait_for(lambda: "could not deal with pods" in caplog.text, "the failure to be logged", 60)
        assert not is_marked(cluster.get_node(node))
        forwarder.mend()
        await_mark(cluster, node)
    finally:
        stop.set()
        thread.join(30)


def test_so_many_nodes_an_hour_and_then_the_brake(cluster: Cluster) -> None:
    now = 4e9
    part = FaultyNodes(cluster.api, SELECTOR, per_hour=1, clock=lambda: now)
    for name in ("a", "b"):
        cluster.pod(f"p{name}", node=cluster.node(name))
        cluster.say(f"p{name}", ended(14))
    with pytest.raises(KubernetesError, match="within an hour"):
        look_at(cluster, part)
    now += 3601.0
    look_at(cluster, part)
    assert all(is_marked(cluster.get_node(f"{cluster.name}-{name}")) for name in "ab")


def test_pod_that_fails_again_and_again_on_one_node_does_not_hold_the_brake_for_the_others(cluster: Cluster) -> None:
    part = FaultyNodes(cluster.api, SELECTOR, per_hour=2)
    looping, other = cluster.node("a"), cluster.node("b")
    cluster.pod("p", node=looping)
    for number in range(4):
        cluster.say("p", ended(14, container=f"containerd://{number}"))
        look_at(cluster, part)
    cluster.pod("q", node=other)
    cluster.say("q", ended(14))
    look_at(cluster, part)
    assert is_marked(cluster.get_node(looping))
    assert is_marked(cluster.get_node(other))


def test_brake_counts_what_was_taken_out_before_the_controller_was_started_again(cluster: Cluster) -> None:
    now = 4e9
    for name in ("a", "b", "c"):
        cluster.pod(f"p{name}", node=cluster.node(name))

    def fails(name: str, container: str = "containerd://1") -> None:
        cluster.say(f"p{name}", ended(14, container=container))
        look_at(cluster, FaultyNodes(cluster.api, SELECTOR, per_hour=2, clock=lambda: now))

    fails("a")
    now += 3000.0
    fails("b")
    fails("a", "containerd://2")  # it is out already, and counts from when it was taken out
    with pytest.raises(KubernetesError, match="2 nodes were taken out"):
        fails("c")
    now += 700.0
    fails("c")
    assert is_marked(cluster.get_node(f"{cluster.name}-c"))


def test_launcher_with_the_right_to_do_so_marks_by_itself(cluster: Cluster) -> None:
    node = cluster.node("a")
    monitor = KubernetesErrorMonitor(Api(cluster.server.client()))
    fault = NodeFault(node, "DriverError", "a worker ended with exit code 201", code=201, run="r", at=4e9)
    monitor.mark(fault)
    version = cluster.get_node(node)["metadata"]["resourceVersion"]
    monitor.mark(fault)
    monitor.close()
    found = cluster.get_node(node)
    assert is_marked(found)
    assert found["metadata"]["resourceVersion"] == version


def test_launcher_that_is_told_kubernetes_has_its_node_marked_over_the_usual_kubeconfig(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--ft-error-monitor=kubernetes``, with all that the launcher does around it."""
    node = cluster.node("a")
    config = cluster.server.kubeconfig(tmp_path_factory.mktemp("kube") / "config")
    monkeypatch.setenv("KUBECONFIG", str(config))
    marker = Marker("kubernetes", timeout=30.0)
    try:
        marker.tell(NodeFault(node, "NodeCheckFailed", "the product is wrong", code=80, run="r", at=4e9))
        found = await_mark(cluster, node)
    finally:
        marker.close()
    assert found["metadata"]["annotations"]["resilience.dev/faulty-message"] == "the product is wrong"


def test_node_that_is_gone_has_nothing_to_mark(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    part = FaultyNodes(cluster.api, SELECTOR)
    part.changed(part.kinds()[0], ADDED, pod("p", node="no-such-node", code=14))
    assert "no-such-node is not there any more" in caplog.text


def test_launcher_whose_node_the_cluster_does_not_know_says_that_it_is_not_marked_and_what_to_give(
    cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = cluster.server.kubeconfig(tmp_path_factory.mktemp("kube") / "config")
    monkeypatch.setenv("KUBECONFIG", str(config))
    caplog.set_level("INFO")
    marker = Marker("kubernetes", timeout=30.0)
    try:
        marker.tell(NodeFault("no-such-node", "DriverError", "a worker ended with exit code 201", code=201, at=4e9))
        wait_for(lambda: "marked as faulty" in caplog.text, "the first attempt", 60)
    finally:
        monkeypatch.setattr(marker, "_timeout", 0.0)  # what close() waits for, and it is told already
        marker.close()
    last = [it.getMessage() for it in caplog.records if "marked as faulty" in it.getMessage()][-1]
    assert "is NOT marked as faulty" in last
    assert "--ft-node-name" in last


@pytest.mark.parametrize("bound_s", [1, -60])
def test_young_node_whose_clock_is_behind_is_marked_and_one_that_came_after_the_pod_is_not(
    cluster: Cluster, bound_s: int
) -> None:
    node = cluster.node("new")
    born = events.seconds(cluster.get_node(node)["metadata"]["creationTimestamp"])
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": events.stamp(born + bound_s)}
    status = ended(201, at=events.stamp(born - 30))
    cluster.pod("x", node=node)
    cluster.say("x", status | {"conditions": [bound]})
    look_at(cluster, FaultyNodes(cluster.api, SELECTOR))
    assert is_marked(cluster.get_node(node)) == (bound_s > 0)
