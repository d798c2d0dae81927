"""The same as :mod:`resilience.integrations.lightning`, for trainers of ``pytorch_lightning``."""

from __future__ import annotations

try:
    import pytorch_lightning
except ModuleNotFoundError as error:
    raise ImportError("pytorch_lightning is not installed: pip install pytorch-lightning.") from error

from resilience.integrations.lightning.callback import Hooks
from resilience.integrations.lightning.faults import SimulatedFaultParams


class ResilienceCallback(Hooks, pytorch_lightning.Callback):
    __doc__ = Hooks.__doc__


__all__ = ["ResilienceCallback", "SimulatedFaultParams"]
