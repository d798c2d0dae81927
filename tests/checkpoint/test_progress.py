"""What a person sees of something long."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
import torch

from resilience.checkpoint import progress
from resilience.checkpoint.flash import FlashCheckpoint


class Screen(io.StringIO):
    """A stream that says what it is."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_bar_is_as_full_as_it_should_be_and_never_more() -> None:
    assert progress.bar("reading", 0.5, 3.2) == f"reading [{'#' * 15}{'.' * 15}]  50% 3 s"
    assert progress.bar("reading", 7.0, 0) == f"reading [{'#' * 30}] 100% 0 s"
    assert "  0%" in progress.bar("reading", -1.0, 0)


def test_terminal_is_shown_a_bar_and_a_pipe_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    terminal, pipe = Screen(True), Screen(False)
    monkeypatch.setattr("sys.stderr", terminal)
    with progress.shown("writing step 3", lambda: 0.25):
        assert terminal.written.wait(30)
    assert "writing step 3 [#" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")
    monkeypatch.setattr("sys.stderr", pipe)
    with progress.shown("writing step 3", lambda: 0.25):
        assert not [thread for thread in threading.enumerate() if thread.name == "resilience-progress"]
    assert pipe.getvalue() == ""


def test_what_is_quick_and_what_other_ranks_do_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Screen(True)
    monkeypatch.setattr("sys.stderr", terminal)
    with progress.shown("quick", lambda: 0.0):
        pass
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    with progress.shown("rank 1", lambda: 0.0, shows=False):
        pass
    assert terminal.getvalue() == ""


@pytest.mark.spawns
def test_person_who_waits_for_a_restore_sees_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FlashCheckpoint(tmp_path) as checkpoint:
        checkpoint.save_state(3, {"weight": torch.arange(1 << 20)})
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "_EVERY_S", 0.001)
    terminal = Screen(True)
    monkeypatch.setattr("sys.stderr", terminal)
    with FlashCheckpoint(tmp_path) as checkpoint:
        assert int(checkpoint.load_state()["weight"][-1]) == (1 << 20) - 1
    shown = [line for line in terminal.getvalue().split("\r\x1b[K") if "restoring" in line]
    assert shown[-1].startswith(f"restoring step 3 from disk [{'#' * 30}] 100%")
