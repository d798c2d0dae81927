"""Groups of real Pod objects fail over: time is passed to the part, the API server is real, the test stands in for the kubelets."""

from __future__ import annotations

from typing import Any

import pytest
from resilience.integrations.kubernetes.api import NotFound
from resilience.integrations.kubernetes.controller import Options
from resilience.integrations.kubernetes.groups import Groups
from resilience.integrations.kubernetes.parts import ADDED, DELETED, NODES, PODS, Kind, Thing
from resilience.integrations.kubernetes.placement import avoids

from tests.integrations.kubernetes.cluster import Cluster
from tests.integrations.kubernetes.pods import JOB, ended, owned_by
from tests.integrations.kubernetes.test_controller import state_of

pytestmark = pytest.mark.spawns
HARD = "requiredDuringSchedulingIgnoredDuringExecution"
OWNER = owned_by("Job", "train", "11111111-2222-3333-4444-555555555555")


class Hand:
    """Hands a part what a controller would, and passes the time."""

    def __init__(self, cluster: Cluster, **more: Any) -> None:
        self.cluster = cluster
        self.options = Options(namespace=cluster.name, state_namespace=cluster.name, **more)
        self.part = Groups(cluster.api, self.options)
        self._known: dict[str, Thing] = {}

    def tick(self, now: float) -> None:
        (kind,) = self.part.kinds()
        found = {it["metadata"]["uid"]: it for it in self.cluster.api.list_all(kind, self.cluster.name)[0]}
        for uid, thing in self._known.items():
            if uid not in found:
                self.part.changed(kind, DELETED, thing)
        for thing in found.values():
            self.part.changed(kind, ADDED, thing)
        self._known = found
        self.part.tick(now)

    def restart(self) -> None:
        """A controller that starts anew knows what the API server has."""
        self.part = Groups(self.cluster.api, self.options)
        self._known = {}


def two_groups(cluster: Cluster, *, owned: bool) -> dict[str, str]:
    """Four pods on four nodes in two racks, and a rack that is free; return each pod's uid."""
    for number in range(6):
        cluster.node(str(number), rack=f"r{number // 2}")
    return {f"w{number}": member(cluster, number, f"w{number}", owned=owned) for number in range(4)}


def member(cluster: Cluster, number: int, name: str, *, owned: bool, placed: bool = True) -> str:
    more: dict[str, Any] = {"owner": OWNER, "index": number} if owned else {}
    if placed:
        more |= {"group": number // 2, "rack": f"{cluster.name}-r{number // 2}", "node": f"{cluster.name}-{number}"}
    return str(cluster.pod(name, **more)["metadata"]["uid"])


def avoided(cluster: Cluster, namespace: str = "") -> set[str]:
    label = f"avoid.resilience.dev/{namespace or cluster.name}.train"
    nodes = [cluster.get_node(f"{cluster.name}-{number}") for number in range(6)]
    return {it["metadata"]["name"].rpartition("-")[2] for it in nodes if label in it["metadata"]["labels"]}


def leaving(cluster: Cluster) -> set[str]:
    return {name for name, it in cluster.pods().items() if it["metadata"].get("deletionTimestamp")}


def bind(cluster: Cluster, name: str, node: str) -> None:
    body = {
        "metadata": {"name": name},
        "target": {"apiVersion": "v1", "kind": "Node", "name": f"{cluster.name}-{node}"},
    }
    cluster.api.create(PODS, body, cluster.name, name=name, subresource="binding")


def moving(cluster: Cluster) -> Hand:
    """Two groups, of which the first was just told to go, at 310 s: it has lost a pod."""
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.gone("w1")
    member(cluster, 1, "w1-b", owned=True, placed=False)
    hand.tick(10.0)
    hand.tick(310.0)
    return hand


def test_replacement_in_time_moves_nobody(cluster: Cluster) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.gone("w1")
    hand.tick(10.0)
    member(cluster, 1, "w1-b", owned=True, placed=False)
    hand.tick(200.0)
    bind(cluster, "w1-b", "4")
    hand.tick(299.0)
    hand.tick(9999.0)
    assert not leaving(cluster)
    assert not avoided(cluster)


def test_group_whose_replacement_waits_300_seconds_is_evicted_together_and_its_rack_avoided(cluster: Cluster) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.gone("w1")
    member(cluster, 1, "w1-b", owned=True, placed=False)
    hand.tick(10.0)
    hand.tick(309.0)
    assert set(cluster.pods()) == {"w0", "w1-b", "w2", "w3"}
    assert not leaving(cluster)
    hand.tick(310.0)
    assert leaving(cluster) == {"w0"}
    assert set(cluster.pods()) == {"w0", "w2", "w3"}, "what waited had no kubelet to wait for"
    assert avoided(cluster) == {"0", "1"}
    told = [it for it in cluster.events() if it["reason"] == "GroupFailover"]
    assert {it["involvedObject"]["kind"] for it in told} == {"Job", "Pod"}
    assert "has had no node for 300 s (threshold 300 s), its replacement w1-b waits for one" in told[0]["message"]


def test_group_moves_once_per_incident_and_its_labels_go_when_it_has_its_nodes(cluster: Cluster) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.gone("w1")
    hand.tick(1.0)
    hand.tick(301.0)
    cluster.let_go()
    for number in (0, 1):  # their owner makes them again
        member(cluster, number, f"w{number}-c", owned=True, placed=False)
    hand.tick(302.0)
    hand.tick(3000.0)
    assert not leaving(cluster)
    assert avoided(cluster) == {"0", "1"}
    for number in (0, 1):
        bind(cluster, f"w{number}-c", str(4 + number))
    hand.tick(3001.0)
    assert not avoided(cluster)
    assert len(state_of(cluster)) == 1
    hand.tick(9999.0)
    assert not leaving(cluster)


def test_controller_that_starts_anew_in_the_middle_goes_on_with_the_same_clock_and_the_same_count(
    cluster: Cluster,
) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster, max_group_failovers=1)
    hand.tick(0.0)
    cluster.gone("w1")
    hand.tick(10.0)
    hand.restart()
    hand.tick(200.0)
    hand.restart()
    hand.tick(310.0)
    assert leaving(cluster) == {"w0"}
    hand.restart()
    cluster.let_go()
    for number in (0, 1):
        member(cluster, number, f"w{number}-c", owned=True, placed=False)
        bind(cluster, f"w{number}-c", str(4 + number))
    hand.tick(400.0)
    assert not avoided(cluster)
    hand.restart()
    cluster.gone("w3")
    hand.tick(500.0)
    hand.tick(800.0)
    hand.restart()
    hand.tick(9999.0)
    assert not leaving(cluster), "one failover was allowed, and has been"
    assert (
        len(
            [
                it
                for it in cluster.events()
                if it["reason"] == "GroupFailoverRefused" and it["involvedObject"]["kind"] == "Job"
            ]
        )
        == 1
    )


def test_plain_pods_are_made_again_with_affinity_to_one_another_and_not_to_the_old_rack(cluster: Cluster) -> None:
    before = two_groups(cluster, owned=False)
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.say("w1", ended(76))
    hand.tick(10.0)
    hand.tick(310.0)
    assert leaving(cluster) == {"w0"}
    assert "w1" not in cluster.pods(), "what has failed has nothing to end"
    hand.restart()
    hand.tick(311.0)
    assert "w1" not in cluster.pods(), "it is made again when the whole group is gone"
    assert cluster.let_go() == ["w0"]
    hand.tick(312.0)
    pods = cluster.pods()
    for name in ("w0", "w1"):
        made = pods[name]
        assert made["metadata"]["uid"] != before[name]
        assert avoids(made, cluster.name, "train")
        (together,) = made["spec"]["affinity"]["podAffinity"][HARD]
        assert together["topologyKey"] == "scheduling/rack-id"
        assert "nodeName" not in made["spec"]
    assert {name: pods[name]["metadata"]["uid"] for name in ("w2", "w3")} == {
        name: before[name] for name in ("w2", "w3")
    }
    hand.tick(313.0)
    assert cluster.pods().keys() == pods.keys()


def test_plain_pod_on_a_node_that_is_gone_is_removed_by_force_after_a_while(cluster: Cluster) -> None:
    two_groups(cluster, owned=False)
    hand = Hand(cluster)
    hand.tick(0.0)
    dead = f"{cluster.name}-1"
    sick = {
        "type": "Ready",
        "status": "Unknown",
        "reason": "NodeStatusUnknown",
        "message": "",
        "lastHeartbeatTime": None,
    }
    cluster.api.patch(NODES, dead, {"status": {"conditions": [sick]}}, subresource="status")
    cluster.api.delete(PODS, "w1", cluster.name)  # as Kubernetes does; there is nobody to end it
    hand.tick(10.0)
    hand.tick(310.0)
    cluster.gone("w0")
    assert leaving(cluster) == {"w1"}
    hand.tick(311.0)
    assert "w1" in cluster.pods()
    hand.tick(4e9)  # long after it was told to end
    assert "w1" not in cluster.pods()
    hand.tick(4e9 + 1)
    assert {"w0", "w1"} <= set(cluster.pods())


def test_group_that_people_took_away_stays_away(cluster: Cluster) -> None:
    two_groups(cluster, owned=False)
    hand = Hand(cluster)
    hand.tick(0.0)
    for name in ("w0", "w1"):
        cluster.gone(name)
    hand.tick(10.0)
    hand.tick(9999.0)
    assert set(cluster.pods()) == {"w2", "w3"}
    for name in ("w2", "w3"):
        cluster.gone(name)
    hand.tick(10000.0)
    assert not state_of(cluster), "a job that is gone is forgotten"


def test_job_that_has_failed_as_a_whole_is_left_as_it_is(cluster: Cluster) -> None:
    two_groups(cluster, owned=False)
    hand = Hand(cluster)
    hand.tick(0.0)
    for name in cluster.pods():
        cluster.say(name, ended(77))
    hand.tick(10.0)
    hand.tick(9999.0)
    assert not leaving(cluster)
    assert set(cluster.pods()) == {"w0", "w1", "w2", "w3"}


def test_failed_pod_that_its_owner_replaced_stays_to_be_looked_at(cluster: Cluster) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.say("w1", ended(14))
    hand.tick(10.0)
    hand.tick(310.0)
    assert leaving(cluster) == {"w0"}
    assert cluster.pods()["w1"]["status"]["phase"] == "Failed"


def test_disruption_budget_is_heeded(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    two_groups(cluster, owned=True)
    budgets = Kind("policy", "v1beta1", "poddisruptionbudgets")
    budget = {"metadata": {"name": "b"}, "spec": {"minAvailable": "100%", "selector": {"matchLabels": {JOB: "train"}}}}
    cluster.api.create(budgets, budget, cluster.name)
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.gone("w1")
    hand.tick(10.0)
    hand.tick(310.0)
    assert "disruption budget" in caplog.text
    assert not leaving(cluster)
    cluster.api.delete(budgets, "b", cluster.name)
    hand.tick(311.0)
    assert leaving(cluster) == {"w0"}
    assert (
        len(
            [it for it in cluster.events() if it["reason"] == "GroupFailover" and it["involvedObject"]["kind"] == "Job"]
        )
        == 1
    )


def test_taint_keeps_everybody_away_only_where_it_was_asked_for_and_goes_again(cluster: Cluster) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster, taint_old_rack=True)
    hand.tick(0.0)
    cluster.gone("w1")
    hand.tick(1.0)
    hand.tick(301.0)
    taints = cluster.get_node(f"{cluster.name}-0")["spec"]["taints"]
    assert [(it["key"], it["value"]) for it in taints] == [("resilience.dev/moved-from", f"{cluster.name}.train")]
    cluster.let_go()
    for name in ("w2", "w3"):
        cluster.gone(name)
    hand.tick(302.0)
    hand.tick(302.0 + 3601.0)  # nobody came: the old rack is given back all the same
    assert not cluster.get_node(f"{cluster.name}-0")["spec"].get("taints")
    assert not avoided(cluster)


def test_template_that_cant_avoid_the_rack_is_said_and_one_that_can_is_not(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.gone("w1")
    hand.tick(1.0)
    hand.tick(301.0)
    assert "may come back to the same rack" in caplog.text
    with pytest.raises(NotFound):
        cluster.api.get(PODS, "w1", cluster.name)


def test_job_that_has_failed_is_not_written_down_again_and_again(cluster: Cluster) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(0.0)
    for name in cluster.pods():
        cluster.say(name, ended(77))
    hand.tick(10.0)
    (before,) = state_of(cluster)
    for now in range(11, 16):
        hand.tick(float(now))
    (after,) = state_of(cluster)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_group_that_has_no_node_left_is_free_to_go_anywhere_and_no_rack_is_barred_to_it(cluster: Cluster) -> None:
    """As after a maintenance of the whole rack: what waits is held by nothing, and its old nodes are as good as others."""
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(0.0)
    for number in range(2):
        cluster.gone(f"w{number}")
        member(cluster, number, f"w{number}-b", owned=True, placed=False)
    hand.tick(10.0)
    hand.tick(9999.0)
    assert {"w0-b", "w1-b"} <= set(cluster.pods())
    assert not avoided(cluster)
    bind(cluster, "w0-b", "0")  # its rack has one node, and not two
    hand.tick(10000.0)
    hand.tick(10299.0)
    assert not avoided(cluster), "from now on somebody is held there, and another one waits"
    hand.tick(10300.0)
    assert avoided(cluster) == {"0", "1"}


def test_job_that_was_made_anew_under_its_name_inherits_no_incident_and_no_marks(cluster: Cluster) -> None:
    hand = moving(cluster)
    assert avoided(cluster) == {"0", "1"}
    for name in cluster.pods():
        cluster.gone(name)
    anew = owned_by("Job", "train", "99999999-2222-3333-4444-555555555555")
    for number in range(4):
        cluster.pod(f"w{number}-n", owner=anew, index=number)
    hand.tick(320.0)
    assert not avoided(cluster)
    hand.tick(9999.0)
    assert set(cluster.pods()) == {f"w{number}-n" for number in range(4)}, "none of them was evicted"
    assert not leaving(cluster)


def test_node_that_is_registered_again_while_its_group_moves_is_avoided_too(cluster: Cluster) -> None:
    hand = moving(cluster)
    cluster.api.delete(NODES, f"{cluster.name}-0")
    hand.tick(330.0)
    cluster.node("0", rack="r0")
    assert avoided(cluster) == {"1"}
    hand.tick(350.0)
    assert avoided(cluster) == {"0", "1"}


def test_plain_pod_that_is_lost_while_its_group_moves_is_made_again_after_the_threshold(cluster: Cluster) -> None:
    two_groups(cluster, owned=False)
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.say("w1", ended(76))
    hand.tick(10.0)
    hand.tick(310.0)
    cluster.let_go()
    hand.tick(312.0)
    bind(cluster, "w0", "4")
    cluster.say("w0", ended(14))
    hand.tick(320.0)
    bind(cluster, "w1", "5")
    failed = cluster.pods()["w0"]["metadata"]["uid"]
    hand.tick(609.0)
    assert not leaving(cluster)
    hand.tick(610.0)
    assert leaving(cluster) == {"w1"}, "the rest of its group goes with it, as the first time"
    cluster.let_go()
    hand.tick(611.0)
    pods = cluster.pods()
    assert {"w0", "w1"} <= pods.keys()
    assert pods["w0"]["metadata"]["uid"] != failed


def test_clock_that_was_ahead_in_another_replica_holds_up_nobody_for_longer(cluster: Cluster) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(7200.0)
    cluster.gone("w1")
    member(cluster, 1, "w1-b", owned=True, placed=False)
    hand.tick(7210.0)
    hand.restart()
    hand.tick(10.0)
    assert not avoided(cluster)
    hand.tick(310.0)
    assert avoided(cluster) == {"0", "1"}
