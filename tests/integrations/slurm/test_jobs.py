"""What Slurm is asked to do with a job: while it is away, and where somebody else was quicker."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import threading

import pytest

pytest.importorskip("resilience.integrations.slurm", reason="not installed here: resilience.integrations")

from resilience.integrations.slurm import chain, jobs
from resilience.integrations.slurm.scontrol import SlurmAway, SlurmError, field, scontrol

from tests.integrations.slurm.conftest import StandIn
from tests.jobs import wait_for

AWAY = "Unexpected message received for job 7\n"  # of requeue and update, where slurmctld can't be reached
SHOW = "show job -o 7"


def test_requeue_that_nobody_hears_is_told_from_a_refusal(slurm: StandIn) -> None:
    slurm.fail(AWAY, "requeue")
    with pytest.raises(SlurmAway):
        scontrol("requeue", "7")


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Protocol authentication error",
        "slurm_load_jobs error: Connection reset by peer",
        "slurm_load_jobs error: No route to host",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    ],
)
def test_slurmctld_or_munge_that_can_not_be_reached_is_waited_for(slurm: StandIn, said: str) -> None:
    slurm.fail(said)
    with pytest.raises(SlurmAway):
        scontrol("show", "job", "7")


def test_scontrol_that_can_not_be_started_is_said(slurm: StandIn) -> None:
    program = slurm.folder / "scontrol"
    program.write_text("#!/nonexistent/interpreter\n")
    with pytest.raises(SlurmError, match=r"scontrol can't be started: No such file") as raised:
        scontrol("show", "job", "7")
    assert not isinstance(raised.value, SlurmAway)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_machine_without_room_for_a_process_is_waited_for(
    slurm: StandIn, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "run", refused)
    with pytest.raises(SlurmAway, match="can't be started"):
        scontrol("show", "job", "7")


def test_field_with_spaces_in_it_is_whole() -> None:
    text = "JobId=7 JobName=x NodeList= BatchHost=n1 StdErr=/a b/my runs/log StdIn=/dev/null Power=\n"
    assert field(text, "StdErr") == "/a b/my runs/log"
    assert (field(text, "NodeList"), field(text, "BatchHost"), field(text, "Power")) == ("", "n1", "")
    lines = "JobId=7 JobName=x\n   StdErr=/a b/log\n   StdIn=/dev/null\n   Power=\n\n"
    assert (field(lines, "StdErr"), field(lines, "JobName"), field(lines, "Absent")) == ("/a b/log", "x", "")
    assert field("ExcNodeList=(null) Features=(null)", "ExcNodeList") == ""


def test_requeue_waits_for_a_slurmctld_that_is_away(slurm: StandIn) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    slurm.fail(AWAY, "requeue")
    asking = threading.Thread(target=jobs.requeue, args=("7", None, 60.0))
    asking.start()
    wait_for(lambda: slurm.requeues, "a first try")
    slurm.mend("requeue")
    asking.join(60)
    assert slurm.calls[:2] == [SHOW, "requeue incomplete 7"]
    assert slurm.calls[-2:] == [SHOW, "requeue incomplete 7"]


def test_job_that_was_cancelled_before_slurmctld_came_back_is_not_requeued(slurm: StandIn) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    slurm.fail(AWAY, "requeue")
    asking = threading.Thread(target=jobs.requeue, args=("7", None, 60.0))
    asking.start()
    wait_for(lambda: slurm.requeues, "a first try")
    slurm.answer("show", "JobId=7 JobState=COMPLETING")
    asked = slurm.requeues
    slurm.mend("requeue")
    asking.join(60)
    assert slurm.requeues <= asked + 1
    assert slurm.calls[-1] == SHOW


def test_job_that_somebody_has_ended_is_not_requeued(slurm: StandIn) -> None:
    slurm.answer("show", "JobId=7 JobState=COMPLETING")
    with pytest.raises(jobs.Ended, match="COMPLETING"):
        jobs.requeue("7")
    assert slurm.calls == [SHOW]


def test_requeue_that_is_refused_is_not_tried_again(slurm: StandIn) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    slurm.fail("Requested operation is presently disabled for job 7", "requeue")
    with pytest.raises(SlurmError, match="disabled"):
        jobs.requeue("7")
    assert slurm.calls == [SHOW, "requeue incomplete 7"]


def test_requeue_that_a_killed_slurmctld_forgot_is_asked_for_again(
    slurm: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "SAVED_S", 0.0)
    slurm.answer("show", "JobId=7 JobState=RUNNING Restarts=0")
    slurm.forget()
    jobs.put_back("7", 0, ["n2"])
    assert slurm.requeues == 2
    assert slurm.calls.count("update JobId=7 ExcNodeList=n2") == 2, "it has forgotten that too"
    assert "has forgotten that the job is requeued" in caplog.text


def test_requeue_that_is_accepted_and_never_comes_true_is_not_asked_for_without_end(
    slurm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SAVED_S", 0.0)
    monkeypatch.setattr(jobs, "_is_forgotten", lambda *_: True)
    monkeypatch.setattr(jobs, "requeue", lambda *_: None)
    with pytest.raises(SlurmError, match="shows the job as running after each"):
        jobs.put_back("7", 0)


def test_slurmctld_that_is_away_after_a_requeue_is_waited_for(slurm: StandIn) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING Restarts=0")
    slurm.fail("Unable to contact slurm controller", "show")
    looked: list[bool] = []
    looking = threading.Thread(target=lambda: looked.append(jobs._is_forgotten("7", 0, 60.0)))
    looking.start()
    wait_for(lambda: slurm.calls, "a first look")
    slurm.mend("show")
    looking.join(60)
    assert looked == [True]


def test_exclusion_waits_for_a_slurmctld_that_is_away(slurm: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    slurm.answer("show", "JobId=7 JobState=PENDING ExcNodeList=n1")
    slurm.fail(AWAY, "update")
    asking = threading.Thread(target=jobs.exclude, args=("7", ["n2"], 60.0))
    with caplog.at_level(logging.INFO):
        asking.start()
        wait_for(lambda: "update JobId=7 ExcNodeList=n1,n2" in slurm.calls, "a first try")
        slurm.mend("update")
        asking.join(60)
    assert "the job does not get n2 again" in caplog.text
    assert "`scontrol update JobId=7 ExcNodeList=`" in caplog.text, "a job that waits for ever is to be helped"
    assert "may get" not in caplog.text


@pytest.mark.parametrize(
    ("told", "preempted"),
    [
        ("PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=None StartTime=2026-01-01T00:00:00", False),
        ("PreemptTime=2026-01-02T00:00:00 StartTime=2026-01-01T00:00:00", True),
        ("PreemptTime=2026-01-02T00:00:00 StartTime=2026-01-03T00:00:00", False),  # before its last requeue
        ("", False),
    ],
)
def test_job_that_slurm_preempts_is_told_from_one_that_it_did_before(
    slurm: StandIn, told: str, preempted: bool
) -> None:
    slurm.answer("show", f"JobId=7 JobState=RUNNING {told}")
    assert jobs.look("7") == jobs.Seen("RUNNING", preempted)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("JobId=7 JobState=RUNNING RunTime=99:00:00 TimeLimit=00:10:00", "RUNNING"),
        ("JobId=7 JobState=COMPLETING RunTime=00:09:59 TimeLimit=00:10:00", "COMPLETING"),
        ("JobId=7 JobState=COMPLETING RunTime=00:10:00 TimeLimit=00:10:00", "TIMEOUT"),
        ("JobId=7 JobState=COMPLETING RunTime=1-00:00:01 TimeLimit=1-00:00:00", "TIMEOUT"),
        ("JobId=7 JobState=COMPLETING RunTime=1-00:00:01 TimeLimit=UNLIMITED", "COMPLETING"),
        ("", "RUNNING"),
    ],
)
def test_job_that_is_being_ended_has_used_up_its_time_or_was_ended_by_somebody(text: str, state: str) -> None:
    assert jobs.job_state(text) == state


def test_follower_of_a_node_that_slurm_gave_up_does_not_requeue_the_next_start(slurm: StandIn) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING Restarts=1")
    assert jobs.look("7", 0).state == jobs.REQUEUED
    assert not chain.may_go_on(jobs.REQUEUED)
    with pytest.raises(jobs.Ended):
        jobs.requeue("7", 0)
    assert slurm.requeues == 0
    jobs.requeue("7", 1)
    assert slurm.requeues
