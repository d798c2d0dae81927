"""The clerk: a thread that writes snapshots to disk and computes digests, one thing at a time, while the loop goes on.

It reads slots through mappings of its own. A slot that it writes is leased; one that it only digests is not, so it looks afterwards
whether the seal is still the same.
"""

from __future__ import annotations

import errno
import functools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from resilience.checkpoint import digest, manifest
from resilience.checkpoint.arena import Slot
from resilience.checkpoint.ledger import Seal
from resilience.checkpoint.manifest import File, Manifest
from resilience.checkpoint.saver.writes import Write
from resilience.checkpoint.stores import Storage
from resilience.checkpoint.writing import Stopwatch
from resilience.errors import CheckpointError

_LOG = logging.getLogger("resilience.saver")
_MORE_ROOM = "Make room, keep fewer checkpoints, or use another disk."
_REMEDIES = {
    errno.EFBIG: "A file may not grow that large: raise the limit of the job (ulimit -f), or use another file system.",
    errno.ENOSPC: _MORE_ROOM,
    errno.EDQUOT: _MORE_ROOM,
    errno.EROFS: "Have the file system mounted for writing.",
    errno.EACCES: "Let this user write there.",
}


@dataclass(frozen=True)
class Part:
    """This node's part of a snapshot that is to be written: everything that the clerk needs to know about it."""

    directory: Storage
    folder: str
    key: tuple[int, int]
    seals: Mapping[int, Seal]
    slots: Mapping[int, Slot]  # by rank: the slot that holds it
    known: Mapping[int, list[str]]  # digests
    progress: Callable[[int, int], None] = lambda written, total: None  # bytes of tensors and values, piece by piece


@dataclass(frozen=True)
class Written:
    """What became of it."""

    shards: tuple[File, ...] = ()
    values: tuple[File, ...] = ()
    why: str = ""

    def digests(self) -> dict[int, list[str]]:
        """Return the digests of the data, by rank."""
        return {file.rank: list(file.digests[1:]) for file in self.shards}

    def message(self) -> dict[str, Any]:
        """Return it as the chair wants to hear it."""
        if self.why:
            return {"op": "failed", "why": self.why}
        files = {"shards": self.shards, "values": self.values}
        return {"op": "written"} | {kind: [_plain(file) for file in found] for kind, found in files.items()}


def _plain(file: File) -> dict[str, Any]:
    return {**asdict(file), "digests": list(file.digests)}


class Clerk:
    """Works off what it is asked for, in order."""

    def __init__(self) -> None:
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="resilience-clerk", daemon=True).start()

    def write(self, part: Part, done: Callable[[Written], None]) -> None:
        """Have a part written; ``done`` is called in the clerk's thread, whatever happens."""
        self.do(lambda: done(persist(part)))

    def do(self, act: Callable[[], None]) -> None:
        """Have something done after everything that was asked for before."""
        self._acts.put(act)

    def close(self) -> None:
        """End the thread, after everything that was asked for."""
        self._acts.put(None)

    def _run(self) -> None:
        while (act := self._acts.get()) is not None:
            try:
                act()
            except Exception:  # noqa: BLE001 - a thread's boundary: what comes after must still be written
                _LOG.exception("something that the clerk was asked to do failed; it goes on with the next.")


def persist(part: Part) -> Written:
    """Write a node's part of a snapshot. Never raises: the training must hear of whatever went wrong."""
    try:
        clock = Stopwatch()
        part.directory.partial(part.folder)
        shards, values = _write_files(part, clock)
        with clock("sync"):
            part.directory.settle(part.folder)
    except Exception as error:  # noqa: BLE001 - said above
        part.directory.discard(part.folder)
        return Written(why=_could_not(part.key, part.directory, error))
    spent = ", ".join(f"{what} {seconds:.3f} s" for what, seconds in clock.seconds.items())
    _LOG.debug("step %s: %s (digests beside the writes).", part.key[1], spent)
    return Written(shards, values)


def _write_files(part: Part, clock: Stopwatch) -> tuple[tuple[File, ...], tuple[File, ...]]:
    """Write tensors and values of all ranks, one after the other: at once they leave the disk no gap for a data loader."""
    shards, values, written = [], [], 0
    total = sum(seal.data + seal.values for seal in part.seals.values())

    def progress(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        part.progress(written, total)

    write = functools.partial(part.directory.write, part.folder, progress=progress, clock=clock)
    for rank, seal in sorted(part.seals.items()):
        header, data, encoded = parts_of(part.slots[rank], seal)
        known = part.known.get(rank, ())
        shards.append(write(f"rank-{rank:05d}.safetensors", rank, bytes(header), data, digests=known))
        values.append(write(f"rank-{rank:05d}.values", rank, b"", encoded))
    return tuple(shards), tuple(values)


def commit(directory: Storage, folder: str, write: Write, facts: Mapping[str, Any]) -> str:
    """Make a checkpoint of a folder in which all nodes have written their parts; return what went wrong, or an empty text."""
    generation, step = write.key
    try:
        files = manifest.files_of(write.shards), manifest.files_of(write.values)
        contents = Manifest(step, generation, write.cycle, write.world, time.time(), *files, dict(facts))
        directory.commit(folder, contents)
    except Exception as error:  # noqa: BLE001 - as above
        return _could_not(write.key, directory, error)
    took = max(time.monotonic() - write.began, 1e-9)
    size, pace = manifest.in_words(contents.nbytes), manifest.in_words(contents.nbytes / took)
    _LOG.info("step %s is durable: %s in %.2f s (%s/s).", step, size, took, pace)
    return ""


def _could_not(key: Sequence[int], directory: Storage, error: Exception) -> str:
    reason = error.strerror or error if isinstance(error, OSError) else error
    text = f"step {key[1]} could not be written to {directory.path} ({socket.gethostname()}): {reason}"
    remedy = _REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    if isinstance(error, (ConnectionError, TimeoutError)):
        remedy = "Look whether the server is up; the next save that is due is tried as ever."
    return f"{text}. What was durable before stays. {remedy}" if remedy else text


def prune(directory: Storage, keep: int, keep_every: int) -> None:
    """Remove what need not be kept. That it can't be is no failure of a save."""
    try:
        for gone in directory.prune(keep, keep_every):
            _LOG.debug("%s is removed: %s are kept.", gone.path.name, keep)
    except OSError as error:
        _LOG.warning("%s: what need not be kept could not be removed: %s", directory.path, error)


def newest_generation(directory: Storage, known: int, complain: Callable[[str], None]) -> int:
    """Return the newest generation that is stored. Where nobody can look, and some are ``known`` (to ranks that are here, so that
    the place is ours and nobody else has written there), that is said, and 0 is returned."""
    try:
        return max((item.manifest.generation for item in directory.stored(complain)), default=0)
    except (CheckpointError, OSError) as error:
        if not known:
            raise
        complain(f"{error} The job goes on with what is in memory.")
        return 0


def parts_of(slot: Slot, seal: Seal) -> tuple[memoryview, memoryview, memoryview]:
    """Return header, data and values of a sealed slot. Raises ``CheckpointError`` if header or values are not what was sealed."""
    header, data, values = _views_of(slot, seal)
    if (digest.short(header), digest.short(values)) != (seal.header_sum, seal.values_sum):
        raise CheckpointError(f"the memory of step {seal.step} has changed since it was sealed")
    return header, data, values


def _views_of(slot: Slot, seal: Seal) -> tuple[memoryview, memoryview, memoryview]:
    slot.refresh()
    if max(seal.data, seal.header_at + seal.header, seal.values_at + seal.values) > slot.nbytes:
        raise CheckpointError(f"the seal of step {seal.step} points outside of its slot of {slot.nbytes} bytes")
    memory = memoryview(slot.map)
    return (
        memory[seal.header_at : seal.header_at + seal.header],
        memory[: seal.data],
        memory[seal.values_at : seal.values_at + seal.values],
    )


def digests_of(slot: Slot, seal: Seal) -> list[str]:
    """Return the digests of a sealed slot's data."""
    _, data, _ = _views_of(slot, seal)
    return digest.digests(data, digest.chunk_size(len(data)))
