"""The harness of the fault tests: it leaves nothing behind, and clears up after one that could not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import jobs


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.spawns
def test_folders_of_a_test_process_that_was_killed_are_swept_and_no_others(place: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"job-{gone.pid}-a", f"job-{os.getpid()}-b", "job-c", "job-of-others"):
        (place / name).mkdir()
        (place / name / "socket").touch()
    jobs.sweep()
    assert {path.name for path in place.iterdir()} == {f"job-{os.getpid()}-b", "job-c", "job-of-others"}


@pytest.mark.spawns
def test_job_that_is_closed_at_once_leaves_neither_process_nor_folder(place: Path) -> None:
    with jobs.job(place / "it", ["--nproc-per-node=1"], jobs.train(1000)) as it:
        assert jobs.homes() == {it.tmp}
    assert not it.family()
    assert jobs.homes() == set()
