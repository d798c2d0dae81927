"""Snapshots on a disk that is full. Needs root, for a file system of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from resilience.integrations.lightning import FlashCheckpointIO

from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.receipt import Level
from resilience.checkpoint.stores.local import Directory
from resilience.errors import SaveError
from tests.checkpoint.conftest import saver_home

__all__ = ["saver_home"]
pytestmark = [pytest.mark.spawns, pytest.mark.root]
MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root: left out are full disks")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def state(mebibytes: int, value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((mebibytes * MIB // 4,), value)}


def test_full_disk_fails_the_save_keeps_the_step_before_and_recovers_when_there_is_room(
    small_disk: Path, saver_home: Path
) -> None:
    checkpoint = FlashCheckpoint(small_disk / "ck", disk_every=1, keep=2)
    checkpoint.save_state(0, state(3, 0.0))
    assert checkpoint.wait().level is Level.DURABLE
    (small_disk / "other").write_bytes(bytes(3 * MIB))
    checkpoint.save_state(1, state(3, 1.0))
    with pytest.raises(SaveError, match=r"step 1 could not be written .*No space left"):
        checkpoint.wait()
    assert [item.manifest.step for item in Directory(small_disk / "ck").stored()] == [0]
    assert not list((small_disk / "ck").glob(".partial*"))
    assert torch.equal(checkpoint.load_state(1)["x"], state(3, 1.0)["x"]), "it is in memory"
    (small_disk / "other").unlink()
    try:
        checkpoint.save_state(2, state(3, 2.0))
    except SaveError as told:  # what was loaded is written once more, and that may have been before there was room
        assert "step 1 could not be written" in str(told)
        checkpoint.save_state(2, state(3, 2.0))
    assert checkpoint.wait().level is Level.DURABLE
    checkpoint.close()


def test_full_disk_takes_no_checkpoint_of_lightning_that_was_there(small_disk: Path, saver_home: Path) -> None:
    plugin = FlashCheckpointIO(timeout=60)
    plugin.save_checkpoint(state(1, 1.0), small_disk / "old.ckpt")
    plugin.wait()
    with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(MIB // 16))
    plugin.save_checkpoint(state(1, 2.0), small_disk / "new.ckpt")
    plugin.remove_checkpoint(small_disk / "old.ckpt")
    with pytest.raises(SaveError, match=r"new\.ckpt was not written"):
        plugin.teardown()
    assert not (small_disk / "new.ckpt").exists()
    assert torch.equal(torch.load(small_disk / "old.ckpt")["x"], state(1, 1.0)["x"])
    (small_disk / "filler").unlink()
    again = FlashCheckpointIO(timeout=60)  # the next life, with room
    assert torch.equal(again.load_checkpoint(small_disk / "new.ckpt")["x"], state(1, 2.0)["x"])
    again.teardown()
