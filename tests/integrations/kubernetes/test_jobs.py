"""What a job asks for: every kind's own place for its replicas, and what can't be meant."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "resilience.integrations.kubernetes.podgroups", reason="not installed here: resilience.integrations"
)

from resilience.integrations.kubernetes.podgroups import PodGroupError, wish
from resilience.integrations.kubernetes.podgroups.jobs import T9K_KINDS, finished

from tests.integrations.kubernetes import t9k

NAMES = [kind.name for kind in T9K_KINDS]
NOT_ELASTIC = [kind.name for kind in T9K_KINDS if not kind.elastic]
ELASTIC = {"enabled": True, "minReplicas": 3, "maxReplicas": 10, "expectedReplicas": 7}


def asked(job: dict[str, Any]) -> Any:
    found = wish(job)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", NAMES)
def test_group_of_every_kind_waits_for_all_replicas(kind: str) -> None:
    group = asked(t9k.job(kind)).group
    assert (group.name, group.min_member, group.queue, group.priority) == (
        "job-sample",
        t9k.SPECS[kind][1],
        "default",
        10,
    )
    assert group.owner is None, "a job in a file has no uid yet"


@pytest.mark.parametrize("kind", NAMES)
def test_job_without_t9k_scheduler_gets_no_group(kind: str) -> None:
    job = t9k.job(kind)
    del job["spec"]["scheduler"]
    assert wish(job) is None


@pytest.mark.parametrize("kind", NAMES)
def test_queue_and_priority_have_defaults(kind: str) -> None:
    group = asked(t9k.job(kind, queue=None, priority=None)).group
    assert (group.queue, group.priority) == ("default", None)


@pytest.mark.parametrize("kind", ["PyTorchTrainingJob", "DeepSpeedJob"])
def test_elastic_job_waits_for_its_minimum(kind: str) -> None:
    job = t9k.job(kind)
    job["spec"]["elastic"] = ELASTIC
    assert asked(job).group.min_member == 3
    job["spec"]["elastic"] = {**ELASTIC, "enabled": False}
    assert asked(job).group.min_member == t9k.SPECS[kind][1]


@pytest.mark.parametrize("kind", NOT_ELASTIC)
def test_elastic_is_said_to_have_no_effect_on_kinds_that_can_not_be(kind: str) -> None:
    job = t9k.job(kind)
    job["spec"]["elastic"] = ELASTIC
    found = asked(job)
    assert found.group.min_member == t9k.SPECS[kind][1]
    assert "only PyTorchTrainingJob and DeepSpeedJob can be elastic" in found.notes[0]


@pytest.mark.parametrize(
    ("elastic", "said"),
    [
        ({"enabled": True}, "spec.elastic.minReplicas is None"),
        ({"enabled": True, "minReplicas": 0}, "minReplicas is 0: it must be a whole number of at least 1"),
        ({"enabled": True, "minReplicas": 4, "maxReplicas": 2}, "minReplicas, 4, is above maxReplicas, 2"),
    ],
)
def test_elastic_numbers_that_can_not_be_meant_raise(elastic: dict[str, Any], said: str) -> None:
    job = t9k.job("DeepSpeedJob")
    job["spec"]["elastic"] = elastic
    with pytest.raises(PodGroupError, match=said):
        wish(job)


def test_replicas_that_are_not_said_are_one() -> None:
    job = t9k.job("GenericJob")
    job["spec"]["replicaSpecs"] = [{"type": "a"}, {"type": "b", "replicas": 0}, {"type": "a", "replicas": 2}]
    assert asked(job).group.min_member == 3


def test_mpi_job_may_also_be_written_with_replica_specs() -> None:
    job = t9k.job("MPIJob")
    del job["spec"]["worker"]
    job["spec"]["replicaSpecs"] = [{"type": "launcher", "replicas": 1}, {"type": "worker", "replicas": 5}]
    assert asked(job).group.min_member == 6


@pytest.mark.parametrize("kind", NAMES)
def test_job_without_replicas_is_told_where_they_stand(kind: str) -> None:
    job = t9k.job(kind)
    job["spec"] = {"scheduler": job["spec"]["scheduler"]}
    with pytest.raises(PodGroupError, match=f"{kind} job-sample has no spec"):
        wish(job)


def test_number_that_is_none_names_its_place() -> None:
    job = t9k.job("GenericJob")
    job["spec"]["replicaSpecs"][1]["replicas"] = "many"
    with pytest.raises(PodGroupError, match=r"spec.replicaSpecs\[1\].replicas is 'many'"):
        wish(job)


def malformed(kind: str, place: str, value: object) -> dict[str, Any]:
    """A job with something else where an object or a list is to be."""
    job = t9k.job(kind)
    *path, last = place.split(".")
    within = job
    for key in path:
        within = within[key]
    within[last] = value
    return job


@pytest.mark.parametrize(
    ("kind", "place", "value", "said"),
    [
        ("GenericJob", "spec", "abc", "GenericJob job-sample: spec is 'abc', not an object"),
        ("GenericJob", "metadata", "abc", "GenericJob: metadata is 'abc', not an object"),
        ("GenericJob", "metadata.name", 5, "the name of a PodGroup is 5, not a text"),
        ("GenericJob", "metadata.namespace", 5, "the namespace of a PodGroup is 5, not a text"),
        ("GenericJob", "spec.scheduler", "t9k", "spec.scheduler is 't9k', not an object"),
        ("GenericJob", "spec.scheduler.t9kScheduler", ["x"], r"spec.scheduler.t9kScheduler is \['x'\], not an object"),
        ("GenericJob", "spec.scheduler.t9kScheduler.queue", 5, "the queue of a PodGroup is 5, not a text"),
        ("GenericJob", "spec.replicaSpecs", ["x"], r"spec.replicaSpecs\[0\] is 'x', not an object"),
        ("GenericJob", "spec.replicaSpecs", [None], r"spec.replicaSpecs\[0\] is None, not an object"),
        ("PyTorchTrainingJob", "spec.elastic", "yes", "spec.elastic is 'yes', not an object"),
        ("GenericJob", "spec.elastic", "yes" * 1000, "spec.elastic is .{80}, not an object"),
        ("BeamJob", "spec.flinkClusterTemplate", "x", "spec.flinkClusterTemplate is 'x', not an object"),
        ("BeamJob", "spec.flinkClusterTemplate.spec.taskManager", 3, "taskManager is 3, not an object"),
    ],
)
def test_job_of_another_shape_is_told_which_place_of_it_is_wrong(
    kind: str, place: str, value: object, said: str
) -> None:
    with pytest.raises(PodGroupError, match=said):
        wish(malformed(kind, place, value))


@pytest.mark.parametrize("value", ["²", "٣", "9" * 5000, "-1", " 1"], ids=lambda text: text[:5])
def test_priority_that_is_no_plain_number_is_told(value: str) -> None:
    with pytest.raises(PodGroupError, match=r"gang-priority is .*, not a whole number"):
        wish(plain({"resilience.dev/gang": "t9k"}, {"resilience.dev/gang-priority": value}))


@pytest.mark.parametrize("item", ["x", None, {"template": "x"}, {"template": {"spec": [1]}}], ids=str)
def test_job_set_of_another_shape_is_told_so(item: object) -> None:
    job_set = {"kind": "JobSet", "metadata": {"name": "set", "labels": {"resilience.dev/gang": "t9k"}}}
    with pytest.raises(PodGroupError, match=r"spec.replicatedJobs\[0\].* is .*, not an object"):
        wish({**job_set, "spec": {"replicatedJobs": [item]}})


@pytest.mark.parametrize(
    "status", ["x", {"conditions": ["x"]}, {"conditions": 3}, {"conditions": [{"type": ["x"]}]}], ids=str
)
def test_status_of_another_shape_does_not_say_that_a_job_is_over(status: object) -> None:
    assert not finished({"status": status})


def test_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(PodGroupError, match="Did you mean 'DeepSpeedJob'"):
        wish({"kind": "DeepspeedJob", "metadata": {"name": "x"}})
    with pytest.raises(PodGroupError, match=r"only batch\.tensorstack\.dev/v1beta1"):
        wish({"kind": "MPIJob", "apiVersion": "kubeflow.org/v1", "metadata": {"name": "x"}})


def plain(labels: dict[str, str], annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "plain", "namespace": "ns", "uid": "u", "labels": labels, "annotations": annotations or {}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"parallelism": 4, **spec}}


def test_plain_job_asks_with_a_label() -> None:
    assert wish(plain({})) is None
    told = {"resilience.dev/gang-queue": "night", "resilience.dev/gang-priority": "7"}
    found = asked(plain({"resilience.dev/gang": "volcano"}, told, completions=3))
    assert found.scheduler.name == "volcano"
    assert (found.group.min_member, found.group.queue, found.group.priority) == (3, "night", 7)
    assert found.group.owner.reference()["uid"] == "u"


def test_plain_job_may_start_with_fewer_but_not_wait_for_more_than_it_has() -> None:
    labels = {"resilience.dev/gang": "t9k"}
    assert asked(plain(labels, {"resilience.dev/gang-min-member": "2"})).group.min_member == 2
    with pytest.raises(PodGroupError, match="it has only 4 Pods: they would wait for ever"):
        wish(plain(labels, {"resilience.dev/gang-min-member": "5"}))
    with pytest.raises(PodGroupError, match="is 'few', not a whole number"):
        wish(plain(labels, {"resilience.dev/gang-min-member": "few"}))


def test_job_set_has_a_role_for_each_of_its_jobs() -> None:
    def part(name: str, replicas: int, parallelism: int) -> dict[str, Any]:
        return {"name": name, "replicas": replicas, "template": {"spec": {"parallelism": parallelism}}}

    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "set", "labels": {"resilience.dev/gang": "t9k"}},
        "spec": {"replicatedJobs": [part("leader", 1, 1), part("workers", 2, 4)]},
    }
    group = asked(job_set).group
    assert group.min_member == 9
    assert [(role.name, role.min_member) for role in group.roles] == [("leader", 1), ("workers", 8)]


def test_job_that_is_over_is_known_by_phase_or_condition() -> None:
    assert not finished({})
    assert not finished({"status": {"conditions": [{"type": "Complete", "status": "False"}]}})
    assert finished({"status": {"phase": "Failed"}})
    assert finished({"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
