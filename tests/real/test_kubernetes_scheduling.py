"""Groups that move between racks, with the real scheduler and the real Job controller of Kubernetes 1.20.

There are no kubelets, and no scheduler that knows racks: a thread of the test says that pods run, takes away those that are to end,
and labels pods by the rack of their node, as that scheduler would.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from resilience.integrations.kubernetes.api import Api, KubernetesError
from resilience.integrations.kubernetes.job.render import render
from resilience.integrations.kubernetes.job.values import JobValues
from resilience.integrations.kubernetes.parts import NODES, PODS, Kind

from resilience.failover.error_monitor import NodeFault
from tests.integrations.kubernetes.cluster import Cluster
from tests.integrations.kubernetes.pods import JOB, ended
from tests.jobs import wait_for
from tests.real import kubernetes

pytestmark = [pytest.mark.spawns, pytest.mark.apiserver]
RACK = "scheduling/rack-id"
HARD = "requiredDuringSchedulingIgnoredDuringExecution"
JOBS = Kind("batch", "v1", "jobs")
SERVICES = Kind("", "v1", "services")


@pytest.fixture(scope="module")
def server() -> Iterator[kubernetes.ApiServer]:
    lacking = kubernetes.missing()
    if lacking:
        pytest.skip(f"not here: {lacking}. Left out is everything with the real scheduler of Kubernetes")
    made = kubernetes.ApiServer()
    try:
        made.start()
        made.start_scheduler()
        made.start_controllers("job")
        yield made
    finally:
        made.close()


@pytest.fixture
def cluster(server: kubernetes.ApiServer, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(server, f"s{abs(hash(request.node.name)) % 10**8}")
    for rack in ("a", "b"):
        for number in range(2):
            made.node(f"{rack}{number}", rack=rack)
    stop = threading.Event()
    thread = threading.Thread(target=_attend, args=(made, Api(server.client()), stop))
    thread.start()
    try:
        yield made
    finally:
        for job in made.api.list_all(JOBS, made.name)[0]:
            made.api.delete(JOBS, job["metadata"]["name"], made.name)
        stop.set()
        thread.join(30)
        made.close()


def _attend(cluster: Cluster, api: Api, stop: threading.Event) -> None:
    """Do what kubelets and a scheduler that knows racks do."""
    while not stop.wait(0.1):
        for pod in api.list_all(PODS, cluster.name)[0]:
            with contextlib.suppress(KubernetesError):
                _attend_to(cluster, api, pod)


def _attend_to(cluster: Cluster, api: Api, pod: dict[str, Any]) -> None:
    meta, node = pod["metadata"], pod["spec"].get("nodeName")
    if meta.get("deletionTimestamp"):
        api.delete(PODS, meta["name"], cluster.name, uid=meta["uid"], grace_s=0)
    elif node and pod["status"]["phase"] == "Pending":
        rack = api.get(NODES, node)["metadata"]["labels"][RACK]
        labels = {"scheduling/rack-group": "0", RACK: rack, "scheduling/rack-group-size": "1"}
        api.patch(PODS, meta["name"], {"metadata": {"labels": labels}}, cluster.name)
        api.patch(PODS, meta["name"], {"status": {"phase": "Running"}}, cluster.name, subresource="status")


def racks(cluster: Cluster) -> list[str]:
    """The racks of the pods that run."""
    running = [
        it
        for it in cluster.pods().values()
        if it["status"]["phase"] == "Running" and not it["metadata"].get("deletionTimestamp")
    ]
    return sorted(it["metadata"]["labels"].get(RACK, "").removeprefix(f"{cluster.name}-") for it in running)


def spec(**more: Any) -> dict[str, Any]:
    room = {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}  # a node has room for one
    return {"containers": [{"name": "main", "image": "none", "resources": room}], **more}


def template(cluster: Cluster) -> dict[str, Any]:
    """A pod template as the documentation asks for."""
    away = [{"matchExpressions": [{"key": f"avoid.resilience.dev/{cluster.name}.train", "operator": "DoesNotExist"}]}]
    together = [{"labelSelector": {"matchLabels": {JOB: "train"}}, "topologyKey": RACK}]
    affinity = {"nodeAffinity": {HARD: {"nodeSelectorTerms": away}}, "podAffinity": {HARD: together}}
    return {"metadata": {"labels": {JOB: "train"}}, "spec": spec(affinity=affinity, restartPolicy="Never")}


def test_jobs_pods_that_get_no_node_in_their_rack_move_to_another_together(cluster: Cluster, tmp_path: Path) -> None:
    running = cluster.controller(tmp_path, "--group-threshold=2", "--no-leader-election")
    job = {
        "metadata": {"name": "train"},
        "spec": {"parallelism": 2, "completions": 2, "backoffLimit": 10, "template": template(cluster)},
    }
    cluster.api.create(JOBS, job, cluster.name)
    before = wait_for(
        lambda: len(racks(cluster)) == 2 and racks(cluster), lambda: f"both pods to run\n{running.log()}", 60
    )
    assert before in (["a", "a"], ["b", "b"]), "the template keeps them together"
    wait_for(lambda: "groups" in running.log(), "the controller", 60)
    wait_for(lambda: _known(cluster, 2), lambda: f"both to be known\n{running.log()}", 60)
    victim = next(iter(cluster.pods().values()))
    broken = victim["spec"]["nodeName"]
    # Before the pod fails: its replacement could be on the same node sooner than the mark.
    cluster.api.patch(NODES, broken, {"spec": {"unschedulable": True}})
    cluster.say(victim["metadata"]["name"], ended(14))
    other = [{"a": "b", "b": "a"}[before[0]]] * 2
    wait_for(lambda: racks(cluster) == other, lambda: f"both pods to run in the other rack\n{running.log()}", 90)
    assert "resilience.dev/faulty" in [it["key"] for it in cluster.get_node(broken)["spec"]["taints"]]
    told = [it for it in cluster.events() if it["reason"] == "GroupFailover" and it["involvedObject"]["kind"] == "Job"]
    assert len(told) == 1
    wait_for(lambda: not _avoided(cluster), lambda: f"the old rack to be given back\n{running.log()}", 30)


def cordon(cluster: Cluster, rack: str, out: bool) -> None:
    for number in range(2):
        cluster.api.patch(NODES, f"{cluster.name}-{rack}{number}", {"spec": {"unschedulable": out or None}})


def test_rendered_job_needs_no_editing_for_its_faulty_node_to_be_marked_and_its_group_to_move(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The other rack is full until the group is to move: then the old one has room too, and only the affinity tells them."""
    values = JobValues(
        name="train", image="none", script=("train.py",), namespace=cluster.name, nodes=2, cpu="1", memory="64Mi", shm="0",
        gang="none", network_check=True,
    )  # fmt: skip
    running = cluster.controller(tmp_path, "--group-threshold=2", "--no-leader-election")
    cordon(cluster, "b", out=True)
    for thing in render(values):
        cluster.api.create({"Service": SERVICES, "Job": JOBS}[thing["kind"]], thing, cluster.name)
    wait_for(lambda: racks(cluster) == ["a", "a"], lambda: f"both pods to run\n{running.log()}", 60)
    wait_for(lambda: _known(cluster, 2), lambda: f"both to be known\n{running.log()}", 60)
    victim = next(iter(cluster.pods().values()))
    (job,) = cluster.api.list_all(JOBS, cluster.name)[0]
    env = {it["name"]: it.get("valueFrom") for it in victim["spec"]["containers"][0]["env"]}
    label = env["JOB_UID"]["fieldRef"]["fieldPath"].split("'")[1]
    assert victim["metadata"]["labels"][label] == job["metadata"]["uid"], "an older controller's Pods have it too"
    broken = victim["spec"]["nodeName"]
    # Its replacement could be there sooner than the mark.
    cluster.api.patch(NODES, broken, {"spec": {"unschedulable": True}})
    told = NodeFault(broken, "NodeCheckFailed", "the product is wrong", code=80).as_message()
    cluster.say(victim["metadata"]["name"], ended(80, told))
    wait_for(lambda: len(_avoided(cluster)) == 2, lambda: f"the rack to be avoided\n{running.log()}", 60)
    cordon(cluster, "b", out=False)
    wait_for(lambda: racks(cluster) == ["b", "b"], lambda: f"both pods to run in the other rack\n{running.log()}", 90)
    assert cluster.get_node(broken)["metadata"]["annotations"]["resilience.dev/faulty-reason"] == "NodeCheckFailed"
    assert "template does not keep them away" not in running.log()


def test_plain_pods_of_which_one_was_lost_are_made_again_together_in_another_rack(
    cluster: Cluster, tmp_path: Path
) -> None:
    running = cluster.controller(tmp_path, "--group-threshold=2", "--no-leader-election")
    for number in range(2):
        pod = {
            "metadata": {"name": f"w{number}", "labels": {JOB: "train"}},
            "spec": spec(nodeSelector={RACK: f"{cluster.name}-a"}),
        }
        cluster.api.create(PODS, pod, cluster.name)
    wait_for(lambda: racks(cluster) == ["a", "a"], lambda: f"both pods to run\n{running.log()}", 60)
    wait_for(lambda: _known(cluster, 2), lambda: f"both to be known\n{running.log()}", 60)
    cluster.say("w1", ended(76))
    wait_for(lambda: racks(cluster) == ["b", "b"], lambda: f"both pods to run in the other rack\n{running.log()}", 90)
    assert set(cluster.pods()) == {"w0", "w1"}
    wait_for(lambda: not _avoided(cluster), lambda: f"the old rack to be given back\n{running.log()}", 30)


def test_scheduler_gives_no_pod_to_a_node_that_was_marked(cluster: Cluster, tmp_path: Path) -> None:
    running = cluster.controller(tmp_path, "--no-leader-election")
    pinned = {"kubernetes.io/hostname": f"{cluster.name}-a0"}
    for name in ("first", "second"):
        pod = {"metadata": {"name": name, "labels": {JOB: "train"}}, "spec": spec(nodeSelector=pinned)}
        cluster.api.create(PODS, pod, cluster.name)
        if name == "first":
            wait_for(lambda: cluster.pods()["first"]["status"]["phase"] == "Running", "the first to run", 60)
            cluster.say("first", ended(201))
            wait_for(
                lambda: cluster.get_node(f"{cluster.name}-a0")["spec"].get("unschedulable"),
                f"the mark\n{running.log()}",
                60,
            )

    def refused() -> str:
        conditions = cluster.pods()["second"]["status"].get("conditions") or ()
        return next(
            (it["message"] for it in conditions if it["type"] == "PodScheduled" and it["status"] == "False"), ""
        )

    wait_for(refused, "the scheduler's word on the second", 60)
    assert "nodeName" not in cluster.pods()["second"]["spec"]


def _known(cluster: Cluster, number: int) -> bool:
    maps = cluster.api.list_all(Kind("", "v1", "configmaps", "resilience.dev/state=groups"), cluster.name)[0]
    import base64
    import json
    import zlib

    seats = [json.loads(zlib.decompress(base64.b64decode(it["data"]["record"])))["seats"] for it in maps]
    return any(len(it) >= number for it in seats)


def _avoided(cluster: Cluster) -> list[str]:
    found = cluster.api.list_all(
        Kind("", "v1", "nodes", f"avoid.resilience.dev/{cluster.name}.train", namespaced=False)
    )[0]
    return [it["metadata"]["name"] for it in found]
