"""What the launcher offers, on a real Ray cluster: node check, hang verdicts, fewer nodes for a while, the tiers of snapshots."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import WORKLOADS, children, wait_for
from tests.real.ray_training import PATIENCE_S, Site, Training, losses, starts, tier

pytestmark = pytest.mark.timeout(900)
ROOT = str(WORKLOADS.parent.parent)


def cycle(it: Training, node: int, number: int) -> dict[str, Any]:
    """The report of a launcher on how a cycle ended."""
    path = it.folder / "run" / f"node-{node}" / "cycles" / f"{number}.json"
    wait_for(path.exists, lambda: f"a report of node {node}\n{it.words()}", PATIENCE_S)
    return dict(json.loads(path.read_text()))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kin(pid: int) -> list[int]:
    """A process and all that come from it, the oldest first."""
    return [pid, *(one for child in children(pid) for one in kin(child))]


@pytest.mark.rare
def test_node_whose_check_fails_never_trains_and_another_one_takes_its_place(site: Site) -> None:
    sound, ill = site.own_node("check"), site.own_node("check", AILMENT="wrong")
    it = site.planned(
        2,
        labels={"pen": "check"},
        environment={"PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo"},
        network_check=True,
        accelerator="tests.nodecheck.patients::Patient",
    )
    it.job.submit()
    wait_for(lambda: it.job.status().excluded, lambda: f"the node to be excluded\n{it.words()}", PATIENCE_S)
    assert not starts(site.folder)
    other = site.own_node("check")
    it.await_steps()
    status = it.job.status()
    assert list(status.excluded) == [ill]
    assert {one.node for one in status.nodes} == {sound, other}
    (line,) = [line for line in status.history if " ended with 80: " in line]
    assert "the product of the GEMM is wrong in 1 of 128 rows" in line
    it.finish()


@pytest.mark.rare
def test_lost_node_gets_its_state_back_from_a_peers_memory(site: Site) -> None:
    it = site.training(2, room=3, replicas=1, environment={"DISK_EVERY": "1000000"})  # else that is as new now and then

    def lose() -> None:
        """All of the node's processes at once. Else its saver, which outlives its raylet, has the newest step on disk too."""
        home, rank = it.node(1), next(int(line[1]) for line in starts(site.folder) if line[0] == "1")
        for pid in kin(parent(rank)):
            with contextlib.suppress(ProcessLookupError):  # the launcher was first
                os.kill(pid, signal.SIGKILL)
        site.cluster.kill(home)

    it.survives(lose)
    assert (tier(it, 0), tier(it, 1)) == ("memory", "other nodes' memory")
    it.finish()


@pytest.mark.rare
def test_rank_that_hangs_is_found_and_restarted_in_place(site: Site) -> None:
    it = site.training(2, rank_heartbeat_timeout=10)
    pid = next(int(line[1]) for line in starts(site.folder) if line[0] == "1")
    it.survives(lambda: os.kill(pid, signal.SIGSTOP))
    culprit = cycle(it, 1, 0)["culprit"]
    assert (culprit["rank"], culprit["kind"], culprit["pid"]) == (1, "hang", pid)
    assert it.job.status().launches == 2
    it.finish()


@pytest.mark.rare
def test_job_with_a_minimum_trains_on_while_a_lost_node_is_replaced(site: Site) -> None:
    pen = [site.own_node("elastic") for _ in range(3)]
    it = site.training(3, labels={"pen": "elastic"}, minimum=2)
    assert {one.node for one in it.job.status().nodes} == set(pen)

    def await_ranks(number: int, blow: Callable[[], object]) -> None:
        """Strike, and wait until training goes on with so many ranks."""
        before = len(starts(site.folder))
        blow()
        started = lambda: len(starts(site.folder)) >= before + number  # noqa: E731
        wait_for(started, lambda: f"{number} ranks to start\n{it.words()}", PATIENCE_S)
        it.await_steps()
        assert sorted(line[0] for line in starts(site.folder)[before:]) == [str(rank) for rank in range(number)]

    others: list[str] = []
    await_ranks(2, lambda: site.cluster.kill(it.node(1)))
    await_ranks(3, lambda: others.append(site.own_node("elastic")))
    assert it.node(1) == others[0]
    (it.folder / "finish").touch()
    assert it.job.wait(PATIENCE_S).succeeded, it.words()
    made = {step for step, _ in losses(site.folder)}
    assert made == set(range(len(made))), "a step is missing"
    it.assert_nothing_left()


@pytest.mark.rare
def test_node_that_is_drained_is_left_at_an_agreed_step_and_none_is_made_twice(site: Site) -> None:
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    for _ in range(3):
        site.own_node("drained")
    it = site.training(2, labels={"pen": "drained"})
    home, stays = it.node(1), it.node(0)
    deadline_ms = int((time.time() + 600) * 1000)
    preempted = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")

    def drain() -> None:
        accepted, why = GcsClient(address=site.cluster.address).drain_node(home, preempted, "spot", deadline_ms)
        assert accepted, why

    it.survives(drain)
    assert it.node(1) not in (home, stays)
    assert any("node 1 is being drained" in line for line in it.job.status().history)
    made = [step for step, _ in losses(site.folder)]
    assert made == list(range(len(made))), "it was not an agreed stop"
    it.finish()
