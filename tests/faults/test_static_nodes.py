"""Nodes of a static rendezvous (``--master-addr``), which come together once and never again: who is found faulty, and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.faults.test_nodecheck import CHECK, ENV, marked
from tests.faults.test_static_rendezvous import static
from tests.jobs import Job, free_port, job, train

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


def test_node_of_a_static_rendezvous_that_fails_its_check_is_marked_by_its_own_name(tmp_path: Path) -> None:
    with static_nodes(tmp_path, train("--epochs", 1), CHECK, "", "wrong") as nodes:
        assert nodes[1].wait() == 80, logs(nodes)
        assert marked(tmp_path) == {"n1": "NodeCheckFailed"}, logs(nodes)
        assert '"node": "n1"' in (tmp_path / "termination-1").read_text()
