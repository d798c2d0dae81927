"""What the job went on from, and how often without getting further: a small file beside the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_NAME = ".restores.json"
Key = tuple[int, int]


def read(directory: Path) -> dict[Key, int]:
    """Return how often each snapshot was gone on from since the last progress. A damaged file is none."""
    try:
        found = json.loads((directory / _NAME).read_text(encoding="utf-8"))
        return {(int(generation), int(step)): int(number) for generation, step, number in found}
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return {}


def write(directory: Path, tries: Mapping[Key, int]) -> None:
    """Keep it."""
    temporary = directory / f"{_NAME}.new"
    temporary.write_text(json.dumps([[*key, number] for key, number in tries.items()]), encoding="utf-8")
    temporary.rename(directory / _NAME)
