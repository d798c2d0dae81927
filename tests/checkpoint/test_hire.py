"""Finding a saver: one for each job and directory, whatever bytes are in their names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilience.checkpoint import hire


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
