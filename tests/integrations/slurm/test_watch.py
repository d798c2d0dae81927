"""Who sees that a job has lost its batch script, with a stand-in for scontrol. What Slurm makes of it: ``tests/real``."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resilience.integrations.slurm", reason="not installed here: resilience.integrations")

from resilience.integrations.slurm.watch import OVER, REQUEUE, WATCH, Seen, Watch, judge, srun_command, srun_environment

from tests.integrations.slurm.conftest import StandIn
from tests.jobs import wait_for

WHOLE = Seen("RUNNING", 0, "n3", ("n3", "n4", "n5"))
# the words before JobId are what `scontrol show hostnames` says: the stand-in has one answer for both
AT_FIRST = "n3 n4 JobId=7 JobState=RUNNING Restarts=0 NodeList=n[3-4] BatchHost=n3 StdErr={log}"
LOST = "n4 JobId=7 JobState=RUNNING Restarts=0 NodeList=n4 BatchHost=n3 StdErr={log}"


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (WHOLE, WATCH),
        (Seen("RUNNING", 0, "n3", ("n3", "n5")), WATCH),  # another node is lost
        (Seen("RUNNING", 0, "n3", ("n4", "n5")), REQUEUE),
        (Seen("SUSPENDED", 0, "n3", ("n4", "n5")), WATCH),
        (Seen("RUNNING", 0, "n3", ()), WATCH),  # Slurm says nothing of nodes
        (Seen("RUNNING", 1, "n4", ("n4", "n5")), OVER),  # it is another start
        (Seen("COMPLETING", 0, "n3", ("n4", "n5")), OVER),
        (Seen("PENDING", 1, "", ()), OVER),
        (Seen("CANCELLED", 0, "n3", ("n3",)), OVER),
    ],
)
def test_job_is_requeued_only_where_it_runs_on_without_its_first_node(now: Seen, verdict: str) -> None:
    assert judge(WHOLE, now, 0) == verdict


def test_first_node_that_slurm_calls_otherwise_is_not_taken_for_a_lost_one() -> None:
    odd = Seen("RUNNING", 0, "n3.cluster", ("n3", "n4"))
    assert judge(odd, odd, 0) == WATCH


@pytest.mark.parametrize(("nodes", "count", "relative"), [(2, 1, 1), (3, 2, 1), (9, 2, 7)])
def test_watchers_are_on_the_last_nodes_and_take_nothing_from_the_launchers(
    nodes: int, count: int, relative: int
) -> None:
    words = srun_command("7", 2, nodes)
    assert {f"--nodes={count}", f"--ntasks={count}", f"--relative={relative}", "--overlap", "--no-kill"} <= set(words)
    assert {"--job=7", "--restart=2"} <= set(words)


def test_watchers_ask_for_no_gpu_though_the_job_has_some() -> None:
    """Slurm refuses a step that asks for none in its flags and for some in its environment."""
    of_job = {"SLURM_GPUS_PER_NODE": "8", "SLURM_GPUS": "16", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "7"}
    assert srun_environment(of_job) == {"SLURM_JOB_ID": "7"}
    assert "--gres=none" in srun_command("7", 0, 3)


@pytest.mark.spawns
def test_srun_of_the_watchers_is_started_without_the_gpus_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(command: list[str], **more: object) -> subprocess.Popen[bytes]:
        words = ["sh", "-c", 'echo "gpus: $SLURM_GPUS_PER_NODE."']
        return subprocess.Popen(words, **more)  # type: ignore[call-overload]

    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "8")
    watch = Watch(tmp_path / "watch.log")
    watch.start(start, "7", 0, 3)
    (step,) = watch.processes()
    step.wait()
    assert (tmp_path / "watch.log").read_text() == "gpus: .\n"


def watcher() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "resilience", "slurm", "watch", "--job=7", "--restart=0", "--every=0.1"]
    return subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.PIPE, text=True)


@pytest.mark.spawns
def test_job_that_lost_its_first_node_is_requeued_though_slurmctld_is_away_at_first(
    slurm: StandIn, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("begun\n")
    slurm.answer("show", AT_FIRST.format(log=log))
    process = watcher()
    try:
        wait_for(lambda: slurm.calls.count("show job -o 7") > 2, "some looks")
        assert slurm.requeues == 0
        slurm.fail("Unable to contact slurm controller")
        slurm.answer("show", LOST.format(log=log))
        seen = len(slurm.calls)
        wait_for(lambda: len(slurm.calls) > seen + 2, "looks in vain")
        assert process.poll() is None
        slurm.mend()
        wait_for(lambda: slurm.requeues, "a requeue")
        slurm.answer("show", "JobId=7 JobState=PENDING Restarts=1")
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, said) == (0, "")
    assert log.read_text().startswith("begun\n")
    assert "the first node, n3, is lost, and the batch script with it" in log.read_text()


@pytest.mark.spawns
def test_refused_requeue_is_said_in_the_log_of_the_job(slurm: StandIn, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    slurm.answer("show", AT_FIRST.format(log=log))
    process = watcher()
    try:
        wait_for(lambda: slurm.calls.count("show job -o 7") > 1, "a look")
        slurm.fail("Requested operation is presently disabled", verb="requeue")
        slurm.answer("show", LOST.format(log=log))
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    assert "the job is NOT requeued" in log.read_text()


@pytest.mark.spawns
def test_job_that_slurm_does_not_know_any_more_is_not_watched(slurm: StandIn) -> None:
    slurm.fail("slurm_load_jobs error: Invalid job id specified")
    process = watcher()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Invalid job id" in said


@pytest.mark.spawns
def test_watch_that_cannot_be_started_is_said_once_and_the_job_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(command: list[str], **more: object) -> subprocess.Popen[bytes]:
        words = ["sh", "-c", "echo 'Unable to create step' >&2; exit 3"]
        return subprocess.Popen(words, **more)  # type: ignore[call-overload]

    watch = Watch(tmp_path / "watch.log")
    watch.start(start, "7", 0, 3)
    (step,) = watch.processes()
    step.wait()
    with caplog.at_level(logging.WARNING):
        watch.look()
        watch.look()
    (record,) = caplog.records
    assert "its srun ended with 3: Unable to create step" in record.getMessage()
