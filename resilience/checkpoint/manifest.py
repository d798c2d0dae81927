"""The manifest: what makes a checkpoint one. A step exists if its manifest does, and lists every file with size and digests.

It is JSON with its own digest in front, written last and renamed into place. Nothing points at the newest checkpoint: that is
derived from the manifests that are there, so no pointer can run ahead of the bytes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

from resilience.checkpoint import digest
from resilience.errors import CheckpointError

FORMAT = "resilience-checkpoint"
VERSION = 1
NAME = "manifest.json"
MAX_NBYTES = 256 << 20  # of some 5,000 ranks
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\Z")
_DIGEST = re.compile(r"[0-9a-f]{32}\Z")


class ManifestError(CheckpointError):
    """A manifest that can't be trusted."""


@dataclass(frozen=True)
class File:
    """One file of a checkpoint: the tensors or the values of one rank. ``digests``: of the header, if it has one (``head``
    bytes), then of each ``chunk`` of what follows."""

    name: str
    rank: int
    nbytes: int
    head: int
    chunk: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint. ``generation`` counts the beginnings of the job: of two, the one with the larger is newer."""

    step: int
    generation: int
    cycle: int
    world: int
    created: float  # seconds since 1970, for people
    shards: tuple[File, ...]
    values: tuple[File, ...]
    facts: dict[str, Any] = field(default_factory=dict)  # versions and the like, for people

    @property
    def key(self) -> tuple[int, int]:
        """What orders checkpoints."""
        return self.generation, self.step

    @property
    def nbytes(self) -> int:
        """How large it is."""
        return sum(file.nbytes for file in (*self.shards, *self.values))

    def as_bytes(self) -> bytes:
        """Return the file's contents: a line with the digest of what follows, and the JSON."""
        body = json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1).encode()
        return f"{digest.NAME} {digest.digest(body)}\n".encode() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read and check it. Raises :class:`ManifestError`."""
        first, _, body = data.partition(b"\n")
        if first.decode("ascii", "replace") != f"{digest.NAME} {digest.digest(body)}":
            raise ManifestError("its digest is wrong: it was cut short or changed")
        try:
            found = json.loads(body)
            kind, version = found.pop("format"), found.pop("version")
            if kind != FORMAT:
                raise ManifestError("it is of another format")
            if type(version) is not int or version < 1:
                raise ManifestError("it has no format version")
            if version > VERSION:
                raise ManifestError(f"it has format version {version}; this program reads up to {VERSION}")
            shards, values = files_of(found.pop("shards")), files_of(found.pop("values"))
            manifest = cls(shards=shards, values=values, **found)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ManifestError(f"it can't be read: {type(error).__name__}: {error}") from error
        manifest._check()
        return manifest

    def _check(self) -> None:
        numbers = (self.step, self.generation, self.cycle, self.world)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ManifestError("a number in it is none")
        dated = type(self.created) in (int, float) and 0 <= self.created < 1e12
        if not dated or not isinstance(self.facts, dict):
            raise ManifestError("what it says about its making can't be meant")
        # Counted first: a world of 10**12 ranks must not become a list.
        ranks = sorted(file.rank for file in self.values)
        if self.world == 0 or len(ranks) != self.world or ranks != list(range(self.world)):
            raise ManifestError(f"it does not list the values of all {self.world} ranks")
        if any(file.rank >= self.world for file in self.shards):
            raise ManifestError(f"it lists tensors of a rank that is none of {self.world}")
        names = [NAME, *(file.name for file in (*self.shards, *self.values))]
        if len(set(names)) != len(names):
            raise ManifestError("it lists a file twice")


def files_of(items: Any) -> tuple[File, ...]:
    """Read a list of files. Raises :class:`ManifestError`."""
    if not isinstance(items, list):
        raise ManifestError("it has no list of files where there should be one")
    return tuple(_file(item) for item in items)


def _file(item: dict[str, Any]) -> File:
    digests = item["digests"]
    if not isinstance(digests, list):
        raise ManifestError("it has no list of digests where there should be one")
    file = File(**{**item, "digests": tuple(digests)})
    numbers = (file.rank, file.nbytes, file.head, file.chunk)
    if not all(type(number) is int and number >= 0 for number in numbers) or not _FILE.match(file.name):
        raise ManifestError(f"it lists a file {file.name!r} that can't be meant")
    if file.chunk == 0 or file.head > file.nbytes:
        raise ManifestError(f"it lists {file.name} with sizes that can't be meant")
    wanted = bool(file.head) + -(-(file.nbytes - file.head) // file.chunk)
    if len(digests) != wanted or not all(isinstance(text, str) and _DIGEST.match(text) for text in digests):
        raise ManifestError(f"it has {len(digests)} digests of {file.name}, not {wanted} of {digest.NAME}")
    return file


def in_words(nbytes: float) -> str:
    """Return a size as people read it."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"
