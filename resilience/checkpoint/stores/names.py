"""What things are called in a place of checkpoints, whatever it is kept in; see ``docs/checkpoint-format.md``."""

from __future__ import annotations

import re

STEP = re.compile(r"step-(\d+)(\.\d+)?\Z")
PARTIAL = ".partial-"
ASIDE = ".aside"


def number_of(name: str) -> int:
    """Return which one of several checkpoints of one step it is, by its name."""
    found = STEP.match(name)
    return int(found[2][1:]) if found and found[2] else 1
