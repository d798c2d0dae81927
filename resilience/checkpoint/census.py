"""Looking at a state: its tensors as they are now, and everything else as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resilience.checkpoint import encoding, garbage
from resilience.checkpoint.leaves import Leaves
from resilience.checkpoint.packing import as_map, pack
from resilience.checkpoint.plan import Collected, Collector
from resilience.checkpoint.state import Part


class Census:
    """Takes one look per save, and knows from the last one what can't have changed."""

    def __init__(self) -> None:
        self._leaves = Leaves()

    @garbage.left_alone()
    def of_parts(self, parts: Sequence[Part]) -> tuple[Collected, bytes]:
        """Return the tensors of all parts now, and everything else of them."""
        collector, values = Collector(), []
        for part in parts:
            collector.owner = part.owner
            written = encoding.encode(part.state(), part.name, collector.keep, self._leaves)
            values.append((pack(part.name), written))
        self._leaves.turn()
        return collector.found, as_map(values)

    @garbage.left_alone()
    def of_state(self, state: Any) -> tuple[Collected, bytes]:
        """Return the tensors of any nested state, and everything else of it."""
        collector = Collector()
        written = encoding.encode(state, "state", collector.keep, self._leaves)
        self._leaves.turn()
        return collector.found, as_map([(pack("state"), written)])
