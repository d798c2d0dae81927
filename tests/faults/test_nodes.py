"""Several launchers on one host: verdicts, stacks and cycle numbers are the job's, not the node's."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jobs import WORKLOADS, Job, fleet, wait_for

pytestmark = pytest.mark.spawns
SCRIPT = str(WORKLOADS / "two_nodes.py")


@contextmanager
def nodes(folder: Path, count: int, options: list[str], script: list[str]) -> Iterator[list[Job]]:
    """Start ``count`` launchers of one job; the first hosts the store."""
    with fleet(folder, count, str(count), options, script) as started:
        yield started.nodes


@pytest.mark.parametrize(("fault", "kind"), [("kill", "signal"), pytest.param("hang", "hang", marks=pytest.mark.long)])
def test_a_fault_on_one_node_is_reported_alike_on_both_and_both_restart(tmp_path: Path, fault: str, kind: str) -> None:
    shared = kind == "signal"  # the console
    options = ["--max-restarts=2", "--ft-rank-section-timeouts=load:2", f"--ft-shared-console={str(shared).lower()}"]
    with nodes(tmp_path, 2, options, [SCRIPT, "40", fault, "10"]) as both:
        assert [it.wait() for it in both] == [0, 0], both[0].log() + both[1].log()
        first, second = (it.report(0) for it in both)
        assert first == second
        assert (first["culprit"]["rank"], first["culprit"]["kind"]) == (1, kind)
        assert first["culprit"]["step"] == 9
        assert first["victims"] == [0]
        stacks = {item["rank"]: item["stack"] for item in first["ranks"]}
        assert stacks[0]
        assert kind == "signal" or "two_nodes.py" in stacks[0]  # after a death the victim may be on its way out already
        blocks = [" cycle 0 failed ====" in it.log() for it in both]
        assert blocks == [True, not shared]
        assert ("cycle 0 failed: rank 1 on " in both[1].log()) is shared
        for it in both:
            assert set(re.findall(r"^\[c(\d+) n", it.log(), re.MULTILINE)) <= {"0", "1"}
            it.assert_nothing_left()
        totals = [note[1] for it in both for rank in range(2) for note in it.notes(rank) if note[1].startswith("total")]
        assert totals == ["total-80", "total-80"]


@pytest.mark.long
def test_what_one_node_learned_holds_on_the_other(tmp_path: Path) -> None:
    """Both launchers answer with the same samples for a section that only the other node's rank is slow in."""
    with nodes(tmp_path, 2, [], [str(WORKLOADS / "learns.py")]) as both:
        assert [it.wait() for it in both] == [0, 0], both[0].log() + both[1].log()
        seen = [json.loads((it.folder / "progress" / "learned").read_text()) for it in both]
        for table in seen:
            assert table["section:uneven"][1] >= 0.5


def test_a_launcher_whose_store_is_silent_ends_itself_and_its_ranks(tmp_path: Path) -> None:
    """The first launcher hosts the store and is stopped: for the second this is a cut-off node."""
    options = ["--ft-store-silence-timeout=4"]
    with nodes(tmp_path, 2, options, [SCRIPT, "100000", "none", "0"]) as both:
        node0, node1 = both
        rank_of_1 = wait_for(
            lambda: next((r for r in range(2) if node1.notes(r)), None) is not None, "a rank on node 1"
        )
        assert rank_of_1
        wait_for(lambda: any(note[1] == "step-10" for r in range(2) for note in node1.notes(r)), "ten steps")
        os.kill(node0.pid, signal.SIGSTOP)
        assert node1.wait() == 75
        assert node1.report(0)["culprit"]["kind"] == "node"
        assert "cut off" in node1.report(0)["culprit"]["message"]
        node1.assert_nothing_left()


@pytest.mark.long
def test_a_node_whose_launcher_falls_silent_is_named_and_may_come_back(tmp_path: Path) -> None:
    options = ["--max-restarts=2", "--ft-node-silence-timeout=4"]
    with nodes(tmp_path, 2, options, [SCRIPT, "300", "none", "0"]) as both:
        by_rank = {}
        for rank in range(2):
            by_rank[rank] = wait_for(
                lambda rank=rank: next((it for it in both if any(n[1] == "step-5" for n in it.notes(rank))), None),  # type: ignore[misc]
                "both ranks to train",
            )
        silent, watcher = by_rank[1], by_rank[0]  # node 0 of the rendezvous watches
        assert silent is both[1], (
            "the store's host is node 0 of the rendezvous: descriptors are sorted, it has the lower pid"
        )
        os.kill(silent.pid, signal.SIGSTOP)
        report = watcher.report(0)
        assert (report["culprit"]["rank"], report["culprit"]["kind"]) == (1, "node")
        os.kill(silent.pid, signal.SIGCONT)
        assert [it.wait() for it in both] == [0, 0], both[0].log() + both[1].log()


def test_a_node_that_is_lost_at_once_is_named_and_not_the_ranks_that_miss_it(tmp_path: Path) -> None:
    """Its launcher is killed; the other node's rank raises within milliseconds, long before any silence is noticed."""
    options = ["--max-restarts=1", "--ft-testimony-timeout=2"]
    with nodes(tmp_path, 2, options, [SCRIPT, "100000", "none", "0"]) as both:
        wait_for(lambda: all(any(n[1] == "step-10" for it in both for n in it.notes(r)) for r in range(2)), "ten steps")
        os.kill(both[1].pid, signal.SIGKILL)
        culprit = both[0].report(0)["culprit"]
        assert (culprit["rank"], culprit["kind"]) == (1, "node")
        assert "probably died first" in culprit["message"]
        assert both[0].report(0)["victims"] == [0]
