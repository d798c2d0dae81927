"""The usage guide of the fault tolerance package, as it is written there: flags, the file, restart policies, ranks, both APIs."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.config import Settings, resolve
from resilience.launcher.ranks import assign, infra_rank
from resilience.launcher.roster import Member
from tests.jobs import job


def told(tmp_path: Path, text: str) -> Settings:
    """The settings of a configuration file."""
    path = tmp_path / "ft.yaml"
    path.write_text(f"fault_tolerance:\n  {text}\n")
    return resolve({}, {}, str(path))


def test_defaults_are_those_of_the_guide() -> None:
    found = resolve({}, {}).failover
    assert (found.restart_policy, found.use_infra_group_rank) == ("any-failed", True)


@pytest.mark.parametrize(("text", "by_infra"), [("True", True), ("False", False), ("true", True), ("false", False)])
def test_use_of_the_infrastructures_ranks_is_told_by_flag_and_by_file(
    tmp_path: Path, text: str, by_infra: bool
) -> None:
    assert resolve({"use_infra_group_rank": text}, {}).failover.use_infra_group_rank is by_infra
    assert told(tmp_path, f"use_infra_group_rank: {text}").failover.use_infra_group_rank is by_infra


@pytest.mark.parametrize("policy", ["any-failed", "min-healthy"])
def test_restart_policy_is_told_by_flag_and_by_file(tmp_path: Path, policy: str) -> None:
    assert resolve({"restart_policy": policy}, {}).failover.restart_policy == policy
    assert told(tmp_path, f"restart_policy: {policy}").failover.restart_policy == policy


def test_slurms_rank_is_looked_at_first_and_then_the_group_rank() -> None:
    assert infra_rank({"SLURM_PROCID": "3", "GROUP_RANK": "5"}) == 3
    assert infra_rank({"GROUP_RANK": "5"}) == 5
    assert infra_rank({}) is None


def test_infrastructures_ranks_hold_in_every_rendezvous_and_earlier_ones_are_ignored() -> None:
    members = [Member(f"n{number}", f"n{number}", 2 - number, rank=number) for number in range(3)]
    assert assign(members, by_infra=True) == {"n2": 0, "n1": 1, "n0": 2}


def test_without_them_earlier_ranks_are_kept_gaps_are_filled_and_descriptors_are_sorted() -> None:
    stayed = [Member("n7", "n7", 0, rank=0), Member("n3", "n3", 1, rank=2)]
    new = [Member("n9", "n9", 2), Member("n5", "n5", 3)]
    assert assign([*new, *stayed], by_infra=False) == {"n7": 0, "n5": 1, "n3": 2, "n9": 3}


BOTH = """\
import os
from resilience import RankMonitorClient

client = RankMonitorClient()
client.init_workload_monitoring()
for step in range(3):
    client.send_heartbeat()
    client.start_section("step")
    if (os.environ["RESILIENCE_CYCLE"], step) == ("0", 2):
        import time
        time.sleep(600)
    client.end_section("step")
client.shutdown_workload_monitoring()
"""


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("setting", "by"),
    [
        ("rank_section_timeouts: {step: 1.5}", "step"),
        pytest.param("rank_heartbeat_timeout: 1.5", "heartbeat", marks=pytest.mark.rare),
    ],
)
def test_both_ways_to_find_a_hang_may_be_used_at_the_same_time(tmp_path: Path, setting: str, by: str) -> None:
    (tmp_path / "ft.yaml").write_text(f"fault_tolerance:\n  {setting}\n")
    (tmp_path / "both.py").write_text(BOTH)
    options = ["--nproc-per-node=1", "--max-restarts=1", f"--ft-cfg-path={tmp_path}/ft.yaml"]
    with job(tmp_path, options, [str(tmp_path / "both.py")]) as it:
        assert it.wait() == 0, it.log()
        culprit = it.report(0)["culprit"]
        assert culprit["kind"] == "hang"
        assert by in culprit["message"]
        it.assert_nothing_left()
