"""Training on a real Ray cluster, as tests have it: where it is tried, what is done to it, and what must be true at its end.

A ``Site`` is the cluster, a test's folder, and the losses that are right. A ``Training`` is one job on it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resilience.integrations.ray.names import is_claim_of

from tests import jobs
from tests.jobs import WORKLOADS, wait_for
from tests.real.ray_cluster import RayCluster

if importlib.util.find_spec("ray") is None:
    pytest.skip(
        "Ray is not installed here: left out is every job on a real cluster. make test-ray has them",
        allow_module_level=True,
    )

SCRIPT = str(WORKLOADS / "ray_steps.py")
STEPS = 1500
PAUSE = 0.05
ROUND = 300
PATIENCE_S = 200.0  # a busy machine may take so long to start all ranks
QUICK = {"testimony_timeout": 2, "node_silence_timeout": 6, "store_silence_timeout": 6, "stop_grace": 20}
RENDEZVOUS = {"keep_alive_interval": 1, "keep_alive_max_attempt": 5}


def losses(folder: Path) -> list[tuple[int, str]]:
    """Every loss that was noted, in order; steps that were made again stand there again."""
    path = folder / "losses"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def starts(folder: Path) -> list[list[str]]:
    path = folder / "starts"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


class Undisturbed:
    """The losses of runs without Ray and without faults, by the number of ranks; each is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[int, dict[int, str]] = {}

    def losses(self, ranks: int, steps: int) -> dict[int, str]:
        """Return those of at least so many steps."""
        if len(self._known.get(ranks, ())) < steps:
            number = -(-steps // ROUND) * ROUND
            folder = self._folder / f"{ranks}-{number}"
            with jobs.job(
                folder, [f"--nproc-per-node={ranks}"], [SCRIPT, str(folder), str(number), "0", "-1"]
            ) as alone:
                assert alone.wait(PATIENCE_S) == 0, alone.log()
            self._known[ranks] = dict(losses(folder))
        return self._known[ranks]


class Site:
    """Where a training is tried."""

    def __init__(self, cluster: RayCluster, folder: Path, undisturbed: Undisturbed) -> None:
        self.cluster, self.folder, self.undisturbed = cluster, folder, undisturbed
        self._own: list[str] = []
        self._trainings: list[Training] = []

    def own_node(self, pen: str, rack: str = "a", cpus: int = 1, **variables: str) -> str:
        """Have a node that only this test uses: jobs find it by its label ``pen``. It has variables in its environment."""
        self._own.append(self.cluster.add(variables, cpus, pen=pen, RACK_ID=rack))
        return self._own[-1]

    def __enter__(self) -> Site:
        self.cluster.connect()
        return self

    def __exit__(self, *_: object) -> None:
        """Have no job run on that a test has left when it failed, and take the test's own nodes away."""
        for it in self._trainings:
            it.end()
        for node in filter(self.cluster.has, self._own):
            self.cluster.remove(node)

    def training(self, nodes: int, *, room: int = 0, steps: int = 5, **more: Any) -> Training:
        """Have a job that trains: it has made some steps. There are at least ``room`` nodes in the cluster."""
        it = self.planned(nodes, room=room, **more)
        it.job.submit()
        it.await_steps(steps)
        return it

    def planned(self, nodes: int, *, room: int = 0, **more: Any) -> Training:
        """Have a job that is not submitted yet."""
        if "labels" not in more:
            self.cluster.some(max(nodes, room))
        it = Training(self, nodes, **more)
        self._trainings.append(it)
        return it


class Training:
    """One job under test, and everything that is done to it."""

    def __init__(self, site: Site, nodes: int, **more: Any) -> None:
        self.site, self.folder, self.nodes = site, site.folder, nodes
        self.job = self.builder(**more).build()

    def builder(
        self,
        *,
        threshold: float | None = None,
        replicas: int = 0,
        detached: bool = False,
        minimum: int | None = None,
        labels: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> Any:
        from resilience.integrations.ray import JobBuilder

        built = (
            JobBuilder()
            .name(self.folder.name.replace("_", "-")[-40:].strip("-"))
            .nodes(self.nodes, minimum)
            .train(SCRIPT, self.folder, STEPS, PAUSE, replicas)
            .workload("steps")
            .settings(**QUICK, **settings)
            .node_labels(labels or {})
            .rendezvous(**RENDEZVOUS)
            .environment({"PROGRESS": str(self.folder), "OMP_NUM_THREADS": "1", **(environment or {})})
            .run_dir(str(self.folder / "run"))
            .detached(detached)
        )
        return built.enable_node_group_failover("RACK_ID", threshold) if threshold is not None else built

    def logs(self, node: int | str = "*") -> list[Path]:
        """Return what the ranks of a node have written, the oldest first."""
        return sorted((self.folder / "run").glob(f"node-{node}/logs/**/stderr.log"), key=lambda it: it.stat().st_mtime)

    def words(self) -> str:
        logs = self.logs()
        tails = [f"--- {path.relative_to(self.folder)}\n{path.read_text(errors='replace')[-800:]}" for path in logs]
        return "\n".join([str(self.job.status()), *tails])

    def await_steps(self, more: int = 5) -> int:
        """Wait until training has got further than ever by some steps; return the step."""
        target = max((step for step, _ in losses(self.folder)), default=-1) + more

        def there() -> int:
            if self.job.status().over:
                raise AssertionError(f"the job ended early:\n{self.words()}")
            return max((step for step, _ in losses(self.folder)), default=-1) >= target

        try:
            wait_for(there, f"step {target}", PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.words()}") from None
        return target

    def survives(self, blow: Callable[[], object]) -> None:
        """Strike, and wait until all ranks have started again and got further than ever."""
        before = len(starts(self.folder))
        blow()
        try:
            wait_for(lambda: len(starts(self.folder)) >= before + self.nodes, "all ranks to start again", PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.words()}") from None
        self.await_steps()

    def order(self, rank: int, what: str) -> None:
        """Tell a rank what to do at its next step."""
        (self.folder / f"order_{rank}").write_text(what)

    def node(self, rank: int) -> str:
        return str(self.job.status().nodes[rank].node)

    def actor(self, kind: str, node: str = "") -> dict[str, Any]:
        """What Ray knows of a live actor of this job: a Supervisor, a StoreKeeper, or a NodeAgent, by its node."""
        import ray

        for it in ray._private.state.actors().values():
            own = it["Name"] == self.job.name or is_claim_of(self.job.name, it["Name"])
            if (
                own
                and it["State"] == "ALIVE"
                and it["ActorClassName"] == kind
                and node in (it["Address"]["NodeID"], "")
            ):
                return dict(it)
        return {}

    def finish(self) -> None:
        """Have it come to its end, and see that nothing was lost, wrong or left behind."""
        (self.folder / "finish").touch()
        status = self.job.wait(PATIENCE_S)
        assert status.succeeded, self.words()
        self.assert_right()
        self.assert_nothing_left()

    def end(self) -> None:
        """Stop it, if it was submitted and is not over."""
        from resilience.integrations.ray import RayJobError

        with contextlib.suppress(RayJobError):
            if not self.job.status().over:
                self.job.stop(PATIENCE_S)

    def assert_right(self) -> None:
        noted = losses(self.folder)
        steps = max(step for step, _ in noted) + 1
        assert {step for step, _ in noted} == set(range(steps)), "a step is missing"
        expected = self.site.undisturbed.losses(self.nodes, steps)
        wrong = [(step, loss) for step, loss in noted if expected[step] != loss]
        assert not wrong, f"{len(wrong)} losses differ, first {wrong[0]}, expected {expected[wrong[0][0]]}"

    def assert_nothing_left(self) -> None:
        import ray
        from ray.util import list_named_actors, placement_group_table

        mark = f"PROGRESS={self.folder}".encode()

        def family() -> list[str]:
            found = []
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and jobs.alive(int(entry.name)):
                    try:
                        if mark in (entry / "environ").read_bytes().split(b"\0"):
                            found.append(jobs.command_line(int(entry.name)))
                    except OSError:
                        continue
            return found

        wait_for(lambda: not family(), f"the end of all of the job's processes: {family()}", 30)
        names = [it["name"] for it in list_named_actors(all_namespaces=True)]
        assert not [name for name in names if name == self.job.name or is_claim_of(self.job.name, name)]
        groups = [it for it in placement_group_table().values() if is_claim_of(self.job.name, it["name"])]
        assert {it["state"] for it in groups} <= {"REMOVED"}
        whole = ray.cluster_resources().get("CPU", 0.0)
        wait_for(lambda: ray.available_resources().get("CPU", 0.0) == whole, "all processors to be free again", 20)


def tier(it: Training, node: int) -> str:
    """Return where the rank of a node was restored from, the last time."""
    said = [line for path in it.logs(node) for line in path.read_text(errors="replace").splitlines()]
    found = [line.partition(" restored from ")[2].partition(" in ")[0] for line in said if " restored from " in line]
    return found[-1] if found else ""


def kill(actor: dict[str, Any]) -> None:
    assert actor, "there is no such actor"
    os.kill(int(actor["Pid"]), signal.SIGKILL)


class submitted_elsewhere:  # noqa: N801 - reads as what it is
    """Submit a job from another program; ended in any case."""

    def __init__(self, it: Training) -> None:
        code = (
            "import ray, sys, time; from resilience.integrations.ray import Job, JobSpec\n"
            f"ray.init(address={it.site.cluster.address!r}, log_to_driver=False)\n"
            "Job(JobSpec.from_text(sys.argv[1])).submit(); time.sleep(600)"
        )
        self.process = subprocess.Popen([sys.executable, "-c", code, it.job.spec.as_text()], stderr=subprocess.DEVNULL)

        def known() -> bool:
            from resilience.integrations.ray import RayJobError

            try:
                return bool(it.job.status())
            except RayJobError:
                assert self.process.poll() is None, "the driver ended"
                return False

        wait_for(known, "the job to be submitted", PATIENCE_S)

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
