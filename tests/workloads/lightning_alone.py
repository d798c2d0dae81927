"""A trainer that is told how many devices there are by nobody but its script: Lightning starts the ranks."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from resilience.integrations.lightning import ResilienceCallback

warnings.simplefilter("ignore")


class Model(BoringModel):
    """Leaves a mark when training is over."""

    def on_train_end(self) -> None:
        trainer: Any = self.trainer
        mark = f"rank-{trainer.global_rank}-of-{trainer.world_size}-after-{trainer.global_step}"
        (Path(sys.argv[1]) / mark).touch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["DEVICES"]),
        strategy=os.environ["STRATEGY"],
        max_steps=20,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[ResilienceCallback(Path(sys.argv[1]) / "flash", disk_every=1)],
    ).fit(Model())
