"""Groups of nodes: ranks stand together within a group, and groups keep their order when a node is lost and another comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_checkpoint_nodes import kill
from tests.faults.test_store import serving
from tests.jobs import WORKLOADS, Fleet

pytestmark = pytest.mark.spawns
FLEET = [str(WORKLOADS / "fleet.py"), "100000"]
OPTIONS = ["--max-restarts=3", "--ft-node-silence-timeout=3"]


def rack(name: str, index: int) -> dict[str, str]:
    """What the downward API makes of a pod's labels."""
    return {"RESILIENCE_NODE_GROUP": name, "RESILIENCE_NODE_GROUP_INDEX": str(index)}


@pytest.mark.long
def test_node_from_another_rack_takes_the_ranks_of_the_lost_one_and_no_group_is_torn_apart(tmp_path: Path) -> None:
    with serving() as port, Fleet(tmp_path, "3", OPTIONS, FLEET, port=port) as it:
        second, lost, third = (
            it.add(env=rack("rack-b", 1)),
            it.add(env=rack("rack-z", 0)),
            it.add(env=rack("rack-b", 1)),
        )
        for node in it.nodes:
            node.await_steps(0)
        assert lost.rank() == 0, it.logs()
        before = {second.rank(), third.rank()}
        assert before == {1, 2}
        kept = second.rank()
        kill(lost.pid)
        new = it.add("--ft-node-group=rack-c", "--ft-node-group-index=0")
        for node in (second, third, new):
            node.await_steps(1)
        assert new.rank() == 0, it.logs()
        assert (second.rank(), third.rank()) == (kept, 3 - kept)
        for node in (second, third, new):
            (node.progress / "finish").touch()
        assert [node.wait() for node in (second, third, new)] == [0, 0, 0], it.logs()
