"""What a pod's end tells of its node."""

from __future__ import annotations

import json

import pytest
from resilience.integrations.kubernetes.cli import main
from resilience.integrations.kubernetes.events import stamp
from resilience.integrations.kubernetes.faulty import KubernetesErrorMonitor, failures, unmarked
from resilience.integrations.kubernetes.nodes import word

from resilience.failover.error_monitor import NodeFault
from resilience.failover.marking import load
from tests.integrations.kubernetes.pods import ended, pod


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (14, "InfoROMCorrupted"),
        (128, "UnknownDevice"),
        (201, "DriverError"),
        (202, "ResidualProcesses"),
    ],
)
def test_exit_code_of_the_hardware_tells_of_the_node(code: int, reason: str) -> None:
    (found,) = failures(pod("p", node="gpu-7", code=code))
    assert (found.fault.node, found.fault.reason, found.fault.code) == ("gpu-7", reason, code)
    assert found.happened > 0


@pytest.mark.parametrize("code", [0, 1, 75, 76, 77, 78, 79, 80, 137, 143])
def test_other_exit_codes_tell_nothing_of_the_node(code: int) -> None:
    assert not list(failures(pod("p", node="gpu-7", code=code)))


def test_node_that_failed_its_check_is_told_by_its_message_and_one_that_is_not_to_be_marked_has_none() -> None:
    told = NodeFault("gpu-7", "NodeCheckFailed", "the product is wrong").as_message()
    assert [it.fault.reason for it in failures(pod("p", node="gpu-7", code=80, message=told))] == ["NodeCheckFailed"]
    assert not list(unmarked(pod("p", node="gpu-7", code=80, message=told)))
    assert len(list(unmarked(pod("p", node="gpu-7", code=80)))) == 1
    assert not list(unmarked(pod("p", code=80)))


def test_container_that_could_not_be_started_ends_with_128_too_and_tells_nothing_of_the_node() -> None:
    thing = pod("p", node="gpu-7", code=128)
    thing["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] = "StartError"
    assert not list(failures(thing))


def test_message_of_the_launcher_says_more_and_its_claim_of_another_node_is_not_believed() -> None:
    told = NodeFault("somebody-elses-node", "NodeCheckFailed", "GEMM on cuda:3 gave a wrong result", run="r1")
    (found,) = failures(pod("p", node="gpu-7", code=1, message=told.as_message()))
    assert found.fault.node == "gpu-7"
    assert (found.fault.reason, found.fault.message, found.fault.run) == (told.reason, told.message, "r1")


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", '{"resilience": 1}', '{"resilience": 2, "fault": {}}', "x" * 4096]
)
def test_message_of_anybody_else_is_no_message(text: str) -> None:
    assert not list(failures(pod("p", node="gpu-7", code=1, message=text)))


@pytest.mark.parametrize(
    "message",
    ["[" * 4000, NodeFault("gpu-7", "Mine", "x", at=1e300).as_message()],
    ids=["brackets", "a time that is none"],
)
def test_message_can_not_keep_its_own_node_from_being_marked(message: str) -> None:
    thing = pod("p", node="gpu-7", code=14, message=message)
    del thing["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"]
    (found,) = failures(thing)
    assert found.fault.node == "gpu-7"
    assert stamp(found.fault.at)


def test_pod_that_never_had_a_node_tells_of_none() -> None:
    assert not list(failures(pod("p", code=14)))


def test_container_that_was_started_again_is_heard_for_what_it_was_before() -> None:
    thing = pod("p", node="gpu-7")
    thing["status"]["containerStatuses"] = [
        {"name": "main", "restartCount": 1, "lastState": ended(201)["containerStatuses"][0]["state"]}
    ]
    assert [it.fault.code for it in failures(thing)] == [201]


def test_same_failure_is_the_same_however_often_it_is_looked_at_and_another_is_another() -> None:
    first, again = (next(failures(pod("p", node="n", code=14))) for _ in range(2))
    later = pod("p", node="n")
    later["status"] |= ended(14, container="containerd://2")
    assert first.id == again.id != next(failures(later)).id


def test_any_reason_becomes_a_word_that_a_taint_can_hold() -> None:
    assert word("NodeCheckFailed") == "NodeCheckFailed"
    assert word("a reason: with/odd, things") == "a-reason-with-odd-things"
    assert word("") == word("///") == "unknown"
    assert len(word("x" * 200)) == 63
    assert json.dumps(word("日本")) == '"unknown"'


def test_launchers_find_the_error_monitor_by_its_name() -> None:
    """The entry point of the installed package, as ``--ft-error-monitor=kubernetes`` looks for it. It connects when it marks."""
    assert isinstance(load("kubernetes"), KubernetesErrorMonitor)


def test_commands_are_listed_and_a_typo_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in ("controller", "job", "manifests", "podgroup", "uncordon"))
    assert main(["uncorden"]) == 2
    assert "Did you mean 'uncordon'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["initContainerStatuses", "containerStatuses"])
def test_bare_code_of_another_container_than_the_one_that_trains_tells_nothing_of_the_node(kind: str) -> None:
    """git ends with 128 for anything that goes wrong."""
    thing = pod("p", node="gpu-7", code=1)
    other = {**ended(128)["containerStatuses"][0], "name": "clone"}
    thing["status"].setdefault(kind, []).append(other)
    assert not list(failures(thing))
    other["state"]["terminated"]["message"] = NodeFault("gpu-7", "NodeCheckFailed", "wrong").as_message()
    assert [it.fault.reason for it in failures(thing)] == ["NodeCheckFailed"], "a check in an init container says so"


def test_pod_says_which_of_its_containers_trains() -> None:
    thing = pod("p", node="gpu-7", code=201)
    thing["spec"]["containers"].insert(0, {"name": "proxy", "image": "none"})
    assert not list(failures(thing)), "the first one, if nothing is said"
    thing["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] = "main"
    assert [it.fault.reason for it in failures(thing)] == ["DriverError"]
