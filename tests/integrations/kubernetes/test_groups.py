"""Who sits where, who is missed, and where a group may go: pods in, words out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from resilience.integrations.kubernetes.members import member
from resilience.integrations.kubernetes.memory import Record, Seat
from resilience.integrations.kubernetes.observing import is_anothers, is_over, observe, waiting
from resilience.integrations.kubernetes.placement import avoid_key, avoids, elsewhere, manifest, nodes_left

from resilience.groups.escalation import Rules, due, moved
from tests.integrations.kubernetes.pods import JOB, owned_by, pod

BATCH = owned_by("Job", "train")
HARD = "requiredDuringSchedulingIgnoredDuringExecution"


def look(record: Record, pods: list[dict[str, Any]], now: float = 0.0) -> Record:
    return observe(record, [member(it) for it in pods], now)


def indexed(number: int, group: int | None, node: str, uid: str = "", **more: Any) -> dict[str, Any]:
    rack = "" if group is None else f"rack-{group}"
    return pod(
        f"train-{number}-{uid or 'a'}",
        uid=f"{number}{uid}",
        index=number,
        group=group,
        rack=rack,
        node=node,
        owner=BATCH,
        **more,
    )


def four() -> list[dict[str, Any]]:
    return [indexed(number, number // 2, f"node-{number}") for number in range(4)]


# -- seats ------------------------------------------------------------------------------------------------------------


def test_seat_is_the_index_where_there_is_one_and_survives_its_pod() -> None:
    assert member(indexed(3, 1, "n")).seat == member(indexed(3, None, "", "b")).seat == "3"


def test_seats_of_a_jobset_are_told_apart_by_job_and_index() -> None:
    labels = {"jobset.sigs.k8s.io/replicatedjob-name": "workers", "jobset.sigs.k8s.io/job-index": "2"}
    thing = pod("x", index=1, owner=BATCH)
    thing["metadata"]["labels"] |= labels
    assert member(thing).seat == "workers/2/1"


def test_plain_pod_and_one_of_a_statefulset_sit_by_name() -> None:
    assert member(pod("worker-0")).seat == "worker-0"
    assert member(pod("worker-0", owner=owned_by("StatefulSet", "worker"))).seat == "worker-0"


def test_labels_that_cant_be_meant_are_no_group() -> None:
    thing = pod("x", node="n")
    thing["metadata"]["labels"]["scheduling/rack-group"] = "first"
    assert not member(thing).place.known


def test_members_with_nodes_and_groups_are_remembered() -> None:
    record = look(Record("default", "train"), four())
    assert record.seats["2"] == Seat("1", "rack-1", "node-2", "train-2-a")
    assert not record.state.incidents


def test_pod_that_waits_is_no_member_until_it_was_one() -> None:
    assert not look(Record("default", "train"), [indexed(0, 0, "")]).seats


# -- who is missed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["gone", "failed", "leaving", "waits"])
def test_member_that_is_gone_or_failed_or_whose_replacement_waits_is_missed(how: str) -> None:
    pods = four()
    record = look(Record("default", "train"), pods)
    if how == "gone":
        del pods[1]
    elif how == "failed":
        pods[1]["status"]["phase"] = "Failed"
    elif how == "leaving":
        pods[1]["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    else:
        pods[1] = indexed(1, None, "", "b")
        pods[1]["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes are available"}
        ]
    record = look(record, pods, 100.0)
    (absent,) = record.state.incidents["0"].absent.items()
    assert (absent[0], absent[1].since) == ("1", 100.0)
    assert {"gone": "gone", "failed": "failed", "leaving": "deleted", "waits": "0/4 nodes"}[how] in absent[1].why


def test_replacement_that_waits_is_known_by_its_seat_and_one_that_is_told_to_go_is_none() -> None:
    pods = four()
    record = look(Record("default", "train"), pods)
    pods[1] = indexed(1, None, "", "b")
    record = look(record, pods, 100.0)
    assert waiting(record, [member(it) for it in pods]) == {"1": "train-1-b"}
    record.doomed["train-1-b"] = "1b"
    assert waiting(record, [member(it) for it in pods]) == {}


def test_replacement_with_a_node_ends_the_incident_and_its_group_is_that_of_its_seat() -> None:
    pods = four()
    record = look(Record("default", "train"), pods)
    record = look(record, [pods[0], *pods[2:]], 100.0)
    pods[1] = indexed(1, None, "node-9", "b")
    record = look(record, pods, 200.0)
    assert not record.state.incidents
    assert record.seats["1"] == Seat("0", "rack-0", "node-9", "train-1-b")


def test_member_that_finished_is_not_missed() -> None:
    pods = four()
    record = look(Record("default", "train"), pods)
    pods[3]["status"]["phase"] = "Succeeded"
    record = look(record, pods, 100.0)
    assert not record.state.incidents
    assert "3" not in record.seats


def test_pods_that_cant_be_told_apart_take_over_from_one_another() -> None:
    def anonymous(name: str, node: str, group: int | None) -> dict[str, Any]:
        return pod(f"train-{name}", node=node, group=group, owner=BATCH)

    record = look(
        Record("default", "train"), [anonymous("a", "n1", 0), anonymous("b", "n2", 0), anonymous("c", "n3", 1)]
    )
    record = look(record, [anonymous("a", "n1", 0), anonymous("c", "n3", 1), anonymous("d", "", None)], 100.0)
    assert list(record.state.incidents["0"].absent) == ["pod/train-b"]
    assert waiting(record, [member(anonymous("d", "", None))]) == {"pod/train-b": "train-d"}
    record = look(record, [anonymous("a", "n1", 0), anonymous("c", "n3", 1), anonymous("d", "n4", None)], 200.0)
    assert not record.state.incidents
    assert {name: seat.group for name, seat in record.seats.items()} == {
        "pod/train-a": "0",
        "pod/train-c": "1",
        "pod/train-d": "0",
    }


def anonymous(name: str, rack: str, group: int | None = None) -> dict[str, Any]:
    return pod(name, uid=name, rack=rack, node=f"node-{name}", owner=BATCH, group=group)


def test_successor_in_another_rack_ends_the_incident_where_racks_are_only_names() -> None:
    first = look(Record("default", "train"), [anonymous(name, "r0") for name in "abc"])
    after = look(first, [anonymous("a", "r0"), anonymous("b", "r0"), anonymous("d", "r1")], now=1.0)
    assert not after.state.incidents
    assert not due(after.state, Rules(threshold_s=5.0), 1000.0), "every pod has a node: nothing moves"


def test_pod_of_another_group_does_not_take_the_seat_where_groups_are_numbered() -> None:
    first = look(Record("default", "train"), [anonymous(name, "r0", 0) for name in "abc"])
    after = look(first, [anonymous("a", "r0", 0), anonymous("b", "r0", 0), anonymous("d", "r1", 1)], now=1.0)
    assert list(after.state.incidents) == ["0"]


@pytest.mark.parametrize(
    "damage",
    [
        {"state": '{"incidents":{},"moves":Infinity}'},
        {"state": "[" * 100_000},
        {"namespace": 1},
        {"marked": []},
        {"doomed": ["a"]},
        {"making": {}},
    ],
)
def test_record_of_another_form_is_no_record(damage: dict[str, Any]) -> None:
    text = json.dumps(json.loads(Record("default", "train").as_text()) | damage)
    with pytest.raises(ValueError, match="not "):
        Record.from_text(text)


def test_pod_that_cant_be_told_from_the_lost_one_takes_over_also_where_both_are_seen_at_once() -> None:
    def anonymous(name: str) -> dict[str, Any]:
        return pod(f"train-{name}", node=f"n-{name}", group=0, owner=BATCH)

    record = look(Record("default", "train"), [anonymous("a"), anonymous("b")])
    record = look(record, [anonymous("a"), anonymous("c")], 100.0)
    assert not record.state.incidents
    assert set(record.seats) == {"pod/train-a", "pod/train-c"}


def test_pods_that_are_told_to_go_hold_no_seat_while_they_are_still_there() -> None:
    pods = four()
    record = look(Record("default", "train"), pods)
    record.doomed = {it["metadata"]["name"]: it["metadata"]["uid"] for it in pods[:2]}
    record.state = moved(record.state, "0", ["0", "1"], 50.0)
    record = look(record, pods, 100.0)
    assert set(record.state.incidents["0"].absent) == {"0", "1"}
    assert not due(record.state, Rules(), 1e6)


def test_plain_group_of_which_nothing_is_left_was_taken_away_on_purpose() -> None:
    pods = [pod(f"w{number}", group=number // 2, rack="r", node="n") for number in range(4)]
    record = look(Record("default", "train"), pods)
    record.plain = {it["metadata"]["name"]: manifest(it) for it in pods}
    record = look(record, pods[2:], 100.0)
    assert not record.state.incidents
    assert set(record.seats) == {"w2", "w3"}


def test_job_is_over_when_its_pods_are_gone_or_done_but_not_while_a_group_is_on_its_way() -> None:
    record = look(Record("default", "train"), four())
    assert is_over(record, [], 0.0, 3600.0)
    assert not is_over(record, [member(it) for it in four()], 0.0, 3600.0)
    done = [indexed(0, 0, "n", phase="Succeeded")]
    assert is_over(record, [member(it) for it in done], 0.0, 3600.0)
    record.state = moved(record.state, "0", ["0"], 100.0)
    assert not is_over(record, [], 200.0, 3600.0)
    assert is_over(record, [], 100.0 + 3601.0, 3600.0)


def test_record_survives_being_written_down() -> None:
    record = look(look(Record("default", "train"), four()), four()[1:], 5.0)
    record.plain, record.marked, record.making = {"a": manifest(pod("a"))}, {"node-1": 3.0}, ["a"]
    assert Record.from_text(record.as_text()) == record
    with pytest.raises(ValueError):
        Record.from_text("{}")


# -- where it may go --------------------------------------------------------------------------------------------------


def moved_pod(thing: dict[str, Any], rack_label: str = "scheduling/rack-id") -> dict[str, Any]:
    return elsewhere(manifest(thing), "default", JOB, "0", rack_label)


def test_plain_pod_goes_together_with_its_group_and_away_from_its_rack() -> None:
    made = moved_pod(pod("w0", group=0, rack="rack-0", node="node-0"))
    assert "nodeName" not in made["spec"]
    assert "uid" not in made["metadata"]
    assert "scheduling/rack-id" not in made["metadata"]["labels"]
    assert made["metadata"]["labels"]["scheduling/rack-group"] == "0"
    (together,) = made["spec"]["affinity"]["podAffinity"][HARD]
    assert together["topologyKey"] == "scheduling/rack-id"
    assert together["labelSelector"]["matchLabels"].items() <= made["metadata"]["labels"].items()
    assert avoids(made, "default", "train")
    assert not avoids(made, "default", "another")
    assert not avoids(made, "elsewhere", "train")


def test_what_a_pod_required_stays_required_but_for_its_old_rack() -> None:
    thing = pod("w0", group=0, rack="rack-0", node="node-0")
    zone = {"key": "zone", "operator": "In", "values": ["z1"]}
    pin = {"key": "scheduling/rack-id", "operator": "In", "values": ["rack-0"]}
    thing["spec"]["affinity"] = {"nodeAffinity": {HARD: {"nodeSelectorTerms": [{"matchExpressions": [zone, pin]}]}}}
    thing["spec"]["nodeSelector"] = {"gpu": "h100", "scheduling/rack-id": "rack-0"}
    made = moved_pod(thing)
    (term,) = made["spec"]["affinity"]["nodeAffinity"][HARD]["nodeSelectorTerms"]
    assert zone in term["matchExpressions"]
    assert pin not in term["matchExpressions"]
    assert made["spec"]["nodeSelector"] == {"gpu": "h100"}


def test_moving_twice_adds_nothing_twice() -> None:
    once = moved_pod(pod("w0", group=0, rack="rack-0", node="node-0"))
    assert moved_pod(once) == once


def test_without_racks_on_the_nodes_a_group_only_stays_away_from_its_old_nodes() -> None:
    made = moved_pod(pod("w0", group=0, node="node-0"), rack_label="")
    assert "podAffinity" not in made["spec"]["affinity"]
    assert avoids(made, "default", "train")


def test_template_avoids_a_rack_only_if_all_its_alternatives_do() -> None:
    away = {"matchExpressions": [{"key": "avoid.resilience.dev/default.train", "operator": "DoesNotExist"}]}
    thing = pod("w0")
    for terms, good in (([], False), ([away], True), ([away, {"matchExpressions": []}], False)):
        thing["spec"]["affinity"] = {"nodeAffinity": {HARD: {"nodeSelectorTerms": terms}}}
        assert avoids(thing, "default", "train") is good


def test_rack_that_only_a_pods_label_names_is_left_alone() -> None:
    racks = {"node-0": "rack-0", "node-1": "rack-0", "theirs": "rack-7"}
    assert nodes_left({"node-0"}, {"rack-0", "rack-7"}, racks) == ["node-0", "node-1"]
    assert nodes_left({"node-0"}, {"rack-7"}, racks) == ["node-0"]
    assert nodes_left({"node-9"}, {"rack-0"}, racks) == ["node-9"], "nobody says where a node is that has no label"


def test_no_two_namespaces_share_the_label_of_a_job_however_long_their_names() -> None:
    names = [("a", "train"), ("b", "train"), ("a" * 63, "j" * 63), ("a" * 63, "j" * 62), ("a" * 62 + "b", "j" * 63)]
    keys = [avoid_key(*it) for it in names]
    assert keys[0] == "avoid.resilience.dev/a.train"
    assert len(set(keys)) == len(keys)
    assert max(len(it.partition("/")[2]) for it in keys) == 63


def test_jobset_that_makes_its_jobs_anew_is_the_same_job_and_one_that_was_made_anew_is_not() -> None:
    def pods(jobset: str, job: str) -> list[dict[str, Any]]:
        made = [indexed(number, number // 2, f"n{number}") for number in range(4)]
        for it in made:
            it["metadata"]["ownerReferences"][0]["uid"] = job
            it["metadata"]["labels"] |= {"jobset.sigs.k8s.io/jobset-name": "train"}
            it["metadata"]["labels"] |= {"jobset.sigs.k8s.io/jobset-uid": jobset} if jobset else {}
        return made

    def anothers(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> bool:
        return is_anothers(look(Record("default", "train"), before), [member(it) for it in after])

    assert not anothers(pods("a", "1"), pods("a", "2")), "its own restart"
    assert anothers(pods("a", "1"), pods("b", "2"))
    assert not anothers(pods("", "1"), pods("", "2")), "an older release does not tell"
