"""Why a launcher ended is told from what it left, and nothing is told that was about something else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from resilience.integrations.ray.cause import cause, run_folder

NOWHERE = Path("/nonexistent/error.json")


def report(folder: Path, cycle: int, action: str = "stop", at: float = 1000.0, **culprit: Any) -> None:
    (folder / "cycles").mkdir(exist_ok=True)
    path = folder / "cycles" / f"{cycle}.json"
    path.write_text(json.dumps({"cycle": cycle, "action": action, "culprit": culprit or None}))
    os.utime(path, (at, at))


def test_newest_report_names_the_rank_and_its_error_in_one_line(tmp_path: Path) -> None:
    report(tmp_path, 0, at=1000, rank=0, message="ValueError: first")
    report(tmp_path, 10, at=1020, rank=3, message="ValueError: bad\n  batch" + "x" * 2000)
    said = cause(tmp_path, 1000, NOWHERE)
    assert said.startswith("rank 3: ValueError: bad batchxxx")
    assert said.endswith(f"…; reports and logs of that node: {tmp_path}")
    assert len(said.splitlines()) == 1


def test_report_of_a_check_that_failed_names_no_rank(tmp_path: Path) -> None:
    report(tmp_path, 0, kind="check", rank=None, message="faulty, the GEMM")
    assert cause(tmp_path, 1000, NOWHERE).startswith("faulty, the GEMM; ")


def test_failure_that_was_survived_is_not_the_cause_of_the_end(tmp_path: Path) -> None:
    report(tmp_path, 0, action="restart", rank=0, message="ValueError: survived")
    assert "ValueError" not in cause(tmp_path, 1000, NOWHERE)


def test_report_of_an_earlier_launch_is_not_the_cause_of_the_end(tmp_path: Path) -> None:
    report(tmp_path, 0, at=900, rank=0, message="ValueError: yesterday")
    assert "yesterday" not in cause(tmp_path, 1000, NOWHERE)


def test_report_without_a_culprit_or_half_written_tells_only_where(tmp_path: Path) -> None:
    report(tmp_path, 0)
    assert cause(tmp_path, 1000, NOWHERE) == f"reports and logs of that node: {tmp_path}"
    (tmp_path / "cycles" / "1.json").write_text('{"cycle": 1, ')
    assert cause(tmp_path, 1000, NOWHERE) == f"reports and logs of that node: {tmp_path}"


def test_run_folder_that_can_not_be_looked_into_hides_no_cause(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "File name too long"}}))
    assert cause(tmp_path / ("a" * 300), 1000, path) == "File name too long"


def test_launcher_that_never_got_so_far_is_known_by_its_error_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "the folder can't be made"}}))
    assert cause(None, 1000, path) == "the folder can't be made"
    path.write_text("[]")
    assert cause(None, 1000, path) == ""


def test_run_folder_is_the_one_it_was_told_or_the_one_with_its_process_id(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    assert run_folder(["--ft-run-dir=runs/x", "a.py"], state, "/code", 7) == Path("/code/runs/x")
    assert run_folder(["a.py"], state, None, 7) is None
    mine, other = tmp_path / "resilience/runs/20260101-000000-x-7", tmp_path / "resilience/runs/20260101-000000-x-77"
    mine.mkdir(parents=True)
    other.mkdir()
    assert run_folder(["a.py"], state, None, 7) == mine


def test_folders_of_others_below_the_folder_for_temporary_files_are_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    run = tmp_path / "resilience-runs-1" / "20260101-000000-x-7"
    run.mkdir(parents=True)
    assert run_folder(["a.py"], state, None, 7) == run
    if os.getuid() == 0:
        os.chown(run, 12345, -1)
        assert run_folder(["a.py"], state, None, 7) is None
        os.chown(run, 0, -1)
        os.chown(run.parent, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert run_folder(["a.py"], state, None, 7) is None


def test_link_to_a_folder_of_ours_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "real" / "x-7").mkdir(parents=True)
    (tmp_path / "resilience-runs-1").symlink_to(tmp_path / "real")
    assert run_folder(["a.py"], {"XDG_STATE_HOME": str(tmp_path / "state")}, None, 7) is None


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "link", "endless"])
def test_what_is_no_file_is_not_read_and_nobody_waits_for_it(tmp_path: Path, kind: str) -> None:
    report(tmp_path, 0, at=1000, rank=0, message="ValueError: the real one")
    odd, error_file = tmp_path / "cycles" / "1.json", tmp_path / "error.json"
    for path in (odd, error_file):
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to("/dev/zero")
        else:
            with path.open("wb") as file:
                file.truncate(2**40)
    if kind == "endless":
        assert cause(tmp_path, 1000, error_file) == f"reports and logs of that node: {tmp_path}"
    else:
        assert cause(tmp_path, 1000, error_file).startswith("rank 0: ValueError: the real one; ")


def test_culprit_on_another_node_is_told_with_that_node_and_its_folder(tmp_path: Path) -> None:
    log = "/shared/runs/node-0/logs/cycle_0/rank_0/stderr.log"
    report(tmp_path, 0, rank=0, host="gpu-07 (abcd)", message="ValueError: bad", log_path=log)
    mine, theirs = cause(tmp_path, 1000, NOWHERE, "abcd"), cause(tmp_path, 1000, NOWHERE, "ef01")
    assert mine == f"rank 0: ValueError: bad; reports and logs of that node: {tmp_path}"
    assert theirs == "rank 0 on gpu-07 (abcd): ValueError: bad; reports and logs of that node: /shared/runs/node-0"
    report(tmp_path, 0, rank=0, host="gpu-07 (abcd)", message="ValueError: bad", log_path="/logs/0.log")
    assert cause(tmp_path, 1000, NOWHERE, "ef01") == "rank 0 on gpu-07 (abcd): ValueError: bad"
