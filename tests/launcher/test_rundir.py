from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilience.errors import ConfigError
from resilience.launcher import rundir


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "resilience" / "runs"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short: a socket's path has at most 107 bytes
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def scratch_like(parent: Path, name: str, owner: str | None) -> Path:
    path = parent / f"resilience-{os.getuid()}-{name}"
    path.mkdir()
    (path / "socket").touch()
    if owner is not None:
        (path / "owner").write_text(owner)
    return path


def test_run_directory_lies_below_the_state_folder_and_is_named_by_the_run(state: Path) -> None:
    path = rundir.make_run_dir(None, "my job/7")
    assert path.parent == state
    assert "my-job-7" in path.name
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("number", "at_fault"),
    [(errno.ENOSPC, True), (errno.EROFS, True), (errno.EDQUOT, True), (errno.EIO, True), (errno.ENOTDIR, False)],
)
def test_disk_that_is_at_fault_is_told_from_a_path_that_can_not_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, at_fault: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match="can't be made") as refused:
        rundir.make_run_dir(str(tmp_path / "run"), "x")
    assert isinstance(refused.value, rundir.DiskFault) == at_fault


def test_given_run_directory_is_used_as_it_is(tmp_path: Path, state: Path) -> None:
    wanted = tmp_path / "deep" / "er"
    assert rundir.make_run_dir(str(wanted), "x") == wanted
    assert wanted.is_dir()
    assert rundir.make_run_dir(str(wanted), "x") == wanted


def test_run_directory_that_can_not_be_made_says_so_and_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Nothing was started. Give another with --ft-run-dir"):
        rundir.make_run_dir(str(tmp_path / "file" / "run"), "x")


def test_unwritable_state_folder_falls_back_to_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert rundir.make_run_dir(None, "x").parent == tmp_path / f"resilience-runs-{os.getuid()}"


def test_newest_fifty_runs_are_kept_and_those_that_are_still_written_to(state: Path) -> None:
    long_ago = time.time() - 48 * 3600
    for number in range(60):
        run = state / f"20200101-0000{number:02}-job-1"
        run.mkdir(parents=True)
        (run / "log").touch()
        if number != 3:
            os.utime(run / "log", (long_ago, long_ago))
    mine = rundir.make_run_dir(None, "job")
    left = sorted(path.name for path in state.iterdir())
    assert left[0] == "20200101-000003-job-1"
    assert left[1] == "20200101-000011-job-1"
    assert left[-1] == mine.name
    assert len(left) == rundir.KEPT_RUNS + 1 == 51


def test_given_run_directory_removes_nothing(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"run-{number}").mkdir()
    rundir.make_run_dir(str(tmp_path / "mine"), "job")
    assert len(list(tmp_path.iterdir())) == 61


def test_scratch_is_private_and_is_taken_away(runtime: Path) -> None:
    scratch = rundir.Scratch()
    assert scratch.path.parent == runtime
    assert stat.S_IMODE(scratch.path.stat().st_mode) == 0o700
    scratch.remove()
    assert list(runtime.iterdir()) == []
    scratch.remove()  # twice does no harm


def test_scratch_of_a_live_launcher_is_left_alone(runtime: Path) -> None:
    first, second = rundir.Scratch(), rundir.Scratch()
    assert first.path.is_dir()
    assert second.path.is_dir()
    first.remove()
    second.remove()


@pytest.mark.spawns
def test_scratch_of_a_dead_launcher_is_swept(runtime: Path) -> None:
    code = "import os; from resilience.launcher.rundir import Scratch; print(Scratch().path, flush=True); os._exit(9)"
    died = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    left = Path(died.stdout.strip())
    assert left.is_dir()
    rundir.Scratch().remove()
    assert not left.exists()


def test_scratch_without_an_owner_is_swept_only_when_it_is_old(runtime: Path) -> None:
    fresh = scratch_like(runtime, "fresh", None)
    old = scratch_like(runtime, "old", None)
    os.utime(old, (time.time() - 120, time.time() - 120))
    rundir.Scratch().remove()
    assert fresh.exists()
    assert not old.exists()


@pytest.mark.parametrize("owner", ["", "7", "not a pid at all", "not numbers", "-1 5"])
def test_scratch_whose_owner_is_nonsense_does_not_stop_the_launcher(runtime: Path, owner: str) -> None:
    scratch_like(runtime, "odd", owner)
    rundir.Scratch().remove()


def test_scratch_that_another_launcher_has_just_swept_does_not_stop_this_one(runtime: Path) -> None:
    # Listed, and not there when it is looked at.
    (runtime / f"resilience-{os.getuid()}-gone").symlink_to(runtime / "nowhere")
    rundir.Scratch().remove()


def test_directories_of_others_are_left_alone(runtime: Path) -> None:
    other = runtime / f"resilience-{os.getuid() + 1}-x"
    other.mkdir()
    (runtime / "resilience").mkdir()
    rundir.Scratch().remove()
    assert other.exists()
    assert (runtime / "resilience").exists()


def test_link_to_somewhere_else_is_not_followed(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "owner").touch()
    (runtime / f"resilience-{os.getuid()}-link").symlink_to(tmp_path / "precious")
    rundir.Scratch().remove()
    assert (tmp_path / "precious" / "owner").exists()


def test_folder_with_a_long_name_is_not_used_for_a_socket(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = runtime / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    scratch = rundir.Scratch()
    assert len(os.fsencode(scratch.path / "socket")) <= 107
    assert scratch.path.parent != long
    scratch.remove()


@pytest.mark.spawns
@pytest.mark.root
def test_scratch_of_a_live_launcher_in_another_container_is_left_alone(runtime: Path) -> None:
    """Two containers that share /tmp do not see each other's pids."""
    probe = subprocess.run(["unshare", "-p", "-f", "--mount-proc", "true"], check=False, capture_output=True)
    if probe.returncode:
        pytest.skip("needs root and pid namespaces: left out is a launcher in another container with the same /tmp")
    mine = rundir.Scratch()
    code = "from resilience.launcher.rundir import Scratch; Scratch().remove()"
    other = ["unshare", "-p", "-f", "--mount-proc", sys.executable, "-c", code]
    subprocess.run(other, check=True, timeout=60)
    assert mine.path.exists()
    mine.remove()


def test_directory_used_by_another_job_is_set_aside_and_never_overwritten(tmp_path: Path) -> None:
    first = rundir.make_run_dir(str(tmp_path), "job-1")
    kept = [first / name / "0.json" for name in ("cycles", "ends", "logs", "progress")]
    for path in kept:
        path.parent.mkdir()
        path.write_text("{}")
    assert rundir.make_run_dir(str(tmp_path), "job-1") == first  # another node of the same job
    assert all(path.exists() for path in kept)
    rundir.make_run_dir(str(tmp_path), "job-2")
    assert not any(path.parent.exists() for path in kept)
    aside = sorted(path.parent.name for path in (first / "earlier").rglob("*.json"))
    assert aside == ["cycles", "ends", "logs", "progress"]


def test_mark_that_is_not_written_yet_is_no_other_jobs(tmp_path: Path) -> None:
    """One launcher's truncated file, as another sees it."""
    (tmp_path / "job").touch()
    (tmp_path / "ends").mkdir()
    rundir.make_run_dir(str(tmp_path), "job-1")
    assert (tmp_path / "ends").is_dir()
    assert (tmp_path / "job").read_text() == "job-1"


def test_mark_is_never_seen_in_part_and_stays_as_it_is_when_it_fits(tmp_path: Path) -> None:
    rundir.make_run_dir(str(tmp_path), "job-1")
    with (tmp_path / "job").open() as seen:
        rundir.make_run_dir(str(tmp_path), "job-2")
        assert seen.read() == "job-1", "it was replaced, and not written over"
    before = (tmp_path / "job").stat()
    rundir.make_run_dir(str(tmp_path), "job-2")
    assert (tmp_path / "job").stat() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", "job"]


@pytest.mark.parametrize("when", ["before it moves", "while it moves"])
def test_launcher_that_comes_second_leaves_alone_what_the_first_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    rundir.make_run_dir(str(tmp_path), "job-1")
    for name in ("cycles", "ends", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").touch()
    act: Any = Path.mkdir if when == "before it moves" else Path.rename

    def held_up(self: Path, *given: Any, **more: Any) -> Any:
        if "earlier" in self.parts or when == "while it moves":
            monkeypatch.undo()
            rundir.make_run_dir(str(tmp_path), "job-2")  # the first
            (tmp_path / "ends").mkdir()
            (tmp_path / "ends" / "new").touch()
        return act(self, *given, **more)

    monkeypatch.setattr(Path, act.__name__, held_up)
    rundir.make_run_dir(str(tmp_path), "job-2")
    assert [path.name for path in (tmp_path / "ends").iterdir()] == ["new"]
    (aside,) = (tmp_path / "earlier").iterdir()
    assert sorted(str(path.relative_to(aside)) for path in aside.rglob("old")) == ["cycles/old", "ends/old", "logs/old"]


def test_directory_that_nothing_was_written_to_is_taken_away_and_no_other(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    for folder in (empty, full):
        folder.mkdir()
    (full / "job").write_text("mine")
    for folder in (empty, full, tmp_path / "never"):
        rundir.drop_unused(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
