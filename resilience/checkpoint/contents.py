"""What is in a snapshot: the tensors of a state as they are now, and everything else as bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resilience.checkpoint import encoding, garbage
from resilience.checkpoint.plan import Collected, Collector
from resilience.checkpoint.state import Part


@garbage.left_alone()
def of_parts(parts: Iterable[Part]) -> tuple[Collected, bytes]:
    """Return the state of the parts of a checkpoint, by name."""
    collector = Collector()
    values = []
    for part in parts:
        collector.owner = part.owner
        values.append((encoding.pack(part.name), encoding.encode(part.state(), part.name, collector.keep)))
    return collector.found, encoding.as_map(values)


@garbage.left_alone()
def of_state(state: Any) -> tuple[Collected, bytes]:
    """Return any nested state of tensors and plain values."""
    collector = Collector()
    values = encoding.encode(state, "state", collector.keep)
    return collector.found, encoding.as_map([(encoding.pack("state"), values)])
