"""What a launcher gets of its actor's environment: what people have set there, not what its engine has.

Ray tells each of its processes ``OMP_NUM_THREADS``, as many as it has CPUs. That is right for one rank; of several each would take
them all. Without it torch's launcher decides, as anywhere else: one for each of several ranks.

Hazard: nothing here may import Ray at the top: it is tried without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from resilience.integrations.flags import says_where
from resilience.integrations.ray import fence

from resilience import config

_THREADS = "OMP_NUM_THREADS"
_ALONE = ("--nproc-per-node=1",)


def given(flags: Sequence[str], raylet: int | None) -> dict[str, str]:
    """Return the variables for a launcher with these flags, of this process and of the raylet that started it."""
    here = config.environment()
    several = any(word.startswith("--nproc-per-node=") and word not in _ALONE for word in flags)
    rays = several and _THREADS in here and not _is_peoples(_THREADS, raylet)
    return {name: value for name, value in here.items() if not (says_where(name) or (rays and name == _THREADS))}


def _is_peoples(name: str, raylet: int | None) -> bool:
    """Whether a variable was set with ``ray start``, or by a ``runtime_env``; so it is taken where that can't be known."""
    ray = fence.connected()
    if raylet is None or ray is None:
        return True
    try:
        started_with = Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    told = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    return name in told or any(word.startswith(f"{name}=".encode()) for word in started_with)
