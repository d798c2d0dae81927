"""The same as :mod:`resilience.integrations.lightning`, for trainers of ``pytorch_lightning``."""

from __future__ import annotations

from typing import Any

try:
    import pytorch_lightning
except ModuleNotFoundError as error:
    raise ImportError("pytorch_lightning is not installed: pip install pytorch-lightning.") from error

from resilience.integrations.faults import SimulatedFaultParams
from resilience.integrations.lightning.callback import Hooks
from resilience.integrations.lightning.checkpoint_io import FlashIO
from resilience.integrations.lightning.nvrx import FaultTolerance, FaultToleranceSections


class ResilienceCallback(Hooks, pytorch_lightning.Callback):
    __doc__ = Hooks.__doc__


class FlashCheckpointIO(FlashIO, pytorch_lightning.plugins.io.CheckpointIO):
    __doc__ = FlashIO.__doc__

    def _torch_io(self) -> Any:
        return pytorch_lightning.plugins.io.TorchCheckpointIO()


class FaultToleranceCallback(FaultTolerance, pytorch_lightning.Callback):
    __doc__ = FaultTolerance.__doc__


class FaultToleranceSectionsCallback(FaultToleranceSections, pytorch_lightning.Callback):
    __doc__ = FaultToleranceSections.__doc__


__all__ = [
    "FaultToleranceCallback",
    "FaultToleranceSectionsCallback",
    "FlashCheckpointIO",
    "ResilienceCallback",
    "SimulatedFaultParams",
]
