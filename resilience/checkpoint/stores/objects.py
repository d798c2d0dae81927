"""Checkpoints in an object store, which can neither rename nor lock.

    URL/step-00000100/rank-00000.safetensors   tensors       uploaded first
                      rank-00000.values        all else      uploaded first
                      manifest.json            put last, on condition that it is not there: the commit
    URL/.partial-…                             names a folder that is being written, or removed
    URL/.lock                                  who writes here, renewed every few seconds; see :mod:`lease`

A folder without a manifest is no checkpoint. One that a ``.partial-…`` names as well is swept by the next job, with whatever parts
of an upload the store still keeps; of two nodes that begin a folder, the one that creates that object gives it its name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from resilience.checkpoint import digest, manifest
from resilience.checkpoint.manifest import File, Manifest, ManifestError
from resilience.checkpoint.schedule import surplus
from resilience.checkpoint.stores import Kept, Url
from resilience.checkpoint.stores.client import PATIENCE_S, Client, in_words, may_pass, refused
from resilience.checkpoint.stores.lease import Lease
from resilience.checkpoint.stores.names import ASIDE, PARTIAL, STEP, number_of
from resilience.checkpoint.stores.upload import Contents, upload
from resilience.checkpoint.writing import Stopwatch
from resilience.errors import CheckpointError

_LOG = logging.getLogger("resilience.checkpoint")
_HERE, _GONE = f"{PARTIAL}here-", f"{PARTIAL}gone-"
_AT_ONCE = 8
Listing = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Stored:
    """A checkpoint that is in the store."""

    path: Url
    manifest: Manifest


class Bucket:
    """A place of checkpoints in an object store. ``patience``: how long what may pass is tried again, in seconds."""

    def __init__(self, path: Url, patience: float = PATIENCE_S) -> None:
        self.path = path
        self._patience = patience
        self._lease: Lease | None = None
        self._run: str | None = None
        self._mark = ""
        self._names: dict[str, str] = {}  # of the folders that are being written
        self._abandoned: set[str] = set()  # what could not be removed yet
        self._manifests: dict[str, tuple[object, Manifest]] = {}  # by name: its edition, and what it says
        self._at_work = threading.Lock()

    @functools.cached_property
    def _client(self) -> Client:
        return Client(self.path, self._patience)

    @functools.cached_property
    def _hasty(self) -> Client:
        return self._client.hasty()

    # -- one job at a time ------------------------------------------------------------------------------------------

    def claim(self, run: str) -> None:
        """Make it ours until :meth:`close`, or raise ``DirectoryInUse``. Sweeps what an earlier job left half done."""
        if self._lease is not None:
            return
        try:
            self._hasty.look_for_bucket()
            self._hasty.make_folder()
            lease = Lease(self._client, run)
            lease.take()
            self._lease, self._run = lease, run
            self._sweep(self._hasty)
        except CheckpointError:
            raise
        except Exception as error:
            self.close()
            raise refused(self.path, error) from error

    def _sweep(self, client: Client) -> None:
        """Remove what was begun and is no checkpoint."""
        for name in [name for name in client.listed() if name.startswith(PARTIAL)]:
            if name.startswith(_HERE):
                client.remove(name)
            else:
                self._undo(client, name)

    def _undo(self, client: Client, intent: str) -> None:
        """Remove the folder that an object names, unless it is a checkpoint, and then that object."""
        with contextlib.suppress(FileNotFoundError):
            folder = client.read(intent).decode("ascii", "replace")
            if STEP.match(folder) and not client.exists(f"{folder}/{manifest.NAME}"):
                client.remove_folder(folder)
            client.remove(intent)

    def mark(self) -> str:
        """Leave an object by which other nodes know that they have the same place; return its name."""
        self._unmark()
        self._mark = f"{_HERE}{secrets.token_hex(8)}"
        self._hasty.put(self._mark, b"here")
        return self._mark

    def sees(self, mark: str) -> bool:
        """Whether what :meth:`mark` left elsewhere is here."""
        try:
            return self._hasty.exists(mark)
        except Exception as error:
            raise refused(self.path, error) from error

    def _unmark(self) -> None:
        if self._mark:
            with contextlib.suppress(Exception):  # the next job sweeps it
                self._hasty.remove(self._mark)
            self._mark = ""

    def say_leaving(self, leaving: bool = True) -> None:
        """Let whoever comes next know that it is worth waiting for us, or that it is not."""
        if self._lease is not None:
            self._lease.say_leaving(leaving)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep it ours until the block ends: another thread's :meth:`close` waits."""
        with self._at_work:
            yield

    def close(self) -> None:
        """Let others write here, as soon as nobody is :meth:`at_work`."""
        with self._at_work:
            self._unmark()
            lease, self._lease, self._run = self._lease, None, None
            if lease is not None:
                lease.give_back()

    # -- reading ----------------------------------------------------------------------------------------------------

    def stored(self, complain: Callable[[str], None] = lambda text: None) -> list[Stored]:
        """Return the checkpoints that are whole as far as names and sizes go, newest first; ``complain`` of the others."""
        try:
            return self._stored(self._hasty, complain)
        except OSError as error:
            raise refused(self.path, error) from error

    def _stored(self, client: Client, complain: Callable[[str], None]) -> list[Stored]:
        top = client.listed()
        if not top:
            client.look_for_bucket()
        unfinished = self._unfinished(client, top)

        def look(name: str) -> Stored | str | None:
            try:
                rows = client.listed(name)
                if not rows:
                    return None  # some stores go on to list a folder that has nothing in it
                return Stored(self.path / name, self._read(client, name, rows))
            except (ManifestError, OSError) as error:
                if not isinstance(error, ManifestError) and may_pass(error):
                    raise  # nobody knows what is there
                return f"{self.path / name}: {error if isinstance(error, ManifestError) else in_words(error)}. It is left out."

        with ThreadPoolExecutor(_AT_ONCE, "resilience-list") as pool:
            found = list(pool.map(look, [name for name in top if STEP.match(name)]))
        self._manifests = {name: known for name, known in self._manifests.items() if name in top}
        for item in found:
            if isinstance(item, str) and not any(f"{self.path / name}:" in item for name in unfinished):
                complain(item)
        whole = [item for item in found if isinstance(item, Stored)]
        return sorted(whole, key=lambda item: (item.manifest.key, number_of(item.path.name)), reverse=True)

    def _unfinished(self, client: Client, top: Listing) -> set[str]:
        """Return the folders that are being written or removed."""
        found = set()
        for intent in [name for name in top if name.startswith(PARTIAL) and not name.startswith(_HERE)]:
            with contextlib.suppress(FileNotFoundError):
                found.add(client.read(intent).decode("ascii", "replace"))
        return found

    def _read(self, client: Client, name: str, rows: Listing) -> Manifest:
        if ASIDE in rows:
            why = client.read(f"{name}/{ASIDE}", 0, min(1000, int(rows[ASIDE]["size"]))).decode(errors="replace")
            raise ManifestError(f"it was set aside: {why}")
        row = rows.get(manifest.NAME, {})
        edition = row.get("ETag") or (row.get("size"), row.get("mtime"), row.get("created"))
        known = self._manifests.get(name)
        if known is None or known[0] != edition:
            known = self._manifests[name] = edition, _manifest_of(client, name, rows)
        check_sizes(known[1], rows)
        return known[1]

    def read(self, checkpoint: str, name: str, start: int, end: int) -> bytes:
        """Return some bytes of a file of a checkpoint."""
        return self._client.read(f"{checkpoint}/{name}", start, end)

    def recall(self, name: str) -> bytes:
        """Return a small object that :meth:`note` left."""
        return self._hasty.read(name)

    def note(self, name: str, text: str) -> None:
        """Keep a small object beside the checkpoints."""
        self._hasty.put(name, text.encode())

    def free_bytes(self) -> None:
        """Nobody knows how much may still be written."""

    # -- writing ----------------------------------------------------------------------------------------------------

    def partial(self, folder: str) -> Url:
        """Begin a folder, whose name begins with the step; several nodes may write into it at the same time."""
        if self._lease is not None:
            self._lease.check()
        intent = f"{PARTIAL}{folder}"
        while folder not in self._names:
            try:
                name = self._free_name(int(folder.partition("-")[0]))
                self._client.create(intent, name.encode())
                self._names[folder] = name
            except FileExistsError:  # another node was quicker
                with contextlib.suppress(FileNotFoundError):
                    self._names[folder] = self._client.read(intent).decode("ascii")
        self._client.make_folder(self._names[folder])
        return self.path / self._names[folder]

    def _free_name(self, step: int) -> str:
        """Return a name that comes after those that a step has already: of two saves of one step that says which is newer."""
        top = self._client.listed()
        begun = self._unfinished(self._client, top)
        start = f"step-{step:08d}"
        taken = [number_of(name) for name in {*top, *begun} if STEP.match(name) and name.partition(".")[0] == start]
        return f"{start}{f'.{max(taken) + 1}' if taken else ''}"

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
        """Write a file into a folder. It is durable when this returns."""
        size = digest.chunk_size(len(data))
        contents = Contents(head, data, size, digests, progress)
        found = upload(self._client, f"{self._names[folder]}/{name}", contents, clock or Stopwatch())
        of_head = [digest.digest(head)] if head else []
        return File(name, rank, contents.nbytes, len(head), size, (*of_head, *found))

    def settle(self, folder: str) -> None:
        """Look whether the folder is still wanted: a job that took this one's place has swept it, and what was written since."""
        name = self._names[folder]
        if not self._client.exists(f"{PARTIAL}{folder}"):
            self._names.pop(folder)
            with contextlib.suppress(Exception):
                self._hasty.remove_folder(name)
            raise CheckpointError(
                f"{self.path / name} was removed while it was written: another job, or another saver, came"
            )

    def commit(self, folder: str, contents: Manifest) -> None:
        """Make a checkpoint of a folder in which every file is: if we still have the place, and nobody else has made one of it."""
        if self._lease is not None:
            self._client.again(self._lease.confirm, self._client.patience())
        name = self._names[folder]
        check_sizes(contents, {**self._client.listed(name), manifest.NAME: {}})
        try:
            self._client.create(f"{name}/{manifest.NAME}", contents.as_bytes())
        except FileExistsError:
            self._names.pop(folder)  # it is not ours to be removed
            raise CheckpointError(f"{self.path / name} was made a checkpoint by another job, which stays") from None
        self._names.pop(folder)
        with contextlib.suppress(Exception):  # where there is a manifest the next job does no more than this
            self._hasty.remove(f"{PARTIAL}{folder}")
            self._hasty.abort_uploads(f"{name}/")  # begun twice, since the first answer was lost

    def discard(self, folder: str) -> None:
        """Remove what was written into a folder that will not become a checkpoint. What can't be removed now is, later."""
        self._names.pop(folder, None)
        self._abandoned.add(folder)
        self._clear()

    def _clear(self) -> None:
        for folder in sorted(self._abandoned):
            try:
                self._undo(self._hasty, f"{PARTIAL}{folder}")
            except Exception as error:  # noqa: BLE001 - whatever fsspec raises: nobody waits for this
                _LOG.debug("%s: %s could not be removed: %s", self.path, folder, in_words(error))
                return
            self._abandoned.discard(folder)

    def set_aside(self, item: Kept, why: str) -> None:
        """Have a checkpoint no longer count. It stays, for whoever wants to look."""
        self._hasty.put(f"{item.path.name}/{ASIDE}", why.encode())

    def prune(self, keep: int, keep_every: int = 0) -> list[Stored]:
        """Remove all but the newest ``keep`` steps (and every ``keep_every``-th); return what is gone.

        It is written down first, then the manifest goes: what is half removed is no checkpoint any more, and is swept.
        """
        self._clear()
        client = self._hasty  # nobody waits for it, and nobody may have to wait for it at the end
        whole = self._stored(client, lambda text: None)
        gone = [whole[place] for place in surplus([item.manifest.step for item in whole], keep, keep_every)]
        for item in gone:
            name = item.path.name
            client.put(f"{_GONE}{name}", name.encode())
            client.remove(f"{name}/{manifest.NAME}")
            self._undo(client, f"{_GONE}{name}")
        return gone


def read_manifest(folder: Url) -> Manifest:
    """Read a checkpoint's manifest and look whether every file is there, in full. Raises ``ManifestError`` or ``OSError``."""
    client = Client(Url(str(folder).rpartition("/")[0]))
    rows = client.listed(folder.name)
    found = _manifest_of(client, folder.name, rows)
    check_sizes(found, rows)
    return found


def _manifest_of(client: Client, name: str, rows: Listing) -> Manifest:
    if manifest.NAME not in rows:
        raise ManifestError("there is no manifest: it was never finished")
    if int(rows[manifest.NAME]["size"]) > manifest.MAX_NBYTES:
        raise OSError(errno.EFBIG, "its manifest is too large")
    return Manifest.from_bytes(client.read(f"{name}/{manifest.NAME}"))


def check_sizes(contents: Manifest, rows: Listing) -> None:
    """Raise ``ManifestError`` unless every file of a checkpoint is there, in full. Pure."""
    for file in (*contents.shards, *contents.values):
        if file.name not in rows:
            raise ManifestError(f"{file.name} is missing")
        if int(rows[file.name]["size"]) != file.nbytes:
            raise ManifestError(f"{file.name} has {rows[file.name]['size']} bytes, not {file.nbytes}")
