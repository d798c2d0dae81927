"""The node check before every start, with real launchers and real check processes: who is unfit never trains, the rest does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_strategies import SCRIPT, finish
from tests.jobs import Fleet, Job, children, command_line, job, stopped, wait_for

pytestmark = pytest.mark.spawns
ROOT = Path(__file__).parent.parent.parent
CHECK = ["--network-check", "--accelerator=tests.nodecheck.patients::Patient"]
ENV = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "GLOO_SOCKET_IFNAME": "lo"}


@contextmanager
def nodes(
    folder: Path, nnodes: str, *ailments: str, options: tuple[str, ...] = (), together: int = 0
) -> Iterator[Fleet]:
    """Launchers whose nodes have something, or nothing, wrong with them."""
    faults = f"--ft-error-monitor=file:{folder}/faults.jsonl"
    options = (*CHECK, faults, "--max-restarts=3", *options)
    with Fleet(folder, nnodes, list(options), SCRIPT, together=together or len(ailments)) as it:
        it.env = ENV
        for number, ailment in enumerate(ailments):
            log = f"--ft-termination-log={folder}/termination-{number}"
            it.add(log, env={"AILMENT": ailment})
        yield it


def marked(folder: Path) -> dict[str, str]:
    """Who was marked as faulty, and why."""
    path = folder / "faults.jsonl"
    faults = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {fault["node"]: fault["reason"] for fault in faults}


def check_in(report: dict[str, Any]) -> dict[str, str]:
    """The verdicts in a report, by the node's name."""
    return {item["name"].partition("(")[2].rstrip(")"): item["state"] for item in report["check"]}


def check_processes(node: Job) -> list[int]:
    return [pid for pid in children(node.pid) if "resilience.nodecheck.process" in command_line(pid)]


def test_node_that_fails_its_check_never_trains_a_slow_one_is_told_of_and_the_rest_trains(tmp_path: Path) -> None:
    with nodes(tmp_path, "2:3", "", "wrong", "slow") as it:
        assert it.nodes[1].wait() == 80, it.logs()
        for node in (it.nodes[0], it.nodes[2]):
            node.await_steps(1)
            report = node.report(0)
            assert check_in(report) == {"n0": "healthy", "n1": "faulty", "n2": "straggler"}, it.logs()
            assert report["culprit"]["kind"] == "check"
            assert "the product of the GEMM is wrong in 1 of 128 rows" in report["culprit"]["message"]
            assert check_processes(node) == []
        assert not any(it.nodes[1].steps(cycle) for cycle in range(3))
        assert marked(tmp_path) == {"n1": "NodeCheckFailed"}
        message = json.loads((tmp_path / "termination-1").read_text())
        assert message["fault"]["node"] == "n1"
        assert not (tmp_path / "termination-0").exists()
        again = it.add("--ft-node-name=n1")
        assert again.wait() == 76, again.log()
        assert finish([it.nodes[0], it.nodes[2]]) == [0, 0], it.logs()
        assert "its GEMM takes" in it.nodes[0].log()
        for node in it.nodes:
            node.assert_nothing_left()


@pytest.mark.long
def test_straggler_is_out_where_that_is_asked_for(tmp_path: Path) -> None:
    with nodes(tmp_path, "2:3", "", "", "slow", options=("--exclude_straggler",)) as it:
        assert it.nodes[2].wait() == 80, it.logs()
        for node in it.nodes[:2]:
            node.await_steps(1)
        assert marked(tmp_path) == {"n2": "NodeIsStraggler"}
        assert finish(it.nodes[:2]) == [0, 0], it.logs()


@pytest.mark.parametrize(
    "ailment", [pytest.param("hangs", marks=pytest.mark.long), pytest.param("mute", marks=pytest.mark.rare)]
)
def test_node_whose_check_hangs_is_found_and_the_others_train(tmp_path: Path, ailment: str) -> None:
    with nodes(tmp_path, "2:3", "", "", ailment, options=("--ft-node-check-timeout=6",)) as it:
        assert it.nodes[2].wait() == 80, it.logs()
        for node in it.nodes[:2]:
            node.await_steps(1)
        assert marked(tmp_path) == {"n2": "NodeCheckFailed"}
        assert finish(it.nodes[:2]) == [0, 0], it.logs()
        for node in it.nodes:
            node.assert_nothing_left()


def test_check_is_made_before_a_restart_too_and_a_node_that_became_faulty_does_not_go_on(tmp_path: Path) -> None:
    ailment = tmp_path / "ailment"
    options = [*CHECK, "--max-restarts=5", f"--ft-error-monitor=file:{tmp_path}/faults.jsonl", "--ft-node-name=n0"]
    with job(tmp_path / "node", options, SCRIPT, {**ENV, "AILMENT_FILE": str(ailment), "RESUME": "1"}) as it:
        it.await_steps(0)
        assert check_processes(it) == []
        it.order("kill SIGKILL")
        it.await_steps(1)
        assert it.log().count("node check (") == 2
        ailment.write_text("crashes")
        it.order("kill SIGKILL")
        assert it.wait() == 80, it.log()
        assert "ended with signal 11 (SIGSEGV)" in it.report(2)["culprit"]["message"]
        assert it.report(1)["culprit"]["kind"] == "signal"
        assert not it.steps(2)
        assert marked(tmp_path) == {"n0": "NodeCheckFailed"}
        it.assert_nothing_left()


@pytest.mark.long
def test_two_nodes_that_do_not_reach_each_other_end_with_the_code_to_try_again_and_nobody_is_marked(
    tmp_path: Path,
) -> None:
    with nodes(tmp_path, "2", "") as it:
        it.add(env={"GLOO_SOCKET_IFNAME": "none0"})
        assert [node.wait() for node in it.nodes] == [75, 75], it.logs()
        assert marked(tmp_path) == {}
        for node in it.nodes:
            assert "a third one would tell" in node.log()
            node.assert_nothing_left()


@pytest.mark.parametrize(
    "bad", [pytest.param(0, marks=pytest.mark.long), *(pytest.param(bad, marks=pytest.mark.rare) for bad in (1, 2))]
)
def test_of_three_nodes_the_one_with_the_broken_network_is_found(tmp_path: Path, bad: int) -> None:
    """Also where it is the one that hosts the store: then it stays, without workers, until the job is over."""
    with nodes(tmp_path, "2:3", together=3) as it:
        for number in range(3):
            it.add(env={"GLOO_SOCKET_IFNAME": "none0"} if number == bad else {})
        others = [node for number, node in enumerate(it.nodes) if number != bad]
        for node in others:
            node.await_steps(1)
        assert marked(tmp_path) == {f"n{bad}": "NodeCheckFailed"}
        if bad == 0:  # one that is slow to read that all are done still finds the store
            (others[0].progress / "finish").touch()
            wait_for(lambda: "waiting for the other nodes" in others[0].log(), it.logs)
            with stopped(others[0].pid):
                assert finish(others[1:]) == [0], it.logs()
        assert finish(others) == [0, 0], it.logs()
        assert it.nodes[bad].wait() == 80, it.logs()
        for node in it.nodes:
            node.assert_nothing_left()


@pytest.mark.long
def test_spare_takes_the_place_of_a_faulty_node_and_is_checked_first(tmp_path: Path) -> None:
    with nodes(tmp_path, "2", "", "wrong", options=("--ft-use-infra-group-rank=false",)) as it:
        assert it.nodes[1].wait() == 80, it.logs()
        spare = it.add()
        for node in (it.nodes[0], spare):
            node.await_steps(1)
        assert it.nodes[0].log().count("node check (") == 2
        assert finish([it.nodes[0], spare]) == [0, 0], it.logs()


@pytest.mark.long
def test_launcher_that_is_killed_while_its_check_hangs_is_gone_with_it(tmp_path: Path) -> None:
    with nodes(tmp_path, "2:3", "", "", "hangs", options=("--ft-node-silence-timeout=4",)) as it:
        hanging = it.nodes[2]
        wait_for(lambda: "are checked before the workers start" in hanging.log(), "the check to begin")
        (pid,) = check_processes(hanging)
        os.kill(hanging.pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the check's process to end")
        for node in it.nodes[:2]:
            node.await_steps(1)
        assert marked(tmp_path) == {}
        assert finish(it.nodes[:2]) == [0, 0], it.logs()
        for node in it.nodes:
            node.assert_nothing_left()


@pytest.mark.long
def test_sigterm_during_the_check_ends_the_launcher_and_its_check_at_once(tmp_path: Path) -> None:
    options = [*CHECK, "--ft-node-check-timeout=600"]
    with job(tmp_path / "node", options, SCRIPT, {**ENV, "AILMENT": "hangs"}) as it:
        wait_for(lambda: "the node check uses" in it.log() and check_processes(it), "the check")
        it.process.send_signal(signal.SIGTERM)
        assert it.wait(30) == 1, it.log()
        it.assert_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize(("flags", "code"), [(["--network-check"], 80), ([], 1)])
def test_disk_that_takes_no_run_directory_is_a_fault_of_the_node_where_nodes_are_checked(
    tmp_path: Path, flags: list[str], code: int
) -> None:
    alone = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a mount namespace: left out is a launcher on a read-only disk")
    disk, message = tmp_path / "disk", tmp_path / "message"
    disk.mkdir()
    mount = [*alone, "sh", "-c", f'mount -t tmpfs -o ro tmpfs {disk} && exec "$@"', "sh"]
    monitor = [f"--ft-error-monitor=file:{tmp_path}/faults.jsonl", f"--ft-termination-log={message}"]
    options = [*flags, *monitor, f"--ft-run-dir={disk}/run", "--ft-node-name=n0"]
    with job(tmp_path / "node", options, SCRIPT, ENV, lambda command: [*mount, *command]) as it:
        assert it.wait() == code, it.log()
        assert "can't be made: Read-only file system" in it.log()
        assert "Traceback" not in it.log()
        assert marked(tmp_path) == ({"n0": "NodeCheckFailed"} if code == 80 else {})
        assert message.exists() == (code == 80)
        it.assert_nothing_left()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--network-check", "--accelerator=nvida"], "Did you mean 'nvidia'?"),
        pytest.param(
            ["--network_check", "--accelerator=tests.nodecheck.patients::Patent"],
            "Did you mean 'Patient'?",
            marks=pytest.mark.rare,
        ),
        pytest.param(["--ft-error-monitor=fiel:/tmp/x"], "Did you mean 'file'?", marks=pytest.mark.rare),
    ],
)
def test_what_can_not_be_meant_ends_with_2_before_anything_is_started(
    tmp_path: Path, flags: list[str], words: str
) -> None:
    with job(tmp_path, flags, SCRIPT, ENV) as it:
        assert it.wait() == 2, it.log()
        assert words in it.log()
        assert "can't be written" not in it.log()
        assert not it.notes(0)
        it.assert_nothing_left()
