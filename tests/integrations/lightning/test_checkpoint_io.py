"""With the plugin Lightning saves, keeps, removes and loads what it does without; and a process that dies loses nothing."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from resilience.integrations.lightning import FlashCheckpointIO, ResilienceCallback, staging
from torch.utils.data import DataLoader

from resilience.checkpoint.encoding import register_codec
from resilience.errors import ConfigError, ResilienceError, SaveError
from tests.checkpoint.conftest import savers
from tests.integrations.lightning.training import Model, Numbers, loader
from tests.jobs import stopped, wait_for

pytestmark = pytest.mark.spawns


class Plain(Model):
    """Has hyperparameters of several kinds."""

    def __init__(
        self, lr: float = 0.1, shape: tuple[int, ...] = (1, 2), where: Path = Path("data"), more: Any = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters()


def trainer_of(folder: Path, plugins: list[Any], callbacks: list[Any], **settings: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        plugins=plugins,
        **{"max_epochs": 3, **settings},
    )


def fit(folder: Path, flash: bool, model: Any = None, **options: Any) -> tuple[pl.Trainer, ModelCheckpoint]:
    pl.seed_everything(2)
    saving = ModelCheckpoint(folder / "saved", **options)
    trainer = trainer_of(folder, [FlashCheckpointIO()] if flash else [], [saving])
    trainer.fit(model or Plain(), loader("plain"), DataLoader(Numbers(), 8))
    return trainer, saving


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def contents(folder: Path) -> dict[str, Any]:
    """What is in every checkpoint of a folder; links are named by what they lead to."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.ckpt")):
        found[path.name] = path.readlink().name if path.is_symlink() else torch.load(path, weights_only=False)
    return found


def without_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return value.replace(str(folder), "")
    if isinstance(value, dict):
        return {without_folder(key, folder): without_folder(item, folder) for key, item in value.items()}
    return type(value)(without_folder(item, folder) for item in value) if isinstance(value, list) else value


TABLE: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "the best two": {"monitor": "val", "save_top_k": 2, "filename": "{epoch}-{val:.3f}"},
    "the largest": {"monitor": "val", "mode": "max", "save_top_k": 1},
    "all": {"save_top_k": -1},
    "none but the last": {"save_top_k": 0, "save_last": True},
    "and the last": {"monitor": "val", "save_top_k": 1, "save_last": True},
    "the last as a link": {"save_top_k": 1, "save_last": "link"},
    "every five steps": {"every_n_train_steps": 5, "save_top_k": -1, "filename": "{step}"},
    "weights only": {"save_weights_only": True, "save_top_k": -1},
    "at the end of training": {"save_on_train_epoch_end": True, "every_n_epochs": 2},
    "by the clock": {"train_time_interval": timedelta(0), "save_top_k": 1, "filename": "{step}"},
}


FEW = ("the best two", "the last as a link")
ROWS = [pytest.param(row, id=name, marks=() if name in FEW else pytest.mark.rare) for name, row in TABLE.items()]


@pytest.mark.parametrize("options", ROWS)
def test_every_option_of_model_checkpoint_gives_the_same_files_with_the_same_contents(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    found = []
    for flash in (False, True):
        folder = tmp_path / ("flash" if flash else "plain")
        _, saving = fit(folder, flash, **options)
        told = {name: getattr(saving, name) for name in ("best_model_path", "last_model_path", "best_model_score")}
        assert not (folder / "saved" / ".flash").exists() or not list((folder / "saved" / ".flash").glob("step-*"))
        found.append(without_folder({**told, "files": contents(folder / "saved")}, folder))
    assert found[0]["files"]
    assert same(*found)


def test_checkpoints_that_lightning_wrote_are_loaded_and_those_of_the_plugin_by_lightning(tmp_path: Path) -> None:
    _, plain = fit(tmp_path / "plain", flash=False)
    _, flash = fit(tmp_path / "flash", flash=True)
    for path, plugins in ((plain.best_model_path, [FlashCheckpointIO()]), (flash.best_model_path, [])):
        model = Plain()
        trainer = trainer_of(tmp_path / "more", plugins, [], max_epochs=4, enable_checkpointing=False)
        trainer.fit(model, loader("plain"), DataLoader(Numbers(), 8), ckpt_path=path, weights_only=False)
        assert (trainer.current_epoch, trainer.global_step) == (4, 32)
    loaded = Plain.load_from_checkpoint(flash.best_model_path, weights_only=False)
    assert (loaded.hparams.lr, loaded.hparams.shape, loaded.hparams.where) == (0.1, (1, 2), Path("data"))


def test_what_is_saved_is_what_it_was_when_it_was_saved(tmp_path: Path) -> None:
    model, plugin = Plain(), FlashCheckpointIO()
    trainer = trainer_of(tmp_path, [plugin], [], max_epochs=1, enable_checkpointing=False)
    trainer.fit(model, loader("plain"), DataLoader(Numbers(), 8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plugin.begin()  # else it is there when the call returns
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    plugin.wait(tmp_path / "x.ckpt")
    assert same(dict(torch.load(tmp_path / "x.ckpt", weights_only=False)["state_dict"]), before)
    trainer.strategy.remove_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()
    plugin.teardown()


class Vocabulary:
    """A type of the user's own."""

    def __init__(self, words: list[str]) -> None:
        self.words = words


@dataclass
class Unknown:
    """One that nobody has said anything about."""

    number: int = 1


def test_hyperparameters_of_any_type_are_kept_by_a_codec(tmp_path: Path) -> None:
    register_codec(Vocabulary, encode=lambda it: it.words, decode=Vocabulary)
    _, saving = fit(tmp_path, flash=True, model=Plain(more=Vocabulary(["a", "b"])))
    found = torch.load(saving.best_model_path, weights_only=False)["hyper_parameters"]["more"]
    assert type(found) is Vocabulary
    assert found.words == ["a", "b"]


def test_what_cannot_be_kept_is_said_before_step_0_with_the_callback_and_by_the_first_save_without(
    tmp_path: Path,
) -> None:
    model = Plain(more=Unknown())
    callbacks = [ResilienceCallback(tmp_path / "flash"), ModelCheckpoint(tmp_path / "saved")]
    trainer = trainer_of(tmp_path, [FlashCheckpointIO()], callbacks)
    with pytest.raises(ConfigError, match=r"hyper_parameters.*more.*Unknown"):
        trainer.fit(model, loader("plain"), DataLoader(Numbers(), 8))
    assert trainer.global_step == 0
    with pytest.raises(ResilienceError, match="Unknown"):
        fit(tmp_path / "alone", flash=True, model=Plain(more=Unknown()))
    FlashCheckpointIO().teardown()


_DIES = """
import os, sys, threading
from pathlib import Path
import torch
from resilience.integrations.lightning import FlashCheckpointIO
from resilience.integrations.lightning import staging
folder, names = Path(sys.argv[1]), sys.argv[3:]
saved = threading.Event()
# when the saver has it, and before there is a file
staging.publish = lambda *_: (saved.wait(), os.kill(os.getpid(), 9))
io = FlashCheckpointIO(*filter(None, [sys.argv[2]]))
for name in names:
    io.save_checkpoint({"state_dict": {"weight": torch.arange(5)}, "name": name}, folder / name)
saved.set()
io.wait()
"""


def dies(folder: Path, *names: str, staged: str = "") -> None:
    """Have a process save files, and die before the first of them is there."""
    command = [sys.executable, "-c", _DIES, str(folder), staged, *names]
    assert subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL
    assert not list(folder.glob("*.ckpt"))


@pytest.mark.parametrize("staged", ["", pytest.param("elsewhere", marks=pytest.mark.rare)])
def test_checkpoint_of_a_process_that_died_before_its_file_was_made_is_made_by_the_next(
    tmp_path: Path, staged: str
) -> None:
    where = str(tmp_path / staged) if staged else ""
    dies(tmp_path, "x.ckpt", staged=where)
    plugin = FlashCheckpointIO(*filter(None, [where]))
    found = plugin.load_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    assert same(found, {"state_dict": {"weight": torch.arange(5)}, "name": "x.ckpt"})
    plugin.teardown()


def test_all_files_that_were_on_their_way_are_made_also_where_others_were_made_before(tmp_path: Path) -> None:
    plugin = FlashCheckpointIO()
    for number in range(4):
        plugin.save_checkpoint({"name": number}, tmp_path / "before.ckpt")
    plugin.teardown()
    (tmp_path / "before.ckpt").unlink()
    dies(tmp_path, "x.ckpt", "y.ckpt")
    plugin = FlashCheckpointIO()
    plugin.save_checkpoint({"name": "z.ckpt"}, tmp_path / "z.ckpt")
    plugin.teardown()
    names = ["x.ckpt", "y.ckpt", "z.ckpt"]
    assert [torch.load(tmp_path / name)["name"] for name in names] == names


@pytest.mark.long
def test_training_with_the_callback_makes_the_files_that_an_earlier_life_has_promised(tmp_path: Path) -> None:
    dies(tmp_path, "x.ckpt")
    callbacks = [ResilienceCallback(tmp_path / "flash"), ModelCheckpoint(tmp_path, save_top_k=0)]
    trainer = trainer_of(tmp_path, [FlashCheckpointIO()], callbacks, max_epochs=1)
    trainer.fit(Plain(), loader("plain"), DataLoader(Numbers(), 8))
    assert torch.load(tmp_path / "x.ckpt")["name"] == "x.ckpt"


def test_what_is_saved_after_training_is_there_when_the_call_returns_and_another_trainer_can_save_there(
    tmp_path: Path,
) -> None:
    for name in ("a.ckpt", "b.ckpt"):
        trainer = trainer_of(tmp_path, [FlashCheckpointIO()], [], max_epochs=1, enable_checkpointing=False)
        trainer.fit(Plain(), loader("plain"), DataLoader(Numbers(), 8))
        trainer.save_checkpoint(tmp_path / name)
        assert torch.load(tmp_path / name, weights_only=False)["global_step"] == trainer.global_step


def test_older_file_stays_when_the_newer_one_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = FlashCheckpointIO()
    plugin.save_checkpoint({"name": "old"}, tmp_path / "old.ckpt")
    plugin.wait()
    refused = threading.Event()

    def full(_: Path) -> Path:
        refused.wait()
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(staging, "publish", full)
    plugin.save_checkpoint({"name": "new"}, tmp_path / "new.ckpt")
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    refused.set()
    with pytest.raises(SaveError, match=r"new\.ckpt was not written.*no space"):
        plugin.teardown()
    assert torch.load(tmp_path / "old.ckpt")["name"] == "old"
    monkeypatch.undo()
    plugin = FlashCheckpointIO()  # the next life, with room
    assert plugin.load_checkpoint(tmp_path / "new.ckpt")["name"] == "new"
    plugin.teardown()


def test_saver_that_is_stopped_holds_nobody_up_for_longer_than_the_timeout(tmp_path: Path, saver_home: Path) -> None:
    plugin = FlashCheckpointIO(timeout=2)
    plugin.save_checkpoint({"name": 1}, tmp_path / "x.ckpt")
    plugin.wait()
    (pid,) = savers(saver_home)
    with stopped(pid):
        plugin.save_checkpoint({"name": 2}, tmp_path / "x.ckpt")
        with pytest.raises(SaveError):
            plugin.teardown()
    assert torch.load(tmp_path / "x.ckpt")["name"] == 1


def test_failure_behind_the_training_is_raised_by_the_next_call(tmp_path: Path) -> None:
    plugin = FlashCheckpointIO(tmp_path / "staged")
    target = tmp_path / "folder" / "x.ckpt"
    target.parent.mkdir()
    plugin.save_checkpoint({"a": torch.ones(3)}, target)
    plugin.wait()
    target.unlink()
    target.parent.rmdir()
    target.parent.write_text("in the way")
    with pytest.raises((ResilienceError, OSError)):
        plugin.save_checkpoint({"a": torch.ones(3)}, target)
        plugin.wait()
    target.parent.unlink()
    plugin.save_checkpoint({"a": torch.zeros(3)}, target)
    plugin.teardown()
    wait_for(target.exists, "the file")
