"""Faulty nodes out of scheduling: once, with a reason, and by an epilog that believes nobody more than it must."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from pathlib import Path

import pytest

pytest.importorskip("resilience.integrations.slurm", reason="not installed here: resilience.integrations")

from resilience.integrations.slurm import node, scontrol
from resilience.integrations.slurm.drain import Drainer, SlurmErrorMonitor, _left, epilog, reason
from resilience.integrations.slurm.scontrol import SlurmAway, SlurmDenied, SlurmError

from resilience.failover.error_monitor import NodeFault, of_code
from resilience.failover.marking import leave_message
from tests.integrations.slurm.conftest import StandIn
from tests.jobs import wait_for

FAULT = NodeFault("n2", "DriverError", "a worker ended with exit code 201: driver error", code=201, run="7")
MINE = dataclasses.replace(FAULT, node="n5")  # the node that the epilog runs on
WORD = "0123456789abcdef"  # what nobody can guess
ENVIRON = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n5"}
SHOW = "show node n2 -o"
DRAIN = f"update NodeName=n2 State=DRAIN Reason={reason(FAULT)}"


def test_node_is_drained_with_a_reason(slurm: StandIn) -> None:
    slurm.answer("show", "NodeName=n2 State=MIXED ThreadsPerCore=1")
    SlurmErrorMonitor().mark(FAULT)
    assert slurm.calls == [SHOW, DRAIN]


@pytest.mark.parametrize("state", ["IDLE+DRAIN", "MIXED+DRAIN", "DRAINED", "DOWN+DRAIN", "FAIL"])
def test_node_that_is_out_keeps_the_reason_it_has(slurm: StandIn, state: str) -> None:
    slurm.answer("show", f"NodeName=n2 State={state} Reason=fan [root@now]")
    SlurmErrorMonitor().mark(FAULT)
    assert slurm.calls == [SHOW]


def test_node_that_is_only_down_is_drained_since_it_may_come_back(slurm: StandIn) -> None:
    slurm.answer("show", "NodeName=n2 State=DOWN")
    SlurmErrorMonitor().mark(FAULT)
    assert DRAIN in slurm.calls


def test_user_without_the_right_reads_what_to_do(slurm: StandIn) -> None:
    slurm.fail("slurm_update error: Invalid user id\n")
    with pytest.raises(SlurmDenied, match=r"operator rights.*resilience slurm epilog"):
        SlurmErrorMonitor().mark(FAULT)


def test_unknown_node_is_said_with_what_to_do(slurm: StandIn) -> None:
    slurm.fail("Node n2 not found\n")
    with pytest.raises(SlurmError, match="--ft-node-name"):
        SlurmErrorMonitor().mark(FAULT)


def test_slurmctld_that_is_away_is_told_from_a_refusal(slurm: StandIn) -> None:
    slurm.fail("slurm_load_node error: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(SlurmAway):
        SlurmErrorMonitor().mark(FAULT)


def test_machine_without_slurm_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(scontrol, "_PLACES", str(tmp_path))
    with pytest.raises(SlurmError, match="there is no scontrol"):
        SlurmErrorMonitor().mark(FAULT)


def test_reason_is_one_short_line_whatever_the_message_is() -> None:
    text = reason(NodeFault("n", "Odd", 'a\nb\t"c" \\ \x1b[31m' + "x" * 500))
    assert text.isprintable()
    assert len(text) == 200
    assert not set(text) & set("\"'\\")


def test_mark_is_not_lost_when_slurmctld_comes_back(slurm: StandIn) -> None:
    slurm.fail("slurm_load_node error: Unable to contact slurm controller (connect failure)\n")
    drainer = Drainer()
    drainer.tell(FAULT)
    drainer.tell(FAULT)
    wait_for(lambda: slurm.calls, "a first attempt")
    slurm.answer("show", "State=IDLE")
    slurm.mend()
    drainer.close(30)
    assert slurm.calls.count(DRAIN) == 1


def test_refused_drain_is_said_once_and_holds_nobody_up(slurm: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    slurm.fail("slurm_update error: Access/permission denied\n")
    drainer = Drainer()
    with caplog.at_level(logging.ERROR):
        drainer.tell(FAULT)
        drainer.close(30)
    (record,) = caplog.records
    assert "node n2 is NOT drained (DriverError)" in record.getMessage()


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: StandIn) -> Path:
    folder = tmp_path / "faults"
    folder.mkdir()
    told = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(os.getuid()), "SLURMD_NODENAME": "n5"}
    for name, text in told.items():
        monkeypatch.setenv(name, text)
    slurm.answer("show", "State=IDLE")
    return folder


def test_epilog_drains_the_node_it_runs_on_whatever_its_user_calls_it(faults: Path, slurm: StandIn) -> None:
    """``--ft-node-name`` of one's own: the file's name has Slurm's name of the node in it."""
    (faults / "7.n5").write_text(FAULT.as_message())
    assert epilog([f"--fault-dir={faults}"]) == 0
    assert slurm.calls[-1].startswith("update NodeName=n5 State=DRAIN Reason=resilience: DriverError")
    assert not (faults / "7.n5").exists()


def test_epilog_that_slurm_runs_without_a_search_path_drains_its_node(
    faults: Path, slurm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(scontrol, "_PLACES", f"/nowhere:{slurm.folder}")
    (faults / "7.n5").write_text(MINE.as_message())
    assert epilog([f"--fault-dir={faults}"]) == 0
    assert slurm.calls[-1].startswith("update NodeName=n5 State=DRAIN")


@pytest.mark.parametrize(
    "name", ["7", "7.n2", f"7.n2.{WORD}", "7.n51", f"7.n51.{WORD}", "7.n5.lan", f"7.n5.lan.{WORD}"]
)
def test_epilog_leaves_what_other_nodes_of_the_job_left_to_their_epilogs(
    faults: Path, slurm: StandIn, name: str
) -> None:
    """Where several nodes see the folder, a healthy one must not be drained for a faulty one."""
    (faults / name).write_text(FAULT.as_message())
    (faults / "7.n3").write_text("half written by another no")
    assert epilog([f"--fault-dir={faults}"]) == 0
    assert slurm.calls == []
    assert {path.name for path in faults.iterdir()} == {name, "7.n3"}


def test_epilog_takes_away_only_what_its_own_node_left(faults: Path, slurm: StandIn) -> None:
    (faults / f"7.n2.{WORD}").write_text(FAULT.as_message())
    (faults / f"7.n5.{WORD}").write_text(MINE.as_message())
    assert epilog([f"--fault-dir={faults}"]) == 0
    assert slurm.calls[-1].startswith("update NodeName=n5 State=DRAIN")
    assert [path.name for path in faults.iterdir()] == [f"7.n2.{WORD}"]


@pytest.mark.parametrize("text", ["nan", "-1", "inf", "soon", ""])
def test_patience_that_is_no_time_is_said_and_keeps_no_node_from_being_drained(
    faults: Path, slurm: StandIn, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (faults / "7").write_text(MINE.as_message())
    assert epilog([f"--fault-dir={faults}", f"--patience={text}"]) == 0
    assert f"--patience={text} is no number of seconds" in capsys.readouterr().err
    assert slurm.calls[-1].startswith("update NodeName=n5 State=DRAIN")


def test_launcher_leaves_its_fault_where_the_epilog_of_its_node_looks(faults: Path, slurm: StandIn) -> None:
    faults.chmod(0o1777)
    (flag,) = [word for word in node.flags("/r", "", str(faults), ENVIRON) if word.startswith("--ft-termination-log=")]
    leave_message(FAULT, flag.partition("=")[2])
    assert epilog([f"--fault-dir={faults}"]) == 0
    assert slurm.calls[-1].startswith("update NodeName=n5 State=DRAIN")
    assert list(faults.iterdir()) == []


def test_epilog_of_a_job_that_left_nothing_asks_slurm_nothing(faults: Path, slurm: StandIn) -> None:
    (faults / "8").write_text(MINE.as_message())
    assert epilog([f"--fault-dir={faults}"]) == 0
    assert slurm.calls == []


def test_epilog_believes_only_the_jobs_own_user(faults: Path, slurm: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    (faults / "7").write_text(MINE.as_message())
    monkeypatch.setenv("SLURM_JOB_UID", str(os.getuid() + 1))
    assert epilog([f"--fault-dir={faults}"]) == 0
    assert slurm.calls == []


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder", "nonsense"])
def test_epilog_follows_no_link_and_waits_for_no_pipe(faults: Path, slurm: StandIn, kind: str) -> None:
    (faults / "other").write_text(MINE.as_message())
    path = faults / "7"
    if kind == "link":
        path.symlink_to(faults / "other")
    elif kind == "hard link":
        path.hardlink_to(faults / "other")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("[" * 10000)
    assert epilog([f"--fault-dir={faults}"]) == 0
    assert slurm.calls == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "nonsense"])
def test_things_of_others_keep_no_node_from_being_drained(faults: Path, slurm: StandIn, kind: str) -> None:
    faults.chmod(0o1777)
    (faults / "70.x").write_text("of another job")
    for name in ("7", "7.0"):
        path = faults / name
        if kind == "link":
            path.symlink_to(faults / "70.x")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.write_text("[" * 10000)
            path.with_name(f"{name}.link").hardlink_to(path)
    leave_message(MINE, str(faults / "7"))
    assert epilog([f"--fault-dir={faults}"]) == 0
    assert slurm.calls[-1].startswith("update NodeName=n5 State=DRAIN")
    left = [fault for path in faults.iterdir() if (fault := _left(path, os.getuid())) is not None]
    assert left == [], "what was acted on is taken away"
    assert (faults / "70.x").exists()


def test_epilog_insists_while_slurmctld_is_away(faults: Path, slurm: StandIn) -> None:
    (faults / "7.ab").write_text(MINE.as_message())
    slurm.fail("Unable to contact slurm controller (connect failure)")
    codes: list[int] = []
    ending = threading.Thread(target=lambda: codes.append(epilog([f"--fault-dir={faults}", "--patience=60"])))
    ending.start()
    wait_for(lambda: slurm.calls, "a first try")
    assert (faults / "7.ab").exists(), "it is taken away only when the node is drained"
    slurm.mend()
    ending.join(60)
    assert codes == [0]
    assert slurm.calls[-1].startswith("update NodeName=n5 State=DRAIN")
    assert not (faults / "7.ab").exists()


def test_epilog_that_could_not_drain_says_so_and_leaves_what_it_found(
    faults: Path, slurm: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    (faults / "7").write_text(MINE.as_message())
    slurm.fail("Unable to contact slurm controller (connect failure)")
    assert epilog([f"--fault-dir={faults}", "--patience=0.1"]) == 0
    assert "node n5 is NOT drained" in capsys.readouterr().err
    assert (faults / "7").exists()


def test_epilog_never_fails_since_slurm_would_drain_the_node_for_it(
    faults: Path, slurm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    (faults / "7").write_text(str(of_code("n5", 201)))
    slurm.fail("Unable to contact slurm controller")
    assert epilog([f"--fault-dir={faults}", "--patience=0.1"]) == 0
    (faults / "7").write_text(MINE.as_message())
    assert epilog([f"--fault-dir={faults}", "--patience=0.1"]) == 0
    monkeypatch.delenv("SLURM_JOB_ID")
    assert epilog([f"--fault-dir={faults}"]) == 0
