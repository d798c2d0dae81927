"""A Lightning training under a strategy, with what makes a resume hard.

    lightning_strategies.py STRATEGY FOLDER [with a fault from the environment]

STRATEGY: ``ddp``, ``fsdp`` (FSDP1) or ``model_parallel`` (FSDP2). At the end each rank writes the digest of what it has to
FOLDER/final_<rank>. ``CKPT``: a checkpoint to begin with.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from resilience.integrations.lightning import ResilienceCallback
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
WIDTH = 8


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 1))

    def configure_model(self) -> None:
        if KIND == "model_parallel":
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.layers[0], self.layers[3], self.layers):
                fully_shard(layer, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.layers(batch[0] + 0.1 * torch.randn_like(batch[0])).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8), "interval": "step"}]


class FSDPOnCpu(FSDPStrategy):
    """Tells FSDP that the device is the CPU: Lightning hands on the number of a device, and a CPU has none."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            sharding_strategy=self.sharding_strategy,
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )


def strategy() -> Any:
    if KIND == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if KIND == "fsdp":
        return FSDPOnCpu(process_group_backend="gloo", state_dict_type=os.environ.get("STATE", "full"))
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


class OnCpu(CUDAAccelerator):
    """Lightning's FSDPStrategy takes no accelerator but CUDA's, and looks no further: gloo and the CPU do the rest."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: Any) -> Any:
        return [torch.device("cpu")] * len(devices)

    @staticmethod
    def auto_device_count() -> int:
        return 2

    def setup_device(self, device: torch.device) -> None:
        pass

    def setup(self, trainer: Any) -> None:
        pass

    def teardown(self) -> None:
        pass


class Final(pl.Callback):
    """Notes what this rank has before the strategy is torn down."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        tensors = [*trainer.strategy.model.parameters()]
        for state in trainer.optimizers[0].state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        local = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
        found = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in local))
        found.update(
            repr((trainer.global_step, float(torch.rand(1)), float(trainer.callback_metrics["loss"]))).encode()
        )
        (FOLDER / f"final_{trainer.global_rank}").write_text(found.hexdigest())


if __name__ == "__main__":
    pl.seed_everything(4)
    FOLDER.mkdir(exist_ok=True, parents=True)
    data = TensorDataset(torch.randn(96, WIDTH))
    trainer = pl.Trainer(
        accelerator=OnCpu() if KIND == "fsdp" else "cpu",
        devices=2,
        strategy=strategy(),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ResilienceCallback(FOLDER / "flash"),
            ModelCheckpoint(FOLDER / "saved", every_n_train_steps=5, save_top_k=-1),
            Final(),
        ],
    )
    trainer.fit(Model(), DataLoader(data, 4, shuffle=True), ckpt_path=os.environ.get("CKPT") or None)
