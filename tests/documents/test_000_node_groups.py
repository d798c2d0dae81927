"""The "User Guide with Node Group Using", as it is written there: labels, contiguous ranks, escalation; Kubernetes and Ray."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import pytest
from omegaconf import DictConfig
from resilience.integrations.kubernetes.controller import Options
from resilience.integrations.kubernetes.members import member
from resilience.integrations.kubernetes.memory import Record
from resilience.integrations.kubernetes.observing import observe
from resilience.integrations.ray import DLJobBuilder
from resilience.integrations.ray.spec import Groups

from resilience.config import resolve
from resilience.errors import ConfigError
from resilience.groups.escalation import Rules, State, due, lost, placed
from resilience.groups.topology import Place, from_labels
from resilience.launcher.ranks import assign
from resilience.launcher.roster import Member
from tests.integrations.kubernetes.pods import pod
from tests.integrations.ray.world import running

# The document's table: label, format, examples.
INDEX = ("scheduling/rack-group", ["0", "1", "2", "3"])
NAME = ("scheduling/rack-id", ["xxx.xx"])
COUNT = ("scheduling/rack-group-size", ["1", "2", "4"])


@pytest.mark.parametrize("text", INDEX[1])
def test_index_of_a_group_starts_from_0(text: str) -> None:
    assert from_labels({INDEX[0]: text}) == Place(index=int(text))


def test_name_of_a_group_is_any_string_that_the_scheduler_understands() -> None:
    assert from_labels({NAME[0]: "xxx.xx"}).name == "xxx.xx"


@pytest.mark.parametrize("text", COUNT[1])
def test_group_size_is_how_many_groups_there_are(text: str) -> None:
    assert from_labels({INDEX[0]: "0", COUNT[0]: text}).groups == int(text)
    with pytest.raises(ConfigError):  # as an index it would be one too many
        from_labels({INDEX[0]: text, COUNT[0]: text})


def in_launchers(labels: dict[str, str], name: str, infra: int | None = None) -> Member:
    """What a launcher makes of its pod's labels, which the downward API hands to it as environment variables."""
    environ = {
        "RESILIENCE_NODE_GROUP": labels.get(NAME[0], ""),
        "RESILIENCE_NODE_GROUP_INDEX": labels.get(INDEX[0], ""),
    }
    settings = resolve({}, environ).failover
    return Member(name, name, infra, group=settings.node_group or "", group_index=settings.node_group_index)


def test_ranks_are_continuous_in_every_group_in_whatever_order_the_pods_come() -> None:
    pods = [{INDEX[0]: str(number % 4), NAME[0]: f"rack-{9 - number % 4}", COUNT[0]: "4"} for number in range(12)]
    members = [in_launchers(labels, f"node-{number}", number) for number, labels in enumerate(pods)]
    ranks = assign(members[::-1], by_infra=True)
    groups = [it.group_index for it in sorted(members, key=lambda it: ranks[it.id])]
    assert groups == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for group in range(4):
        infra = [it.infra for it in sorted(members, key=lambda it: ranks[it.id]) if it.group_index == group]
        assert infra == sorted(infra, key=lambda it: it or 0)


def test_pod_without_the_labels_is_a_node_like_any_other() -> None:
    members = [in_launchers({}, f"node-{number}", number) for number in (2, 0, 1)]
    assert assign(members, by_infra=True) == {"node-0": 0, "node-1": 1, "node-2": 2}


def test_default_timeout_is_300_seconds_everywhere() -> None:
    assert Rules().threshold_s == Options().group_threshold == 300.0


def test_1_if_all_nodes_are_scheduled_normally_fault_tolerance_is_as_usual() -> None:
    state = State()
    for number, start in enumerate(range(0, 10_000, 1000)):  # ten failures, each replaced after 299 s
        state = lost(state, "0", f"node-{number}", start, "failed")
        assert not due(state, Rules(), start + 299.0)
        state = placed(state, "0", f"node-{number}")
    assert not due(state, Rules(), 1e9)


def test_2_if_a_nodes_fault_tolerance_is_blocked_it_escalates_to_the_entire_group() -> None:
    """By the pods themselves: a replacement that gets no node, as for lack of resources."""

    def world(blocked: bool) -> list[dict[str, Any]]:
        pods = [
            pod(f"w{number}", group=number // 2, rack=f"r{number // 2}", node=f"n{number}", index=number)
            for number in range(4)
        ]
        if blocked:
            pods[2] = pod("w2", uid="another", index=2)
            why = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "Insufficient nvidia.com/gpu",
            }
            pods[2]["status"]["conditions"] = [why]
        return pods

    record = observe(Record("default", "train"), [member(it) for it in world(False)], 0.0)
    decisions: list[tuple[float, str]] = []
    for now in itertools.count(100.0, 50.0):
        record = observe(record, [member(it) for it in world(True)], now)
        decisions += [(now, decision.group) for decision in due(record.state, Rules(), now)]
        if decisions or now > 2000.0:
            break
    assert decisions == [(400.0, "1")]
    assert "Insufficient nvidia.com/gpu" in due(record.state, Rules(), 400.0)[0].reason


# -- Usage On Ray --------------------------------------------------------------------------------------------------------


def test_example_for_ray_builds_as_it_is_written() -> None:
    args = argparse.Namespace(lr=0.1, layers=[1, 2], name="llm")
    job = (
        DLJobBuilder()
        .config(DictConfig(args.__dict__))
        .nodes(4)
        .nproc_per_node(2)
        .train("train.py")
        .workload("xxx").enable_node_group_failover("RACK_ID", 300)
        .build()
    )  # fmt: skip
    assert job.spec.groups == Groups("RACK_ID", 300)
    assert (job.spec.workload, job.spec.config) == ("xxx", args.__dict__)


def test_on_ray_too_the_default_timeout_is_300_seconds() -> None:
    job = DLJobBuilder().train("train.py").enable_node_group_failover("RACK_ID").build()
    assert job.spec.groups is not None
    assert job.spec.groups.threshold_s == 300.0


def test_on_ray_all_nodes_with_the_same_label_value_follow_the_source_node_after_the_threshold() -> None:
    it = running("aabbcc", 4, threshold=300)
    it.kill_node(it.node(3))
    it.run(295)
    assert it.racks()[:3] == ["a", "a", "b"]
    it.run(10)
    assert (it.racks(), it.running()) == (["a", "a", "c", "c"], [True] * 4)
