"""Snapshots in the memory of other nodes: a node is lost with everything it had, and whoever takes its place has it back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.checkpoint.stores.local import Directory
from tests.faults.test_checkpoint import saver_of
from tests.faults.test_checkpoint_nodes import finals, kill, undisturbed  # noqa: F401 - a fixture
from tests.faults.test_store import serving
from tests.jobs import WORKLOADS, Fleet, Job, wait_for

pytestmark = pytest.mark.spawns
OPTIONS = ["--max-restarts=4", "--ft-rank-term-timeout=2", "--ft-testimony-timeout=2", "--ft-node-silence-timeout=3"]
DDP = str(WORKLOADS / "ddp_flash.py")
SNAPSHOTS = str(WORKLOADS / "snapshots.py")
NEVER = "1000000"


@contextmanager
def nodes(
    folder: Path, number: int, script: list[str], *, ranks: int = 1, groups: str = "", **env: str
) -> Iterator[Fleet]:
    """Launchers of one job, each with a rank from the infrastructure, and a store that none of them keeps."""
    options = [*OPTIONS, f"--nproc-per-node={ranks}"]
    with serving() as port, Fleet(folder, str(number), options, script, port=port) as it:
        it.env = {"REPLICAS": "1", "DISK_EVERY": NEVER, "DT": "0.04", **env}
        for place in range(number):
            it.add(env={"GROUP_RANK": str(place), "RESILIENCE_NODE_GROUP": groups[place : place + 1]})
        yield it


def lose(it: Fleet, place: int) -> Job:
    """Kill a node: launcher, saver and ranks at once, and with them their memory. Another one takes its place."""
    node = it.nodes[place]
    kill(*node.family())
    it.nodes.pop(place)
    it.add(env={"GROUP_RANK": str(place)})
    it.nodes.insert(place, it.nodes.pop())
    return node


def end(it: Fleet) -> None:
    assert [node.wait() for node in it.nodes] == [0] * len(it.nodes), it.logs()
    for node in it.nodes:
        node.assert_nothing_left()


def noted(what: str, *nodes: Job) -> list[tuple[int, int]]:
    """The ranks and steps of such notes."""
    found = [(rank, note[1]) for node in nodes for rank in range(6) for note in node.notes(rank) if len(note) == 4]
    return [(rank, int(text[len(what) :])) for rank, text in found if text.startswith(what)]


def await_replicated(it: Fleet, number: int = 2) -> None:
    """Wait until every rank has heard of some replicated steps."""
    wait_for(
        lambda: min((len(set(noted("replicated-", node))) for node in it.nodes), default=0) >= number,
        "snapshots to be replicated",
    )


def check(it: Fleet, lost: Job, ranks: int) -> int:
    """All ranks went on from one step that is no older than what was said to be replicated, and it was right."""
    restored = noted("restored-", *it.nodes)
    assert {rank for rank, _ in restored} == set(range(ranks)), it.logs()
    steps = {step for _, step in restored}
    assert len(steps) == 1, it.logs()
    (step,) = steps
    assert step >= max(known for _, known in noted("replicated-", lost)), it.logs()
    assert not noted("BAD-", *it.nodes), it.logs()
    return step


def kept_files(node: Job) -> list[str]:
    """What a node's saver keeps for others, as files: the memory that no rank and no launcher has."""

    def slots(pid: int) -> dict[int, str]:
        found = {}
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if "resilience-slot" in str(entry.readlink()):
                    found[entry.stat().st_ino] = str(entry)
            except OSError:
                continue
        return found

    saver = saver_of(node)
    others = {inode for pid in node.family() if pid != saver for inode in slots(pid)}
    return [path for inode, path in slots(saver).items() if inode not in others]


def test_node_that_is_lost_gets_its_state_back_from_a_peer_and_all_go_on(tmp_path: Path) -> None:
    with nodes(tmp_path, 2, [SNAPSHOTS, str(tmp_path / "ck"), "20", "64"], UNTIL_LOST="1") as it:
        await_replicated(it)
        lost = lose(it, 1)
        end(it)
        step = check(it, lost, 2)
        assert "was fetched from other nodes' memory" in it.nodes[1].log()
        assert "go to the node with rank 1 (127.0.0.1), through lo (127.0.0.1), no limit" in it.nodes[0].log()
        (item,) = Directory(tmp_path / "ck").stored()
        assert item.manifest.step == step + 20, "nothing was on disk before"


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(0, marks=pytest.mark.long),
        pytest.param(1, marks=pytest.mark.rare),
        pytest.param(2, marks=pytest.mark.rare),
    ],
)
def test_any_of_three_nodes_with_two_ranks_each_can_be_lost(tmp_path: Path, place: int) -> None:
    """That of rank 0 too, which is the chair's. Two of them are of one group, and keep no copies for each other."""
    script = [SNAPSHOTS, str(tmp_path / "ck"), "20", "256"]
    with nodes(tmp_path, 3, script, ranks=2, groups="aab", UNTIL_LOST="1") as it:
        await_replicated(it)
        for name, keeper, node in zip((0, 2, 4), (4, 4, 2), it.nodes, strict=True):
            assert f"here (node with rank {name}) go to the node with rank {keeper} " in node.log()
        lost = lose(it, place)
        end(it)
        check(it, lost, 6)
        assert "was fetched from other nodes' memory" in it.nodes[place].log()


@pytest.mark.rare
def test_nodes_that_are_lost_one_after_the_other_are_each_given_back_what_they_had(tmp_path: Path) -> None:
    with nodes(tmp_path, 3, [SNAPSHOTS, str(tmp_path / "ck"), "300", "64"]) as it:
        for place in (2, 0):
            seen = {node: len(noted("replicated-", node)) for node in it.nodes}
            wait_for(
                lambda seen=seen: all(len(noted("replicated-", node)) > seen[node] + 3 for node in it.nodes),  # type: ignore[misc]
                "snapshots to be replicated",
            )
            lose(it, place)
            wait_for(
                lambda place=place: noted("restored-", it.nodes[place]),  # type: ignore[misc]
                f"the node to be back\n{it.logs()}",
            )
        end(it)
        assert not noted("BAD-", *it.nodes)
        for place in (2, 0):
            assert "was fetched from other nodes' memory" in it.nodes[place].log()


@pytest.mark.rare
@pytest.mark.parametrize("rank", [0, 1])
def test_new_node_takes_the_place_of_the_lost_one_also_where_nobody_gives_ranks(tmp_path: Path, rank: int) -> None:
    options = [*OPTIONS, "--nproc-per-node=1"]
    script = [SNAPSHOTS, str(tmp_path / "ck"), "20", "64"]
    with serving() as port, Fleet(tmp_path, "3", options, script, port=port) as it:
        it.env = {"REPLICAS": "1", "DISK_EVERY": NEVER, "DT": "0.02", "UNTIL_LOST": "1"}
        for _ in range(3):
            it.add()
        await_replicated(it)
        lost = next(node for node in it.nodes if noted("step-", node)[0][0] == rank)
        kill(*lost.family())
        it.nodes.remove(lost)
        newcomer = it.add()
        end(it)
        check(it, lost, 3)
        assert {known for known, _ in noted("step-", newcomer)} == {rank}, it.logs()


@pytest.mark.long
def test_job_that_lost_everything_begins_afresh_and_says_what_is_gone(tmp_path: Path) -> None:
    script = [SNAPSHOTS, str(tmp_path / "ck"), "20", "64"]
    with nodes(tmp_path, 2, script, REPLICAS="0", UNTIL_LOST="1") as it:
        for node in it.nodes:
            node.await_steps(0, 5)
        wait_for(lambda: noted("complete-", *it.nodes), "a snapshot to be complete")
        lose(it, 1)
        end(it)
        assert "was complete, and is lost with the memory of nodes that are gone" in it.nodes[0].log()


@pytest.mark.long
def test_ddp_with_a_lost_node_ends_bit_for_bit_like_one_without(
    tmp_path: Path,
    undisturbed: dict[int, str],  # noqa: F811
) -> None:
    """Weights, optimizer, schedule, loader and random numbers; the model itself was not sent, for both nodes have it."""
    with nodes(tmp_path, 2, [DDP, str(tmp_path / "ck"), "24", "node", "1", "13"]) as it:
        wait_for((it.nodes[1].progress / "ready").exists, lambda: f"step 13 to be replicated\n{it.logs()}")
        lose(it, 1)
        end(it)
        assert "the job goes on from step 13 (memory)" in it.logs()
        assert finals(it) == undisturbed


@pytest.mark.long
def test_copy_that_was_damaged_in_memory_is_refused_and_the_job_goes_on_from_disk(tmp_path: Path) -> None:
    script = [SNAPSHOTS, str(tmp_path / "ck"), "20", "64"]
    with nodes(tmp_path, 2, script, DISK_EVERY="5", DISK_UNTIL="50", UNTIL_LOST="1") as it:
        wait_for(lambda: noted("durable-", *it.nodes), "something to be durable")
        # The disk must not be as new as the copies, or nobody would look at them.
        wait_for(
            lambda: all(max(noted("replicated-", node), default=(0, 0))[1] > 50 for node in it.nodes),
            lambda: f"copies that are newer than the disk\n{it.logs()}",
        )
        keeper = it.nodes[0]
        kill(*it.nodes[1].family())
        paths = kept_files(keeper)
        assert paths
        for path in paths:
            with open(path, "r+b") as file:
                for at in range(0, os.fstat(file.fileno()).st_size, 4096):
                    file.seek(at + 100)
                    byte = file.read(1)
                    file.seek(at + 100)
                    file.write(bytes([byte[0] ^ 1]))
        it.nodes.pop(1)
        it.add(env={"GROUP_RANK": "1"})
        end(it)
        assert "can't be used: rank 1: rank 1's copy of step" in it.logs()
        assert "the digest is wrong" in it.logs()
        assert "(disk)" in it.logs()
        assert not noted("BAD-", *it.nodes)


@pytest.mark.rare
def test_saver_that_is_killed_while_it_receives_costs_nothing_and_copies_are_made_again(tmp_path: Path) -> None:
    script = [SNAPSHOTS, str(tmp_path / "ck"), "400", "8192"]  # 2 MiB of each rank's own: a second each
    with nodes(tmp_path, 2, script, BANDWIDTH="2MB/s", DT="0.05", LOCKSTEP="1") as it:
        await_replicated(it, 1)
        assert "through lo (127.0.0.1), 0.002 GB/s at most" in it.logs()
        kill(saver_of(it.nodes[1]))
        after = max(step for _, step in noted("step-", *it.nodes))
        wait_for(
            lambda: all(max(step for _, step in noted("replicated-", node)) > after for node in it.nodes),
            f"a later step to be replicated\n{it.logs()}",
        )
        lost = lose(it, 0)
        end(it)
        assert not noted("BAD-", *it.nodes)
        assert max(step for _, step in noted("replicated-", lost)) > after
        assert "was fetched from other nodes' memory" in it.nodes[0].log()


@pytest.mark.rare
def test_without_copies_a_lost_node_takes_what_was_only_in_memory_with_it(tmp_path: Path) -> None:
    """So that the tests above show something."""
    script = [SNAPSHOTS, str(tmp_path / "ck"), "20", "64"]
    with nodes(tmp_path, 2, script, REPLICAS="0", UNTIL_LOST="1") as it:
        wait_for(lambda: len(noted("complete-", *it.nodes)) > 10, "snapshots to be complete")
        lose(it, 1)
        end(it)
        assert {note[1] for node in it.nodes for rank in range(2) for note in node.notes(rank)} >= {"fresh"}
        assert not noted("restored-", *it.nodes)
