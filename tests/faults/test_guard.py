"""One rank's bad batch takes all ranks back; training ends as if it had never been there, whoever is killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.checkpoint.stores.local import Directory
from tests.jobs import WORKLOADS, Job, job

pytestmark = pytest.mark.spawns
TWO = ["--nproc-per-node=2", "--max-restarts=2"]
SCRIPT = str(WORKLOADS / "guarded.py")


def finals(it: Job) -> list[str]:
    return [(it.progress / f"final_{rank}").read_text() for rank in range(2)]


def rollbacks(it: Job) -> list[list[str]]:
    return [(it.progress / f"went_{rank}").read_text().split() for rank in range(2)]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """How the training ends when batch 13 never was there."""
    folder = tmp_path_factory.mktemp("without")
    with job(folder, TWO, [SCRIPT, str(folder / "ck"), "24", "without 13"]) as it:
        assert it.wait() == 0, it.log()
        return finals(it)


@pytest.mark.parametrize(
    ("bad", "mode"),
    [
        pytest.param("nan 1 13", "blocking", marks=pytest.mark.rare),
        pytest.param("spike 0 13", "overlap", marks=pytest.mark.rare),
        pytest.param("nan 1 13", "overlap", marks=pytest.mark.rare),
        pytest.param("spike 0 13", "blocking", marks=pytest.mark.rare),
    ],
)
def test_bad_batch_of_one_rank_is_undone_on_both_bit_for_bit(
    tmp_path: Path, without: list[str], bad: str, mode: str
) -> None:
    with job(tmp_path, TWO, [SCRIPT, str(tmp_path / "ck"), "24", bad], {"MODE": mode}) as it:
        assert it.wait() == 0, it.log()
        assert rollbacks(it) == [["13-13"]] * 2
        assert finals(it) == without
        assert f"step 13, batch 13 (rank {bad.split()[1]}: loss " in it.log()
        assert "All ranks are back at step 12; batch 13 is left out" in it.log()
        it.assert_nothing_left()


@pytest.mark.parametrize(
    ("when", "mode"), [("during", "overlap"), pytest.param("after", "blocking", marks=pytest.mark.rare)]
)
@pytest.mark.long
def test_rank_that_is_killed_in_a_rollback_is_restarted_and_all_is_undone_once_more(
    tmp_path: Path, without: list[str], when: str, mode: str
) -> None:
    script = [SCRIPT, str(tmp_path / "ck"), "24", "nan 1 13"]
    with job(tmp_path, TWO, script, {"KILL": when, "MODE": mode}) as it:
        assert it.wait() == 0, it.log()
        assert it.report(0)["culprit"]["rank"] == 1
        assert "the job goes on from step 12 (memory)" in it.log()
        assert "step 13, batch 13 (rank 1: loss nan) is bad" in it.log()
        assert "All ranks are back at step 12; batch 13 is left out" in it.log()
        assert rollbacks(it)[0][-1] == "13-13"
        assert finals(it) == without
        it.assert_nothing_left()


@pytest.mark.long
def test_bad_batch_right_after_a_restart_from_disk_is_undone_too(tmp_path: Path, without: list[str]) -> None:
    with job(tmp_path / "a", TWO, [SCRIPT, str(tmp_path / "ck"), "13", "nan 1 13"]) as it:
        assert it.wait() == 0, it.log()
    assert [item.manifest.step for item in Directory(tmp_path / "ck").stored()] == [12]
    with job(tmp_path / "b", TWO, [SCRIPT, str(tmp_path / "ck"), "24", "nan 1 13"]) as it:
        assert it.wait() == 0, it.log()
        assert "the job goes on from step 12 (disk)" in it.log()
        assert rollbacks(it) == [["13-13"]] * 2
        assert finals(it) == without
