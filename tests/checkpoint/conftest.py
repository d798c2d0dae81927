"""Savers of the tests: real ones, in a folder of their own, and gone when the test is."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import alive, command_line, wait_for


def savers(folder: Path) -> list[int]:
    """The savers that listen in a folder."""
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [
        pid for pid in found if "checkpoint/saver" in (line := command_line(pid)) and str(folder) in line and alive(pid)
    ]


@pytest.fixture
def saver_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary folder for sockets (short: their paths are limited); afterwards no saver may be left."""
    tmp_path_factory.getbasetemp()  # before the folder for temporary files is another one
    # The compiler makes its folder anew when the process ends: not in ours, which is gone by then.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    folder = Path(tempfile.mkdtemp(prefix="ck-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in [name for name in os.environ if name.startswith(("RESILIENCE_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield folder
    for pid in savers(folder):  # this process is the rank that it waits for
        os.kill(pid, 15)
    try:
        wait_for(lambda: not savers(folder), "the savers to end", 30)
    finally:
        for pid in savers(folder):
            os.kill(pid, 9)
        shutil.rmtree(folder, ignore_errors=True)
