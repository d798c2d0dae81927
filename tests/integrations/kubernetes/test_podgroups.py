"""One description of a group, three schedulers: what can't be meant raises, what can't be expressed is said."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "resilience.integrations.kubernetes.podgroups", reason="not installed here: resilience.integrations"
)

from resilience.integrations.kubernetes.podgroups import Owner, PodGroup, PodGroupError, Role, crd, scheduler
from resilience.integrations.kubernetes.podgroups.schedulers import SCHEDULERS, read

WITH_ROLES = PodGroup("band", 3, "night", 50, (Role("singer", 1), Role("drummer", 2)), "music")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"min_member": 0}, "min_member is 0: it must be a whole number of at least 1"),
        ({"min_member": True}, "min_member is True"),
        ({"name": "Dance"}, "'Dance' can't be the name of a PodGroup"),
        ({"name": "d" * 64}, "has 64 characters. Pods carry it as a label, which holds 63"),
        ({"name": ""}, "can't be the name"),
        ({"queue": ""}, "can't be the queue"),
        ({"queue": "a b"}, "can't be the queue"),
        ({"priority": 101}, "from 0 to 100"),
        ({"priority": -1}, "from 0 to 100"),
        ({"namespace": "a.b"}, "can't be a namespace"),
        ({"roles": (Role("a", 1), Role("a", 2))}, "the role 'a' is there twice"),
    ],
)
def test_group_that_can_not_be_meant_raises_when_it_is_built(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(PodGroupError, match=said):
        PodGroup(**{"name": "dance", "min_member": 2, **wrong})


def test_role_needs_a_name_that_a_label_can_hold_and_a_number() -> None:
    with pytest.raises(PodGroupError, match="can't be a role's name"):
        Role("first violin", 1)
    with pytest.raises(PodGroupError, match="min_member of role 'violin' is 0"):
        Role("violin", 0)


def test_t9k_can_be_told_everything() -> None:
    t9k = scheduler("t9k")
    assert t9k.resource(WITH_ROLES)["spec"] == {
        "minMember": 3,
        "queue": "night",
        "priority": 50,
        "roles": [{"name": "singer", "minMember": 1}, {"name": "drummer", "minMember": 2}],
    }
    assert t9k.marks(WITH_ROLES, "singer").labels == {
        "scheduler.tensorstack.dev/group-name": "band",
        "scheduler.tensorstack.dev/queue": "night",
        "scheduler.tensorstack.dev/role": "singer",
    }
    assert t9k.notes(WITH_ROLES) == ()


def test_coscheduling_gets_a_number_and_the_rest_is_said() -> None:
    plugin = scheduler("coscheduling")
    assert plugin.resource(WITH_ROLES) == {
        "apiVersion": "scheduling.x-k8s.io/v1alpha1",
        "kind": "PodGroup",
        "metadata": {"name": "band", "namespace": "music"},
        "spec": {"minMember": 3},
    }
    assert plugin.marks(WITH_ROLES).labels == {"scheduling.x-k8s.io/pod-group": "band"}
    said = " ".join(plugin.notes(WITH_ROLES))
    for word in ("no roles", "2 of role drummer", "no queues", "'night'", "priority 50 is left out"):
        assert word in said
    assert plugin.notes(PodGroup("plain", 2)) == ()


def test_volcano_gets_roles_as_tasks_and_its_group_as_an_annotation() -> None:
    volcano = scheduler("volcano")
    resource = volcano.resource(WITH_ROLES)
    assert resource["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert resource["spec"] == {"minMember": 3, "queue": "night", "minTaskMember": {"singer": 1, "drummer": 2}}
    marks = volcano.marks(WITH_ROLES, "drummer")
    assert marks.annotations == {"scheduling.k8s.io/group-name": "band", "volcano.sh/task-spec": "drummer"}
    assert (dict(marks.labels), marks.scheduler_name) == ({}, "volcano")
    assert "priority 50 is left out" in " ".join(volcano.notes(WITH_ROLES))


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_resource_is_read_back_as_far_as_its_scheduler_can_express_it(name: str) -> None:
    by = scheduler(name)
    group, known = read(by.resource(WITH_ROLES))
    assert known.name == name
    assert (group.name, group.min_member, group.namespace) == ("band", 3, "music")
    assert by.resource(group)["spec"] == by.resource(WITH_ROLES)["spec"]


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_role_that_the_group_has_not_is_an_error_with_every_scheduler(name: str) -> None:
    with pytest.raises(PodGroupError, match=r"no role 'pianist'\. Its roles: singer, drummer"):
        scheduler(name).marks(WITH_ROLES, "pianist")


def test_unknown_scheduler_names_the_nearest() -> None:
    with pytest.raises(PodGroupError, match="Did you mean 'volcano'"):
        scheduler("vulcano")


def test_marks_keep_what_a_template_has() -> None:
    template = {"metadata": {"labels": {"app": "x"}}, "spec": {"schedulerName": "default-scheduler", "containers": []}}
    marked = scheduler("t9k", "our-t9k").marks(PodGroup("g", 1)).onto(template)
    assert marked["metadata"]["labels"]["app"] == "x"
    assert marked["spec"] == {"schedulerName": "our-t9k", "containers": []}
    assert template["metadata"] == {"labels": {"app": "x"}}


def test_owner_controls_its_group_and_must_be_whole() -> None:
    owner = Owner("batch/v1", "Job", "j", "u-1")
    resource = scheduler("t9k").resource(PodGroup("j", 1, owner=owner))
    assert resource["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": "j",
            "uid": "u-1",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    with pytest.raises(PodGroupError, match="needs uid"):
        Owner("batch/v1", "Job", "j", "")


def test_definition_is_structural_and_lists_roles_by_their_name() -> None:
    definition = crd.pod_group()
    assert definition["metadata"]["name"] == "podgroups.scheduler.tensorstack.dev"
    (version,) = definition["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert spec["required"] == ["minMember"]
    assert spec["properties"]["roles"]["x-kubernetes-list-map-keys"] == ["name"]
    assert version["subresources"] == {"status": {}}
