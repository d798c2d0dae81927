"""A job on Slurm: how long until it trains, and until it trains again, in seconds.

A real Slurm on this machine, four nodes; two of them with one rank each, torch and a real gloo group, snapshots on disk every five
steps. *start*: from ``sbatch`` until both ranks did their first step, beside two launchers and a store that are started by hand.
Then from the fault until a step that had never been made: *rank killed* (SIGKILL; its launcher restarts it in place), *preempted*
(SIGUSR1 to the batch process: ranks save and leave, the job is requeued), *node faulty* (a rank ends with 201: the node is drained
by the epilog, the job is requeued elsewhere) and *node lost* (slurmd and all below it, with a spare in the job; the others miss a
node after 6 s here, 60 by default).

*of which Slurm*: the median of the time in which Slurm has the job, from the moment when it no longer runs until it runs again.
For 8 s of it the batch script stays, to see that slurmctld keeps the requeue.
Slurm leaves a requeued job alone for ``AuthInfo=cred_expire`` seconds and one more: 5 here, the least it takes, 120 by default.
Needs root and Debian's Slurm (``make test-slurm`` installs it). Ratios are of medians in the same run.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import clusters, harness
from benchmarks.harness import Row

_RESILIENCE = str(Path(sys.executable).with_name("resilience"))
_CRED_EXPIRE_S = 5
_LOOK_S = 0.1
_PATIENCE = ("--local-addr=127.0.0.1", "--ft-node-silence-timeout=6", "--rdzv-conf=last_call_timeout=2")
_SLURMS = "of which Slurm"

Found = dict[str, list[float]]


def run() -> list[Row]:
    """Return the times."""
    from tests.real import slurm_cluster

    if slurm_cluster.missing():
        return [{"what": "a job on Slurm", "who": "resilience", "note": harness.NOT_INSTALLED}]
    found: Found = {}
    waits: Found = {}
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        cluster = slurm_cluster.Cluster(_RESILIENCE, cred_expire=_CRED_EXPIRE_S)
        try:
            cluster.start()
            for repeat in range(clusters.REPEATS):
                found.setdefault("by hand", []).append(clusters.by_hand(Path(folder) / f"by-hand-{repeat}"))
                _two_nodes(cluster, Path(folder) / f"two-{repeat}", found, waits)
                _with_a_spare(cluster, Path(folder) / f"spare-{repeat}", found)
        finally:
            cluster.close()
    slurms: dict[str, Row] = {what: {_SLURMS: statistics.median(seconds)} for what, seconds in waits.items()}
    return clusters.rows("on Slurm", found, slurms)


def _two_nodes(cluster: Any, folder: Path, found: Found, waits: Found) -> None:
    """Run a job that has no spare, and hurt it three times."""
    job = _Job(cluster, folder, nodes=2, fault_dir=f"{cluster.folder}/faults")
    found.setdefault("start", []).append((clusters.first_step(folder) - job.begun) / 1e9)
    found.setdefault("rank killed", []).append(
        clusters.until_further(folder, lambda: os.kill(job.last_step(1)["pid"], signal.SIGKILL))
    )
    blows = {
        "preempted": lambda: cluster.run("scancel", "--signal=USR1", "--batch", str(job.number)),
        "node faulty": lambda: job.order(1, 201),
    }
    for what, blow in blows.items():
        away = _Away(job)
        found.setdefault(what, []).append(clusters.until_further(folder, blow, away.look))
        waits.setdefault(what, []).append(away.seconds())
    job.finish()


def _with_a_spare(cluster: Any, folder: Path, found: Found) -> None:
    """Run a job that has one, and lose a node."""
    job = _Job(cluster, folder, nodes=2, spares=1)
    clusters.first_step(folder)
    batch = job.told()["BatchHost"]
    nodes = (job.last_step(rank)["node"] for rank in range(2))
    lost = next(node for node in nodes if node != batch)
    found.setdefault("node lost", []).append(clusters.until_further(folder, lambda: cluster.lose(lost)))
    job.finish()


class _Job:
    def __init__(self, cluster: Any, folder: Path, **values: Any) -> None:
        from resilience.integrations.slurm.render import render
        from resilience.integrations.slurm.values import SlurmValues

        folder.mkdir()
        self._cluster, self._folder = cluster, folder
        given = {"command": _RESILIENCE, "directory": str(folder / "runs"), "output": str(folder / "log")}
        script = [clusters.SCRIPT, str(folder)]
        made = SlurmValues(
            name="bench",
            script=script,
            env=clusters.environment(folder),
            store_host="127.0.0.1",
            launcher_args=_PATIENCE,
            **given,
            **values,
        )
        (folder / "job.sh").write_text(render(made))
        self.begun = time.monotonic_ns()
        self.number = int(cluster.run("sbatch", "--parsable", str(folder / "job.sh")))

    def told(self) -> dict[str, str]:
        """Return what Slurm says of the job."""
        told: dict[str, str] = self._cluster.job(self.number)
        return told

    def last_step(self, rank: int) -> dict[str, Any]:
        """Return what a rank told last."""
        return [it for it in clusters.steps(self._folder) if it["rank"] == rank][-1]

    def order(self, rank: int, code: int) -> None:
        """Have a rank end with a code."""
        (self._folder / "order").write_text(str(code))
        (self._folder / "order").rename(self._folder / f"exit_{rank}")

    def finish(self) -> None:
        """Have the job end well, and the nodes be as they were."""
        (self._folder / "finish").touch()
        deadline = time.monotonic() + clusters.GIVE_UP_S
        while (state := self.told()["JobState"]) != "COMPLETED":
            if time.monotonic() > deadline or state in ("FAILED", "CANCELLED"):
                raise harness.JobError(f"the job is {state}\n{(self._folder / 'log').read_text()[-3000:]}")
            time.sleep(_LOOK_S)
        self._cluster.clear()


class _Away:
    """How long a job that is requeued does not run, as Slurm tells."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._looked = self._left = self._back = 0.0

    def look(self) -> None:
        """Ask Slurm, and not too often."""
        now = time.monotonic()
        if self._back or now - self._looked < _LOOK_S:
            return
        self._looked, runs = now, self._job.told()["JobState"] == "RUNNING"
        if not runs and not self._left:
            self._left = now
        if runs and self._left:
            self._back = now

    def seconds(self) -> float:
        """Return it; the job must have been away."""
        if not self._back:
            raise harness.JobError("the job was not requeued")
        return self._back - self._left
