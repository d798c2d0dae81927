"""Training on a real Slurm: ranks that are killed, jobs that are preempted, nodes that are faulty or lost, chains that end.

One cluster of four nodes for all of them, or one in each process (``-n 2``).
Needs root (slurmd starts jobs as their users) and Debian's Slurm: ``make test-slurm``.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from resilience.integrations.slurm import jobs
from resilience.integrations.slurm.jobs import SAVED_S
from resilience.integrations.slurm.render import render
from resilience.integrations.slurm.scontrol import DENIED, scontrol
from resilience.integrations.slurm.values import SlurmValues

from tests.jobs import WORKLOADS, alive, children, command_line, wait_for
from tests.real import slurm_cluster
from tests.real.slurm_cluster import Cluster

pytestmark = [pytest.mark.root, pytest.mark.spawns, pytest.mark.timeout(480)]
RESILIENCE = str(Path(sys.executable).with_name("resilience"))
PATIENCE = ("--ft-node-silence-timeout=5", "--ft-testimony-timeout=2", "--rdzv-conf=last_call_timeout=2")
DEADLINE_S = 240.0
NOBODY = pwd.getpwnam("nobody")
AS_NOBODY = (
    "setpriv",
    f"--reuid={NOBODY.pw_uid}",
    f"--regid={NOBODY.pw_gid}",
    "--clear-groups",
    "sh",
    "-c",
    'exec "$@"',
    "sh",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    lacking = slurm_cluster.missing()
    if lacking:
        pytest.skip(f"not here: {lacking}. Left out is everything on a real Slurm")
    made = Cluster(RESILIENCE)
    try:
        yield made.start()
    finally:
        made.close()


@pytest.fixture(autouse=True)
def fresh_nodes(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.clear()


class Job:
    """A rendered script, submitted. ``light``: ranks that only count their steps."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        steps: int,
        *sbatch: str,
        light: bool = False,
        pace: float = 0.1,
        **values: Any,
    ) -> None:
        self._cluster = cluster
        self.folder = folder
        self.progress = folder / "progress"
        self.progress.mkdir(parents=True, exist_ok=True)
        script = [str(WORKLOADS / "slurm_train.py"), "-" if light else str(folder / "checkpoints"), str(steps)]
        env = {"PROGRESS": str(self.progress), "PACE": str(pace), "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": ""}
        given = {
            "name": "train",
            "script": script,
            "command": RESILIENCE,
            "directory": str(folder / "runs"),
            "env": env,
        }
        given |= {"output": str(folder / "log"), "store_host": "127.0.0.1"}
        given["launcher_args"] = ["--local-addr=127.0.0.1", *values.pop("launcher_args", PATIENCE)]
        path = folder / "job.sh"
        path.write_text(render(SlurmValues(**{**given, **values})))
        self.number = int(cluster.run("sbatch", "--parsable", *sbatch, str(path)))

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else "no log"

    def told(self) -> dict[str, str]:
        """What Slurm says of the job now."""
        return self._cluster.job(self.number)

    def steps(self, rank: int) -> list[list[str]]:
        """What a rank noted: [step, loss, restart, node, procid, group] lines."""
        path = self.progress / f"steps_{rank}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self, rank: int) -> dict[int, str]:
        """The loss of every step; the last one, where a step was made again."""
        return {int(line[0]): line[1] for line in self.steps(rank)}

    def await_steps(self, number: int, rank: int = 0) -> None:
        def enough() -> bool:
            if len(self.steps(rank)) >= number:
                return True
            assert self.told().get("JobState") not in ("FAILED", "COMPLETED"), self.log()[-6000:]
            return False

        wait_for(enough, lambda: f"{number} steps of rank {rank}\n{self.log()[-6000:]}", DEADLINE_S)

    def await_state(self, *states: str) -> dict[str, str]:
        try:
            wait_for(lambda: self.told().get("JobState") in states, "", DEADLINE_S)
        except AssertionError:
            raise AssertionError(f"waited in vain for {states}: {self.told()}\n{self.log()[-8000:]}") from None
        return self.told()

    def order(self, rank: int, what: str) -> None:
        partial = self.progress / f".order_{rank}"
        partial.write_text(what)
        partial.rename(self.progress / f"order_{rank}")

    def launcher(self, rank: int) -> int:
        """The process of a rank's launcher."""
        node = self.steps(rank)[-1][3]
        for pid in slurm_cluster.carriers(re.compile(rf"SLURMD_NODENAME={node}\0".encode())):
            words = command_line(pid).split()
            if "run" in words and f"--ft-node-name={node}" in words and str(self.folder) in " ".join(words):
                return pid
        raise AssertionError(f"no launcher on {node}")

    def sruns(self) -> list[int]:
        """The processes of the srun that has started the launchers."""
        pids = slurm_cluster.carriers(re.compile(re.escape(f"SLURM_JOB_ID={self.number}\0").encode()))
        return [pid for pid in pids if command_line(pid).startswith("srun ") and str(self.folder) in command_line(pid)]

    def end(self) -> None:
        """Have both ranks be done."""
        for rank in range(2):
            self.order(rank, "end")

    def start_now(self, timeout: float = DEADLINE_S) -> None:
        """Have a requeued job start again: Slurm leaves it alone for two minutes.

        Not within the second of its end: such a start was seen to end with 1 before the first line of its script.
        """

        def started() -> bool:
            told = self.told()  # nothing while slurmctld does not answer
            state, restarts = told.get("JobState"), told.get("Restarts")
            assert state not in ("FAILED", "COMPLETED", "CANCELLED"), self.log()[-6000:]
            long_ago = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 2))
            if restarts == "1" and state == "PENDING" and told["SubmitTime"] < long_ago:
                self._cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now", check=False)
            return restarts == "1" and state == "RUNNING"

        try:
            wait_for(started, "", timeout)
        except AssertionError:
            raise AssertionError(f"it was not requeued: {self.told()}\n{self.log()[-8000:]}") from None

    def await_restarted(self, rank: int) -> None:
        """Wait for a rank's first step after the requeue."""
        wait_for(
            lambda: any(line[2] == "1" for line in self.steps(rank)),
            lambda: f"it to go on\n{self.log()[-6000:]}",
            DEADLINE_S,
        )

    def made(self, rank: int) -> list[int]:
        """The steps that a rank made, in order, over all starts."""
        return [int(line[0]) for line in self.steps(rank)]

    def finish(self) -> str:
        """Wait for its good end; return the log."""
        ended = self.await_state("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), self.log()[-8000:]
        return self.log()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Thirty steps on two nodes below different switches, to compare with."""
    job = Job(cluster, tmp_path_factory.mktemp("undisturbed"), 30, "--nodelist=n2,n3", nodes=2, pace=0.0)
    job.finish()
    return job


def test_ranks_and_groups_are_slurms(undisturbed: Job) -> None:
    assert [undisturbed.steps(rank)[0][3:] for rank in range(2)] == [["n2", "0", "left"], ["n3", "1", "right"]]
    assert "finished: all workers ended with 0. The chain ends with exit code 0." in undisturbed.log()


def test_rank_killed_on_two_nodes_trains_to_the_end_with_the_same_losses(
    cluster: Cluster, tmp_path: Path, undisturbed: Job
) -> None:
    job = Job(cluster, tmp_path, 30, nodes=2)
    job.await_steps(5, rank=1)
    job.order(1, "kill")
    log = job.finish()
    assert "ended by signal 9" in log
    assert job.told()["Restarts"] == "0"
    assert [job.losses(rank) for rank in range(2)] == [undisturbed.losses(rank) for rank in range(2)]


def test_preempted_job_leaves_at_one_step_and_goes_on_there_after_its_requeue(
    cluster: Cluster, tmp_path: Path, undisturbed: Job
) -> None:
    job = Job(cluster, tmp_path, 30, nodes=2)
    job.await_steps(5)
    cluster.run("scancel", "--signal=USR1", "--batch", str(job.number))
    job.start_now()
    job.finish()
    for rank in range(2):
        assert job.made(rank) == list(range(30)), "every step once: none is lost, none is made again"
    last = [max(int(line[0]) for line in job.steps(rank) if line[2] == "-") for rank in range(2)]
    assert last[0] == last[1] < 29
    assert {line[2] for line in job.steps(0)} == {"-", "1"}
    assert [job.losses(rank) for rank in range(2)] == [undisturbed.losses(rank) for rank in range(2)]


def test_faulty_node_is_drained_though_slurmctld_was_away_and_a_spare_takes_over(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path, 100000, light=True, nodes=2, spares=1, drain=True)
    job.await_steps(5, rank=1)
    faulty = job.steps(1)[-1][3]
    cluster.stop_controller()
    job.order(1, "exit 201")
    wait_for(lambda: job.steps(1)[-1][3] != faulty, lambda: f"the spare to train\n{job.log()[-6000:]}", DEADLINE_S)
    wait_for(lambda: "It is tried again" in job.log(), lambda: f"an attempt in vain\n{job.log()[-6000:]}", DEADLINE_S)
    cluster.start_controller()
    wait_for(
        lambda: "DRAIN" in cluster.states().get(faulty, ""), lambda: f"a drained node\n{job.log()[-6000:]}", DEADLINE_S
    )
    assert cluster.node(faulty)["Reason"].startswith("resilience: DriverError: a worker ended with exit code 201")
    job.end()
    assert "Exited with exit code 201" in job.finish(), "srun ends with 201, the job all the same with 0"
    assert job.told()["Restarts"] == "0"


def test_cancelled_job_is_not_requeued_though_its_launchers_were_asked_to_stop(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path, 100000, light=True, nodes=2, spares=1)
    job.await_steps(3)
    cluster.run("scancel", str(job.number))
    wait_for(
        lambda: "The chain ends with" in job.log(), lambda: f"the end of the chain\n{job.log()[-6000:]}", DEADLINE_S
    )
    assert "it is not requeued from here" in job.log()
    assert "no other node watches" not in job.log(), "those that did end with the job"
    assert job.await_state("CANCELLED", "PENDING", "COMPLETED")["JobState"] == "CANCELLED"


def test_chain_ends_where_restarting_cannot_help(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, 100000, light=True, nodes=2)
    job.order(1, "raise")
    job.await_steps(1)
    ended = job.await_state("FAILED", "COMPLETED", "PENDING")
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "77:0", "0"), job.log()[-6000:]
    last = next(line for line in job.log().splitlines() if "exit code 77: restarting can't help (rank 1 on" in line)
    assert "ValueError: told to raise; reports and logs: " in last
    assert last.endswith("It is not requeued. The chain ends with exit code 77.")


def test_lost_node_is_replaced_by_a_spare(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, 100000, light=True, nodes=2, spares=1)
    job.await_steps(3)
    job.await_steps(3, rank=1)
    batch_host = job.told()["BatchHost"]
    rank, lost = next((rank, line[3]) for rank in range(2) if (line := job.steps(rank)[-1])[3] != batch_host)
    cluster.lose(lost)
    wait_for(lambda: job.steps(rank)[-1][3] != lost, lambda: f"the spare to train\n{job.log()[-6000:]}", DEADLINE_S)
    job.end()
    job.finish()
    assert job.told()["Restarts"] == "0"


def test_launcher_killed_without_a_spare_has_the_job_requeued_and_it_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, 100000, light=True, nodes=2)
    job.await_steps(3)
    job.await_steps(3, rank=1)
    os.kill(job.launcher(rank=1), signal.SIGKILL)
    job.start_now()
    job.await_restarted(1)
    assert "lost without a word" in job.log()
    assert job.told()["ExcNodeList"] == "(null)"


def test_job_that_is_cancelled_between_the_look_and_the_requeue_stays_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    number = cluster.run("sbatch", "--parsable", "--requeue", "--output=/dev/null", "--wrap=sleep 600").strip()
    wait_for(lambda: cluster.job(int(number)).get("JobState") == "RUNNING", "the job to run")

    def cancelled_meanwhile(*words: str) -> str:
        if words[0] == "requeue":
            cluster.run("scancel", number)
        return str(scontrol(*words))

    monkeypatch.setattr(jobs, "scontrol", cancelled_meanwhile)
    jobs.requeue(number, 0)
    wait_for(lambda: cluster.job(int(number)).get("JobState") == "CANCELLED", "the job to be over")
    assert cluster.job(int(number))["Restarts"] == "0"


def test_ordinary_user_may_requeue_and_leave_nodes_out_but_not_drain(cluster: Cluster) -> None:
    """What the chain counts on, and what the epilog is for."""
    number = cluster.run(
        "sbatch", "--parsable", f"--uid={NOBODY.pw_uid}", "--output=/dev/null", "--wrap=sleep 600"
    ).strip()
    wait_for(lambda: cluster.job(int(number)).get("JobState") == "RUNNING", "the job to run")
    cluster.run(*AS_NOBODY, "scontrol", "requeue", number)
    cluster.run(*AS_NOBODY, "scontrol", "update", f"JobId={number}", "ExcNodeList=n1")
    assert cluster.job(int(number))["ExcNodeList"] == "n1"
    refused = subprocess.run(
        [*AS_NOBODY, "scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=x"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode != 0
    assert any(words in refused.stderr.lower() for words in DENIED), refused.stderr


def test_faulty_node_without_a_spare_is_drained_by_the_epilog_and_the_job_goes_on_elsewhere(
    cluster: Cluster,
) -> None:
    home = cluster.folder / "home"
    home.mkdir()
    (home / "progress").mkdir()
    user = NOBODY.pw_uid if subprocess.run([*AS_NOBODY, RESILIENCE, "--version"], check=False).returncode == 0 else 0
    for path in (home, home / "progress"):  # an ordinary user's, where another user can run what is installed here
        os.chown(path, user, -1)
    faults = str(cluster.folder / "faults")
    job = Job(cluster, home, 100000, f"--uid={user}", light=True, nodes=2, fault_dir=faults)
    job.await_steps(3, rank=1)
    faulty = job.steps(1)[-1][3]
    job.order(1, "exit 201")
    job.start_now()
    assert job.told()["ExcNodeList"] == faulty
    assert "DRAIN" in cluster.states()[faulty]
    assert cluster.node(faulty)["Reason"].startswith("resilience: DriverError")
    job.await_restarted(1)
    assert faulty not in (job.steps(0)[-1][3], job.steps(1)[-1][3])
    assert "too few nodes are left" in job.log()
    drained = [node for node, state in cluster.states().items() if "DRAIN" in state]
    assert drained == [faulty], "the folder is seen by all nodes, and the others are healthy"
    assert list((cluster.folder / "faults").iterdir()) == []


@pytest.mark.rare
def test_requeue_that_a_killed_slurmctld_forgot_is_made_again(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, 100000, light=True, nodes=1)
    job.await_steps(3)
    time.sleep(SAVED_S)  # it has written down that the job runs
    saved = cluster.keep_state()
    cluster.run("scancel", "--signal=USR1", "--batch", str(job.number))
    wait_for(lambda: job.told().get("Restarts") == "1", lambda: f"a requeue\n{job.log()[-6000:]}", DEADLINE_S)
    cluster.stop_controller()
    cluster.put_back_state(saved)  # it may have been quick to write the requeue down
    cluster.start_controller()
    wait_for(lambda: "JobState" in job.told(), "slurmctld", DEADLINE_S)
    job.start_now()
    job.await_restarted(0)
    assert "asked to stop, and did" in job.log()
    assert "has forgotten that the job is requeued" in job.log()


@pytest.mark.rare
def test_request_to_stop_that_no_launcher_hears_has_the_job_requeued_before_its_time_is_up(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path, 100000, light=True, nodes=1, stop_grace=1)
    job.await_steps(3)
    stopped = job.sruns()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    cluster.run("scancel", "--signal=USR1", "--batch", str(job.number))
    try:
        job.start_now()
    finally:
        for pid in stopped:  # a child of it, which nobody else ends
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert "s ago, and none says that it has: ending the step" in job.log()
    assert "no launcher said how it ended" in job.log()
    job.await_restarted(0)


@pytest.mark.rare
def test_slurmctld_that_is_away_when_the_job_starts_costs_it_no_requeue(cluster: Cluster, tmp_path: Path) -> None:
    ready, go = tmp_path / "ready", tmp_path / "go"
    setup = [f"touch {ready}", f"while [ ! -e {go} ]; do sleep 0.1; done"]
    job = Job(cluster, tmp_path, 100000, light=True, nodes=2, setup=setup)
    wait_for(ready.exists, "the batch script", DEADLINE_S)
    time.sleep(SAVED_S)  # else it would not know the job any more
    cluster.stop_controller()
    go.touch()
    wait_for(lambda: "It is tried again" in job.log(), lambda: f"an attempt in vain\n{job.log()[-6000:]}", DEADLINE_S)
    cluster.start_controller()
    wait_for(lambda: "JobState" in job.told(), "slurmctld", DEADLINE_S)
    job.await_steps(3)
    job.end()
    assert "it is started again" in job.finish()
    assert job.told()["Restarts"] == "0"


@pytest.mark.rare
def test_job_that_has_finished_ends_though_a_launcher_hangs_that_was_replaced(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, 100000, light=True, nodes=2, spares=1, stop_grace=1)
    job.await_steps(3)
    job.await_steps(3, rank=1)
    hung = job.launcher(rank=1)
    node = job.steps(1)[-1][3]
    pids = [hung, *children(hung)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: job.steps(1)[-1][3] != node, lambda: f"the spare to train\n{job.log()[-6000:]}", DEADLINE_S)
        job.end()
        assert f"{node} does not say how it ended: ending the step" in job.finish()
    finally:
        for pid in pids:  # those that are not in the launcher's group Slurm does not know of (proctrack/pgid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.rare
def test_launcher_killed_after_steps_has_the_count_begin_anew(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, 100000, light=True, nodes=1)
    job.await_steps(20)
    kept = tmp_path / "runs" / str(job.number) / "0" / "progress"
    wait_for(lambda: kept.is_dir() and list(kept.iterdir()), "what the launcher keeps")
    os.kill(job.launcher(rank=0), signal.SIGKILL)
    job.start_now()
    assert "launchers were killed or nodes lost, at step" in job.log()


@pytest.mark.rare
def test_job_whose_time_is_nearly_up_is_told_by_slurm_and_goes_on_after_its_requeue(
    cluster: Cluster, tmp_path: Path
) -> None:
    # Two minutes are the shortest that can be rendered, and Slurm may signal 95 s before: a busy machine has not begun by then.
    job = Job(cluster, tmp_path, 100000, nodes=2, time="3", stop_grace=5)
    job.await_steps(1)
    job.start_now(180 + DEADLINE_S)
    job.await_restarted(1)
    for made in (job.made(0), job.made(1)):
        assert made == list(range(len(made))), "every step once: none is lost, none is made again"
    assert "asked to stop, and did" in job.log()
    assert "DUE TO TIME LIMIT" not in job.log()


@pytest.mark.rare
def test_job_that_a_more_urgent_one_takes_the_nodes_of_saves_and_goes_on_when_they_are_free(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path, 100000, nodes=2)
    job.await_steps(5)
    urgent = cluster.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"
    )
    wait_for(lambda: cluster.job(int(urgent)).get("JobState") == "RUNNING", lambda: job.log()[-6000:], DEADLINE_S)
    assert job.told()["JobState"] == "PENDING"
    job.start_now()
    job.await_restarted(1)
    for made in (job.made(0), job.made(1)):
        assert made == list(range(len(made))), "every step once: none is lost, none is made again"
    assert "asked to stop, and did" in job.log()


@pytest.mark.rare
def test_lost_first_node_has_slurm_requeue_the_job_and_it_goes_on(
    cluster: Cluster, tmp_path: Path, undisturbed: Job
) -> None:
    job = Job(cluster, tmp_path, 30, nodes=2, pace=0.5)
    job.await_steps(5)
    lost = job.told()["BatchHost"]
    cluster.lose(lost)
    job.start_now()
    job.finish()
    assert job.steps(0)[-1][2] == job.steps(1)[-1][2] == "1"
    assert next(int(line[0]) for line in job.steps(0) if line[2] == "1") > 0
    assert lost not in (job.steps(0)[-1][3], job.steps(1)[-1][3])
    assert [job.losses(rank) for rank in range(2)] == [undisturbed.losses(rank) for rank in range(2)]


@pytest.mark.rare
def test_lost_first_node_of_a_job_with_a_spare_has_the_others_requeue_it_and_it_goes_on(
    cluster: Cluster, tmp_path: Path, undisturbed: Job
) -> None:
    # The first node may be the spare: the others train on. GPUs: those who watch must not ask for what the job has.
    job = Job(cluster, tmp_path, 30, nodes=2, spares=1, gpus_per_node=1, pace=2.5)
    job.await_steps(3)
    lost = job.told()["BatchHost"]
    cluster.lose(lost)
    job.start_now()
    log = job.finish()
    assert f"the first node, {lost}, is lost, and the batch script with it" in log
    assert next(int(line[0]) for line in job.steps(0) if line[2] == "1") > 0
    assert lost not in (job.steps(0)[-1][3], job.steps(1)[-1][3])
    assert [job.losses(rank) for rank in range(2)] == [undisturbed.losses(rank) for rank in range(2)]


@pytest.mark.rare
def test_node_that_slurm_gave_up_does_not_train_on_beside_the_next_start(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, 100000, light=True, nodes=1)
    job.await_steps(5)
    launcher, lost = job.launcher(rank=0), job.told()["BatchHost"]
    old = [launcher, *children(launcher)]
    cluster.lose_slurmd(lost)
    job.start_now()
    wait_for(lambda: not any(map(alive, old)), lambda: f"the end of {old}\n{job.log()[-6000:]}", DEADLINE_S)
    job.await_restarted(0)
    before = len(job.steps(0))
    job.await_steps(before + 5)
    assert {(line[2], line[3] == lost) for line in job.steps(0)[before:]} == {("1", False)}
    assert "finished" not in job.log()
    job.end()
    assert "finished: all workers ended with 0" in job.finish()
