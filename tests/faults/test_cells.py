"""The table of docs/failover.md, cell by cell: kind of failure × strategy → who restarts, who ends, with what code and words."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.test_strategies import finish
from tests.jobs import WORKLOADS, Fleet, Job

LONG, RARE = pytest.mark.long, pytest.mark.rare
pytestmark = [pytest.mark.spawns, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Kind:
    """A way to fail. ``order``: what the rank is told; "launcher" kills its launcher. ``left``: the code of a node that leaves."""

    name: str
    order: str
    said: str
    left: int = 76


KINDS = [
    Kind("exception", "raise bad batch", "ValueError: bad batch"),
    Kind("exit", "exit 3", "ended with exit code 3"),
    Kind("exit", "exit 201", "ended with exit code 201, driver error", left=201),
    Kind("signal", "kill SIGKILL", "ended by signal 9 (SIGKILL)"),
    Kind("signal", "crash", "ended by signal 11 (SIGSEGV)"),
    Kind("oom", "memory", "out of memory: MemoryError"),
    Kind("hang", "hang", "in section 'step' for"),
    Kind("node", "launcher", "the launcher on "),
]
IDS = [kind.order.replace(" ", "-") for kind in KINDS]
EXTENSION = """
import os
from resilience.failover import DynamicAgentFailoverExtension, FailoverStrategy

class Always(DynamicAgentFailoverExtension):
    def get_user_failover_strategy(self, failure_info):
        return FailoverStrategy[os.environ["STRATEGY"]]
"""


@contextmanager
def two_nodes(folder: Path, strategy: str, nnodes: str = "2") -> Iterator[Fleet]:
    """Two launchers with an extension that always asks for one strategy; the store is in the first, which never fails."""
    folder.mkdir(exist_ok=True)
    (folder / "always.py").write_text(EXTENSION)
    options = [
        "--max-restarts=100",
        "--ft-rank-section-timeouts=step:3",
        "--ft-testimony-timeout=2",
        "--ft-node-silence-timeout=3",
        "--dynamic-failover-extension=always::Always",
    ]
    with Fleet(folder, nnodes, options, [str(WORKLOADS / "fleet.py"), "1000000"], together=2) as it:
        it.env = {"PYTHONPATH": str(folder), "STRATEGY": strategy}
        for _ in range(2):
            it.add()
        for node in it.nodes:
            node.await_steps(0)
        yield it


def strike(node: Job, kind: Kind) -> None:
    if kind.order == "launcher":
        os.kill(node.pid, signal.SIGKILL)
    else:
        node.order(kind.order)


def expect_report(node: Job, cycle: int, kind: Kind, strategy: str, action: str) -> None:
    report = node.report(cycle)
    assert report["culprit"]["kind"] == kind.name, node.log()
    assert report["culprit"]["message"].startswith(kind.said), report["culprit"]["message"]
    assert (report["strategy"], report["action"]) == (f"{strategy}_FAILOVER", action), report["action_detail"]
    block = node.log()[node.log().index(f"cycle {cycle} failed") :]
    assert f"{kind.name}, {kind.said}" in block
    assert report["action_detail"] in block


@pytest.mark.parametrize("strategy", [pytest.param("NORMAL", marks=LONG), pytest.param("GLOBAL", marks=RARE)])
def test_every_kind_restarts_all_workers(tmp_path: Path, strategy: str) -> None:
    """One after the other in one job: after each, the next one is handled like the first."""
    kinds = [kind for kind in KINDS if strategy == "GLOBAL" or kind.order != "exit 201"]
    with two_nodes(tmp_path, strategy) as it:
        other = it.nodes[1]
        for cycle, kind in enumerate(kinds):
            strike(other, kind)
            if kind.order == "launcher":
                other = it.add()
            for node in (it.nodes[0], other):
                node.await_steps(cycle + 1)
            expect_report(it.nodes[0], cycle, kind, strategy, "restart")
        assert finish([it.nodes[0], other]) == [0, 0], it.logs()


@LONG
def test_hardware_code_is_a_node_failover_even_if_the_extension_says_normal(tmp_path: Path) -> None:
    kind = next(kind for kind in KINDS if kind.order == "exit 201")
    with two_nodes(tmp_path, "NORMAL") as it:
        strike(it.nodes[1], kind)
        assert it.nodes[1].wait() == 201, it.logs()
        expect_report(it.nodes[0], 0, kind, "NODE", "node")


@LONG
def test_every_kind_makes_its_node_leave_and_another_one_take_its_place(tmp_path: Path) -> None:
    with two_nodes(tmp_path, "NODE") as it:
        for cycle, kind in enumerate(KINDS):
            leaver = it.nodes[-1]
            strike(leaver, kind)
            assert leaver.wait() == (-signal.SIGKILL if kind.order == "launcher" else kind.left), it.logs()
            replacement = it.add()
            for node in (it.nodes[0], replacement):
                node.await_steps(cycle + 1)
            expect_report(it.nodes[0], cycle, kind, "NODE", "node")
        assert finish([it.nodes[0], it.nodes[-1]]) == [0, 0], it.logs()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=LONG if name in ("raise-bad-batch", "launcher") else RARE)
        for kind, name in zip(KINDS, IDS, strict=True)
    ],
)
def test_every_kind_ends_every_launcher(tmp_path: Path, kind: Kind) -> None:
    with two_nodes(tmp_path, "ABORTION") as it:
        strike(it.nodes[1], kind)
        codes = [node.wait() for node in it.nodes]
        assert codes == [77, -signal.SIGKILL if kind.order == "launcher" else 77], it.logs()
        expect_report(it.nodes[0], 0, kind, "ABORTION", "abort")
