"""Where checkpoints are kept: a directory of a file system (:mod:`local`), or a URL that fsspec knows (:mod:`objects`).

Both have the same folders and files, see ``docs/checkpoint-format.md``: what is copied from one to the other is a checkpoint there.

Rule: fsspec is imported only where a URL is given. Hazard: ``Path("s3://bucket")`` is a folder called ``s3:``; URLs are texts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from resilience.checkpoint.manifest import File, Manifest
from resilience.checkpoint.stores import local
from resilience.checkpoint.writing import Stopwatch
from resilience.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")
_CHAINED = re.compile(r"[A-Za-z0-9+.-]+::.*://")


@dataclass(frozen=True)
class Url:
    """A place in an object store, with as much of a path's manners as is needed."""

    text: str

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.text}/{name}")

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        """The last part of it."""
        return self.text.rpartition("/")[2]

    @property
    def protocol(self) -> str:
        """What stands before ``://``."""
        return self.text.partition("://")[0]


Where = Path | Url


class Kept(Protocol):
    """A checkpoint that is there."""

    @property
    def path(self) -> Where:
        """Its folder."""

    @property
    def manifest(self) -> Manifest:
        """What is in it."""


class Storage(Protocol):
    """A place of checkpoints. Calls come in this order; all raise ``OSError`` or ``CheckpointError``:

    1) claim(run)             (chair's saver) once, before step 0; raises ``DirectoryInUse``
    2) mark(); sees(mark)     (chair's saver); (the others) whether all nodes have the same place
    3) partial(folder)        (every saver) begins a checkpoint's folder; then write(folder, …) for each file
    4) settle(folder)         (every saver) what it wrote is durable
    5) commit(folder, …)      (chair's saver) after every settle: from here on it is a checkpoint; or discard(folder)
    6) prune(keep, …)         (chair's saver) after a commit; never removes the newest
    7) say_leaving(), close() (every saver) others may come

    stored(), read() and free_bytes() may be called by anybody at any time; recall(), note() and set_aside() by the chair's saver.
    """

    @property
    def path(self) -> Where:
        """Where it is."""

    def claim(self, run: str) -> None:
        """Make it ours until :meth:`close`; sweeps what an earlier job left half done."""

    def mark(self) -> str:
        """Leave something by which other nodes know that they have the same place; return its name."""

    def sees(self, mark: str) -> bool:
        """Whether what :meth:`mark` left elsewhere is here."""

    def say_leaving(self, leaving: bool = True) -> None:
        """Let whoever comes next know that it is worth waiting for us, or that it is not."""

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        """Keep it ours until the block ends: another thread's :meth:`close` waits."""

    def close(self) -> None:
        """Let others write here."""

    def stored(self, complain: Callable[[str], None] = lambda text: None) -> Sequence[Kept]:
        """Return the checkpoints that are whole as far as names and sizes go, newest first; ``complain`` of the others."""

    def read(self, checkpoint: str, name: str, start: int, end: int) -> bytes:
        """Return some bytes of a file of a checkpoint."""

    def partial(self, folder: str) -> Where:
        """Begin a folder, whose name begins with the step; several nodes may write into it at the same time."""

    def write(
        self,
        folder: str,
        name: str,
        rank: int,
        head: bytes,
        data: memoryview,
        *,
        digests: Sequence[str] = (),
        progress: Callable[[int], None] = lambda nbytes: None,
        clock: Stopwatch | None = None,
    ) -> File:
        """Write a file into a folder, see :func:`writing.write_file`."""

    def settle(self, folder: str) -> None:
        """Have what was written into a folder last."""

    def commit(self, folder: str, contents: Manifest) -> None:
        """Make a checkpoint of a folder in which every file has settled."""

    def discard(self, folder: str) -> None:
        """Remove what was written into a folder that will not become a checkpoint. Never raises."""

    def set_aside(self, item: Kept, why: str) -> None:
        """Have a checkpoint no longer count. It stays, for whoever wants to look."""

    def prune(self, keep: int, keep_every: int = 0) -> Sequence[Kept]:
        """Remove all but the newest ``keep`` steps (and every ``keep_every``-th); return what is gone."""

    def recall(self, name: str) -> bytes:
        """Return a small file that :meth:`note` left."""

    def note(self, name: str, text: str) -> None:
        """Keep a small file beside the checkpoints."""

    def free_bytes(self) -> int | None:
        """Return how much may still be written; ``None`` where nobody knows."""


def where(place: str | os.PathLike[str]) -> Where:
    """Return the place that a user names. Raises :class:`ConfigError` for what can't be meant."""
    text = place if isinstance(place, str) else os.fspath(place)
    if _COLLAPSED.match(text):
        scheme, _, rest = text.partition(":/")
        meant = f"file:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
        if isinstance(place, str):
            raise ConfigError(f"{text}: {meant} was probably meant. A directory of that name is ./{text}.")
        raise ConfigError(f'{text}: a URL loses a slash in a Path. Give it as a text, "{meant}".')
    if _CHAINED.match(text):
        raise ConfigError(f"{text}: URLs with '::' have a cache or an archive between; give that of the place itself.")
    if not _URL.match(text):
        return Path(text).absolute()
    protocol, _, rest = text.partition("://")
    if protocol == "file":
        if not rest.startswith("/"):
            raise ConfigError(f"{text}: a file URL has three slashes, file:///{rest}.")
        return Path(rest)
    if urlsplit(text).password is not None:
        hidden = text.replace(unquote(urlsplit(text).password or ""), "…").replace(urlsplit(text).password or "", "…")
        raise ConfigError(
            f"{hidden}: a password in a URL ends in logs. Give it as fsspec takes it: by the environment or its configuration file."
        )
    return Url(f"{protocol}://{rest.strip('/') if protocol in ('s3', 's3a', 'gs', 'gcs') else rest.rstrip('/')}")


def opened(place: Where) -> Storage:
    """Return the storage at a place. Nothing is asked of it yet."""
    if isinstance(place, Path):
        return local.Directory(place)
    from resilience.checkpoint.stores.objects import Bucket  # noqa: PLC0415 - fsspec, only for those who want it

    return Bucket(place)


def read_manifest(folder: Where) -> Manifest:
    """Read a checkpoint's manifest and look whether every file is there, in full. Raises ``ManifestError`` or ``OSError``."""
    if isinstance(folder, Path):
        return local.read_manifest(folder)
    from resilience.checkpoint.stores import objects  # noqa: PLC0415

    return objects.read_manifest(folder)
