"""The clerk: a thread that writes snapshots to disk and computes digests, one thing at a time, while the loop goes on.

It reads slots through mappings of its own. A slot that it writes is leased; one that it only digests is not, so it looks afterwards
whether the seal is still the same.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from resilience.checkpoint import digest, storage
from resilience.checkpoint.arena import Slot
from resilience.checkpoint.ledger import Seal
from resilience.checkpoint.manifest import Manifest
from resilience.errors import CheckpointError

_LOG = logging.getLogger("resilience.saver")


@dataclass(frozen=True)
class Job:
    """A snapshot to be written: everything that the clerk needs to know about it."""

    directory: storage.Directory
    key: tuple[int, int]
    cycle: int
    world: int
    seals: Mapping[int, Seal]
    slots: Mapping[int, Slot]  # by rank: the slot that holds it
    digests: Mapping[int, list[str]]
    keep: int
    keep_every: int
    facts: Mapping[str, Any]
    done: Callable[
        [str, dict[int, list[str]]], None
    ]  # called in the clerk's thread, with an error or "", and the digests


class Clerk:
    """Works off jobs in order."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="resilience-clerk", daemon=True)
        self._thread.start()

    def write(self, job: Job) -> None:
        """Have a snapshot written."""
        self._jobs.put(job)

    def do(self, act: Callable[[], None]) -> None:
        """Have something done after everything that was asked for before."""
        self._jobs.put(act)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            if not isinstance(job, Job):
                try:
                    job()
                except Exception:  # noqa: BLE001 - the same boundary: what comes after must still be written
                    _LOG.exception("something that the clerk was asked to do failed; it goes on with the next.")
                continue
            try:
                written = persist(job)
            except Exception as error:  # noqa: BLE001 - a thread's boundary: the training must hear of it, whatever it is
                reason = error.strerror or error if isinstance(error, OSError) else error
                job.done(f"step {job.key[1]} could not be written to {job.directory.path}: {reason}", {})
            else:
                job.done("", {file.rank: list(file.digests[1:]) for file in written.shards})


def persist(job: Job) -> Manifest:
    """Write a snapshot, commit it, and remove what need not be kept."""
    began = time.monotonic()
    step = job.key[1]
    storage.make_folder(job.directory.path)
    shards, values = [], []
    with job.directory.new(step) as folder:
        for rank, seal in sorted(job.seals.items()):
            header, data, encoded = parts_of(job.slots[rank], seal)
            name = folder / f"rank-{rank:05d}.safetensors"
            known = job.digests.get(rank, ())
            shards.append(storage.write_file(name, rank, bytes(header), data, digests=known))
            values.append(storage.write_file(folder / f"rank-{rank:05d}.values", rank, b"", encoded))
        contents = Manifest(
            step, job.key[0], job.cycle, job.world, time.time(), tuple(shards), tuple(values), dict(job.facts)
        )
        storage.write_manifest(folder, contents)
    took = max(time.monotonic() - began, 1e-9)
    size, pace = storage.in_words(contents.nbytes), storage.in_words(contents.nbytes / took)
    _LOG.info("step %s is durable: %s in %.2f s (%s/s).", step, size, took, pace)
    try:
        for gone in job.directory.prune(job.keep, job.keep_every):
            _LOG.debug("%s is removed: %s are kept.", gone.path.name, job.keep)
    except OSError as error:  # what was to be written is: that is no failure of the save
        _LOG.warning("%s: what need not be kept could not be removed: %s", job.directory.path, error)
    return contents


def parts_of(slot: Slot, seal: Seal) -> tuple[memoryview, memoryview, memoryview]:
    """Return header, data and values of a sealed slot. Raises ``CheckpointError`` for a seal that points outside of it."""
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
    _, data, _ = parts_of(slot, seal)
    return digest.digests(data, digest.chunk_size(len(data)))
