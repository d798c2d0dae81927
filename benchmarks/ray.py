"""A job on Ray: how long until it trains, and until it trains again, in seconds.

A real Ray cluster on this machine, which finds a lost node within some two seconds (``health_check_*``); two nodes with one rank
each, torch and a real gloo group, snapshots on disk every five steps. *start*: from ``submit()`` until both ranks did their first
step, beside two launchers and a store that are started by hand. Then, in one job: *actor killed*, *node lost* (a spare of its group
is there) and *group moved* (none is; the threshold of 3 s is taken off): from SIGKILL until a step that had never been made. In all
three the other launcher first waits for the lost one's testimony (``testimony_timeout`` 2 s here, 5 by default, and 2 more): that
is *of which*. Ray is imported from this environment, or from the one that BENCH_RAY names. Ratios are of medians in the same run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import clusters, harness
from benchmarks.harness import Row

VENV = "BENCH_RAY"
_THRESHOLD_S = 3.0
_TESTIMONY_S = 2.0
_SETTINGS = {"testimony_timeout": _TESTIMONY_S, "node_silence_timeout": 6}
_KEEP_ALIVE = {"keep_alive_interval": 1, "keep_alive_max_attempt": 5}


def run() -> list[Row]:
    """Return the times, from this environment or another."""
    home = os.environ.get(VENV)
    if home:
        command = [str(Path(home) / "bin" / "python"), "-m", "benchmarks.ray"]
        done = subprocess.run(command, check=True, cwd=harness.ROOT, stdout=subprocess.PIPE, timeout=1800)
        rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
        return rows
    if importlib.util.find_spec("ray") is None:
        return [{"what": "a job on Ray", "who": "resilience", "note": harness.NOT_INSTALLED}]
    return _measure()


def _measure() -> list[Row]:
    from tests.real.ray_cluster import ENVIRONMENT, RayCluster

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ.update(ENVIRONMENT, OMP_NUM_THREADS="1")
        import ray

        cluster = RayCluster()
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            found: dict[str, list[float]] = {}
            for repeat in range(clusters.REPEATS):
                for what, seconds in _one(cluster, Path(folder) / f"on-ray-{repeat}").items():
                    found.setdefault(what, []).append(seconds)
                found.setdefault("by hand", []).append(clusters.by_hand(Path(folder) / f"by-hand-{repeat}"))
        finally:
            ray.shutdown()
            cluster.close()
    testimony: Row = {"of which testimony": _TESTIMONY_S + 2.0}
    return clusters.rows("on Ray", found, dict.fromkeys(found, testimony))


def _one(cluster: Any, folder: Path) -> dict[str, float]:
    """Run one job and hurt it three times."""
    from resilience.integrations.ray import JobBuilder

    folder.mkdir()
    cluster.have(a=1, b=2)
    job = (
        JobBuilder()
        .nodes(2)
        .train(clusters.SCRIPT, folder)
        .enable_node_group_failover("RACK_ID", _THRESHOLD_S, size=1)
        .settings(**_SETTINGS)
        .rendezvous(**_KEEP_ALIVE)
        .environment(clusters.environment(folder))
        .run_dir(str(folder / "run"))
        .build()
    )
    times = {}
    begun = time.monotonic_ns()
    job.submit()
    times["start"] = (clusters.first_step(folder) - begun) / 1e9
    rank = next(one.rank for one in job.status().nodes if one.rack == "b")
    times["actor killed"] = clusters.until_further(
        folder, lambda: os.kill(_pid(job.status().nodes[rank].node), signal.SIGKILL)
    )
    times["node lost"] = clusters.until_further(folder, lambda: cluster.kill(job.status().nodes[rank].node))
    cluster.add(RACK_ID="c")
    times["group moved"] = (
        clusters.until_further(folder, lambda: cluster.kill(job.status().nodes[rank].node)) - _THRESHOLD_S
    )
    (folder / "finish").touch()
    status = job.wait(clusters.GIVE_UP_S)
    if not status.succeeded:
        raise harness.JobError(str(status))
    return times


def _pid(node: str) -> int:
    import ray

    actors = ray._private.state.actors().values()
    return next(
        int(it["Pid"])
        for it in actors
        if it["Address"]["NodeID"] == node and it["State"] == "ALIVE" and it["ActorClassName"] == "NodeAgent"
    )


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(_measure()) + "\n")
