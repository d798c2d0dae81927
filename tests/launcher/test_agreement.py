"""What the launchers tell each other before a round."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from resilience.launcher.agreement import Node, introduce

torch = pytest.importorskip("torch")


def test_nodes_of_a_static_rendezvous_know_each_others_names_and_ranks() -> None:
    store: Any = torch.distributed.HashStore()
    nodes = (Node("host", (0, 1), name="n0"), Node("host", (2,), name="n1"), Node("other", (3, 4, 5), name="n2"))
    with ThreadPoolExecutor(3) as pool:
        told = [pool.submit(introduce, store, me, 3, node) for me, node in enumerate(nodes)]
        assert [it.result(30) for it in told] == [nodes] * 3
    assert introduce(store, 1, 3, nodes[1]) == nodes  # later nobody waits: what the others left is still there
