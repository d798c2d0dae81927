"""Another number of nodes in the middle of a job: snapshots go on being taken and found, whoever has which rank now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.checkpoint.stores.local import Directory
from tests.faults.test_checkpoint_nodes import end, kill
from tests.faults.test_replicas import NEVER, OPTIONS, SNAPSHOTS, await_replicated, noted
from tests.faults.test_store import serving
from tests.jobs import Fleet, Job, wait_for

pytestmark = pytest.mark.spawns


@contextmanager
def job(folder: Path, steps: int, *, together: int = 0, **env: str) -> Iterator[Fleet]:
    """A job of one node or two, with nothing that belongs to single ranks, and a store that none of them keeps. It goes on until
    a node comes or goes, and then so many ``steps`` more."""
    script = [SNAPSHOTS, str(folder / "ck"), str(steps)]
    with serving() as port, Fleet(folder, "1:2", OPTIONS, script, port=port, together=together) as it:
        it.env = {"ELASTIC": "1", "DT": "0.04", **env}
        yield it


def restored(it: Fleet) -> dict[int, int]:
    """By rank: the step that it last went on from."""
    return dict(noted("restored-", *it.nodes))


@pytest.mark.long
def test_rank_0_that_moves_to_a_new_node_has_the_directory_from_the_old_one(tmp_path: Path) -> None:
    with job(tmp_path, 20) as it:
        it.add(env={"GROUP_RANK": "1"}).await_steps(0)
        it.add(env={"GROUP_RANK": "0"})
        end(it)
        assert {rank for rank, _ in noted("step-", it.nodes[1])} == {0}, it.logs()
        assert restored(it).keys() == {0, 1}, it.logs()
        assert not noted("BAD-", *it.nodes), it.logs()
        newest = Directory(tmp_path / "ck").stored()[0].manifest
        assert (newest.step, newest.world) == (restored(it)[0] + 20, 2)


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.rare)])
def test_node_that_is_left_goes_on_from_its_memory_where_all_of_it_is_there(tmp_path: Path, lost: int) -> None:
    """What DDP's ranks have in common is whole on every node; nothing was ever on disk."""
    with job(tmp_path, 20, together=2, DISK_EVERY=NEVER) as it:
        for place in range(2):
            it.add(env={"GROUP_RANK": str(place)})
        for node in it.nodes:
            node.await_steps(0, 10)
        wait_for(lambda: noted("complete-", *it.nodes), "a snapshot to be complete")
        gone = it.nodes.pop(lost)
        done = max(step for _, step in noted("complete-", gone, *it.nodes))
        kill(*gone.family())
        end(it)
        (step,) = restored(it).values()
        assert step >= done, it.logs()
        assert f"the job goes on from step {step} (memory)" in it.nodes[0].log()
        assert not noted("BAD-", *it.nodes), it.logs()
        (last,) = Directory(tmp_path / "ck").stored()
        assert (last.manifest.step, last.manifest.world) == (step + 20, 1)


@pytest.mark.long
@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.rare), 1])
def test_shards_of_a_lost_node_are_found_in_the_copies_that_are_here(tmp_path: Path, lost: int) -> None:
    with job(tmp_path, 20, together=2, MODE="fsdp2", REPLICAS="1", DISK_EVERY=NEVER) as it:
        for place in range(2):
            it.add(env={"GROUP_RANK": str(place)})
        await_replicated(it)
        gone = it.nodes.pop(lost)
        done = max(step for _, step in noted("replicated-", gone))
        kill(*gone.family())
        end(it)
        (step,) = restored(it).values()
        assert step >= done, it.logs()
        assert not noted("BAD-", *it.nodes), it.logs()


@pytest.mark.rare
def test_memory_of_ranks_that_live_elsewhere_now_is_given_back(tmp_path: Path) -> None:
    with job(tmp_path, 60) as it:
        first = it.add(env={"GROUP_RANK": "1"})
        first.await_steps(0)
        alone = snapshot_memory(first)
        it.add(env={"GROUP_RANK": "0"}).await_steps(1, 10)
        assert noted("step-", first)[-1][0] == 1, it.logs()
        wait_for(lambda: snapshot_memory(first) == alone, "rank 0's memory to be given back")
        end(it)


def snapshot_memory(node: Job) -> int:
    """How many pieces of snapshot memory a node's processes hold."""
    found = set()
    for pid in [node.pid, *node.family()]:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if "resilience-slot" in str(entry.readlink()):
                    found.add(entry.stat().st_ino)
            except OSError:
                continue
    return len(found)


@pytest.mark.parametrize("place", ["0", "1"])
@pytest.mark.rare
def test_copies_are_made_as_soon_as_a_second_node_comes(tmp_path: Path, place: str) -> None:
    with job(tmp_path, 150, REPLICAS="1") as it:
        it.add(env={"GROUP_RANK": "1" if place == "0" else "0"}).await_steps(0)
        it.add(env={"GROUP_RANK": place})
        end(it)
        assert {rank for rank, _ in noted("replicated-", *it.nodes)} == {0, 1}, it.logs()


@pytest.mark.rare
def test_write_that_a_lost_node_was_part_of_does_not_fail_those_that_went_on(tmp_path: Path) -> None:
    """Not when it is given up either, which is a while later."""
    with job(tmp_path, 500, together=2, DISK_EVERY=NEVER, DT="0.05") as it:
        for place in range(2):
            it.add(env={"GROUP_RANK": str(place)})
        for node in it.nodes:
            node.await_steps(0, 10)
        gone = it.nodes.pop(1)
        kill(*gone.family())
        end(it)
        assert "The job has gone on without it." in it.nodes[0].log()
        assert it.nodes[0].log().count("failed ====") == 1
