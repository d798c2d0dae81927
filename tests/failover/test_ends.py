"""How launchers ended, left for whoever starts the job again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.failover.ends import FOLDER, NodeEnd, read, reserve, write
from resilience.failover.error_monitor import of_code


def test_what_is_written_is_read_whatever_the_node_is_called(tmp_path: Path) -> None:
    told = (NodeEnd("../n 1", 201, of_code("../n 1", 201, run="7", at=1.0)), NodeEnd("n2", 0))
    for end in told:
        write(tmp_path, end)
    assert read(tmp_path) == tuple(sorted(told, key=lambda end: end.node))
    assert sorted(path.parent for path in tmp_path.rglob("*.json")) == [tmp_path / FOLDER] * 2


def test_later_word_of_a_node_replaces_the_earlier(tmp_path: Path) -> None:
    write(tmp_path, NodeEnd("n1", 1))
    write(tmp_path, NodeEnd("n1", 79))
    assert read(tmp_path) == (NodeEnd("n1", 79),)


@pytest.mark.parametrize("text", ["", "{", "[" * 100000, "[]", '{"node": 1, "code": 2}', '{"node": "n", "code": true}'])
def test_torn_or_foreign_files_are_left_out(tmp_path: Path, text: str) -> None:
    write(tmp_path, NodeEnd("n1", 0))
    (tmp_path / FOLDER / "n2.json").write_text(text)
    assert read(tmp_path) == (NodeEnd("n1", 0),)


def test_run_that_has_not_ended_has_none(tmp_path: Path) -> None:
    assert read(tmp_path) == ()


def test_launcher_that_has_reserved_its_word_has_not_ended(tmp_path: Path) -> None:
    write(tmp_path, NodeEnd("n1", 0))
    reserve(tmp_path, "n1")
    assert read(tmp_path) == (), "what an earlier launcher of this node said does not count any more"
    write(tmp_path, NodeEnd("n1", 79, of_code("n1", 201)))
    assert read(tmp_path) == (NodeEnd("n1", 79, of_code("n1", 201)),)
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["n1.json"]


def test_word_that_is_torn_is_left_out_wherever_the_tear_is(tmp_path: Path) -> None:
    reserve(tmp_path, "n1")
    path = tmp_path / FOLDER / "n1.json"
    before = path.read_bytes()
    write(tmp_path, NodeEnd("n1", 0, of_code("n1", 201)))
    after = path.read_bytes()
    assert len(after) == len(before)
    length = len(after.rstrip())
    for tear in range(length):
        for torn in (after[:tear] + before[tear:], before[:tear] + after[tear:]):
            path.write_bytes(torn)
            assert torn == after or read(tmp_path) == (), tear


def test_word_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine" * 1000)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "n1.json").symlink_to(tmp_path / "precious")
    (tmp_path / FOLDER / "n2.json").hardlink_to(tmp_path / "precious")
    for node in ("n1", "n2"):
        write(tmp_path, NodeEnd(node, 0))
    assert (tmp_path / "precious").read_text() == "mine" * 1000
    assert read(tmp_path) == (NodeEnd("n1", 0), NodeEnd("n2", 0))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system, which ``fill`` fills up."""
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], check=False, capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("not here: root that may mount. Left out is a disk that is full at the end")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


@pytest.mark.root
def test_disk_that_is_full_at_the_end_takes_the_word_that_was_reserved(full_disk: Path) -> None:
    reserve(full_disk, "n1")
    fill(full_disk)
    with pytest.raises(OSError, match="No space"):
        write(full_disk, NodeEnd("n2", 0))
    write(full_disk, NodeEnd("n1", 0))
    assert read(full_disk) == (NodeEnd("n1", 0),)
    assert [path.name for path in (full_disk / FOLDER).iterdir()] == ["n1.json"]


@pytest.mark.root
@pytest.mark.spawns
def test_launcher_that_finishes_on_a_full_disk_says_so(
    full_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(
        "import pathlib, sys\n"
        "try:\n"
        "    with open(sys.argv[1] + '/filler', 'wb', buffering=0) as file:\n"
        "        while True: file.write(b'x' * 4096)\n"
        "except OSError: pass\n"
    )
    command = [sys.executable, "-m", "resilience", "run", f"--ft-run-dir={full_disk}/run", "--ft-node-name=n1"]
    done = subprocess.run(
        [*command, str(script), str(full_disk)], capture_output=True, text=True, check=False, cwd=script.parent
    )
    assert done.returncode == 0, done.stderr
    assert read(full_disk / "run") == (NodeEnd("n1", 0),), done.stderr


_FULL = """
import errno, os, sys, tempfile
from resilience.__main__ import main

def refuse(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

tempfile.mkdtemp = refuse
sys.exit(main())
"""


@pytest.mark.spawns
@pytest.mark.parametrize(("flags", "code"), [(["--network-check"], 80), ([], 1)])
def test_node_whose_own_disk_is_full_leaves_word_for_the_others(tmp_path: Path, flags: list[str], code: int) -> None:
    command = [sys.executable, "-c", _FULL, "run", f"--ft-run-dir={tmp_path}/run", "--ft-node-name=n1"]
    done = subprocess.run([*command, *flags, "train.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    (end,) = read(tmp_path / "run")
    assert (end.node, end.code) == ("n1", 80), "it never trains, and another may"
    if flags:
        assert end.fault is not None
        assert "No space left" in end.fault.message
    else:
        assert end.fault is None, "nobody has asked for a check"


@pytest.mark.spawns
def test_word_is_left_only_where_others_look_for_it(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", _FULL, "run", "--ft-node-name=n1", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 1, done.stderr
    assert list(tmp_path.rglob("*.json")) == []
