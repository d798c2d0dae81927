"""``FlashCheckpointIO``: Lightning's own checkpoints, through memory that outlives the process.

    trainer = Trainer(plugins=[FlashCheckpointIO()], callbacks=[ModelCheckpoint(…)])

1) (training)      ``save_checkpoint`` copies what it is given into snapshot memory and returns
2) (saver)         writes it to disk, and says so in memory
3) (thread here)   makes a file of it, as Lightning would have, under the name that was asked for
4) (thread here)   removes what ``remove_checkpoint`` was given, once the files that were saved before that call are there
5) (training)      what went wrong is raised by the next call; ``load`` and ``teardown`` wait for what they concern

Files are those of ``torch.save``: whoever reads Lightning's checkpoints reads them, and earlier ones are read as ever. A process
that dies between 1) and 3) loses nothing: the next one that saves or loads here, or trains with ``ResilienceCallback``, does 3).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilience.integrations.lightning.staging import Staging, is_unfinished

from resilience.checkpoint.census import Census
from resilience.checkpoint.encoding import EncodingError
from resilience.checkpoint.receipt import Level, Receipt
from resilience.errors import CheckpointError, ConfigError, SaveError
from resilience.pulse.client import section

_LOG = logging.getLogger("resilience.lightning")
_FOLDER = ".flash"
_LOOK_S = 0.01
_JOIN_S = 5.0
_LEFT_S = 60.0  # for the saver to write what an earlier life has left
_MOST = 2  # checkpoints that wait for their file; the saver keeps one more


@dataclass(frozen=True)
class _Promise:
    """A file that is to come."""

    number: int
    path: Path
    receipt: Receipt


@dataclass(frozen=True)
class _Removal:
    """A file that is to go, once what was saved before is there."""

    path: Path


class FlashIO:
    """What Lightning calls. ``folder``: where checkpoints are staged, by default ``.flash`` beside the first of them.

    ``timeout``: seconds that a save waits for room, and that ``load``, ``remove`` and ``teardown`` wait for files that are to come.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, timeout: float = 600.0) -> None:
        super().__init__()
        self._folder = Path(folder) if folder is not None else None
        self._timeout = timeout
        self._plain: Any = self._torch_io()
        self._staging: Staging | None = None
        self._coming: deque[_Promise | _Removal] = deque()
        self._changed = threading.Condition()
        self._failures: list[str] = []
        self._thread: threading.Thread | None = None
        self._over = False  # no training runs that a save could hold up: files are there when it returns

    def _torch_io(self) -> Any:
        raise NotImplementedError  # each flavour of Lightning has its own

    # -- saving -----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Take a copy, and have it written behind the training."""
        if storage_options is not None or _is_url(path):
            self._plain.save_checkpoint(checkpoint, path, storage_options)
            return
        self._raise_failures()
        with section("checkpointing"):
            target = _absolute(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            staged = self._opened(target)
            self._await(self._has_room, f"room for {target}")
            number, receipt = staged.put(checkpoint, target, self._timeout)
            if receipt.level in (Level.SKIPPED, Level.FAILED):
                raise SaveError(f"{target} was not saved: {receipt.reason}. The file that was there is as it was.")
            with self._changed:
                self._coming.append(_Promise(number, target, receipt))
                self._changed.notify_all()
        if self._over:
            self.teardown()

    def begin(self) -> None:
        """Training begins (again): saves are behind it. ``ResilienceCallback`` says so; without it a second ``fit`` waits."""
        self._over = False

    def recover(self, folder: str | os.PathLike[str]) -> None:
        """Make the files that an earlier life has promised in a folder. Rank 0 calls it, as it alone saves."""
        target = _absolute(folder) / "any"
        if self._staging is None and is_unfinished(self._staged_at(target)):
            self._opened(target)

    def _staged_at(self, target: Path) -> Path:
        return self._folder if self._folder is not None else target.parent / _FOLDER

    def _has_room(self) -> bool:
        return sum(isinstance(one, _Promise) for one in self._coming) < _MOST

    def _opened(self, target: Path) -> Staging:
        if self._staging is None:
            self._staging = staged = Staging(self._staged_at(target))
            self._finish_for(staged)
            self._thread = threading.Thread(target=self._work, args=(staged,), name="resilience-files", daemon=True)
            self._thread.start()
        return self._staging

    def _finish_for(self, staged: Staging) -> None:
        """Make the files that an earlier life did not come to make."""
        if staged.left is None:
            return
        deadline = time.monotonic() + _LEFT_S
        staged.secure(staged.left)
        while staged.whole(staged.left) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        for number in staged.unpublished():
            try:
                path = staged.publish(number)
                _LOG.info("%s was saved by an earlier life of this job, and is there now.", path)
            except (CheckpointError, OSError) as error:
                _LOG.warning("a checkpoint of an earlier life of this job can't be had: %s.", error)

    # -- behind the training ----------------------------------------------------------------------------------------

    def _work(self, staged: Staging) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._coming or self._thread is None)
                if not self._coming:
                    return
                one = self._coming[0]
            try:
                if isinstance(one, _Promise):
                    self._keep(staged, one)
                elif self._failures:
                    _LOG.warning("%s is not removed: what was saved after it is not there.", one.path)
                else:
                    self._plain.remove_checkpoint(one.path)
            except Exception as error:  # noqa: BLE001 - a thread's end: it is raised by the next call
                what = "written" if isinstance(one, _Promise) else "removed"
                self._failures.append(f"{one.path} was not {what}: {type(error).__name__}: {error}")
            with self._changed:
                if self._coming:  # else it was given up meanwhile
                    self._coming.popleft()
                self._changed.notify_all()

    def _keep(self, staged: Staging, promise: _Promise) -> None:
        deadline = time.monotonic() + self._timeout
        while (level := promise.receipt.level) not in (Level.DURABLE, Level.FAILED, Level.SKIPPED):
            staged.hear()
            if self._thread is None or time.monotonic() > deadline:
                raise CheckpointError(f"it is in memory, and not on disk after {self._timeout:g} s")
            time.sleep(_LOOK_S)
        if level is not Level.DURABLE:
            raise CheckpointError(promise.receipt.reason)
        staged.publish(promise.number)

    def _await(self, condition: Any, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, self._timeout):
                raise SaveError(
                    f"waited {self._timeout:g} s in vain for {what}. Look at the disk, or give a longer timeout."
                )

    def _raise_failures(self) -> None:
        failures, self._failures = self._failures, []
        if failures:
            raise SaveError("; ".join(failures))

    def wait(self, path: str | os.PathLike[str] | None = None) -> None:
        """Wait until a file is there, or all; raises :class:`SaveError` for what went wrong behind the training."""
        target = None if path is None else _absolute(path)
        self._await(lambda: not [one for one in self._coming if target in (None, one.path)], f"{target or 'all files'}")
        self._raise_failures()

    # -- loading and removing ---------------------------------------------------------------------------------------

    def load_checkpoint(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint: one of ours or any other of Lightning's."""
        if not _is_url(path):
            self.wait(path)
            target = _absolute(path)
            if not target.exists() and self._staging is None and is_unfinished(self._staged_at(target)):
                self._opened(target)
        loaded: dict[str, Any] = self._plain.load_checkpoint(path, *args, **kwargs)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; one that is still to come, too. Not before those that were saved since are files: else a disk that
        is full takes the old one and the new one."""
        with self._changed:
            if self._coming and not _is_url(path):
                self._coming.append(_Removal(_absolute(path)))
                self._changed.notify_all()
                return
        self._plain.remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for all files, and give the memory back. What is saved after that is there when the call returns."""
        self._over = True
        staged, self._staging = self._staging, None
        if staged is None:
            return
        try:
            self.wait()
        except BaseException as error:
            self._end_thread()
            # The saver goes on, and the next life makes the files.
            staged.__exit__(type(error), error, error.__traceback__)
            raise
        self._end_thread()
        staged.close(self._timeout)
        staged.forget_files()

    def _end_thread(self) -> None:
        with self._changed:
            thread, self._thread = self._thread, None
            self._coming.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join(_JOIN_S)


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path.cwd() / path  # links stay links: one may be what is to be written


def _is_url(path: Any) -> bool:
    return "://" in str(path)


def prepare(trainer: Any) -> None:
    """Training begins: make the files that an earlier life has promised, and say now what the first checkpoint could not keep."""
    plugin = trainer.strategy.checkpoint_io
    if not isinstance(plugin, FlashIO):
        return
    plugin.begin()
    folders = {getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks}
    for folder in folders if trainer.is_global_zero else ():
        if folder and not _is_url(folder):
            plugin.recover(folder)
    wrong = unkept(hyperparameters(trainer)) if folders else ""
    if wrong:
        raise ConfigError(
            f"FlashCheckpointIO can't keep a part of this model's checkpoints: {wrong}. Nothing was trained. Leave it out "
            "(save_hyperparameters(ignore=[…])), keep its name instead, or take the plugin out: Lightning's own pickles anything."
        )


def hyperparameters(trainer: Any) -> dict[str, Any]:
    """Return what a checkpoint will have of things that anybody may have put there: hyperparameters, states of callbacks."""
    found: dict[str, Any] = {"callbacks": {one.state_key: one.state_dict() for one in trainer.callbacks}}
    for thing in (trainer.lightning_module, trainer.datamodule):
        if thing is not None and thing.hparams:
            found[thing.CHECKPOINT_HYPER_PARAMS_KEY] = dict(thing.hparams)
    return found


def unkept(checkpoint: dict[str, Any]) -> str:
    """Say what of a checkpoint can't be kept, if anything: before step 0, and not after the first epoch."""
    try:
        Census().of_state(checkpoint)
    except EncodingError as error:
        return str(error)
    return ""
