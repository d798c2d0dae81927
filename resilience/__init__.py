"""In-training-loop resilience for PyTorch.

    import resilience

    @resilience.record
    def main():
        with resilience.section("setup"):
            model, optimizer, loader = build()
        with resilience.expect_heartbeats():
            for step, batch in enumerate(loader):
                with resilience.section("step"):
                    train_step(model, optimizer, batch)
                resilience.heartbeat(step)

Start it with ``resilience run`` in place of ``torchrun`` and every rank is watched; under plain ``python`` or ``torchrun``
nobody watches, and the calls cost next to nothing. Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilience.errors import ResilienceError

if TYPE_CHECKING:
    from resilience.checkpoint.flash import FlashCheckpoint
    from resilience.checkpoint.guard import Guard
    from resilience.pulse.client import (
        done,
        end_all_sections,
        expect_heartbeats,
        heartbeat,
        section,
        stop_requested,
    )
    from resilience.pulse.control import WorkloadAction, WorkloadControlRequest
    from resilience.pulse.rank_monitor_client import RankMonitorClient
    from resilience.recording import annotate, record

__version__ = "0.1.0"
__all__ = [
    "FlashCheckpoint",
    "Guard",
    "RankMonitorClient",
    "ResilienceError",
    "WorkloadAction",
    "WorkloadControlRequest",
    "__version__",
    "annotate",
    "done",
    "end_all_sections",
    "expect_heartbeats",
    "heartbeat",
    "record",
    "section",
    "stop_requested",
]

_HOMES = {
    "FlashCheckpoint": "resilience.checkpoint.flash",
    "Guard": "resilience.checkpoint.guard",
    "RankMonitorClient": "resilience.pulse.rank_monitor_client",
    "WorkloadAction": "resilience.pulse.control",
    "WorkloadControlRequest": "resilience.pulse.control",
    "annotate": "resilience.recording",
    "done": "resilience.pulse.client",
    "end_all_sections": "resilience.pulse.client",
    "expect_heartbeats": "resilience.pulse.client",
    "heartbeat": "resilience.pulse.client",
    "record": "resilience.recording",
    "section": "resilience.pulse.client",
    "stop_requested": "resilience.pulse.client",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use and keep it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'resilience' has no attribute {name!r}")
    import importlib  # noqa: PLC0415

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
