"""Lightning: one callback links a trainer to everything.

    from resilience.integrations.lightning import ResilienceCallback

    trainer = Trainer(callbacks=[ResilienceCallback("checkpoints")], …)

For ``lightning``, and for ``pytorch_lightning`` where that is what the script has imported or what is installed; the classes in
:mod:`resilience.integrations.pytorch_lightning` are always for the latter.
"""

from __future__ import annotations

from typing import Any

from resilience.integrations.faults import SimulatedFaultParams
from resilience.integrations.lightning import flavour
from resilience.integrations.lightning.callback import Hooks
from resilience.integrations.lightning.checkpoint_io import FlashIO
from resilience.integrations.lightning.nvrx import FaultTolerance, FaultToleranceSections

_lightning = flavour.chosen()
_Callback: Any = _lightning.Callback
_CheckpointIO: Any = _lightning.plugins.io.CheckpointIO


class ResilienceCallback(Hooks, _Callback):
    __doc__ = Hooks.__doc__


class FlashCheckpointIO(FlashIO, _CheckpointIO):
    __doc__ = FlashIO.__doc__

    def _torch_io(self) -> Any:
        return _lightning.plugins.io.TorchCheckpointIO()


class FaultToleranceCallback(FaultTolerance, _Callback):
    __doc__ = FaultTolerance.__doc__


class FaultToleranceSectionsCallback(FaultToleranceSections, _Callback):
    __doc__ = FaultToleranceSections.__doc__


__all__ = [
    "FaultToleranceCallback",
    "FaultToleranceSectionsCallback",
    "FlashCheckpointIO",
    "ResilienceCallback",
    "SimulatedFaultParams",
]
