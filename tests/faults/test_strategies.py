"""What each failover strategy does on several launchers: who restarts, who ends, with which code, what is said."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.failover import ends
from tests.jobs import WORKLOADS, Fleet, Job, alive, children, command_line, fleet, stopped, wait_for

pytestmark = pytest.mark.spawns
SCRIPT = [str(WORKLOADS / "fleet.py"), "100000"]
NO_PROGRESS = "8,3"  # steps: no later cycle gets as far as the first, which would renew the budget


@contextmanager
def training(folder: Path, count: int, nnodes: str, *options: str, steps: int = 3, **env: str) -> Iterator[Fleet]:
    """``count`` launchers; the workers of those that have a place train, the others wait."""
    places = int(nnodes.rpartition(":")[2])
    with fleet(folder, min(count, places), nnodes, list(options), SCRIPT, **env) as it:
        for node in it.nodes:
            node.await_steps(0, steps)
        for _ in range(count - places):
            spare = it.add()
            wait_for(lambda spare=spare: "is a spare" in spare.log(), "the spare to say that it waits")  # type: ignore[misc]
        yield it


def finish(nodes: list[Job]) -> list[int]:
    for node in nodes:
        (node.progress / "finish").touch()
    return [node.wait() for node in nodes]


def test_normal_restarts_the_workers_of_all_nodes_in_place(tmp_path: Path) -> None:
    with training(tmp_path, 2, "2", "--max-restarts=3") as it:
        launchers = [node.pid for node in it.nodes]
        it.nodes[1].order("raise bad batch")
        for node in it.nodes:
            node.await_steps(1)
        reports = [node.report(0) for node in it.nodes]
        assert reports[0] == reports[1]
        assert (reports[0]["action"], reports[0]["strategy"]) == ("restart", "NORMAL_FAILOVER")
        assert reports[0]["culprit"]["message"] == "ValueError: bad batch"
        assert reports[0]["culprit"]["host"]
        assert reports[0]["culprit"]["sections"][-1]["name"] == "step"
        assert "(1 of 3 restarts used)" in reports[0]["action_detail"]
        assert finish(it.nodes) == [0, 0], it.logs()
        assert launchers == [node.pid for node in it.nodes]
        for node in it.nodes:
            node.assert_nothing_left()


def test_nodes_whose_devices_break_at_once_all_leave_with_their_own_codes_and_are_marked(tmp_path: Path) -> None:
    marks = tmp_path / "faults.jsonl"
    with training(tmp_path, 3, "3", "--max-restarts=3", f"--ft-error-monitor=file:{marks}") as it:
        # Both launchers find a dead worker when they look again.
        with stopped(it.nodes[1].pid), stopped(it.nodes[2].pid):
            for node, code in ((1, 201), (2, 14)):
                it.nodes[node].order(f"exit {code}")
                pid = int(it.nodes[node].await_note(it.nodes[node].rank(), "obeys-exit")[3])
                wait_for(lambda pid=pid: not alive(pid), "the worker to end")  # type: ignore[misc]
        assert [node.wait() for node in it.nodes[1:]] == [201, 14], it.logs()
        assert it.nodes[0].report(0)["action"] == "node"
    told = [json.loads(line) for line in marks.read_text().splitlines()]
    assert sorted((fault["node"], fault["code"]) for fault in told) == [("n1", 201), ("n2", 14)]
    left = [end for node in it.nodes[1:] for end in ends.read(node.run_dir)]
    assert [(end.node, end.code) for end in left] == [("n1", 201), ("n2", 14)]
    assert [end.fault.reason for end in left if end.fault is not None] == ["DriverError", "InfoROMCorrupted"]


@pytest.mark.parametrize(
    "code",
    [
        201,
        pytest.param(14, marks=pytest.mark.rare),
        *(pytest.param(code, marks=pytest.mark.rare) for code in (128, 202)),
    ],
)
def test_hardware_code_ends_its_node_with_that_code_and_the_others_go_on_without_it(tmp_path: Path, code: int) -> None:
    with training(tmp_path, 3, "2:3", "--max-restarts=3") as it:
        it.nodes[2].order(f"exit {code}")
        assert it.nodes[2].wait() == code, it.logs()
        for node in it.nodes[:2]:
            node.await_steps(1)
            assert node.report(0)["action"] == "node"
            assert node.report(0)["culprit"]["exit_code"] == code
        assert finish(it.nodes[:2]) == [0, 0], it.logs()
        assert f"leaves the job with exit code {code}" in it.nodes[0].log()


def test_node_that_leaves_is_waited_for_when_too_few_are_left_and_its_replacement_takes_its_place(
    tmp_path: Path,
) -> None:
    with training(tmp_path, 2, "2", "--max-restarts=3") as it:
        it.nodes[1].order("exit 201")
        assert it.nodes[1].wait() == 201, it.logs()
        assert it.nodes[0].process.poll() is None
        replacement = it.add()
        for node in (it.nodes[0], replacement):
            node.await_steps(1)
        assert finish([it.nodes[0], replacement]) == [0, 0], it.logs()


@pytest.mark.long
def test_node_that_hosts_the_store_leaves_but_its_launcher_stays_until_the_job_is_over(tmp_path: Path) -> None:
    with training(tmp_path, 3, "2:3", "--max-restarts=3") as it:
        it.nodes[0].order("exit 201")
        for node in it.nodes[1:]:
            node.await_steps(1)
        assert it.nodes[0].process.poll() is None, "the others would be lost without the store"
        assert "holds the rendezvous store" in it.nodes[0].log()
        assert finish(it.nodes[1:]) == [0, 0], it.logs()
        assert it.nodes[0].wait() == 201
        it.nodes[0].assert_nothing_left()


@pytest.mark.long
def test_budget_of_a_node_goes_from_processes_to_the_node(tmp_path: Path) -> None:
    options = ["--max-restarts=10", "--ft-max-node-restarts=1"]
    with training(tmp_path, 3, "2:3", *options, steps=8, CEILINGS=NO_PROGRESS) as it:
        it.nodes[2].order("raise first")
        for node in it.nodes:
            node.await_steps(1)
        it.nodes[2].order("raise second")
        assert it.nodes[2].wait() == 76, it.logs()
        it.nodes[0].await_steps(2)
        report = it.nodes[0].report(1)
        assert (report["action"], report["strategy"]) == ("node", "NODE_FAILOVER")
        assert finish(it.nodes[:2]) == [0, 0], it.logs()


EXTENSION = """
from resilience.failover import AgentFailureInfo, DynamicAgentFailoverExtension, FailoverStrategy

class ByMessage(DynamicAgentFailoverExtension):
    def get_user_failover_strategy(self, failure_info: AgentFailureInfo) -> FailoverStrategy:
        if failure_info.rehearsal:
            return FailoverStrategy.NORMAL_FAILOVER
        word = failure_info.message.rpartition(" ")[2]
        assert failure_info.failures and failure_info.report["culprit"]["rank"] == failure_info.rank
        return FailoverStrategy[word]
"""


@contextmanager
def extended(folder: Path, count: int, nnodes: str, *options: str) -> Iterator[Fleet]:
    (folder / "by_message.py").write_text(EXTENSION)
    flags = ["--dynamic_failover_extension=by_message::ByMessage", *options]
    with Fleet(folder, nnodes, flags, SCRIPT, together=count) as it:
        for _ in range(count):
            it.add(env={"PYTHONPATH": str(folder), "CEILINGS": NO_PROGRESS})
        for node in it.nodes:
            node.await_steps(0, 8)
        yield it


def test_global_restarts_every_node_at_once_counts_once_and_later_failures_are_handled_like_the_first(
    tmp_path: Path,
) -> None:
    with extended(tmp_path, 2, "2", "--max-restarts=3") as it:
        for cycle, (node, word) in enumerate([(0, "GLOBAL"), (1, "GLOBAL"), (0, "GLOBAL")]):
            it.nodes[node].order(f"raise {'abc'[cycle]} {word}")
            for other in it.nodes:
                other.await_steps(cycle + 1)
            report = it.nodes[1].report(cycle)
            assert (report["action"], report["strategy"]) == ("restart", "GLOBAL_FAILOVER")
            assert f"({cycle + 1} of 3 restarts used)" in report["action_detail"]
        it.nodes[1].order("raise d GLOBAL")
        assert [node.wait() for node in it.nodes] == [1, 1], it.logs()
        assert "all 3 restarts are used" in it.nodes[0].report(3)["action_detail"]


def test_abortion_ends_every_launcher_with_the_same_code_and_the_cause(tmp_path: Path) -> None:
    with extended(tmp_path, 3, "3", "--max-restarts=3") as it:
        it.nodes[1].order("raise poisoned ABORTION")
        assert [node.wait() for node in it.nodes] == [77, 77, 77], it.logs()
        for node in it.nodes:
            assert node.report(0)["strategy"] == "ABORTION_FAILOVER"
            assert "ValueError: poisoned ABORTION" in node.log()
            node.assert_nothing_left()


@pytest.mark.long
def test_extension_asks_for_the_node_and_the_node_ends_with_the_documented_code(tmp_path: Path) -> None:
    with extended(tmp_path, 2, "1:2", "--max-restarts=3") as it:
        it.nodes[1].order("raise sick NODE")
        assert it.nodes[1].wait() == 76, it.logs()
        it.nodes[0].await_steps(1)
        assert finish(it.nodes[:1]) == [0], it.logs()


def test_same_failure_twice_without_progress_aborts_and_with_progress_goes_on(tmp_path: Path) -> None:
    with training(tmp_path, 2, "2", "--max-restarts=9", steps=5, CEILINGS="5,10,5") as it:
        it.nodes[1].order("raise bad sample 17")
        for node in it.nodes:
            node.await_steps(1, 10)  # further than the first time
        it.nodes[1].order("raise bad sample 18")
        for node in it.nodes:
            node.await_steps(2, 5)  # not as far
        it.nodes[1].order("raise bad sample 19")
        assert [node.wait() for node in it.nodes] == [77, 77], it.logs()
        assert "the same failure as in cycle 1" in it.nodes[0].report(2)["action_detail"]


@pytest.mark.long
def test_error_before_the_first_step_is_tried_twice_and_no_more(tmp_path: Path) -> None:
    with Fleet(tmp_path, "1", ["--max-restarts=9"], SCRIPT) as it:
        node = it.add(env={"SETUP_FAILS": "1"})
        assert node.wait() == 77, it.logs()
        assert not (node.run_dir / "cycles" / "2.json").exists()


def test_launcher_that_is_killed_is_replaced_by_a_waiting_one(tmp_path: Path) -> None:
    options = ["--max-restarts=3", "--ft-testimony-timeout=2", "--ft-node-silence-timeout=5"]
    with training(tmp_path, 3, "2", *options) as it:
        spare = it.nodes[2]
        os.kill(it.nodes[1].pid, signal.SIGKILL)
        for node in (it.nodes[0], spare):
            node.await_steps(1)
        assert it.nodes[0].report(0)["culprit"]["kind"] == "node"
        assert finish([it.nodes[0], spare]) == [0, 0], it.logs()


@pytest.mark.long
def test_lost_node_is_reported_though_a_spare_was_the_first_to_miss_it(tmp_path: Path) -> None:
    with training(tmp_path, 2, "2", "--max-restarts=3", "--ft-testimony-timeout=2") as it:  # they would take a minute
        spare = it.add("--ft-node-silence-timeout=2")
        wait_for(lambda: "is a spare" in spare.log(), "the spare to say that it waits")
        os.kill(it.nodes[1].pid, signal.SIGKILL)
        for node in (it.nodes[0], spare):
            node.await_steps(1)
        culprit = it.nodes[0].report(0)["culprit"]
        assert (culprit["rank"], culprit["kind"]) == (1, "node"), culprit
        assert "a node that waits has its place" in culprit["message"]
        assert finish([it.nodes[0], spare]) == [0, 0], it.logs()


@pytest.mark.long
def test_node_that_only_stood_still_is_not_blamed_by_those_who_saw_it_taken_out(tmp_path: Path) -> None:
    with training(tmp_path, 2, "2", "--max-restarts=3", "--ft-use-infra-group-rank=false") as it:
        spare = it.add("--ft-node-silence-timeout=2")
        wait_for(lambda: "is a spare" in spare.log(), "the spare to say that it waits")
        with stopped(it.nodes[1].pid):
            wait_for(lambda: "its place is free" in spare.log(), "the spare to miss it")
        for node in (it.nodes[0], spare):
            node.await_steps(1)
        wait_for(lambda: "is a spare" in it.nodes[1].log(), "it to wait for a place")
        assert not (it.nodes[0].run_dir / "cycles").exists(), it.logs()
        assert finish([it.nodes[0], spare]) == [0, 0], it.logs()
        assert it.nodes[1].wait() == 0, it.logs()


@pytest.mark.long
def test_spare_does_not_take_the_place_of_a_node_that_only_restarts(tmp_path: Path) -> None:
    with training(tmp_path, 3, "2", "--max-restarts=9", "--ft-use-infra-group-rank=false") as it:
        ranks = [node.rank() for node in it.nodes[:2]]
        for cycle in range(1, 4):
            it.nodes[1].order(f"raise {'abc'[cycle - 1]}")
            for node in it.nodes[:2]:
                node.await_steps(cycle)
        assert [node.rank() for node in it.nodes[:2]] == ranks
        assert "spare" in it.nodes[2].log()
        assert finish(it.nodes[:2]) == [0, 0], it.logs()
        assert it.nodes[2].wait() == 0, "the job is over for the spare too"


@pytest.mark.long
def test_spare_takes_over_and_the_ranks_of_the_others_stay(tmp_path: Path) -> None:
    with training(tmp_path, 3, "2", "--max-restarts=9", "--ft-use-infra-group-rank=false") as it:
        ranks = [node.rank() for node in it.nodes[:2]]
        it.nodes[1].order("exit 201")
        assert it.nodes[1].wait() == 201, it.logs()
        for node in (it.nodes[0], it.nodes[2]):
            node.await_steps(1)
        assert [it.nodes[0].rank(), it.nodes[2].rank()] == ranks
        assert finish([it.nodes[0], it.nodes[2]]) == [0, 0], it.logs()


@pytest.mark.long
@pytest.mark.parametrize(
    "variable",
    ["SLURM_PROCID", *(pytest.param(name, marks=pytest.mark.rare) for name in ("GROUP_RANK", "JOB_COMPLETION_INDEX"))],
)
def test_ranks_come_from_the_infrastructure_and_a_surplus_node_says_why_it_waits(tmp_path: Path, variable: str) -> None:
    with Fleet(tmp_path, "2", ["--max-restarts=3"], SCRIPT) as it:
        for number in (1, 0):
            it.add(env={variable: str(number)})
        for node in it.nodes:
            node.await_steps(0)
        assert [node.rank() for node in it.nodes] == [1, 0]
        surplus = it.add(env={variable: "2"})
        wait_for(lambda: "--ft-use-infra-group-rank=false" in surplus.log(), "the message")
        it.nodes[0].order("raise x")
        for node in it.nodes[:2]:
            node.await_steps(1)
        assert [node.rank() for node in it.nodes[:2]] == [1, 0]
        assert finish(it.nodes[:2]) == [0, 0], it.logs()
        assert surplus.wait() == 0


def test_node_that_comes_later_is_let_in_and_that_does_not_count(tmp_path: Path) -> None:
    with Fleet(tmp_path, "1:2", ["--max-restarts=1"], SCRIPT) as it:
        first = it.add()
        first.await_steps(0)
        second = it.add()
        for node in (first, second):
            node.await_steps(1)
        second.order("raise x")
        for node in (first, second):
            node.await_steps(2)
        assert "(1 of 1 restarts used)" in first.report(1)["action_detail"]
        assert finish(it.nodes) == [0, 0], it.logs()


@pytest.mark.long
def test_launcher_that_dies_between_alarm_and_verdict_is_not_waited_for_long(tmp_path: Path) -> None:
    """Its extension is slow; while it is asked, the launcher is killed. The other one gives the verdict."""
    (tmp_path / "slow.py").write_text(
        EXTENSION.replace(
            "        word =", "        import os, time; time.sleep(float(os.environ['SLOW']))\n        word ="
        ).replace("FailoverStrategy[word]", "FailoverStrategy.NORMAL")
    )
    flags = ["--dynamic_failover_extension=slow::ByMessage", "--ft-failover-timeout=600", "--max-restarts=3"]
    flags += ["--ft-node-silence-timeout=8"]  # it may be killed before it has raised the alarm
    with Fleet(tmp_path, "1:2", flags, SCRIPT, together=2) as it:
        for slow in ("0", "1000"):
            it.add(env={"PYTHONPATH": str(tmp_path), "SLOW": slow})
        for node in it.nodes:
            node.await_steps(0)
        it.nodes[1].order("raise x NORMAL")
        # Whoever notices first asks, and that is the launcher of the rank that fails.
        wait_for(lambda: not [pid for pid in children(it.nodes[1].pid) if "fleet.py" in command_line(pid)], "its end")
        os.kill(it.nodes[1].pid, signal.SIGKILL)
        it.nodes[0].await_steps(1)
        assert it.nodes[0].report(0)["culprit"]["kind"] == "node"
        assert finish(it.nodes[:1]) == [0], it.logs()


def test_launcher_that_is_ended_from_outside_is_missed_at_once_even_without_collectives(tmp_path: Path) -> None:
    with training(tmp_path, 2, "1:2", "--max-restarts=3") as it:
        os.kill(it.nodes[1].pid, signal.SIGINT)
        it.nodes[0].await_steps(1)
        report = it.nodes[0].report(0)
        assert report["culprit"]["kind"] == "node"
        assert "left the job" in report["culprit"]["message"]
        assert "world-1" in [note[1] for note in it.nodes[0].notes(0)]
        assert it.nodes[1].wait() == 1
        assert finish(it.nodes[:1]) == [0], it.logs()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.rare)])
def test_launcher_that_waits_ends_in_good_order_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with Fleet(tmp_path, "2", [], SCRIPT) as it:
        node = it.add()
        wait_for(lambda: "waiting for more" in node.log(), "it to say that it waits")
        os.kill(node.pid, number)
        assert node.wait() == 1
        assert f"ended by {number.name}" in node.log()
        node.assert_nothing_left()
