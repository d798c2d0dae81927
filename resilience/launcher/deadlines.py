"""The hierarchy of deadlines: ours must lie below those of the layers around us, or they end the job before we can say why.

:func:`hierarchy` and :func:`problems` are pure; both are printed at start.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from resilience.config import Settings

_LOG = logging.getLogger("resilience.launcher")
COLLECTIVE_TIMEOUT_S = 600.0  # torch's default for NCCL process groups; gloo has 1800


def rendezvous_limit(launch: Any) -> float:
    """Return how long a rendezvous may take before it counts as stuck in a store call: torch's own deadlines, and then some."""
    configs = launch.rdzv_configs
    join = float(configs.get("join_timeout", configs.get("timeout", 600)))
    return (
        max(join, 600.0 if "join_timeout" not in configs else join) + 2 * float(configs.get("read_timeout", 60)) + 60.0
    )


def hierarchy(settings: Settings, shutdown_timeout: float) -> list[tuple[str, float]]:
    """Return our deadlines, shortest line of defence first."""
    monitor, launcher = settings.monitor, settings.launcher
    return [
        ("ranks are looked at every", monitor.workload_check_interval),
        ("stacks collected within", monitor.testimony_timeout),
        ("hung rank, signal to SIGKILL", monitor.rank_term_timeout),
        ("other ranks, signal to SIGKILL", shutdown_timeout),
        ("silent node", launcher.node_silence_timeout),
        ("silent store", launcher.store_silence_timeout),
    ]


def problems(settings: Settings) -> list[str]:
    """Return what is wrong with the order of the deadlines."""
    found = []
    timeouts, monitor = settings.timeouts, settings.monitor
    named = {
        "initial_rank_heartbeat_timeout": timeouts.initial_rank_heartbeat_timeout,
        "rank_heartbeat_timeout": timeouts.rank_heartbeat_timeout,
        "rank_out_of_section_timeout": timeouts.rank_out_of_section_timeout,
        **{f"section {name!r}": value for name, value in timeouts.rank_section_timeouts.items()},
    }
    for name, value in named.items():
        if value is None or math.isinf(value):
            continue
        if value < monitor.workload_check_interval:
            found.append(
                f"{name} is {value:g} s but ranks are looked at every {monitor.workload_check_interval:g} s "
                "(--ft-workload-check-interval)"
            )
        if value > COLLECTIVE_TIMEOUT_S and name != "initial_rank_heartbeat_timeout":
            found.append(
                f"{name} is {value:g} s, above NCCL's default of {COLLECTIVE_TIMEOUT_S:g} s: a hung collective is then ended "
                "by NCCL first, on the victims"
            )
    return found


def announce(launch: Any, settings: Settings) -> None:
    """Print the hierarchy and what is wrong with it."""
    _LOG.info(
        "deadlines: %s",
        "; ".join(f"{what}: {_s(value)}" for what, value in hierarchy(settings, launch.shutdown_timeout)),
    )
    for note in settings.notes:
        _LOG.warning("%s", note)
    for problem in problems(settings):
        _LOG.warning("deadlines: %s.", problem)


def _s(value: float) -> str:
    return f"{value:g} s"
