"""The controller's duty for groups, in a cluster in memory: in any order, twice, after a restart, and against others' changes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "resilience.integrations.kubernetes.podgroups", reason="not installed here: resilience.integrations"
)

from resilience.integrations.kubernetes.api import Conflict
from resilience.integrations.kubernetes.parts import PODS
from resilience.integrations.kubernetes.podgroups import GroupIsFixed, PodGroup, PodGroupError, scheduler
from resilience.integrations.kubernetes.podgroups.apply import CREATED, UNCHANGED, UPDATED, Later, ensure, join
from resilience.integrations.kubernetes.podgroups.jobs import JOB, KINDS, T9K_KINDS
from resilience.integrations.kubernetes.podgroups.part import PodGroups
from resilience.integrations.kubernetes.podgroups.schedulers import T9k

from tests.integrations.kubernetes import t9k
from tests.integrations.kubernetes.memory import MemoryCluster

NS = "team"
GROUP = "scheduler.tensorstack.dev/group-name"
QUEUE = "scheduler.tensorstack.dev/queue"


@pytest.fixture
def cluster() -> MemoryCluster:
    made = MemoryCluster()
    made.attach(PodGroups(made))
    return made


def submit(cluster: MemoryCluster, kind: str = "GenericJob", name: str = "job-sample") -> dict[str, Any]:
    return cluster.create(KINDS[kind].kind, t9k.job(kind, name), NS)


def pod_of(job: dict[str, Any], name: str = "w-0", labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": job["metadata"]["name"]}
    reference = {**owner, "uid": job["metadata"]["uid"], "controller": True}
    metadata = {"name": name, "labels": labels or {}, "ownerReferences": [reference]}
    return {"metadata": metadata, "spec": {"schedulerName": "t9k-scheduler", **spec}, "status": {"phase": "Pending"}}


def labels_of(cluster: MemoryCluster, name: str = "w-0") -> dict[str, str]:
    return dict(cluster.get(PODS, name, NS)["metadata"]["labels"])


@pytest.mark.parametrize("kind", [known.name for known in T9K_KINDS])
def test_every_kind_gets_its_group_and_its_pods_get_labels(cluster: MemoryCluster, kind: str) -> None:
    job = submit(cluster, kind)
    group = cluster.get(T9k.kind, "job-sample", NS)
    assert group["spec"] == {"minMember": t9k.SPECS[kind][1], "queue": "default", "priority": 10}
    assert group["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    cluster.create(PODS, pod_of(job), NS)
    assert labels_of(cluster) == {GROUP: "job-sample", QUEUE: "default"}
    assert not [event for event in cluster.events() if event["type"] == "Warning"]


def test_pods_that_were_told_before_their_job_are_labelled_when_it_is(cluster: MemoryCluster) -> None:
    part, cluster.part = cluster.part, None
    job = submit(cluster)
    cluster.create(PODS, pod_of(job), NS)
    part.changed(PODS, "ADDED", cluster.get(PODS, "w-0", NS))
    assert labels_of(cluster) == {}
    part.changed(KINDS["GenericJob"].kind, "ADDED", cluster.get(KINDS["GenericJob"].kind, "job-sample", NS))
    assert labels_of(cluster)[GROUP] == "job-sample"


def test_being_told_everything_again_writes_nothing(cluster: MemoryCluster) -> None:
    cluster.create(PODS, pod_of(submit(cluster)), NS)
    before = len(cluster.writes)
    cluster.attach(cluster.part)
    cluster.attach(PodGroups(cluster))  # a controller that was started anew
    assert cluster.writes[before:] == []


def test_number_follows_the_job(cluster: MemoryCluster) -> None:
    submit(cluster)
    kind = KINDS["GenericJob"].kind
    cluster.patch(kind, "job-sample", {"spec": {"replicaSpecs": [{"type": "worker", "replicas": 7}]}}, NS)
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"]["minMember"] == 7
    assert cluster.events("PodGroupUpdated")


def test_pod_keeps_its_queue_when_the_jobs_changes(cluster: MemoryCluster) -> None:
    cluster.create(PODS, pod_of(submit(cluster)), NS)
    cluster.patch(
        KINDS["GenericJob"].kind, "job-sample", {"spec": {"scheduler": {"t9kScheduler": {"queue": "night"}}}}, NS
    )
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"]["queue"] == "night"
    assert labels_of(cluster)[QUEUE] == "default"


def test_status_that_changes_costs_no_call(cluster: MemoryCluster) -> None:
    submit(cluster)
    before = len(cluster.writes)
    cluster.patch(KINDS["GenericJob"].kind, "job-sample", {"status": {"phase": "Running"}}, NS)
    assert cluster.writes[before:] == [("patch", "genericjobs", "job-sample")]


def test_group_that_was_deleted_is_made_again_while_the_job_runs(cluster: MemoryCluster) -> None:
    submit(cluster)
    cluster.delete(T9k.kind, "job-sample", NS)
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"]["minMember"] == 5
    cluster.patch(KINDS["GenericJob"].kind, "job-sample", {"status": {"phase": "Succeeded"}}, NS)
    cluster.delete(T9k.kind, "job-sample", NS)
    assert cluster.key(T9k.kind, NS, "job-sample") not in cluster.things


def test_group_of_ours_that_somebody_changed_is_put_right(cluster: MemoryCluster) -> None:
    submit(cluster)
    cluster.patch(T9k.kind, "job-sample", {"spec": {"minMember": 1}}, NS)
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"]["minMember"] == 5


def test_group_that_somebody_else_made_is_left_alone_and_that_is_said(cluster: MemoryCluster) -> None:
    cluster.create(T9k.kind, scheduler("t9k").resource(PodGroup("job-sample", 2)), NS)
    job = submit(cluster)
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"]["minMember"] == 2
    (event,) = cluster.events("GroupOfAnother")
    assert "minMember is 2, not 5" in event["message"]
    cluster.create(PODS, pod_of(job), NS)
    assert labels_of(cluster) == {}


def test_group_that_somebody_else_made_and_that_says_the_same_is_used(cluster: MemoryCluster) -> None:
    """T9k's own controllers may run as well, leave out what is the default, and say more."""
    theirs = {"minMember": 5, "topologyPolicy": "x"}
    cluster.create(T9k.kind, {"metadata": {"name": "job-sample"}, "spec": theirs}, NS)
    job = cluster.create(KINDS["GenericJob"].kind, t9k.job("GenericJob", priority=0), NS)
    cluster.create(PODS, pod_of(job), NS)
    assert labels_of(cluster)[GROUP] == "job-sample"
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"] == theirs


def test_priority_that_the_job_gives_up_goes_from_the_group(cluster: MemoryCluster) -> None:
    submit(cluster)
    cluster.patch(
        KINDS["GenericJob"].kind, "job-sample", {"spec": {"scheduler": {"t9kScheduler": {"priority": None}}}}, NS
    )
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"] == {"minMember": 5, "queue": "default"}


def test_two_jobs_of_one_name_do_not_share_a_group(cluster: MemoryCluster) -> None:
    submit(cluster, "GenericJob")
    submit(cluster, "MPIJob")
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"]["minMember"] == 5
    (event,) = cluster.events("GroupOfAnother")
    assert "belongs to GenericJob job-sample" in event["message"]
    assert event["involvedObject"]["kind"] == "MPIJob"


def test_group_of_a_deleted_job_is_waited_for_until_the_garbage_collector_took_it(cluster: MemoryCluster) -> None:
    submit(cluster)
    cluster.delete(KINDS["GenericJob"].kind, "job-sample", NS)
    part, cluster.part = cluster.part, None
    job = submit(cluster)
    with pytest.raises(Later, match="garbage collector"):
        part.changed(KINDS["GenericJob"].kind, "ADDED", job)
    cluster.delete(T9k.kind, "job-sample", NS)
    part.changed(KINDS["GenericJob"].kind, "ADDED", job)
    (reference,) = cluster.get(T9k.kind, "job-sample", NS)["metadata"]["ownerReferences"]
    assert reference["uid"] == job["metadata"]["uid"]


@pytest.mark.parametrize("restarted", [False, True])
def test_pod_that_is_moved_to_another_group_is_put_back_and_told_the_way_out(
    cluster: MemoryCluster, restarted: bool
) -> None:
    cluster.create(PODS, pod_of(submit(cluster)), NS)
    if restarted:
        cluster.part = None
    cluster.patch(PODS, "w-0", {"metadata": {"labels": {GROUP: "other"}}}, NS)
    if restarted:
        cluster.attach(PodGroups(cluster))
    assert labels_of(cluster)[GROUP] == "job-sample"
    (event,) = cluster.events("GroupIsFixed")
    assert "delete the Pod and create it again" in event["message"]
    assert event["involvedObject"]["kind"] == "Pod"


def test_label_that_was_removed_is_put_back(cluster: MemoryCluster) -> None:
    cluster.create(PODS, pod_of(submit(cluster)), NS)
    cluster.patch(PODS, "w-0", {"metadata": {"labels": {GROUP: None}}}, NS)
    assert labels_of(cluster)[GROUP] == "job-sample"


def test_pod_whose_template_names_another_group_is_left_there(cluster: MemoryCluster) -> None:
    cluster.create(PODS, pod_of(submit(cluster), labels={GROUP: "theirs"}), NS)
    assert labels_of(cluster) == {GROUP: "theirs"}
    assert "Take the label out of the job's Pod template" in cluster.events("OtherGroup")[0]["message"]


def test_pods_that_wait_for_another_scheduler_are_said_once_for_the_job(cluster: MemoryCluster) -> None:
    job = submit(cluster)
    for number in range(3):
        cluster.create(PODS, pod_of(job, f"w-{number}", schedulerName="default-scheduler"), NS)
    (event,) = cluster.events("WrongScheduler")
    assert "put schedulerName: t9k-scheduler into the job's Pod template" in event["message"]
    assert event["involvedObject"]["kind"] == "GenericJob"
    assert labels_of(cluster, "w-2")[GROUP] == "job-sample"


def test_cluster_without_the_schedulers_resource_is_told_to_the_job_and_tried_again(cluster: MemoryCluster) -> None:
    part, cluster.part = cluster.part, None
    job = submit(cluster)
    cluster.absent.add("podgroups")
    for _ in range(2):
        with pytest.raises(Later, match="resilience kubernetes podgroup crd"):
            part.changed(KINDS["GenericJob"].kind, "ADDED", job)
    assert len(cluster.events("NoPodGroupYet")) == 1
    cluster.absent.clear()
    part.changed(KINDS["GenericJob"].kind, "ADDED", job)
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"]["minMember"] == 5


@pytest.mark.parametrize("over", [{"status": {"phase": "Failed"}}, {"metadata": {"deletionTimestamp": "now"}}])
def test_pods_that_are_over_are_not_touched(cluster: MemoryCluster, over: dict[str, Any]) -> None:
    pod = pod_of(submit(cluster))
    pod = {**pod, **over, "metadata": {**pod["metadata"], **over.get("metadata", {})}}
    cluster.create(PODS, pod, NS)
    assert labels_of(cluster) == {}


def test_pods_of_others_are_not_touched(cluster: MemoryCluster) -> None:
    submit(cluster)
    cluster.create(PODS, {"metadata": {"name": "lone", "labels": {}}, "spec": {}}, NS)
    assert labels_of(cluster, "lone") == {}


def test_pod_is_found_by_t9ks_labels_where_something_stands_between_it_and_its_job(cluster: MemoryCluster) -> None:
    submit(cluster, "BeamJob")
    labels = {"tensorstack.dev/component": "beamjob", "beamjob": "job-sample"}
    between = {"kind": "StatefulSet", "apiVersion": "apps/v1", "name": "flink", "uid": "another", "controller": True}
    pod = {"metadata": {"name": "w-0", "labels": labels, "ownerReferences": [between]}, "spec": {}}
    cluster.create(PODS, pod, NS)
    assert labels_of(cluster)[GROUP] == "job-sample"


def test_pods_of_a_job_set_get_their_roles(cluster: MemoryCluster) -> None:
    job_set = {
        "metadata": {"name": "set", "labels": {"resilience.dev/gang": "t9k"}},
        "spec": {"replicatedJobs": [{"name": "workers", "template": {"spec": {"parallelism": 2}}}]},
    }
    cluster.create(KINDS["JobSet"].kind, job_set, NS)
    labels = {"jobset.sigs.k8s.io/jobset-name": "set", "jobset.sigs.k8s.io/replicatedjob-name": "workers"}
    child = {"kind": "Job", "apiVersion": "batch/v1", "name": "set-workers-0", "uid": "child", "controller": True}
    cluster.create(PODS, {"metadata": {"name": "w-0", "labels": labels, "ownerReferences": [child]}, "spec": {}}, NS)
    assert labels_of(cluster)["scheduler.tensorstack.dev/role"] == "workers"


def test_plain_job_is_looked_after_when_it_asks(cluster: MemoryCluster) -> None:
    job = {"metadata": {"name": "plain", "labels": {"resilience.dev/gang": "volcano"}}, "spec": {"parallelism": 2}}
    made = cluster.create(JOB.kind, job, NS)
    volcano = scheduler("volcano")
    assert cluster.get(volcano.kind, "plain", NS)["spec"] == {"minMember": 2, "queue": "default"}
    cluster.create(PODS, pod_of({**made, "apiVersion": "batch/v1", "kind": "Job"}, schedulerName="volcano"), NS)
    annotations = cluster.get(PODS, "w-0", NS)["metadata"]["annotations"]
    assert annotations["scheduling.k8s.io/group-name"] == "plain"


def test_job_that_can_not_be_meant_is_told_so_once_and_mended_later(cluster: MemoryCluster) -> None:
    job = t9k.job("DeepSpeedJob")
    job["spec"]["elastic"] = {"enabled": True}
    kind = KINDS["DeepSpeedJob"].kind
    cluster.create(kind, job, NS)
    cluster.patch(kind, "job-sample", {"status": {"phase": "Pending"}}, NS)
    (event,) = cluster.events("InvalidPodGroup")
    assert "minReplicas" in event["message"]
    cluster.patch(kind, "job-sample", {"spec": {"elastic": {"minReplicas": 2}}}, NS)
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"]["minMember"] == 2


def test_job_of_another_shape_gets_an_event_and_is_not_tried_again(cluster: MemoryCluster) -> None:
    job = t9k.job("GenericJob")
    job["spec"]["scheduler"] = "t9k"
    job["status"] = {"conditions": ["x"]}
    cluster.create(KINDS["GenericJob"].kind, job, NS)  # raises where the part does, and would be told again then
    (event,) = cluster.events("InvalidPodGroup")
    assert "spec.scheduler is 't9k', not an object. No PodGroup was made." in event["message"]


def test_every_pod_of_a_large_job_is_written_once(cluster: MemoryCluster) -> None:
    job = submit(cluster)
    for number in range(300):
        cluster.create(PODS, pod_of(job, f"w-{number}"), NS)
    patched = [name for verb, plural, name in cluster.writes if (verb, plural) == ("patch", "pods")]
    assert sorted(patched) == sorted(f"w-{number}" for number in range(300))


class Contested(MemoryCluster):
    """Somebody else makes the group just before us, and deletes it before it is read."""

    rivals = 1

    def create(self, kind: Any, thing: Any, namespace: str = "") -> dict[str, Any]:
        if kind == T9k.kind and self.rivals:
            self.rivals -= 1
            raise Conflict("already exists", 409)
        return super().create(kind, thing, namespace)


def test_group_that_comes_and_goes_meanwhile_is_there_in_the_end() -> None:
    cluster = Contested()
    cluster.attach(PodGroups(cluster))
    submit(cluster)
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"]["minMember"] == 5


def test_endless_contest_is_given_up_for_now() -> None:
    cluster = Contested()
    cluster.rivals = 100
    with pytest.raises(Later, match="changed by somebody else 4 times"):
        ensure(cluster, PodGroup("dance", 2, namespace=NS), scheduler("t9k"))


def test_pod_whose_place_another_one_of_its_name_took_is_not_labelled_by_mistake(cluster: MemoryCluster) -> None:
    job = submit(cluster)
    part, cluster.part = cluster.part, None
    cluster.create(PODS, pod_of(job), NS)
    seen = cluster.get(PODS, "w-0", NS)
    cluster.delete(PODS, "w-0", NS)
    cluster.create(PODS, {"metadata": {"name": "w-0", "labels": {}}, "spec": {}}, NS)
    part.changed(PODS, "ADDED", seen)
    assert labels_of(cluster) == {}


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_applying_by_hand_creates_changes_and_leaves_alone(cluster: MemoryCluster) -> None:
    by = scheduler("t9k")
    assert ensure(cluster, PodGroup("dance", 2, namespace=NS), by, by_hand=True)[0] == CREATED
    assert ensure(cluster, PodGroup("dance", 2, namespace=NS), by, by_hand=True)[0] == UNCHANGED
    assert ensure(cluster, PodGroup("dance", 3, namespace=NS), by, by_hand=True)[0] == UPDATED
    assert cluster.get(by.kind, "dance", NS)["spec"]["minMember"] == 3


def test_joining_by_hand_labels_a_pod_that_waits_and_refuses_what_can_not_be_changed(cluster: MemoryCluster) -> None:
    by, dance, other = scheduler("t9k"), PodGroup("dance", 2, namespace=NS), PodGroup("other", 2, namespace=NS)
    cluster.create(PODS, {"metadata": {"name": "p"}, "spec": {"schedulerName": "t9k-scheduler"}}, NS)
    cluster.create(PODS, {"metadata": {"name": "q"}, "spec": {"schedulerName": "default-scheduler"}}, NS)
    assert join(cluster, dance, by, "p") == UPDATED
    assert join(cluster, dance, by, "p") == UNCHANGED
    with pytest.raises(GroupIsFixed, match=r"belongs to PodGroup 'dance'.*delete the Pod and create it again"):
        join(cluster, other, by, "p")
    with pytest.raises(PodGroupError, match="a Pod's scheduler can't be changed: nothing was labelled"):
        join(cluster, dance, by, "q")


def test_pod_that_its_job_let_go_of_is_forgotten_and_the_others_are_labelled() -> None:
    cluster = MemoryCluster()
    cluster.attach(PodGroups(cluster))
    job = submit(cluster)
    for name in ("w-0", "w-1"):
        cluster.create(PODS, pod_of(job, name), NS)
    cluster.patch(PODS, "w-0", {"metadata": {"ownerReferences": None}}, NS)
    cluster.delete(PODS, "w-0", NS)
    cluster.patch(KINDS["GenericJob"].kind, "job-sample", {"metadata": {"annotations": {"a": "b"}}}, NS)
    cluster.create(PODS, pod_of(job, "w-2"), NS)
    assert "scheduler.tensorstack.dev/group-name" in cluster.get(PODS, "w-2", NS)["metadata"]["labels"]


def test_group_of_somebody_else_that_is_deleted_as_the_event_says_is_made_anew(cluster: MemoryCluster) -> None:
    cluster.create(T9k.kind, scheduler("t9k").resource(PodGroup("job-sample", 2)), NS)
    cluster.create(PODS, pod_of(submit(cluster)), NS)
    assert cluster.events("GroupOfAnother")
    cluster.delete(T9k.kind, "job-sample", NS)
    assert cluster.get(T9k.kind, "job-sample", NS)["spec"]["minMember"] == 5
    assert labels_of(cluster)[GROUP] == "job-sample"


def test_second_job_of_a_name_gets_its_group_when_the_first_one_and_its_group_are_gone(cluster: MemoryCluster) -> None:
    submit(cluster, "GenericJob")
    other = submit(cluster, "MPIJob")
    cluster.delete(KINDS["GenericJob"].kind, "job-sample", NS)
    cluster.delete(T9k.kind, "job-sample", NS)
    owner = cluster.get(T9k.kind, "job-sample", NS)["metadata"]["ownerReferences"][0]
    assert owner["uid"] == other["metadata"]["uid"]
