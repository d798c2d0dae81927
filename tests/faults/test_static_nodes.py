"""Nodes of a static rendezvous (``--master-addr``), which come together once and never again: who is found faulty, and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.faults.test_nodecheck import CHECK, ENV, marked
from tests.faults.test_static_rendezvous import static
from tests.faults.test_strategies import SCRIPT
from tests.jobs import Job, job
from tests.ports import free_port

pytestmark = pytest.mark.spawns


@contextmanager
def static_nodes(folder: Path, script: list[str], options: list[str], *ailments: str) -> Iterator[list[Job]]:
    """Launchers of a static job, each with a name of its own."""
    port = free_port()
    with ExitStack() as stack:
        found = []
        for number, ailment in enumerate(ailments):
            name, log = f"--ft-node-name=n{number}", f"--ft-termination-log={folder}/termination-{number}"
            command = [
                *static(number, port),
                f"--nnodes={len(ailments)}",
                f"--ft-error-monitor=file:{folder}/faults.jsonl",
                "--local-addr=127.0.0.1",
                name,
                log,
                *options,
            ]
            env = {**ENV, "AILMENT": ailment}
            found.append(stack.enter_context(job(folder / f"node{number}", command, script, env)))
        yield found


def logs(nodes: list[Job]) -> str:
    return "\n".join(node.log()[-3000:] for node in nodes)


@pytest.mark.parametrize("bad", [1, pytest.param(0, marks=pytest.mark.rare)])
def test_node_of_a_static_rendezvous_that_fails_its_check_is_marked_by_its_own_name_and_all_end(
    tmp_path: Path, bad: int
) -> None:
    ailments = ["wrong" if number == bad else "" for number in range(3)]
    with static_nodes(tmp_path, SCRIPT, CHECK, *ailments) as nodes:
        codes = [node.wait() for node in nodes]
        assert codes == [80 if number == bad else 75 for number in range(3)], logs(nodes)
        assert marked(tmp_path) == {f"n{bad}": "NodeCheckFailed"}, logs(nodes)
        assert f'"node": "n{bad}"' in (tmp_path / f"termination-{bad}").read_text()
        other = nodes[2]
        assert "did not pass the node check; this rendezvous can't go on without it" in other.log()
        assert "does not answer" not in other.log()
        report = other.report(0)
        assert report["culprit"]["kind"] == "check"
        assert "so the others end with 75" in report["action_detail"]
        for node in nodes:
            node.assert_nothing_left()


@pytest.mark.parametrize("leaver", [1, pytest.param(0, marks=pytest.mark.rare)])
def test_node_that_leaves_a_static_rendezvous_ends_the_others_at_once(tmp_path: Path, leaver: int) -> None:
    with static_nodes(tmp_path, SCRIPT, ["--max-restarts=3"], "", "") as nodes:
        for node in nodes:
            node.await_steps(0)
        nodes[leaver].order("exit 201")
        assert [node.wait() for node in nodes] == [201 if number == leaver else 75 for number in (0, 1)], logs(nodes)
        stays = nodes[1 - leaver]
        assert "a static rendezvous can't go on without it" in stays.report(0)["action_detail"]
        assert not stays.steps(1)
        assert marked(tmp_path) == {f"n{leaver}": "DriverError"}, logs(nodes)
