"""Finding a saver: one for each job and directory, whatever bytes are in their names."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from resilience.checkpoint import hire
from tests.checkpoint.conftest import savers
from tests.jobs import wait_for


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where savers listen; none is started."""
    monkeypatch.setattr(hire, "private_folder", lambda: tmp_path)
    monkeypatch.setattr(hire, "start", lambda path: None)
    return tmp_path


def test_directory_whose_name_is_no_text_has_a_saver_of_its_own(places: Path) -> None:
    names = [os.fsdecode(b"/data/" + raw) for raw in (b"x\xff", b"x\xfe", b"x?", "xä".encode())]
    found = [hire.find_or_start("job", name) for name in names]
    assert len(set(found)) == len(names)
    assert found == [hire.find_or_start("job", name) for name in names]
    assert hire.find_or_start(os.fsdecode(b"job\xff"), "/data/x") != hire.find_or_start("job", "/data/x")


def test_folder_of_sockets_goes_with_the_last_saver_and_comes_again(saver_home: Path) -> None:
    first, second = (Path(hire.find_or_start(job, "/data/x")) for job in ("first", "second"))
    folder = first.parent
    assert folder.parent == saver_home
    assert {*folder.iterdir()} == {first, second}
    (pid,) = [pid for pid in savers(saver_home) if first.name in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: savers(saver_home) != [] and pid not in savers(saver_home), "the first to end", 30)
    assert [*folder.iterdir()] == [second]
    (other,) = savers(saver_home)
    os.kill(other, signal.SIGTERM)
    wait_for(lambda: not savers(saver_home), "the other one to end", 30)
    assert not folder.exists()
    assert Path(hire.find_or_start("first", "/data/x")).is_socket()


def test_folder_that_is_taken_away_under_ones_hands_is_made_anew(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = iter([places / "gone", places])
    monkeypatch.setattr(hire, "private_folder", lambda: next(there))
    assert Path(hire.find_or_start("job", "/data/x")).parent == places
