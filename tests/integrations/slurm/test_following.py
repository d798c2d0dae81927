"""The process in the batch script, with stand-ins for srun and scontrol: what it starts, remembers, passes on and asks for."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("resilience.integrations.slurm", reason="not installed here: resilience.integrations")

from resilience.integrations.slurm import cli, deadlines, following, node, records
from resilience.integrations.slurm.chain import Decision, History
from resilience.integrations.slurm.drain import Drainer
from resilience.integrations.slurm.jobs import Seen
from resilience.integrations.slurm.records import Start, last_failure, recall, remember
from resilience.integrations.slurm.start import Options, srun_command
from resilience.integrations.slurm.watch import Watch

from resilience.failover import ends, progress
from resilience.failover.error_monitor import NodeFault
from tests.integrations.slurm.conftest import StandIn
from tests.jobs import wait_for

# Nobody waits here for a slurmctld to write down what it has accepted.
_QUICK = """
import sys
from resilience.integrations.slurm import jobs
from resilience.__main__ import main
jobs.SAVED_S = 0.1
sys.exit(main())
"""
_SRUN = """#!{python} -IS
import json, os, pathlib, signal, sys, time
run_dir = pathlib.Path(next(word for word in sys.argv if word.startswith("--run-dir="))[10:])
code, waits = {code}, {waits}
signal.signal(signal.SIGUSR1, lambda *_: globals().__setitem__("waits", False))
(run_dir / "srun").write_text(str(os.getpid()))
while waits:
    time.sleep(0.02)
(run_dir / "ends").mkdir()
(run_dir / "ends" / "n1.json").write_text(json.dumps({{"node": "n1", "code": code, "fault": None}}))
sys.exit(code)
"""


def options(folder: Path, **more: Any) -> Options:
    given: dict[str, Any] = {"job": "7", "restart": 0, "folder": folder, "nodes": 1, "needed": 1, "host": "h"}
    return Options(**{**given, "arguments": ("--nnodes=1", "train.py"), **more})


def follow(
    slurm: StandIn, folder: Path, *flags: str, code: int = 0, waits: bool = False, has_srun: bool = True
) -> subprocess.Popen[str]:
    """Start it as a batch script does, with an srun that ends with ``code``, or waits for SIGUSR1 before."""
    program = slurm.folder / "srun"
    program.write_text(_SRUN.format(python=sys.executable, code=code, waits=waits))
    program.chmod(0o755 if has_srun else 0o644)
    return follow_as_it_is(slurm, folder, *flags)


def follow_as_it_is(slurm: StandIn, folder: Path, *flags: str) -> subprocess.Popen[str]:
    """Start it with the srun that is there."""
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    command = [sys.executable, "-c", _QUICK, "slurm", "follow", f"--dir={folder}", *flags, "--", "train.py"]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, cwd=folder)


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("code", "ends_with", "requeued"), [(0, 0, False), (77, 77, False), (79, 79, True), (1, 1, True)]
)
def test_codes_are_acted_on(slurm: StandIn, tmp_path: Path, code: int, ends_with: int, requeued: bool) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    process = follow(slurm, tmp_path, code=code)
    _, said = process.communicate(timeout=60)
    assert process.returncode == ends_with, said
    assert bool(slurm.requeues) is requeued


@pytest.mark.spawns
def test_request_to_stop_reaches_srun_and_the_job_is_requeued(slurm: StandIn, tmp_path: Path) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    process = follow(slurm, tmp_path, code=1, waits=True)
    wait_for((tmp_path / "7" / "0" / "srun").exists, "srun")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    assert slurm.requeues
    assert recall(tmp_path / "7").counted == 0


@pytest.mark.spawns
def test_requeue_that_slurmctld_forgot_when_it_was_killed_is_made_again(slurm: StandIn, tmp_path: Path) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    slurm.forget()
    process = follow(slurm, tmp_path, code=79)
    _, said = process.communicate(timeout=60)
    assert slurm.requeues == 2
    assert "has forgotten that the job is requeued" in said


@pytest.mark.spawns
def test_slurmctld_that_is_away_when_srun_starts_costs_the_job_nothing(slurm: StandIn, tmp_path: Path) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    slurm.fail("Unable to contact slurm controller (connect failure)")
    program = slurm.folder / "srun"
    fails = f"import pathlib, sys\nif pathlib.Path({str(slurm.folder / 'error')!r}).exists(): sys.exit(1)\n"
    text = _SRUN.format(python=sys.executable, code=0, waits=False)
    program.write_text(text.replace("\n", "\n" + fails, 1))
    program.chmod(0o755)
    process = follow_as_it_is(slurm, tmp_path)
    wait_for(lambda: len(slurm.calls) > 1, "tries in vain")
    slurm.mend()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "slurmctld was away, so srun has ended with 1 and started nothing: it is started again" in said
    assert slurm.requeues == 0


@pytest.mark.spawns
@pytest.mark.parametrize("fault", ["slurmctld is there", "a launcher has begun", "asked to stop"])
def test_srun_that_failed_for_another_reason_is_not_started_again(slurm: StandIn, tmp_path: Path, fault: str) -> None:
    follower = following.Follower(options(tmp_path), asked=fault == "asked to stop")
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    if fault != "slurmctld is there":
        slurm.fail("Unable to contact slurm controller (connect failure)")
    if fault == "a launcher has begun":
        (tmp_path / "7" / "0" / "ends").mkdir(parents=True)
    assert not follower._is_to_be_started_again(1, 2.0)


@pytest.mark.spawns
@pytest.mark.parametrize("end", ["asked to stop", "cancelled", "told by SIGTERM", "only the watch"])
def test_watch_that_ends_with_the_job_is_not_missed(
    slurm: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    slurm.answer("show", f"JobId=7 JobState={'COMPLETING' if end == 'cancelled' else 'RUNNING'}")
    follower = following.Follower(options(tmp_path, nodes=3, needed=2), asked=end == "asked to stop")
    follower._watch = Watch(tmp_path / "watch.log")
    follower._watch.start(lambda command, **more: subprocess.Popen(["false"], **more), "7", 0, 3)
    follower._watch.processes()[0].wait()
    if end == "told by SIGTERM":
        follower._on_term(signal.SIGTERM, None)
        follower._ended_by_slurm = False  # that it was looked into
    with caplog.at_level(logging.WARNING):
        follower._look_after_watch()
    assert ("no other node watches over this one" in caplog.text) is (end == "only the watch")


@pytest.mark.spawns
def test_what_follows_is_said_though_the_srun_of_the_watch_does_not_end(
    slurm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("show", "JobId=7 JobState=COMPLETING")
    monkeypatch.setattr(following, "_LEAVE_S", 0.5)
    follower = following.Follower(options(tmp_path, nodes=3, needed=2))
    stays = subprocess.Popen(["sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"], stdout=subprocess.PIPE)
    assert stays.stdout is not None
    stays.stdout.readline()
    follower._others.append(stays)
    monkeypatch.setattr(follower, "_train", lambda drainer: 143)
    decided: list[tuple[bool, bool]] = []

    def act(decision: Decision) -> int:
        decided.append((stays.poll() is None, decision.requeue))
        return 5

    monkeypatch.setattr(follower, "_act", act)
    program = slurm.folder / "srun"
    program.touch()
    program.chmod(0o755)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    before |= {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGHUP)}
    try:
        assert follower.run() == 5
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert decided == [(True, False)], "decided before anybody waits for it"
    assert stays.poll() is not None, "and then it is ended"


_STUBBORN = """#!{python} -IS
import json, os, pathlib, signal, sys, time
run_dir = pathlib.Path(next(word for word in sys.argv if word.startswith("--run-dir="))[10:])
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
(run_dir / "srun").write_text(str(os.getpid()))
for node in {ended}:
    (run_dir / "ends").mkdir(exist_ok=True)
    (run_dir / "ends" / node).write_text(json.dumps({{"node": node, "code": {code}, "fault": None}}))
    (run_dir / "ends" / node).rename(run_dir / "ends" / (node + ".json"))
if {stops}:
    os.kill(os.getpid(), signal.SIGSTOP)
while not (run_dir / "go").exists():
    time.sleep(0.02)
sys.exit(len(heard))
"""


def stubborn(slurm: StandIn, *ended: str, code: int = 0, stops: bool = False) -> None:
    """An srun that ends when the file ``go`` is there, with the number of requests to stop that it has had."""
    program = slurm.folder / "srun"
    program.write_text(_STUBBORN.format(python=sys.executable, ended=ended, code=code, stops=stops))
    program.chmod(0o755)


@pytest.mark.spawns
def test_second_request_to_stop_does_not_spoil_the_first(
    slurm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following.Follower, "_start_store", lambda self: "h:1")
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    stubborn(slurm)
    follower = following.Follower(options(tmp_path))
    records.claim(tmp_path / "7", Start("", 0))
    path = tmp_path / "7" / "0" / "srun"
    codes: list[int] = []
    training = threading.Thread(target=lambda: codes.append(follower._train(None)))
    training.start()
    wait_for(lambda: path.exists() and path.read_text(), "srun")
    follower._ask()
    time.sleep(0.5)  # signals of one kind that come together are one
    follower.gave_up = True
    follower._ask()
    time.sleep(0.5)
    (tmp_path / "7" / "0" / "go").touch()
    training.join(60)
    assert codes == [1]


@pytest.mark.spawns
def test_request_to_stop_while_srun_is_started_reaches_it(
    slurm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following.Follower, "_start_store", lambda self: "h:1")
    stubborn(slurm)
    follower = following.Follower(options(tmp_path))
    records.claim(tmp_path / "7", Start("", 0))
    path = tmp_path / "7" / "0" / "srun"
    start = following.Follower._start

    def started_and_asked(command: list[str]) -> subprocess.Popen[bytes]:
        process = start(command)
        wait_for(lambda: path.exists() and path.read_text(), "srun")
        follower._ask()
        os.kill(process.pid, signal.SIGSTOP)  # else it may end before it hears of it
        (tmp_path / "7" / "0" / "go").touch()
        threading.Timer(1.0, os.kill, (process.pid, signal.SIGCONT)).start()
        return process

    monkeypatch.setattr(follower, "_start", started_and_asked)
    assert follower._train(None) == 1


@pytest.mark.spawns
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_shared_file_system_that_has_a_bad_moment_ends_no_healthy_job(
    slurm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Python 3.10 and 3.11 raise what a folder can't be listed for."""
    asked = threading.Event()
    monkeypatch.setattr(following.Follower, "_start_store", lambda self: "h:1")
    monkeypatch.setattr(following, "_LOOK_S", 0.05)
    stubborn(slurm)
    follower = following.Follower(options(tmp_path))
    records.claim(tmp_path / "7", Start("", 0))
    path = tmp_path / "7" / "0" / "srun"
    codes: list[int] = []
    training = threading.Thread(target=lambda: codes.append(follower._train(None)))
    training.start()
    wait_for(lambda: path.exists() and path.read_text(), "srun")
    with monkeypatch.context() as bad:
        bad.setattr(Path, "glob", refuse(number, asked))
        asked.wait(10)
        asked.clear()
        asked.wait(10)
    (tmp_path / "7" / "0" / "go").touch()
    training.join(60)
    assert asked.is_set(), "it looked again"
    assert (codes, caplog.text) == ([0], "")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_what_follows_is_decided_though_the_shared_file_system_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as bad:
        for name in ("glob", "iterdir", "exists", "read_text"):
            bad.setattr(Path, name, refuse(number))
        decision = following.Follower(options(tmp_path))._decide(79, (ends.NodeEnd("n1", 79),), Seen())
        lost, begun = records.lost_in(tmp_path), records.has_begun(tmp_path)
    assert decision.requeue
    assert lost is None
    assert begun, "and nothing is started beside what may run"


def test_nobody_is_given_up_where_it_cannot_be_seen_whether_a_cycle_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(tmp_path, 1, "node", "the launcher on n2 has been silent for 60 s", 5)
    assert records.lost_in(tmp_path) == 1
    glob = Path.glob

    def some(self: Path, pattern: str) -> Any:
        return refuse(errno.EIO)(self) if self.name == "logs" else glob(self, pattern)

    monkeypatch.setattr(Path, "glob", some)
    assert records.lost_in(tmp_path) is None


def refuse(number: int, asked: threading.Event | None = None) -> Callable[..., Any]:
    """Return what a file system says that does not answer."""

    def act(*_: object, **__: object) -> Any:
        if asked is not None:
            asked.set()
        raise OSError(number, os.strerror(number))

    return act


@pytest.mark.spawns
@pytest.mark.parametrize("what", ["a launcher", "srun"])
def test_job_ends_though_something_hangs(
    slurm: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    monkeypatch.setattr(deadlines, "MARGIN_S", 0.5)
    monkeypatch.setattr(following, "_LEAVE_S", 1.0)
    names = ("n1", "n2", "n3")
    stubborn(slurm, *(names[:2] if what == "a launcher" else names), stops=what == "srun")
    monkeypatch.setattr(following.Follower, "_start_store", lambda self: "h:1")
    arguments = ("--nnodes=2", "--ft-stop-grace=0.5", "train.py")
    follower = following.Follower(options(tmp_path, nodes=3, needed=2, names=names, arguments=arguments))
    records.claim(tmp_path / "7", Start("", 0))
    with caplog.at_level(logging.WARNING):
        code = follower._train(None)
    assert code == 128 + (signal.SIGTERM if what == "a launcher" else signal.SIGKILL)
    assert ("n3 does not say how it ended" if what == "a launcher" else "srun does not end") in caplog.text


@pytest.mark.spawns
def test_job_that_was_preempted_while_it_started_is_requeued_for_free(slurm: StandIn, tmp_path: Path) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING PreemptTime=2026-01-02T00:00:00 StartTime=2026-01-01T00:00:00")
    process = follow(slurm, tmp_path, code=1)
    process.communicate(timeout=60)
    assert slurm.requeues
    assert recall(tmp_path / "7").counted == 0


@pytest.mark.spawns
def test_sigterm_of_a_preemption_is_not_passed_on_since_slurm_tells_the_launchers(
    slurm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following.Follower, "_start_store", lambda self: "h:1")
    slurm.answer("show", "JobId=7 JobState=RUNNING PreemptTime=2026-01-02T00:00:00 StartTime=2026-01-01T00:00:00")
    stubborn(slurm)
    follower = following.Follower(options(tmp_path))
    records.claim(tmp_path / "7", Start("", 0))
    training = threading.Thread(target=lambda: codes.append(follower._train(None)))
    codes: list[int] = []
    training.start()
    path = tmp_path / "7" / "0" / "srun"
    wait_for(lambda: path.exists() and path.read_text(), "srun")
    follower._ended_by_slurm = True
    wait_for(lambda: follower.asked, "it to be known")
    (tmp_path / "7" / "0" / "go").touch()
    training.join(60)
    assert codes == [0]


@pytest.mark.spawns
def test_job_that_was_asked_to_stop_before_it_began_starts_nothing_and_is_requeued(
    slurm: StandIn, tmp_path: Path
) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    process = follow(slurm, tmp_path, "--asked", code=1)
    process.communicate(timeout=60)
    assert slurm.requeues
    assert recall(tmp_path / "7").counted == 0
    assert not (tmp_path / "7" / "0" / "srun").exists()


@pytest.mark.spawns
@pytest.mark.parametrize(("state", "requeued"), [("RUNNING", True), ("COMPLETING", False)])
def test_sigterm_is_passed_on_only_where_slurm_has_not_told_the_steps_itself(
    slurm: StandIn, tmp_path: Path, state: str, requeued: bool
) -> None:
    slurm.answer("show", f"JobId=7 JobState={state}")
    process = follow(slurm, tmp_path, code=79, waits=True)
    path = tmp_path / "7" / "0" / "srun"
    wait_for(lambda: path.exists() and path.read_text(), "srun")
    process.send_signal(signal.SIGTERM)
    if state == "COMPLETING":  # here Slurm would tell the launchers
        wait_for(lambda: slurm.calls, "the question for the job's state")
        os.kill(int(path.read_text()), signal.SIGUSR1)
    process.communicate(timeout=60)
    assert bool(slurm.requeues) is requeued


@pytest.mark.spawns
def test_chain_that_is_over_starts_nothing(slurm: StandIn, tmp_path: Path) -> None:
    (tmp_path / "done").touch()
    process = follow(slurm, tmp_path, f"--finished-file={tmp_path / 'done'}")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Nothing is started" in said
    assert not (tmp_path / "7").exists()


@pytest.mark.spawns
def test_job_that_cannot_remember_is_not_requeued_for_ever(
    slurm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    records.claim(tmp_path / "7", Start("", 2))
    (tmp_path / "7" / "chain.json").mkdir()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    process = follow(slurm, tmp_path, code=1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "nothing can be remembered" in said
    assert slurm.requeues == 0


@pytest.mark.spawns
@pytest.mark.parametrize("fault", ["no srun", "marker", "array", "few"])
def test_job_that_cannot_begin_ends_in_words_and_is_not_requeued(
    slurm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    flags = {"marker": f"--finished-file={'x' * 300}", "few": "--needed=2"}
    if fault == "array":
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "6")
    if fault == "no srun":
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    process = follow(slurm, tmp_path, *([flags[fault]] if fault in flags else []), has_srun=fault != "no srun")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert "Nothing was started" in said
    assert "Traceback" not in said
    assert slurm.calls == (["show job -o 7"] if fault == "array" else [])


@pytest.mark.spawns
def test_job_submitted_from_within_another_is_not_taken_for_that_one(
    slurm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "6")  # Slurm sets neither for the first start of a job that is alone
    monkeypatch.setenv("SLURM_RESTART_COUNT", "4")
    slurm.answer("show", "JobId=7 JobName=x Requeue=1 Restarts=0 JobState=RUNNING")
    process = follow(slurm, tmp_path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert (tmp_path / "7" / "0" / "ends").is_dir()
    assert not (tmp_path / "7" / "4").exists()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("JobId=8 ArrayJobId=6 ArrayTaskId=1 Restarts=1", ("6", "1")),
        ("JobId=8 ArrayJobId=(null) Restarts=0", ("", "0")),
        ("JobId=8", ("", "4")),
        ("", ("5", "4")),
        (None, ("5", "4")),
    ],
)
def test_variables_count_only_where_slurm_cannot_say(slurm: StandIn, answer: str | None, told: tuple[str, str]) -> None:
    variables = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_RESTART_COUNT": "4"}
    if answer is None:
        slurm.fail("Unable to contact slurm controller")
    slurm.answer("show", answer or "")
    assert cli._array_and_restart("8", variables) == told
    assert cli._array_and_restart("8", {}) == ("", "")
    assert len(slurm.calls) == 1


def test_marker_that_can_not_be_looked_for_at_the_end_counts_as_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not following.Follower(options(tmp_path, finished_file="x" * 300))._is_finished()
    assert "It counts as not there" in caplog.text


@pytest.mark.spawns
def test_interrupted_job_ends_in_words_and_is_not_requeued(slurm: StandIn, tmp_path: Path) -> None:
    process = follow(slurm, tmp_path, waits=True)
    path = tmp_path / "7" / "0" / "srun"
    wait_for(lambda: path.exists() and path.read_text(), "srun")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "ended by SIGINT" in said
    assert "Traceback" not in said
    assert slurm.calls == []


@pytest.mark.spawns
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGHUP])
def test_signal_that_asks_for_nothing_is_said_and_does_not_end_the_job(
    slurm: StandIn, tmp_path: Path, number: signal.Signals
) -> None:
    stubborn(slurm, "n1")
    process = follow_as_it_is(slurm, tmp_path)
    path = tmp_path / "7" / "0" / "srun"
    wait_for(lambda: path.exists() and path.read_text(), "srun")
    process.send_signal(number)
    assert process.stderr is not None
    said = process.stderr.readline()
    (tmp_path / "7" / "0" / "go").touch()
    process.communicate(timeout=60)
    assert f"{number.name} is ignored here" in said
    assert process.returncode == 0


@pytest.mark.spawns
def test_store_that_died_is_said_by_the_one_who_started_it(
    slurm: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower = following.Follower(options(tmp_path))
    store = subprocess.Popen(["sleep", "1000"])
    follower._others.append(store)
    follower._look(None)
    assert not follower._broken
    store.kill()
    store.wait()
    with caplog.at_level(logging.ERROR):
        follower._look(None)
        follower._look(None)
    (record,) = caplog.records
    assert "the rendezvous store on h was ended by signal 9" in record.getMessage()
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    (tmp_path / "7" / "0").mkdir(parents=True)
    report(tmp_path / "7" / "0", 0, "exit", "x", 3)
    remember(tmp_path / "7", History(1, "exit: x", 3))
    decision = follower._decide(75, (ends.NodeEnd("n1", 75),), Seen())
    assert "the rendezvous store" in decision.why
    assert decision.requeue, "what the launchers saw of it is no failure that repeats itself"


def test_rank_that_ended_the_job_is_named_with_its_error(slurm: StandIn, tmp_path: Path) -> None:
    run_dir = tmp_path / "7" / "0"
    run_dir.mkdir(parents=True)
    report(run_dir, 3, "exception", "ValueError: bad batch", 3, action="stop")
    told = json.loads((run_dir / "cycles" / "3.json").read_text())
    told["culprit"] |= {"rank": 3, "host": "gpu-07 (n2)"}
    (run_dir / "cycles" / "3.json").write_text(json.dumps(told))
    decision = following.Follower(options(tmp_path))._decide(1, (ends.NodeEnd("n2", 1),), Seen())
    assert f"(rank 3 on gpu-07 (n2): ValueError: bad batch; reports and logs: {run_dir})" in decision.why


@pytest.mark.spawns
def test_killed_follower_leaves_no_srun_behind(slurm: StandIn, tmp_path: Path) -> None:
    process = follow(slurm, tmp_path, waits=True)
    path = tmp_path / "7" / "0" / "srun"
    wait_for(lambda: path.exists() and path.read_text(), "srun")
    process.kill()
    process.communicate(timeout=60)
    pid = int(path.read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of srun")


def test_outside_of_slurm_it_says_where_it_belongs(slurm: StandIn, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "resilience", "slurm", "follow", f"--dir={tmp_path}", "--", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "it belongs in a batch script. Nothing was started. Submit the script: `sbatch FILE`." in done.stderr


def test_srun_starts_one_launcher_per_node_and_none_ends_for_another(tmp_path: Path) -> None:
    words = srun_command(options(tmp_path, nodes=3, needed=3, srun_args=("--mpi=none",)), "h:1")
    assert words[:4] == ["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"]
    assert {"--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--endpoint=h:1", f"--run-dir={tmp_path}/7/0"} <= set(
        words
    )
    assert "--no-kill" not in words
    assert words[words.index("--") :] == ["--", "--nnodes=1", "train.py"]
    assert "--no-kill" in srun_command(options(tmp_path, nodes=3, needed=2), "h:1")


def test_job_submitted_without_an_environment_has_that_of_its_script_on_all_nodes(tmp_path: Path) -> None:
    words = srun_command(options(tmp_path, srun_args=("--export=A",)), "")
    assert "--export=ALL" in words, "SLURM_EXPORT_ENV=NONE, which srun takes for its own, would count"
    assert words.index("--export=ALL") < words.index("--export=A"), "the user has the last word"


def test_launcher_is_told_who_its_node_is() -> None:
    environ = {
        **{"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURMD_NODENAME": "n2"},
        **{"SLURM_TOPOLOGY_ADDR": "top.left.n2", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"},
    }
    assert list(node.flags("/runs/7/2", "h:1", "/faults", environ)) == [
        *("--ft-run-dir=/runs/7/2", "--ft-node-name=n2", "--ft-node-group=left", "--ft-termination-log=/faults/7.n2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--rdzv-id=slurm-7-2", "--rdzv-conf=is_host=false"),
    ]
    assert list(node.flags("/runs", "", "", {})) == ["--ft-run-dir=/runs"]


STALE = '{"node": "n9", "code": 0, "fault": null}'


@pytest.mark.spawns
def test_job_that_fails_is_no_success_though_an_older_one_of_its_number_was(slurm: StandIn, tmp_path: Path) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    (tmp_path / "7" / "0" / "ends").mkdir(parents=True)
    (tmp_path / "7" / "0" / "ends" / "n9.json").write_text(STALE)
    remember(tmp_path / "7", History(3, "hang: x", 40))
    process = follow(slurm, tmp_path, code=1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "another job with this number" in said
    assert recall(tmp_path / "7").counted == 1


def test_what_a_job_keeps_is_there_at_its_next_start(tmp_path: Path) -> None:
    assert records.claim(tmp_path / "7", Start("a", 0)) is None
    remember(tmp_path / "7", History(2, "hang: x", 40))
    assert records.claim(tmp_path / "7", Start("a", 1)) is None
    assert records.claim(tmp_path / "7", Start("a", 5)) is None, "Slurm may have requeued it meanwhile"
    assert recall(tmp_path / "7") == History(2, "hang: x", 40)
    assert {path.name for path in (tmp_path / "7").iterdir()} == {"0", "1", "5", "chain.json", "job.json"}


@pytest.mark.spawns
def test_count_goes_on_at_the_next_start_of_the_same_job_of_the_same_cluster(
    slurm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("show", "JobId=7 JobState=RUNNING")
    records.claim(tmp_path / "7", Start("a", 0))
    remember(tmp_path / "7", History(2, "", -1))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "a")
    _, said = follow(slurm, tmp_path, code=1).communicate(timeout=60)
    assert recall(tmp_path / "7").counted == 3, said


def test_run_directory_of_this_start_is_empty_though_somebody_else_had_it(tmp_path: Path) -> None:
    records.claim(tmp_path, Start("a", 0))
    remember(tmp_path, History(2, "hang: x", 40))
    (tmp_path / "1" / "ends").mkdir(parents=True)  # of one that could not leave its mark
    aside = records.claim(tmp_path, Start("a", 1))
    assert aside is not None
    assert [path.name for path in aside.iterdir()] == ["1"]
    assert list((tmp_path / "1").iterdir()) == []
    assert recall(tmp_path) == History(2, "hang: x", 40)


@pytest.mark.parametrize("start", [Start("a", 0), Start("b", 2), Start("a", 1)])
def test_what_another_job_of_the_number_kept_is_set_aside_and_not_lost(tmp_path: Path, start: Start) -> None:
    for restart in (0, 1):
        records.claim(tmp_path, Start("a", restart))
    remember(tmp_path, History(2, "hang: x", 40))
    (tmp_path / "1" / "ends").mkdir()
    (tmp_path / "users own").touch()
    aside = records.claim(tmp_path, start)
    assert aside is not None
    assert {path.name for path in aside.iterdir()} == {"0", "1", "chain.json", "job.json"}
    assert (aside / "1" / "ends").is_dir()
    assert recall(tmp_path) == History()
    assert list((tmp_path / str(start.restart)).iterdir()) == []
    assert (tmp_path / "users own").exists()
    assert records.claim(tmp_path, Start(start.cluster, start.restart)) != aside, "nothing is overwritten"


@pytest.mark.root
@pytest.mark.spawns
@pytest.mark.parametrize("what", ["folder", "link"])
def test_job_folder_that_another_user_has_made_is_refused_and_nothing_is_written_through_it(
    slurm: StandIn, tmp_path: Path, what: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("not here: root. Left out is a folder of another user's")
    (tmp_path / "precious").write_text("mine")
    trap = tmp_path / ("7" if what == "folder" else "theirs")
    trap.mkdir(0o777)
    os.chown(trap, 65534, -1)
    (trap / ".job.json").symlink_to(tmp_path / "precious")
    if what == "link":
        (tmp_path / "7").symlink_to(trap)
    process = follow(slurm, tmp_path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert (tmp_path / "precious").read_text() == "mine"
    assert [path.name for path in trap.iterdir()] == [".job.json"]
    assert ("belongs to user 65534" if what == "folder" else "is a link") in said
    assert "give another directory" in said
    assert "nothing is requeued" in said


def test_memory_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    home = tmp_path / "7"
    home.mkdir()
    for name in (".job.json", ".chain.json", "job.json", "chain.json", "0"):
        (home / name).symlink_to(tmp_path / ("nowhere" if name == "0" else "precious"))
    records.claim(home, Start("", 0))
    remember(home, History(2, "hang: x", 40))
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()
    assert (home / "0").is_dir()
    assert recall(home) == History(2, "hang: x", 40)


def test_what_a_job_keeps_is_open_to_nobody_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        records.claim(tmp_path / "7", Start("", 0))
        ends.write(tmp_path / "7" / "0", ends.NodeEnd("n1", 0))
        progress.write(tmp_path / "7" / "0" / "progress" / "n1", 1)
    finally:
        os.umask(before)
    found = [tmp_path / "7", *(tmp_path / "7").rglob("*")]
    assert len(found) == 7
    assert [path for path in found if path.stat().st_mode & 0o022] == []


def test_step_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "n1").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"):
        progress.write(tmp_path / "progress" / "n1", 3)
    assert (tmp_path / "precious").read_text() == "mine"


def test_no_node_is_drained_on_the_word_of_another(slurm: StandIn, tmp_path: Path) -> None:
    follower = following.Follower(options(tmp_path, names=("n1", "n2")))
    (tmp_path / "7" / "0").mkdir(parents=True)
    for name, faulty in (("n1", "n9"), ("n2", "n2")):
        ends.write(tmp_path / "7" / "0", ends.NodeEnd(name, 201, NodeFault(faulty, "DriverError", "x")))
    slurm.answer("show", "NodeName=n2 State=IDLE")
    drainer = Drainer()
    follower._told(drainer)
    drainer.close(60)
    assert [call.split()[:2] for call in slurm.calls if call.startswith("update")] == [["update", "NodeName=n2"]]


def test_node_that_is_not_in_the_job_has_no_say(tmp_path: Path) -> None:
    follower = following.Follower(options(tmp_path, names=("n1", "n2")))
    for name in ("n1", "n9"):
        (tmp_path / "7" / "0").mkdir(parents=True, exist_ok=True)
        ends.write(tmp_path / "7" / "0", ends.NodeEnd(name, 0))
    assert [end.node for end in follower._told(None)] == ["n1"]


@pytest.mark.spawns
def test_which_nodes_are_in_the_job_is_asked_of_slurm(
    slurm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("show", "n2\nJobState=RUNNING")  # of the names, and of the job
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[2]")
    process = follow(slurm, tmp_path, code=201)  # which n1 tells
    _, said = process.communicate(timeout=60)
    assert "show hostnames n[2]" in slurm.calls
    assert "no launcher said how it ended" in said, said


@pytest.mark.parametrize("text", ['{"counted": Infinity, "cause": "", "step": 1}', "[" * 100000, "7", '{"counted": 1}'])
def test_odd_memory_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "chain.json").write_text(text)
    assert recall(tmp_path) == History()


def test_step_of_a_killed_launcher_is_what_it_kept_while_it_ran(tmp_path: Path) -> None:
    report(tmp_path, 0, "exit", "x", 3)
    progress.write(tmp_path / "progress" / "n1", 40)
    assert last_failure(tmp_path) == (40, "exit: x")


def test_odd_report_is_left_out(tmp_path: Path) -> None:
    report(tmp_path, 0, "exit", "x", 3)
    text = (tmp_path / "cycles" / "0.json").read_text()
    (tmp_path / "cycles" / "1.json").write_text(text.replace('"cycle": 0', '"cycle": Infinity').replace("3", "9"))
    assert last_failure(tmp_path) == (3, "exit: x")


def test_history_survives_and_a_torn_one_is_none(tmp_path: Path) -> None:
    remember(tmp_path, History(2, "hang: x", 40))
    assert recall(tmp_path) == History(2, "hang: x", 40)
    (tmp_path / "chain.json").write_text('{"counted": 2')
    assert recall(tmp_path) == History()


def report(folder: Path, cycle: int, kind: str, message: str, *steps: int | None, action: str = "stop") -> None:
    culprit = {"kind": kind, "message": message, "rank": 0}
    (folder / "cycles").mkdir(exist_ok=True)
    told = {"cycle": cycle, "culprit": culprit, "action": action, "ranks": [{"step": step} for step in steps]}
    (folder / "cycles" / f"{cycle}.json").write_text(json.dumps(told))


def test_cause_is_the_newest_and_the_step_the_highest(tmp_path: Path) -> None:
    assert last_failure(tmp_path) == (-1, "")
    report(tmp_path, 2, "exit", "ended with exit code 3 at 0xff", 30, None)
    report(tmp_path, 10, "exception", "ValueError: bad batch 17", 20, 21)
    (tmp_path / "cycles" / "11.json").write_text("{")
    assert last_failure(tmp_path) == (30, "exception: ValueError: bad batch #")


def test_lost_node_is_no_failure_that_repeats_itself(tmp_path: Path) -> None:
    report(tmp_path, 0, "node", "the launcher on n2 has been silent for 60 s", 5)
    assert last_failure(tmp_path) == (5, "")


@pytest.mark.parametrize("action", ["restart", "wait"])
def test_failure_that_was_survived_did_not_end_the_start(tmp_path: Path, action: str) -> None:
    report(tmp_path, 0, "exit", "x", 5)
    report(tmp_path, 1, "exit", "x", 9, action=action)
    assert last_failure(tmp_path) == (9, "")


def test_failure_at_the_stop_is_told_apart_from_those_before_it(tmp_path: Path) -> None:
    assert records.stop_failure(tmp_path) == ""
    report(tmp_path, 2, "exception", "OSError: no space\nleft", 60, action="preempted")
    (tmp_path / "cycles" / "3.json").write_text("{")
    assert records.stop_failure(tmp_path) == "exception of rank 0: OSError: no space left"
    report(tmp_path, 10, "exit", "x", 61, action="restart")
    assert records.stop_failure(tmp_path) == ""


def test_launchers_wait_for_a_lost_node_until_a_new_cycle_begins(tmp_path: Path) -> None:
    assert records.lost_in(tmp_path) is None
    report(tmp_path, 0, "exit", "ended with exit code 3", 5)
    report(tmp_path, 1, "node", "the launcher on n2 has been silent for 60 s", 5)
    for cycle in (0, 1):
        (tmp_path / "logs" / f"cycle_{cycle}").mkdir(parents=True)
    assert records.lost_in(tmp_path) == 1
    (tmp_path / "logs" / "cycle_2").mkdir()
    assert records.lost_in(tmp_path) is None
    report(tmp_path, 2, "hang", "in section 'load'", 5)
    assert records.lost_in(tmp_path) is None


def test_cycle_without_logs_has_begun_when_a_launcher_says_so(tmp_path: Path) -> None:
    """With --redirects, --log-dir or --tee there are none here; with --network-check not before that is done."""
    report(tmp_path, 1, "node", "the launcher on n2 has been silent for 60 s", 5)
    progress.write(tmp_path / "progress" / "n1", 40, 1)
    progress.write(tmp_path / "progress" / "n2", 40, 1)
    assert records.lost_in(tmp_path) == 1
    progress.write(tmp_path / "progress" / "n1", 40, 2)
    assert records.lost_in(tmp_path) is None, "though it makes steps again that it has made before"


def test_store_that_does_not_start_is_said(slurm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "ourselves", lambda: ["/bin/false"])
    follower = following.Follower(options(tmp_path, nodes=2))
    with pytest.raises(following.SlurmError, match="did not start on h"):
        follower._start_store()
    for process in follower._others:
        following._end(process)
