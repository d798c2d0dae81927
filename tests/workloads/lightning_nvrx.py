"""A Lightning script as users of NVRx write it, with another import. ``lightning_nvrx.py FOLDER [STEP that raises]``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from resilience.integrations.lightning import FaultToleranceSectionsCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilience import WorkloadAction, WorkloadControlRequest

warnings.simplefilter("ignore")
FOLDER, RAISES = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.trainer.global_step == RAISES and self.global_rank == 1:
            raise ValueError("a bad batch")
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def policy(error: Exception) -> WorkloadControlRequest:
    action = WorkloadAction.ShutdownWorkload if isinstance(error, ValueError) else WorkloadAction.Continue
    return WorkloadControlRequest(action, f"because of {error}")


if __name__ == "__main__":
    callback = FaultToleranceSectionsCallback(
        autoresume=True, calculate_timeouts=True, exp_dir=FOLDER / "ft", exc_handling_policy=policy
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=40,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(320, 4)), 4))
