"""What the job went on from, and how often without getting further: a small file beside the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from resilience.checkpoint.stores import Storage

_NAME = ".restores.json"
Key = tuple[int, int]


def read(directory: Storage) -> dict[Key, int]:
    """Return how often each snapshot was gone on from since the last progress. A damaged file is none."""
    try:
        found = json.loads(directory.recall(_NAME))
        return {(int(generation), int(step)): int(number) for generation, step, number in found}
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return {}


def write(directory: Storage, tries: Mapping[Key, int]) -> None:
    """Keep it. Raises ``OSError``."""
    directory.note(_NAME, json.dumps([[*key, number] for key, number in tries.items()]))


class Tries:
    """How often the job went on from which snapshot since it last got further."""

    def __init__(self, directory: Storage, complain: Callable[[str], None]) -> None:
        self._directory = directory
        self._complain = complain
        self._counts: dict[Key, int] | None = None
        # What this life of the job went on from: counted once, however often it is loaded.
        self._gone_on: set[Key] = set()

    @property
    def counts(self) -> dict[Key, int]:
        """By snapshot. Looked up when it is first asked for: only the chair's node ever does."""
        if self._counts is None:
            self._counts = read(self._directory)
        return self._counts

    def begin(self) -> None:
        """Another life of the job begins."""
        self._gone_on = set()
        _ = self.counts  # here, where somebody waits anyway, and not in the middle of the training

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
        self._counts = counts
        try:
            write(self._directory, counts)
        except OSError as error:
            self._complain(
                f"{self._directory.path}: what the job went on from could not be noted: {error.strerror or error}"
            )
