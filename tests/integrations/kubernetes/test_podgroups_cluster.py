"""Groups of Pods against a real API server: what its schema refuses, what the controller makes, and what can't be changed.

The API server is 1.20: it drops what it does not know of a Job (``completionMode``, ``podFailurePolicy``). Those fields are checked
against the client's typed models, in ``tests/integrations/kubernetes/test_job_render.py``.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip(
    "kubernetes", reason="not here: the package kubernetes. Left out are groups of Pods on a real API server"
)

from resilience.integrations.kubernetes.api import Api, Conflict, KubernetesError, NotFound
from resilience.integrations.kubernetes.cli import main
from resilience.integrations.kubernetes.controller import Controller
from resilience.integrations.kubernetes.job.render import render
from resilience.integrations.kubernetes.job.values import from_mapping
from resilience.integrations.kubernetes.manifests import manifests
from resilience.integrations.kubernetes.parts import PODS, Kind
from resilience.integrations.kubernetes.podgroups import GroupIsFixed, PodGroup, PodGroupError, Role, crd, scheduler
from resilience.integrations.kubernetes.podgroups.jobs import JOB, KINDS, T9K_KINDS
from resilience.integrations.kubernetes.podgroups.part import PodGroups
from resilience.integrations.kubernetes.podgroups.schedulers import T9k

from tests.integrations.kubernetes import t9k
from tests.integrations.kubernetes.test_docs import blocks
from tests.jobs import wait_for
from tests.real.kubernetes import ApiServer

pytestmark = [pytest.mark.timeout(300)]
CRDS = Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
NAMESPACES = Kind("", "v1", "namespaces", namespaced=False)
EVENTS = Kind("", "v1", "events")
ACCOUNT = "system:serviceaccount:resilience-system:resilience-controller"
GROUP = "scheduler.tensorstack.dev/group-name"
RBAC = {
    "ClusterRole": Kind("rbac.authorization.k8s.io", "v1", "clusterroles", namespaced=False),
    "ClusterRoleBinding": Kind("rbac.authorization.k8s.io", "v1", "clusterrolebindings", namespaced=False),
}
SERVICES, CLAIMS = Kind("", "v1", "services"), Kind("", "v1", "persistentvolumeclaims")


@pytest.fixture(scope="session")
def admin(api_server: ApiServer) -> Api:
    """The cluster, with all definitions in it and served, and the controller's roles."""
    api = Api(api_server.client())
    for definition in (crd.pod_group(), *t9k.definitions()):
        with contextlib.suppress(Conflict):
            api.create(CRDS, definition)
    for document in manifests():
        if document["kind"] in RBAC:
            with contextlib.suppress(Conflict):
                api.create(RBAC[document["kind"]], document)
    for kind in (T9k.kind, *(known.kind for known in T9K_KINDS)):
        wait_for(lambda kind=kind: served(api, kind), f"{kind.plural} to be served")  # type: ignore[misc]
    return api


def served(api: Api, kind: Kind) -> bool:
    """Whether a kind is served: a definition that is established may still be answered with 404 for some seconds."""
    try:
        api.list_all(kind)
    except NotFound:
        return False
    return True


@pytest.fixture
def space(admin: Api) -> str:
    """A namespace of the test's own."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    admin.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@pytest.fixture
def controller(api_server: ApiServer, admin: Api, space: str) -> Iterator[None]:
    """The controller with this part, as the account of the shipped manifests, with no right beyond its roles."""
    with running(api_server, space):
        yield


@contextlib.contextmanager
def running(api_server: ApiServer, space: str) -> Iterator[None]:
    api = Api(api_server.client(ACCOUNT))
    stop = threading.Event()
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(Controller(api, [PodGroups(api)], space).run(stop)))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        assert ended == [0]


def submit(admin: Api, space: str, kind: str, name: str = "job-sample") -> dict[str, Any]:
    made = admin.create(KINDS[kind].kind, t9k.job(kind, name), space)
    return {**made, "kind": kind, "apiVersion": KINDS[kind].api_version}


def pod_of(job: dict[str, Any], name: str, by: str = "t9k-scheduler") -> dict[str, Any]:
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": job["metadata"]["name"]}
    reference = {**owner, "uid": job["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}
    spec = {"schedulerName": by, "containers": [{"name": "c", "image": "example"}]}
    metadata = {"name": name, "ownerReferences": [reference]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def found(admin: Api, kind: Kind, name: str, space: str) -> dict[str, Any] | None:
    try:
        return dict(admin.get(kind, name, space))
    except NotFound:
        return None


def group_of(admin: Api, space: str, name: str = "job-sample") -> dict[str, Any]:
    made = wait_for(lambda: found(admin, T9k.kind, name, space), f"PodGroup {name}", 30)
    return dict(made)


def label_of(admin: Api, space: str, pod: str) -> str:
    return str((admin.get(PODS, pod, space)["metadata"].get("labels") or {}).get(GROUP, ""))


def reasons(admin: Api, space: str) -> dict[str, str]:
    return {event["reason"]: event["message"] for event in admin.list_all(EVENTS, space)[0]}


# -- what the pages show ----------------------------------------------------------------------------------------------


def test_python_of_the_page_has_its_group_in_the_cluster(
    api_server: ApiServer, admin: Api, space: str, tmp_path: Path
) -> None:
    where = str(api_server.kubeconfig(tmp_path / "config"))  # the client reads KUBECONFIG once, when it is imported
    names: dict[str, Any] = {}
    for code in blocks("gang-scheduling.md", "python"):
        exec(code.replace('"dev"', repr(space)).replace("connect()", f"connect({where!r})"), names)
    assert names["done"] == "created"
    assert admin.get(T9k.kind, "role-test", space)["spec"]["minMember"] == 3
    names["api"].close()


@pytest.mark.parametrize("page", ["gang-scheduling.md", "kubernetes-groups.md"])
def test_jobs_of_the_pages_are_accepted_as_they_are_shown(admin: Api, space: str, page: str) -> None:
    shown = [it for text in blocks(page, "yaml") for it in yaml.safe_load_all(text) if it.get("kind") == "Job"]
    assert len(shown) == 1
    admin.create(JOB.kind, shown[0], space)


# -- what the schema says ---------------------------------------------------------------------------------------------


def test_api_server_keeps_a_group_as_it_is_described_and_gives_defaults(admin: Api, space: str) -> None:
    group = PodGroup("band", 3, "night", 50, (Role("singer", 1), Role("drummer", 2)), space)
    wanted = scheduler("t9k").resource(group)
    assert admin.create(T9k.kind, wanted, space)["spec"] == wanted["spec"]
    bare = {"apiVersion": T9k().api_version, "kind": "PodGroup", "metadata": {"name": "bare"}, "spec": {"minMember": 1}}
    assert admin.create(T9k.kind, bare, space)["spec"] == {"minMember": 1, "queue": "default"}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"queue": "default"}, "minMember"),
        ({"minMember": 0}, "minMember"),
        ({"minMember": "two"}, "minMember"),
        ({"minMember": 1, "priority": 101}, "priority"),
        ({"minMember": 1, "priority": -1}, "priority"),
        ({"minMember": 1, "queue": ""}, "queue"),
        ({"minMember": 1, "roles": [{"name": "a"}]}, "minMember"),
        ({"minMember": 1, "roles": [{"name": "a", "minMember": 1}, {"name": "a", "minMember": 2}]}, "Duplicate value"),
        ({"minMember": 1, "roles": [{"name": "a b", "minMember": 1}]}, "name"),
    ],
)
def test_group_that_can_not_be_meant_is_refused_by_the_schema(
    admin: Api, space: str, spec: dict[str, Any], said: str
) -> None:
    thing = {"apiVersion": T9k().api_version, "kind": "PodGroup", "metadata": {"name": "wrong"}, "spec": spec}
    with pytest.raises(KubernetesError, match=said) as refusal:
        admin.create(T9k.kind, thing, space)
    assert refusal.value.status == 422


@pytest.mark.parametrize("kind", [known.name for known in T9K_KINDS])
def test_every_kind_of_job_is_accepted_and_a_wrong_priority_refused(admin: Api, space: str, kind: str) -> None:
    assert submit(admin, space, kind)["spec"] == t9k.job(kind)["spec"]
    with pytest.raises(KubernetesError, match="priority") as refusal:
        admin.create(KINDS[kind].kind, t9k.job(kind, "wrong", priority=101), space)
    assert refusal.value.status == 422


# -- what the controller does -----------------------------------------------------------------------------------------


def test_all_eight_kinds_get_their_groups_and_their_pods_are_labelled(admin: Api, space: str, controller: None) -> None:
    jobs = {kind: submit(admin, space, kind, kind.lower()) for kind in t9k.SPECS}
    for kind, job in jobs.items():
        group = group_of(admin, space, kind.lower())
        assert group["spec"] == {"minMember": t9k.SPECS[kind][1], "queue": "default", "priority": 10}
        (reference,) = group["metadata"]["ownerReferences"]
        assert (reference["kind"], reference["uid"]) == (kind, job["metadata"]["uid"])
        assert reference["controller"] is reference["blockOwnerDeletion"] is True
        admin.create(PODS, pod_of(job, f"{kind.lower()}-0"), space)
    for kind in jobs:
        pod = f"{kind.lower()}-0"
        wait_for(lambda pod=pod: label_of(admin, space, pod), f"the label of {pod}", 30)  # type: ignore[misc]
        assert label_of(admin, space, pod) == kind.lower()


def test_jobs_and_pods_that_were_there_before_the_controller_are_looked_after(
    api_server: ApiServer, admin: Api, space: str
) -> None:
    job = submit(admin, space, "DeepSpeedJob")
    admin.create(PODS, pod_of(job, "early"), space)
    with running(api_server, space):
        wait_for(lambda: label_of(admin, space, "early") == "job-sample", "the label", 30)
    version = group_of(admin, space)["metadata"]["resourceVersion"]
    with running(api_server, space):  # started anew: it comes to the same, and writes nothing
        admin.create(PODS, pod_of(job, "late"), space)
        wait_for(lambda: label_of(admin, space, "late") == "job-sample", "the label", 30)
    assert group_of(admin, space)["metadata"]["resourceVersion"] == version


def test_number_follows_the_job(admin: Api, space: str, controller: None) -> None:
    submit(admin, space, "MPIJob")
    assert group_of(admin, space)["spec"]["minMember"] == 5
    admin.patch(KINDS["MPIJob"].kind, "job-sample", {"spec": {"worker": {"replicas": 8}}}, space)
    wait_for(lambda: group_of(admin, space)["spec"]["minMember"] == 8, "minMember to follow", 30)


def test_pods_group_is_fixed_and_the_way_out_is_told(admin: Api, space: str, controller: None) -> None:
    job = submit(admin, space, "GenericJob")
    admin.create(PODS, pod_of(job, "w-0"), space)
    wait_for(lambda: label_of(admin, space, "w-0") == "job-sample", "the label", 30)
    admin.patch(PODS, "w-0", {"metadata": {"labels": {GROUP: "other"}}}, space)
    wait_for(lambda: "GroupIsFixed" in reasons(admin, space), "the Event", 30)
    wait_for(lambda: label_of(admin, space, "w-0") == "job-sample", "the label to be put back", 30)
    assert "delete the Pod and create it again" in reasons(admin, space)["GroupIsFixed"]


def test_pods_scheduler_can_not_be_changed_and_that_is_told(admin: Api, space: str, controller: None) -> None:
    job = submit(admin, space, "GenericJob")
    admin.create(PODS, pod_of(job, "w-0", "default-scheduler"), space)
    with pytest.raises(KubernetesError, match="may not change fields other than") as refusal:
        admin.patch(PODS, "w-0", {"spec": {"schedulerName": "t9k-scheduler"}}, space)
    assert refusal.value.status == 422
    wait_for(lambda: "WrongScheduler" in reasons(admin, space), "the Event", 30)


# -- a job to start from ----------------------------------------------------------------------------------------------


def test_rendered_job_is_accepted_and_its_group_made(admin: Api, space: str, controller: None) -> None:
    values = {"name": "llm", "image": "example", "script": ["train.py"], "nodes": 3, "namespace": space}
    kinds = {"Service": SERVICES, "PersistentVolumeClaim": CLAIMS, "PodGroup": T9k.kind, "Job": JOB.kind}
    made = {
        thing["kind"]: admin.create(kinds[thing["kind"]], thing, space)
        for thing in render(from_mapping({**values, "gang": "t9k", "controller": True, "checkpoint_size": "1Gi"}))
    }
    assert set(made) == {"PersistentVolumeClaim", "Service", "Job"}
    assert made["Service"]["spec"]["clusterIP"] == "None"
    spec = made["Job"]["spec"]
    assert (spec["completions"], spec["parallelism"]) == (3, 3)
    assert spec["template"]["spec"]["schedulerName"] == "t9k-scheduler"
    assert "podFailurePolicy" not in spec, "this API server has learned of it: check that it keeps the rules"
    group = group_of(admin, space, "llm")
    assert group["spec"]["minMember"] == 3
    assert group["metadata"]["ownerReferences"][0]["uid"] == made["Job"]["metadata"]["uid"]


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_person_applies_a_group_has_pods_join_and_can_not_move_them(
    api_server: ApiServer, admin: Api, space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    way = [f"--kubeconfig={api_server.kubeconfig(tmp_path / 'config')}", f"--namespace={space}"]
    for name, said in (("dance", "created"), ("dance", "unchanged"), ("other", "created")):
        assert main(["podgroup", "apply", f"--name={name}", "--min-member=2", *way]) == 0
        assert f"/{name} {said}" in capsys.readouterr().out
    assert main(["podgroup", "apply", "--name=dance", "--min-member=3", *way]) == 0
    assert group_of(admin, space, "dance")["spec"]["minMember"] == 3
    for name, by in (("p", "t9k-scheduler"), ("q", "default-scheduler")):
        spec = {"schedulerName": by, "containers": [{"name": "c", "image": "example"}]}
        admin.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}, space)
    with pytest.raises(PodGroupError, match="nothing was labelled"):
        main(["podgroup", "join", "dance", "p", "q", *way])
    assert label_of(admin, space, "p") != "dance", "all of them or none"
    assert main(["podgroup", "join", "dance", "p", *way]) == 0
    assert label_of(admin, space, "p") == "dance"
    with pytest.raises(GroupIsFixed):
        main(["podgroup", "join", "other", "p", *way])
    with pytest.raises(PodGroupError, match="a Pod's scheduler can't be changed"):
        main(["podgroup", "join", "dance", "q", *way])


def test_person_applies_the_group_of_a_job_in_the_cluster(
    api_server: ApiServer, admin: Api, space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit(admin, space, "XGBoostTrainingJob")
    way = [f"--kubeconfig={api_server.kubeconfig(tmp_path / 'config')}", f"--namespace={space}"]
    assert main(["podgroup", "render", "--job=xgboosttrainingjob/job-sample", *way]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert main(["podgroup", "apply", "--job=XGBoostTrainingJob/job-sample", *way]) == 0
    assert group_of(admin, space)["spec"]["minMember"] == 3
