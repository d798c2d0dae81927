"""Groups among other people's things: tenants who claim too much, records that vanish, jobs in trouble, a lease that is lost."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from resilience.integrations.kubernetes.api import Api, Conflict, Forbidden, KubernetesError, Unreachable
from resilience.integrations.kubernetes.delivery import Delivery
from resilience.integrations.kubernetes.parts import ADDED, PODS, Kind, Thing
from resilience.integrations.kubernetes.pods import is_gone, is_there

from tests.integrations.kubernetes.cluster import EVENTS, NAMESPACES, Cluster
from tests.integrations.kubernetes.pods import JOB, ended
from tests.integrations.kubernetes.test_controller import state_of
from tests.integrations.kubernetes.test_group_failover import OWNER, Hand, avoided, leaving, two_groups

if TYPE_CHECKING:
    from tests.real.kubernetes import ApiServer

pytestmark = pytest.mark.spawns

# -- tenants ----------------------------------------------------------------------------------------------------------


def test_pod_that_claims_another_rack_gets_only_the_nodes_marked_that_it_ran_on(cluster: Cluster) -> None:
    for number in range(6):
        cluster.node(str(number), rack=f"r{number // 2}")
    for number in range(2):
        cluster.pod(f"w{number}", group=0, rack=f"{cluster.name}-r2", node=f"{cluster.name}-{number}")
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.say("w1", ended(76))
    hand.tick(10.0)
    hand.tick(310.0)
    assert avoided(cluster) == {"0", "1"}


def test_job_of_the_same_name_in_another_namespace_does_not_take_the_labels_away(
    cluster: Cluster, api_server: ApiServer
) -> None:
    other = Cluster(api_server, f"{cluster.name}-b")
    try:
        two_groups(cluster, owned=True)
        for number in range(2):
            about: dict[str, Any] = {"group": 0, "rack": f"{cluster.name}-r0", "node": f"{cluster.name}-{number}"}
            other.pod(f"w{number}", owner=OWNER, index=number, **about)
        hands = [Hand(cluster), Hand(other)]
        for now in (0.0, 10.0, 310.0):
            for hand in hands:
                hand.tick(now)
                hand.cluster.say("w1", ended(76))
        assert avoided(cluster) == avoided(cluster, other.name) == {"0", "1"}
        for name in other.pods():
            other.gone(name)
        hands[1].tick(9999.0)
        assert avoided(cluster) == {"0", "1"}
        assert not avoided(cluster, other.name)
    finally:
        other.close()


# -- what is remembered -----------------------------------------------------------------------------------------------

MAPS = Kind("", "v1", "configmaps")


def test_record_that_somebody_deleted_is_written_again(cluster: Cluster) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(0.0)
    (found,) = state_of(cluster)
    cluster.api.delete(MAPS, found["metadata"]["name"], cluster.name)
    cluster.gone("w1")
    hand.tick(10.0)
    assert len(state_of(cluster)) == 1
    hand.restart()
    hand.tick(310.0)
    assert leaving(cluster) == {"w0"}, "the clock that was written again is heeded"


def test_record_that_another_replica_has_just_made_is_taken_over_and_not_deleted(cluster: Cluster) -> None:
    two_groups(cluster, owned=True)
    late, quick = Hand(cluster), Hand(cluster)
    late.part.tick(0.0)  # it has seen that there is nothing yet
    quick.tick(0.0)
    cluster.gone("w1")
    quick.tick(10.0)
    (before,) = state_of(cluster)
    late.tick(20.0)
    (after,) = state_of(cluster)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    late.tick(310.0)
    assert leaving(cluster) == {"w0"}, "its clock is that of the other"


def test_record_that_cant_be_read_is_written_over(cluster: Cluster) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(0.0)
    (found,) = state_of(cluster)
    cluster.api.patch(MAPS, found["metadata"]["name"], {"data": {"record": "AAAA"}}, cluster.name)
    hand.restart()
    for now in (1.0, 2.0):
        hand.tick(now)
    (after,) = state_of(cluster)
    assert after["data"] == found["data"]


class Killed(BaseException):
    """The end of a controller's process."""


class Mortal(Api):
    """The API server; the controller that writes the Event of this number is killed before it does."""

    fatal = 0

    def create(self, kind: Kind, thing: Thing, namespace: str = "", **more: Any) -> dict[str, Any]:
        if kind == EVENTS:
            self.fatal -= 1
            if not self.fatal:
                raise Killed
        return super().create(kind, thing, namespace, **more)


@pytest.mark.parametrize("fatal", [1, 2])
def test_controller_killed_between_a_move_and_its_events_leaves_them_to_the_next_one(
    cluster: Cluster, fatal: int
) -> None:
    two_groups(cluster, owned=True)
    cluster.api = mortal = Mortal(cluster.server.client())
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.gone("w1")
    hand.tick(10.0)
    mortal.fatal = fatal
    with pytest.raises(Killed):
        hand.tick(310.0)
    hand.restart()
    hand.tick(315.0)
    hand.tick(320.0)
    told = [it["involvedObject"]["kind"] for it in cluster.events() if it["reason"] == "GroupFailover"]
    assert sorted(told) == ["Job", "Pod"], "each once"
    assert leaving(cluster) == {"w0"}


def test_records_of_another_namespace_in_the_same_place_are_left_alone(cluster: Cluster, api_server: ApiServer) -> None:
    other = Cluster(api_server, f"{cluster.name}-b")
    try:
        two_groups(cluster, owned=True)
        Hand(cluster).tick(0.0)
        stranger = Hand(other)
        stranger.options = dataclasses.replace(stranger.options, state_namespace=cluster.name)
        stranger.restart()
        stranger.tick(1.0)
        assert len(state_of(cluster)) == 1
    finally:
        other.close()


# -- jobs that are in trouble -----------------------------------------------------------------------------------------


class Grudging(Api):
    """The API server, which refuses as it is told to: what it says to creations of pods, by how their names begin."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.refusals: dict[str, list[KubernetesError]] = {}

    def create(
        self, kind: Kind, thing: Thing, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> dict[str, Any]:
        for start, errors in self.refusals.items():
            if kind == PODS and errors and str(thing["metadata"]["name"]).startswith(start):
                raise errors.pop(0)
        return super().create(kind, thing, namespace, name=name, subresource=subresource)


def grudging(cluster: Cluster) -> Grudging:
    cluster.api = made = Grudging(cluster.server.client())
    return made


def test_job_that_cant_be_read_holds_up_no_other_and_not_the_whole_part(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    (kind,) = hand.part.kinds()
    broken = {"metadata": {"namespace": cluster.name, "uid": "u", "labels": {JOB: "a-broken-one"}}}
    hand.part.changed(kind, ADDED, broken)
    hand.tick(0.0)
    assert len(state_of(cluster)) == 1
    assert f"could not deal with job {cluster.name}/a-broken-one" in caplog.text
    delivery = Delivery([hand.part])
    delivery.listed(kind)
    delivery.tick(1.0)
    assert not delivery.owes()


def test_job_for_which_the_server_does_not_answer_pauses_and_the_next_one_has_its_turn(cluster: Cluster) -> None:
    for number in range(4):
        node, job = cluster.node(str(number), rack="r"), ("a", "b")[number // 2]
        about: dict[str, Any] = {"group": 0, "rack": f"{cluster.name}-r", "node": node, "owner": OWNER}
        cluster.pod(f"{job}{number}", job=job, index=number, **about)
    api = grudging(cluster)
    hand = Hand(cluster)
    hand.tick(0.0)
    for name in ("a1", "b3"):
        cluster.gone(name)
    hand.tick(10.0)
    api.refusals["a"] = [Unreachable("it hangs") for _ in range(3)]
    hand.tick(310.0)
    assert not leaving(cluster), "while the server is away, one after the other"
    hand.tick(310.2)
    assert len(api.refusals["a"]) == 2, "this one pauses"
    assert leaving(cluster) == {"b2"}


def moving_plain(cluster: Cluster, hand: Hand) -> None:
    """A group of plain pods is gone, and about to be made again."""
    hand.tick(0.0)
    cluster.say("w1", ended(76))
    hand.tick(10.0)
    hand.tick(310.0)
    cluster.let_go()


def test_job_whose_namespace_ends_is_given_up_and_its_rack_given_back(cluster: Cluster, api_server: ApiServer) -> None:
    other = Cluster(api_server, f"{cluster.name}-b")
    try:
        two_groups(other, owned=False)
        hand = Hand(other)
        hand.options = dataclasses.replace(hand.options, state_namespace=cluster.name)
        hand.restart()
        moving_plain(other, hand)
        assert avoided(other) == {"0", "1"}
        other.api.delete(NAMESPACES, other.name)
        for name in other.pods():  # as Kubernetes does
            other.api.delete(PODS, name, other.name)
        hand.tick(312.0)
        assert not avoided(other)
        hand.tick(313.0)
        assert other.let_go() == ["w2", "w3"]
        hand.tick(314.0)
        assert not state_of(cluster)
    finally:
        other.close()


def test_answers_to_a_pods_creation_are_told_apart(cluster: Cluster) -> None:
    def refusal(namespace: str = cluster.name, name: str = "w") -> KubernetesError:
        with pytest.raises(KubernetesError) as caught:
            cluster.api.create(PODS, thing(name), namespace)
        return caught.value

    def thing(name: str) -> dict[str, Any]:
        return {"metadata": {"name": name}, "spec": {"containers": [{"name": "main", "image": "none"}]}}

    cluster.pod("w", node=cluster.node("a"))
    assert is_there(refusal())
    cluster.api.delete(PODS, "w", cluster.name)
    assert leaving(cluster) == {"w"}
    assert not is_there(refusal()), "it has its name yet, but not for long"
    assert is_gone(refusal("nowhere"), "nowhere")
    quota = 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'
    assert not is_there(Conflict(quota, 409))
    assert not is_gone(Forbidden('pods "w" is forbidden: exceeded quota', 403), cluster.name)
    cluster.api.delete(NAMESPACES, cluster.name)
    assert is_gone(refusal(name="new"), cluster.name)


def test_plain_pod_that_a_quota_was_in_the_way_of_is_made_later(cluster: Cluster) -> None:
    two_groups(cluster, owned=False)
    api = grudging(cluster)
    hand = Hand(cluster)
    moving_plain(cluster, hand)
    api.refusals["w0"] = [Conflict('Operation cannot be fulfilled on resourcequotas "q"', 409)]
    hand.tick(312.0)
    assert "w0" not in cluster.pods()
    hand.tick(313.0)
    assert {"w0", "w1"} <= set(cluster.pods())


def test_plain_pod_is_made_again_as_it_was_last(cluster: Cluster) -> None:
    two_groups(cluster, owned=False)
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.gone("w1")
    about: dict[str, Any] = {"group": 0, "rack": f"{cluster.name}-r0", "node": f"{cluster.name}-1"}
    cluster.pod("w1", annotations={"release": "2"}, **about)
    moving_plain(cluster, hand)
    hand.tick(312.0)
    assert cluster.pods()["w1"]["metadata"]["annotations"]["release"] == "2"


def test_pod_that_was_given_to_another_job_is_missed_in_its_old_one(cluster: Cluster) -> None:
    two_groups(cluster, owned=True)
    hand = Hand(cluster)
    hand.tick(0.0)
    cluster.api.patch(PODS, "w1", {"metadata": {"labels": {JOB: "another"}}}, cluster.name)
    hand.tick(10.0)
    hand.tick(310.0)
    assert leaving(cluster) == {"w0"}


def test_replica_that_loses_its_lease_within_a_round_evicts_nobody_more(cluster: Cluster) -> None:
    for number in range(4):
        about: dict[str, Any] = {"group": 0, "rack": f"{cluster.name}-r", "node": cluster.node(str(number), rack="r")}
        cluster.pod(f"w{number}", owner=OWNER, index=number, **about)
    hand = Hand(cluster, leading=lambda: not leaving(cluster))
    hand.tick(0.0)
    cluster.gone("w3")
    hand.tick(10.0)
    hand.tick(310.0)
    hand.tick(320.0)
    assert len(leaving(cluster)) == 1
