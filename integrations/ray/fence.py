"""Whether the launcher of this Ray node may go on: it may not once Ray has given the node up, for then another one takes its place.

Nobody can tell it: Ray brings no calls to a node that it holds for dead, though everything on it may run. So its actor looks.

1) the raylet is gone, also as a zombie that nobody reaps  the node is lost
2) the raylet is stopped, or no supervisor asks            the cluster's store (GCS) knows whether Ray has given the node up
3) no supervisor has asked for a quarter of an hour        the job has none any more: the launcher is asked to stop and the node is
                                                           given back; or it has one, which hangs, and is restarted

Hazard: nothing here may import Ray at the top: it is tried without.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from resilience.integrations.ray.silence import Silence

from resilience import config

SUSPECT_S = 25.0  # without a word from the supervisor, which asks at least each 20 s
ORPHANED_S = 900.0


class Raylet(Enum):
    """How the process stands that Ray runs on each node."""

    RUNS = "runs"
    STOPPED = "stopped"
    GONE = "gone"


class Verdict(Enum):
    """What is to be done with the launcher."""

    GO_ON = "go on"
    UNASKED = "unasked"  # its supervisor may hang
    LOST = "lost"
    ORPHANED = "orphaned"


def raylet(pid: int | None) -> Raylet:
    """Return how a raylet stands; one that can't be known runs."""
    if pid is None:
        return Raylet.RUNS
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return Raylet.GONE
    return Raylet.GONE if letter in "ZXx" else Raylet.STOPPED if letter in "Tt" else Raylet.RUNS


def raylet_pid() -> int | None:
    """Return the pid of this worker's raylet, where it is told and can be seen from here."""
    told = config.environment().get("RAY_RAYLET_PID", "")
    return int(told) if told.isdigit() and raylet(int(told)) is not Raylet.GONE else None


def verdict(
    stands: Raylet, silent_s: float, given_up: Callable[[], bool], supervised: Callable[[], bool] = lambda: False
) -> Verdict:
    """Return what follows. ``given_up`` and ``supervised`` ask the cluster, and are called only where there is a reason to."""
    if stands is Raylet.GONE:
        return Verdict.LOST
    if (stands is Raylet.STOPPED or silent_s > SUSPECT_S) and given_up():
        return Verdict.LOST
    if silent_s <= ORPHANED_S:
        return Verdict.GO_ON
    return Verdict.UNASKED if supervised() else Verdict.ORPHANED


def given_up() -> bool:
    """Return whether Ray holds this node for dead. Who is connected to no cluster has not been given up by one.

    Hazard: a question to Ray from a process that is not connected starts a cluster on this host.
    """
    if (ray := connected()) is None:
        return False
    me = ray.get_runtime_context().get_node_id()
    return any(it["NodeID"] == me and not it["Alive"] for it in ray.nodes())


def connected() -> Any:
    """Return Ray, where this process is connected to a cluster; else ``None``."""
    if "ray" not in sys.modules:
        return None
    import ray  # noqa: PLC0415

    return ray if ray.is_initialized() else None


def supervisor(job: str) -> Any:
    """Return the supervisor of a job, if Ray has one, in whatever state. Who is connected to no cluster has none."""
    if not job or (ray := connected()) is None:
        return None
    from resilience.integrations.ray.memory import NAMESPACE  # noqa: PLC0415

    try:
        return ray.get_actor(job, namespace=NAMESPACE)
    except ValueError:
        return None


def wake(job: str, silence: Silence) -> bool:
    """Have a supervisor restarted that hangs, as whoever waits for the job has; return whether it was time to."""
    import ray  # noqa: PLC0415
    from resilience.integrations.ray import memory  # noqa: PLC0415

    actor = supervisor(job)
    if actor is None or not silence.hangs(memory.last_sign(job), time.monotonic(), lambda: _alive(ray, actor)):
        return False
    sys.stderr.write(
        f"resilience: the supervisor of job {job} gives no sign of life; it is ended, and Ray restarts it\n"
    )
    sys.stderr.flush()
    ray.kill(actor, no_restart=False)
    return True


def _alive(ray: Any, actor: Any) -> bool:
    return bool(ray._private.state.actors(actor._actor_id.hex()).get("State") == "ALIVE")


def leave(why: Verdict) -> None:
    """End this actor; where the cluster still has it, give its place back, so that it is not restarted."""
    sys.stderr.write(f"resilience: this node's launcher was ended: its node or its job is {why.value}\n")
    sys.stderr.flush()
    if why is Verdict.LOST:
        os._exit(1)
    import ray  # noqa: PLC0415
    from ray.util.placement_group import get_current_placement_group, remove_placement_group  # noqa: PLC0415

    group, me = get_current_placement_group(), ray.get_runtime_context().current_actor
    if group is not None:
        remove_placement_group(group)
    ray.kill(me, no_restart=True)
