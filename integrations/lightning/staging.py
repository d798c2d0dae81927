"""The memory and the saver behind :class:`FlashCheckpointIO`: whole Lightning checkpoints of one process, on their way to a file.

Under DDP only rank 0 is given checkpoints, so this is a flash checkpoint of one rank, whatever the size of the job. What it keeps
is staged: it becomes a file of the user's choice once the saver has it on disk, and is removed some checkpoints later.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from resilience.checkpoint import reading
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.reading import Opened
from resilience.checkpoint.receipt import Receipt
from resilience.checkpoint.stores.local import Directory, read_manifest, sync
from resilience.errors import CheckpointError

_LOG = logging.getLogger("resilience.lightning")
_KEEP = 3
_PUBLISHED = "published"  # holds the number of the newest checkpoint that has become a file


class Staging(FlashCheckpoint):
    """A flash checkpoint of this process alone."""

    _alone = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, disk_every=None, keep=_KEEP, slots=2)
        self.folder = folder
        self.left: int | None = None  # the newest that an earlier life has left here without its file
        try:
            found = self._agree(None, self._look, fresh=True)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        self._next = 0 if found is None else found + 1

    def _look(self, opened: Opened) -> None:
        state = opened.values.get("state", {})
        if isinstance(state.get("path"), str) and state["number"] > self._last_published():
            self.left = state["number"]

    def secure(self, number: int) -> None:
        """Have the saver write one that it has in memory only: its disk may have been full when it tried."""
        self._attendant.ask({"op": "secure", "step": number})

    def unpublished(self) -> list[int]:
        """Return what is on disk and was not made a file, oldest first."""
        last = self._last_published()
        return sorted(item.manifest.step for item in Directory(self.folder).stored() if item.manifest.step > last)

    def publish(self, number: int) -> Path:
        """Make the file of a checkpoint that is on disk, and note that it is there; return its path."""
        folder = self.whole(number)
        if folder is None:
            raise CheckpointError("the saver has lost it")
        path = publish(folder)
        mark = self.folder / _PUBLISHED
        partial = mark.with_name(f".{_PUBLISHED}.{os.getpid()}")
        partial.write_text(str(number))
        partial.replace(mark)
        return path

    def hear(self) -> None:
        """Raise :class:`SaveError` if the saver could not write something since it was asked last."""
        self._attendant.hear()

    def _last_published(self) -> int:
        try:
            return int((self.folder / _PUBLISHED).read_text())
        except (OSError, ValueError):
            return -1

    def put(self, checkpoint: dict[str, Any], path: Path, wait: float) -> tuple[int, Receipt]:
        """Take a copy of a checkpoint that is meant for ``path``. Returns when it is in memory that outlives this process."""
        number = self._next
        receipt = self.save_state(
            number, {"number": number, "path": str(path), "checkpoint": checkpoint}, disk=True, wait=wait
        )
        self._next += 1
        return number, receipt

    def whole(self, number: int) -> Path | None:
        """Return where a checkpoint is on disk, if it is."""
        found = [item for item in Directory(self.folder).stored() if item.manifest.step == number]
        return Path(str(found[0].path)) if found else None

    def forget_files(self) -> None:
        """All of them are files now: remove what was on its way."""
        for item in Directory(self.folder).stored():
            shutil.rmtree(str(item.path), ignore_errors=True)
        (self.folder / _PUBLISHED).unlink(missing_ok=True)  # numbers begin again


def is_unfinished(folder: Path) -> bool:
    """Whether an earlier life has left something in a folder of staged checkpoints: one that ended well leaves a lock at most."""
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def read(folder: Path) -> dict[str, Any]:
    """Return a checkpoint that is on disk, and what it is meant for. Every byte is checked; nothing in it is executed."""
    opened = reading.open_disk(folder, read_manifest(folder), 0)
    if not isinstance(opened.values, dict) or "state" not in opened.values:
        raise CheckpointError(f"{folder} is a checkpoint of another kind. Nothing was loaded.")
    state = opened.source.fresh(opened.values["state"])
    wrong = opened.check.wrong()
    if wrong:
        raise CheckpointError(f"{folder} is damaged: {wrong}. Nothing was loaded.")
    found: dict[str, Any] = state
    return found


def publish(folder: Path) -> Path:
    """Make a file of a checkpoint that is on disk, as ``torch.save`` does; return its path. It is whole, or as it was before."""
    state = read(folder)
    path = Path(state["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            torch.save(state["checkpoint"], file)
            file.flush()
            os.fsync(file.fileno())
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)
    return path
