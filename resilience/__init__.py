"""In-training-loop resilience for PyTorch.

    import resilience

    with resilience.section("setup"):
        model, optimizer, loader = build()
    with resilience.expect_heartbeats():
        for step, batch in enumerate(loader):
            with resilience.section("step"):
                train_step(model, optimizer, batch)
            resilience.heartbeat(step)

Start it with ``resilience run`` in place of ``torchrun`` and every rank is watched; under plain ``python`` or ``torchrun``
the calls do nothing. Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilience.errors import ResilienceError

if TYPE_CHECKING:
    from resilience.pulse.client import done, end_all_sections, expect_heartbeats, heartbeat, section
    from resilience.pulse.rank_monitor_client import RankMonitorClient

__version__ = "0.1.0"
__all__ = [
    "RankMonitorClient",
    "ResilienceError",
    "__version__",
    "done",
    "end_all_sections",
    "expect_heartbeats",
    "heartbeat",
    "section",
]

_HOMES = {
    "RankMonitorClient": "resilience.pulse.rank_monitor_client",
    "done": "resilience.pulse.client",
    "end_all_sections": "resilience.pulse.client",
    "expect_heartbeats": "resilience.pulse.client",
    "heartbeat": "resilience.pulse.client",
    "section": "resilience.pulse.client",
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
