"""``resilience nodecheck``: nodes that only a store connects know of each other's end, and flags that can't be meant."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from resilience.launcher.checkup import StoreBoard, join
from tests.jobs import wait_for

torch = pytest.importorskip("torch")
SILENCE_S = 1.0


def party(nodes: int) -> list[StoreBoard]:
    """Boards of nodes that came together in one store."""
    store: Any = torch.distributed.HashStore()
    with ThreadPoolExecutor(nodes) as pool:
        joining = [pool.submit(join, store, me, f"host-{me}", nodes, SILENCE_S) for me in range(nodes)]
        found = [it.result() for it in joining]
    assert all(names == tuple(f"host-{me}" for me in range(nodes)) for _, names in found)
    return [board for board, _ in found]


def test_node_that_goes_is_lost_to_all_others_and_those_that_stay_are_not() -> None:
    boards = party(3)
    try:
        boards[1].close()
        for me in (0, 2):
            wait_for(boards[me].lost_nodes, "the silence to be noticed")
            assert boards[me].lost_nodes() == {1: "host-1 has been silent for 1 s"}
    finally:
        for board in boards:
            board.close()
