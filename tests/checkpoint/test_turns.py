"""One checkpoint per directory in a process: it is there once, ends once, and a forked process has no part in it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from resilience.checkpoint.turns import Stay
from resilience.errors import CheckpointError, ConfigError


class Checkpoint:
    """Stands in for the one that stays."""


def test_directory_is_taken_until_the_stay_is_over(tmp_path: Path) -> None:
    one, other = Checkpoint(), Checkpoint()
    stay = Stay(tmp_path, one)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="another FlashCheckpoint of this process is open on it"):
        Stay(tmp_path / "link", other)
    assert stay.end()
    assert Stay(tmp_path / "link", other).end()


def test_stay_that_was_dropped_without_an_end_is_in_nobodys_way(tmp_path: Path) -> None:
    stay = Stay(tmp_path, Checkpoint())
    del stay
    gc.collect()
    assert Stay(tmp_path, Checkpoint()).end()


def test_stay_ends_once_and_then_nothing_may_be_asked(tmp_path: Path) -> None:
    stay = Stay(tmp_path, Checkpoint())
    stay.check()
    assert stay.end()
    assert not stay.end()
    with pytest.raises(CheckpointError, match="is closed, or belongs to another process"):
        stay.check()


def test_forked_process_may_ask_nothing_and_takes_leave_of_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay = Stay(tmp_path, Checkpoint())
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(CheckpointError, match="belongs to another process"):
        stay.check()
    assert not stay.end()
