"""A trainer whose loader stands still once, in the middle of the epoch."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from resilience.integrations.lightning import ResilienceCallback
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
folder = Path(sys.argv[1])


class Broken(RandomDataset):
    """Never comes back from one item, the first time."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 12 and not (folder / "hung").exists():
            (folder / "hung").touch()
            threading.Event().wait()
        return super().__getitem__(index)


if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[ResilienceCallback(folder / "flash")],
    )
    trainer.fit(BoringModel(), DataLoader(Broken(32, 20)))
    print(f"{trainer.global_step} steps")
