"""What the job went on from, and how often without getting further: a small file beside the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from resilience.checkpoint.files import write_small
from resilience.checkpoint.storage import read_small

_NAME = ".restores.json"
Key = tuple[int, int]


def read(directory: Path) -> dict[Key, int]:
    """Return how often each snapshot was gone on from since the last progress. A damaged file is none."""
    try:
        found = json.loads(read_small(directory / _NAME, 1 << 20))
        return {(int(generation), int(step)): int(number) for generation, step, number in found}
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return {}


def write(directory: Path, tries: Mapping[Key, int]) -> None:
    """Keep it. Raises ``OSError``."""
    write_small(directory / _NAME, json.dumps([[*key, number] for key, number in tries.items()]))


class Tries:
    """How often the job went on from which snapshot since it last got further."""

    def __init__(self, directory: Path, complain: Callable[[str], None]) -> None:
        self._directory = directory
        self._complain = complain
        self.counts = read(directory)
        self._gone_on: set[Key] = (
            set()
        )  # what this life of the job went on from: counted once, however often it is loaded

    def begin(self) -> None:
        """Another life of the job begins."""
        self._gone_on = set()

    def add(self, key: Key) -> None:
        """The job is about to go on from a snapshot. If that fails twice, another one is taken."""
        if key not in self._gone_on:
            self._gone_on.add(key)
            self._keep({**self.counts, key: self.counts.get(key, 0) + 1})

    def take_back(self, key: Key) -> None:
        """The snapshot turned out to be bad, which is no failure of a restart."""
        if key in self._gone_on:
            self._gone_on.discard(key)
            self._keep({**self.counts, key: self.counts.get(key, 1) - 1})

    def forget(self) -> None:
        """The job got further, or ended in good order: what it went on from was good."""
        if self.counts:
            self._keep({})

    def _keep(self, counts: dict[Key, int]) -> None:
        self.counts = counts
        try:
            write(self._directory, counts)
        except OSError as error:
            self._complain(f"{self._directory}: what the job went on from could not be noted: {error.strerror}")
