"""Another number of nodes in the middle of a job: snapshots go on being taken and found, whoever has which rank now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.checkpoint.stores.local import Directory
from tests.faults.test_checkpoint_nodes import end
from tests.faults.test_replicas import OPTIONS, SNAPSHOTS, noted
from tests.faults.test_store import serving
from tests.jobs import Fleet

pytestmark = pytest.mark.spawns


@contextmanager
def job(folder: Path, steps: int, *, ranks: int = 1, **env: str) -> Iterator[Fleet]:
    """A job of one node or two, with nothing that belongs to single ranks, and a store that none of them keeps."""
    options = [*OPTIONS, f"--nproc-per-node={ranks}"]
    with serving() as port, Fleet(folder, "1:2", options, [SNAPSHOTS, str(folder / "ck"), str(steps)], port=port) as it:
        it.env = {"ELASTIC": "1", "DT": "0.04", **env}
        yield it


def restored(it: Fleet) -> dict[int, int]:
    """By rank: the step that it last went on from."""
    return dict(noted("restored-", *it.nodes))


def test_rank_0_that_moves_to_a_new_node_has_the_directory_from_the_old_one(tmp_path: Path) -> None:
    with job(tmp_path, 120) as it:
        it.add(env={"GROUP_RANK": "1"}).await_steps(0)
        it.add(env={"GROUP_RANK": "0"})
        end(it)
        assert {rank for rank, _ in noted("step-", it.nodes[1])} == {0}, it.logs()
        assert restored(it).keys() == {0, 1}, it.logs()
        assert not noted("BAD-", *it.nodes), it.logs()
        newest = Directory(tmp_path / "ck").stored()[0].manifest
        assert (newest.step, newest.world) == (119, 2)
