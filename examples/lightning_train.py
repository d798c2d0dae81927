"""A Lightning script that loses nothing: kill a rank or let one hang, and it goes on in the middle of the epoch.

python examples/lightning_train.py FOLDER
export RESILIENCE_SIMULATED_FAULT='kill:rank=1,step=13'  # to see it survive that
resilience run --nproc-per-node=2 --max-restarts=3 examples/lightning_train.py FOLDER
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from resilience.integrations.lightning import ResilienceCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder, width = Path(sys.argv[1]), 32


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 1)
        )

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(inputs), inputs.sum(dim=-1, keepdim=True))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.loss(batch[0] + 0.01 * torch.randn_like(batch[0]))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "interval": "step"}]


if __name__ == "__main__":
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    lightning.seed_everything(1)
    data = TensorDataset(torch.randn(320, width))
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=4,
        log_every_n_steps=1,
        logger=CSVLogger(folder / "logs", flush_logs_every_n_steps=1),
        callbacks=[
            ResilienceCallback(folder / "flash"),  # the one line
            ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=1),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    trainer.fit(model, DataLoader(data, 16, shuffle=True), DataLoader(data, 32))
    if trainer.is_global_zero:
        torch.save(model.state_dict(), folder / "final.pt")
        print(
            f"loss {trainer.callback_metrics['val_loss']:.6f} after {trainer.global_step} steps on {trainer.world_size} ranks"
        )
