"""Snapshots in the memory of other nodes: a node is lost with everything it had, and whoever takes its place has it back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.checkpoint.storage import Directory
from tests.faults.test_store import serving
from tests.jobs import WORKLOADS, Fleet, Job, wait_for

pytestmark = pytest.mark.spawns
OPTIONS = ["--max-restarts=4", "--ft-rank-term-timeout=2", "--ft-testimony-timeout=2", "--ft-node-silence-timeout=3"]
SNAPSHOTS = str(WORKLOADS / "snapshots.py")
NEVER = "1000000"


@contextmanager
def nodes(folder: Path, number: int, script: list[str], ranks: int = 1, **env: str) -> Iterator[Fleet]:
    """Launchers of one job, each with a rank from the infrastructure, and a store that none of them keeps."""
    options = [*OPTIONS, f"--nproc-per-node={ranks}"]
    with serving() as port, Fleet(folder, str(number), options, script, port=port) as it:
        it.env = {"REPLICAS": "1", "DISK_EVERY": NEVER, "DT": "0.02", **env}
        for place in range(number):
            it.add(env={"GROUP_RANK": str(place)})
        yield it


def notes(it: Fleet, what: str) -> list[tuple[int, int]]:
    """The ranks and steps of such notes."""
    found = [(rank, note[1]) for node in it.nodes for rank in range(6) for note in node.notes(rank)]
    return [(rank, int(text[len(what) :])) for rank, text in found if text.startswith(what)]


def newest(it: Fleet, what: str) -> int:
    return max((step for _, step in notes(it, what)), default=-1)


def lose(it: Fleet, place: int) -> Job:
    """Kill a node: launcher, saver and ranks at once, and with them their memory. Another one takes its place."""
    node = it.nodes[place]
    everybody = node.family()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in everybody:
            os.kill(pid, number)
    it.nodes.pop(place)
    it.add(env={"GROUP_RANK": str(place)})
    it.nodes.insert(place, it.nodes.pop())
    return node


def end(it: Fleet) -> None:
    assert [node.wait() for node in it.nodes] == [0] * len(it.nodes), it.logs()
    for node in it.nodes:
        node.assert_nothing_left()


@pytest.mark.parametrize(("number", "place"), [(2, 1)])
def test_node_that_is_lost_gets_its_state_back_from_a_peer_to_the_bit(tmp_path: Path, number: int, place: int) -> None:
    with nodes(tmp_path, number, [SNAPSHOTS, str(tmp_path / "ck"), "200", "64"], ranks=2) as it:
        wait_for(lambda: len(notes(it, "replicated-")) > 8, f"snapshots to be replicated\n{it.logs()}")
        lost = lose(it, place)
        known = max(
            newest(it, "replicated-"),
            max(int(n[1][11:]) for r in range(6) for n in lost.notes(r) if n[1].startswith("replicated-")),
        )
        end(it)
        restored = notes(it, "restored-")
        assert {rank for rank, _ in restored} == set(range(2 * number)), it.logs()
        assert len({step for _, step in restored}) == 1
        assert known <= restored[0][1] < 199
        assert not notes(it, "BAD-")
        assert "was fetched from other nodes' memory" in it.nodes[place].log()
        (item,) = Directory(tmp_path / "ck").stored()
        assert item.manifest.step == 199
