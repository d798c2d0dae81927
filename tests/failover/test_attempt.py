"""Others' code in a process of its own: heard to its end, ended in time, and never killed by a number that is another's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from resilience.failover.attempt import Attempt
from tests.jobs import alive, wait_for

pytestmark = pytest.mark.spawns


def test_it_is_told_and_heard() -> None:
    code = "import sys; print(sys.stdin.read()[::-1], file=sys.stderr); sys.exit(7)"
    assert Attempt([sys.executable, "-c", code]).run(b"abc", 60) == (7, "cba\n")


def test_of_what_it_says_the_end_is_kept() -> None:
    code = "import sys; sys.stderr.write('x' * 2_000_000 + 'the end')"
    code_, said = Attempt([sys.executable, "-c", code]).run(b"", 60)
    assert (code_, said.endswith("xthe end"), len(said) < 1_100_000) == (0, True, True)


def test_whoever_does_not_start_says_why() -> None:
    with pytest.raises(FileNotFoundError):
        Attempt(["/there/is/none"]).run(b"", 60)


@pytest.mark.parametrize("how", ["its time is up", "it is cut short"])
def test_it_is_ended_with_what_it_started(tmp_path: Path, how: str) -> None:
    late = how == "its time is up"
    it, ends = Attempt(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/child; wait"]), []
    timeout = 1.0 if late else 60.0
    thread = threading.Thread(target=lambda: ends.append(it.run(b"", timeout)))
    thread.start()
    wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip(), "its child", 30)
    if not late:
        it.cut_short()
    thread.join(30)
    assert ends == [(None if late else -9, "")]
    wait_for(lambda: not alive(int((tmp_path / "child").read_text())), "the end of its child", 10)


def test_nobody_is_killed_by_the_number_of_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Attempt(["true"])
    it.run(b"", 60)
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    it.cut_short()
    assert killed == []


def test_what_stays_in_the_background_holds_nobody_up(tmp_path: Path) -> None:
    it = Attempt(["sh", "-c", f"setsid sleep 60 & echo $! > {tmp_path}/child"])
    try:
        assert it.run(b"", 30) == (0, "")
    finally:
        subprocess.run(["kill", (tmp_path / "child").read_text().strip()], check=True)
