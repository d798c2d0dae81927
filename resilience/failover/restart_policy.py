"""When workers restart: on any failure, or only when too few nodes are whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable

ANY_FAILED, MIN_HEALTHY = "any-failed", "min-healthy"
RUNNING, SUCCEEDED, FAILED, GONE = "running", "succeeded", "failed", "gone"  # how the workers of a node are
LEFT = "left"  # the launcher was ended from outside, or taken out of the job
GO_ON, FINISHED, RESTART = "go on", "finished", "restart"


def standing(states: Iterable[str], policy: str, min_nodes: int) -> str:
    """Return how the job stands, from how the workers of each node are.

    A node that is GONE took leave after it had succeeded. ``any-failed``: one failed node is enough for a restart.
    ``min-healthy``: nodes whose workers all run, or have succeeded, are whole; fewer than ``min_nodes`` of them, and all
    restart; until then the whole ones go on, and the job has finished when none of them runs any more.
    """
    known = list(states)
    running, failed = known.count(RUNNING), known.count(FAILED)
    done = len(known) - running - failed
    if policy == MIN_HEALTHY:
        if running + done < min_nodes:
            return RESTART
        return GO_ON if running else FINISHED
    if failed:
        return RESTART
    return GO_ON if running else FINISHED
