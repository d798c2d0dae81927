"""A training with everything that makes a resume hard, and what is to be seen of it when it is over."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from resilience.integrations.lightning import ResilienceCallback
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torchmetrics import MeanMetric

WIDTH = 6
SAMPLES = 32
BATCH = 4


class Crash(Exception):  # noqa: N818 - reads as what it is
    """What ends a training in the middle."""


class Rows(Logger):
    """Keeps what is logged: by step and name, the last time it was."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[int | None, str], float] = {}

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows |= {(step, name): float(value) for name, value in metrics.items()}

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


class Numbers(Dataset[torch.Tensor]):
    """Samples; ``noisy`` ones take random numbers of the process that reads them."""

    def __init__(self, noisy: bool = False) -> None:
        self.rows = torch.arange(SAMPLES * WIDTH, dtype=torch.float32).view(SAMPLES, WIDTH).sin()
        self.noisy = noisy
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return self.rows[index] + (0.1 * torch.randn(WIDTH) + 0.1 * float(np.random.rand()) if self.noisy else 0)


class Stream(IterableDataset[torch.Tensor]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(Numbers().rows[torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3))])


class SizedStream(Stream):
    """Samples that can only be gone through, and yet are counted."""

    def __len__(self) -> int:
        return SAMPLES


class Pairs:
    """A batch sampler of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from torch.randperm(SAMPLES).view(-1, BATCH).tolist()

    def __len__(self) -> int:
        return SAMPLES // BATCH


class Stateful:
    """A loader that knows its place, and has no order that could be made again."""

    def __init__(self, sized: bool) -> None:
        self.rng = np.random.default_rng(5)
        self.order: list[int] = []
        self.at = 0
        self._resumed = False
        if sized:
            self.__class__ = _Sized

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self._resumed:
            self.order, self.at = [int(one) for one in self.rng.permutation(SAMPLES // BATCH)], 0
        self._resumed = False
        rows = Numbers().rows.view(-1, BATCH, WIDTH)
        while self.at < len(self.order):
            self.at += 1
            yield rows[self.order[self.at - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "at": self.at, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at, self._resumed = list(state["order"]), state["at"], True
        self.rng.bit_generator.state = state["rng"]


class _Sized(Stateful):
    def __len__(self) -> int:
        return SAMPLES // BATCH


def loader(kind: str) -> Any:
    """Return a loader of some kind."""
    seeded = torch.Generator().manual_seed(9)
    made: dict[str, Callable[[], Any]] = {
        "plain": lambda: DataLoader(Numbers(), BATCH, shuffle=True),
        "generator": lambda: DataLoader(Numbers(), BATCH, shuffle=True, generator=seeded),
        "workers": lambda: DataLoader(Numbers(), BATCH, shuffle=True, num_workers=1, multiprocessing_context="fork"),
        "noisy": lambda: DataLoader(Numbers(noisy=True), BATCH, shuffle=True),
        "sized stream": lambda: DataLoader(SizedStream(), BATCH),
        "own batches": lambda: DataLoader(Numbers(), batch_sampler=Pairs()),
        "stream": lambda: DataLoader(Stream(), BATCH),
        "replacement": lambda: DataLoader(Numbers(), BATCH, sampler=RandomSampler(range(SAMPLES), replacement=True)),
        "stateful": lambda: Stateful(sized=True),
        "endless": lambda: Stateful(sized=False),
    }
    return made[kind]()


class Model(pl.LightningModule):
    """Dropout, batch norm, noise, a schedule, a metric over the epoch, and hooks that keep things in checkpoints."""

    def __init__(self, crash_at: int | None = None, manual: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1))
        self.mean = MeanMetric()
        self.crash_at = crash_at
        self.seen: list[float] = []
        self.automatic_optimization = not manual

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.layers(batch + 0.1 * torch.randn_like(batch)) - batch.sum(dim=1, keepdim=True)).square().mean()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if self.trainer.fit_loop.total_batch_idx == self.crash_at:
            raise Crash
        self.seen.append(float(batch.sum()))
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if index == 0:
            self.log("first", loss, on_epoch=True)
        self.mean(loss)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", torch.rand(1)[0], on_epoch=True)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            first, second = (torch.optim.Adam(self.layers[at].parameters(), lr=0.02) for at in (0, 3))
            return first, second
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "interval": "step"}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
        always = self.trainer.limit_val_batches and self.trainer.check_val_every_n_epoch == 1
        return [optimizer], [step, {"scheduler": plateau, "monitor": "val" if always else "loss"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = list(self.seen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = list(checkpoint["seen"])


class Counting(Model):
    """Counts epochs in its state when they begin."""

    def __init__(self, crash_at: int | None = None, manual: bool = False) -> None:
        super().__init__(crash_at, manual)
        self.register_buffer("epochs", torch.zeros(1))

    def on_train_epoch_start(self) -> None:
        self.epochs += 1


class StopAfter(pl.Callback):
    """Wants training to stop, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


@dataclass
class Outcome:
    """What is to be seen of a training."""

    digest: str
    rows: dict[tuple[int | None, str], float]
    seen: list[float]
    metrics: dict[str, float]
    counts: dict[str, Any] = field(default_factory=dict)


def trained(
    folder: Any,
    *,
    kind: str = "plain",
    crash_at: int | None = None,
    rows: Rows | None = None,
    manual: bool = False,
    callback: dict[str, Any] | None = None,
    also: tuple[Any, ...] = (),
    module: type[Model] = Model,
    seed: int = 1,
    **settings: Any,
) -> Outcome:
    """Train in this process. Whatever is given on top goes to the trainer."""
    pl.seed_everything(seed)
    model, rows = module(crash_at, manual), rows or Rows()
    trainer = pl.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=rows,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[ResilienceCallback(folder / "flash", **{"verify": True, **(callback or {})}), *also],
        **{"max_epochs": 3, "log_every_n_steps": 1, **settings},
    )
    trainer.fit(model, loader(kind), DataLoader(Numbers(), 8))
    return outcome(trainer, model, rows)


def outcome(trainer: Any, model: Model, rows: Rows) -> Outcome:
    """Look at everything that a training leaves."""
    states = [*model.state_dict().values()]
    for optimizer in trainer.optimizers:
        states += [value for state in optimizer.state.values() for value in state.values()]
    found = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in states))
    found.update(repr([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]).encode())
    found.update(repr((float(torch.rand(1)), float(np.random.rand()))).encode())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    counts = {"global_step": trainer.global_step, "epoch": trainer.current_epoch}
    return Outcome(found.hexdigest(), rows.rows, model.seen, metrics, counts)
