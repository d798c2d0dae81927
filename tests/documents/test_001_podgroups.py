"""The document on PodGroups, example by example: what it writes goes in, what it says comes out.

Where the document abbreviates with ``...`` a Pod template stands here; ``ownerReferences: [...]`` is checked to name the job.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

pytest.importorskip(
    "resilience.integrations.kubernetes.podgroups", reason="not installed here: resilience.integrations"
)

from resilience.integrations.kubernetes import podgroups
from resilience.integrations.kubernetes.parts import PODS
from resilience.integrations.kubernetes.podgroups.jobs import KINDS, T9K_KINDS
from resilience.integrations.kubernetes.podgroups.part import PodGroups
from resilience.integrations.kubernetes.podgroups.schedulers import T9k, read

from tests.integrations.kubernetes.memory import MemoryCluster

NAMESPACE = "dev-wangdi"
DANCE = """
apiVersion: scheduler.tensorstack.dev/v1beta1
kind: PodGroup
metadata:
  name: dance
spec:
  minMember: 2
  queue: default
  priority: 50
"""
DANCERS = """
apiVersion: v1
kind: Pod
metadata:
  name: test1
  labels:
    scheduler.tensorstack.dev/group-name: dance
spec:
  schedulerName: t9k-scheduler
  containers:
  - image: nginx:latest
    name: test
    resources:
      requests:
        cpu: 1
        memory: 200Mi
---
apiVersion: v1
kind: Pod
metadata:
  name: test2
  labels:
    scheduler.tensorstack.dev/group-name: dance
spec:
  schedulerName: t9k-scheduler
  containers:
  - image: nginx:latest
    name: test
    resources:
      requests:
        cpu: 1
        memory: 200Mi
"""
ROLES = """
apiVersion: scheduler.tensorstack.dev/v1beta1
kind: PodGroup
metadata:
  name: role-test
spec:
  roles:
  - name: master
    minMember: 1
  - name: worker
    minMember: 1
  minMember: 3
  queue: default
  priority: 50
"""
GENERIC_JOB = """
apiVersion: batch.tensorstack.dev/v1beta1
kind: GenericJob
metadata:
 name: job-sample
spec:
 scheduler:
   t9kScheduler:
     queue: default
     priority: 10
 replicaSpecs:
   - type: worker
     replicas: 4
     template: {}
   - type: ps
     replicas: 1
     template: {}
"""
GROUP_OF_THE_GENERIC_JOB = """
apiVersion: scheduler.tensorstack.dev/v1beta1
kind: PodGroup
metadata:
  name: job-sample
  ownerReferences: [...]
spec:
  minMember: 5
  priority: 10
  queue: default
"""
POD_OF_THE_GENERIC_JOB = """
apiVersion: v1
kind: Pod
metadata:
  labels:
    genericjob: job-sample
    genericjob-replica: job-sample-worker-2
    scheduler.tensorstack.dev/group-name: job-sample
    scheduler.tensorstack.dev/queue: default
    tensorstack.dev/component: genericjob
    tensorstack.dev/component-type: user
  name: job-sample-worker-0
  namespace: dev-wangdi
  ownerReferences: [...]
"""
ELASTIC_JOB = """
apiVersion: batch.tensorstack.dev/v1beta1
kind: PyTorchTrainingJob
metadata:
 name: torch-mnist-trainingjob
spec:
 scheduler:
   t9kScheduler:
     queue: default
     priority: 10
 elastic:
   enabled: true
   minReplicas: 3
   maxReplicas: 10
   expectedReplicas: 7
"""
GROUP_OF_THE_ELASTIC_JOB = """
apiVersion: scheduler.tensorstack.dev/v1beta1
kind: PodGroup
metadata:
  name: torch-mnist-trainingjob
  ownerReferences: [...]
spec:
  minMember: 3
  priority: 10
  queue: default
"""


@pytest.fixture
def cluster() -> MemoryCluster:
    """A cluster with the controller's part in it."""
    made = MemoryCluster()
    made.attach(PodGroups(made))
    return made


def created(cluster: MemoryCluster, text: str) -> dict[str, Any]:
    """Create a job in the cluster, as a user does."""
    job = yaml.safe_load(text)
    return cluster.create(KINDS[job["kind"]].kind, job, NAMESPACE)


def assert_is(found: dict[str, Any], text: str, owner: dict[str, Any]) -> None:
    """The group in the cluster is the document's, and belongs to the job."""
    shown = yaml.safe_load(text)
    (reference,) = found["metadata"]["ownerReferences"]
    assert reference == {
        "apiVersion": "batch.tensorstack.dev/v1beta1",
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    assert shown["metadata"].pop("ownerReferences") == ["..."]
    assert found["metadata"]["name"] == shown["metadata"]["name"]
    assert found["metadata"]["namespace"] == owner["metadata"]["namespace"] == NAMESPACE
    assert {key: found[key] for key in ("apiVersion", "kind", "spec")} == {
        key: shown[key] for key in ("apiVersion", "kind", "spec")
    }


def test_example_1_a_group_and_two_pods() -> None:
    t9k = podgroups.scheduler("t9k")
    group = podgroups.PodGroup("dance", min_member=2, queue="default", priority=50)
    assert t9k.resource(group) == yaml.safe_load(DANCE)
    for pod in yaml.safe_load_all(DANCERS):
        assert t9k.group_of(pod) == "dance"
        bare = {**pod, "metadata": {"name": pod["metadata"]["name"]}, "spec": {"containers": pod["spec"]["containers"]}}
        marked = t9k.marks(group).onto(bare)
        assert marked["spec"] == pod["spec"]
        assert pod["metadata"]["labels"].items() <= marked["metadata"]["labels"].items()


def test_example_2_a_group_with_roles() -> None:
    t9k = podgroups.scheduler("t9k")
    group = podgroups.PodGroup(
        "role-test", 3, "default", 50, roles=(podgroups.Role("master", 1), podgroups.Role("worker", 1))
    )
    assert t9k.resource(group) == yaml.safe_load(ROLES)
    assert read(yaml.safe_load(ROLES))[0] == group
    for name, role in (("master", "master"), ("worker", "worker"), ("worker1", "worker")):
        pod = t9k.marks(group, role).onto({"metadata": {"name": name}, "spec": {}})
        labels = pod["metadata"]["labels"]
        assert labels["scheduler.tensorstack.dev/group-name"] == "role-test"
        assert labels["scheduler.tensorstack.dev/role"] == role
        assert pod["spec"]["schedulerName"] == "t9k-scheduler"


def test_a_pod_can_not_change_its_group() -> None:
    from resilience.integrations.kubernetes.podgroups.members import joined

    (first, _) = yaml.safe_load_all(DANCERS)
    with pytest.raises(podgroups.GroupIsFixed, match="delete the Pod and create it again"):
        joined(first, podgroups.PodGroup("other", 2), podgroups.scheduler("t9k"))


def test_generic_job_gets_the_group_that_the_document_shows(cluster: MemoryCluster) -> None:
    job = created(cluster, GENERIC_JOB)
    assert_is(cluster.get(T9k.kind, "job-sample", NAMESPACE), GROUP_OF_THE_GENERIC_JOB, job)


def test_pod_of_the_generic_job_gets_the_labels_that_the_document_shows(cluster: MemoryCluster) -> None:
    job = created(cluster, GENERIC_JOB)
    shown = yaml.safe_load(POD_OF_THE_GENERIC_JOB)
    labels = shown["metadata"]["labels"]
    given = {key: value for key, value in labels.items() if not key.startswith("scheduler.tensorstack.dev/")}
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": "job-sample", "uid": job["metadata"]["uid"]}
    pod = {
        "metadata": {
            "name": shown["metadata"]["name"],
            "labels": given,
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {"schedulerName": "t9k-scheduler"},
    }
    cluster.create(PODS, pod, NAMESPACE)
    assert cluster.get(PODS, "job-sample-worker-0", NAMESPACE)["metadata"]["labels"] == labels
    order = [what for what in cluster.writes if what[1] in ("podgroups", "pods")]
    assert order == [
        ("create", "podgroups", "job-sample"),
        ("create", "pods", "job-sample-worker-0"),
        ("patch", "pods", "job-sample-worker-0"),
    ]


def test_elastic_job_waits_for_the_fewest_replicas_that_it_can_train_with(cluster: MemoryCluster) -> None:
    job = created(cluster, ELASTIC_JOB)
    assert_is(cluster.get(T9k.kind, "torch-mnist-trainingjob", NAMESPACE), GROUP_OF_THE_ELASTIC_JOB, job)


def test_all_eight_kinds_are_known_and_two_of_them_can_be_elastic() -> None:
    assert [kind.name for kind in T9K_KINDS] == [
        "TensorFlowTrainingJob",
        "PyTorchTrainingJob",
        "XGBoostTrainingJob",
        "GenericJob",
        "MPIJob",
        "ColossalAIJob",
        "DeepSpeedJob",
        "BeamJob",
    ]
    assert {kind.name for kind in T9K_KINDS if kind.elastic} == {"PyTorchTrainingJob", "DeepSpeedJob"}
    assert {kind.api_version for kind in T9K_KINDS} == {"batch.tensorstack.dev/v1beta1"}
