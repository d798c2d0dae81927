"""Nodes as the chair knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from resilience.checkpoint.decisions import Key


@dataclass
class Seat:
    """A node as the chair knows it."""

    ranks: int
    again: bool  # it only lost its saver, or its line
    # Sealed by all of its ranks, safe from being overwritten; the edition grows if a step is saved again.
    held: dict[Key, int]
    leased: set[Key]  # of these, what an earlier saver was writing
    at: int | None = None  # how far it is, if it was asked
    tried: int = 0  # all of its ranks are through with the steps below this
    bye: bool = False
    peer: tuple[Any, ...] = ()  # where it takes copies of others' snapshots: host, port, group
