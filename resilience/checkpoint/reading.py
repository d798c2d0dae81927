"""Opening a snapshot, in slots or in files, with its digests checked beside the reading."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from resilience.checkpoint import decoding, digest, files, shards
from resilience.checkpoint.encoding import UnknownCodec
from resilience.checkpoint.manifest import File, Manifest
from resilience.checkpoint.source import Ref, Shard, Source
from resilience.checkpoint.stores import Url, Where
from resilience.errors import CheckpointError

_THREADS = 4  # at most for memory, whatever the cores; for files always: they wait for the disk


class Check:
    """Digests that are being checked in threads, beside the copying."""

    def __init__(self, threads: int = _THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._answers: list[Future[str]] = []

    def add(self, data: memoryview, chunk: int, wanted: Sequence[str], where: str) -> None:
        """Have some data checked, chunk by chunk."""
        spans = list(digest.chunks(len(data), chunk))
        if len(spans) != len(wanted):
            text = f"{where}: {len(wanted)} digests for {len(spans)} chunks"
            self._answers.append(self._pool.submit(str, text))
            return
        for (start, end), known in zip(spans, wanted, strict=True):
            where_exactly = f"{where}, bytes {start} to {end}"
            self._answers.append(self._pool.submit(_compare, data[start:end], known, where_exactly))

    def fraction(self) -> float:
        """Return how much has been checked, between 0 and 1."""
        return sum(answer.done() for answer in self._answers) / max(1, len(self._answers))

    def wrong(self) -> str:
        """Wait for everything; return what is wrong, or an empty text. Raises what came in the way of checking."""
        self._pool.shutdown()
        return "; ".join([text for answer in self._answers if (text := answer.result())][:3])


def _compare(data: memoryview, known: str, where: str) -> str:
    return "" if digest.digest(data) == known else f"{where}: the digest is wrong"


@dataclass
class Opened:
    """A snapshot that is ready to be read: tensors, this rank's values, and the check that runs beside it. ``world``: so many ranks
    made it; ``stranger``: this one was none of them, and the values are those of rank 0."""

    source: Source
    values: Any
    check: Check
    world: int = 1
    stranger: bool = False


def share_of_cores(local_world: int) -> int:
    """Return how many threads this rank may keep busy, if all ranks of the node do the same."""
    return max(1, min(_THREADS, len(os.sched_getaffinity(0)) // local_world))


def open_memory(
    message: dict[str, Any],
    fds: Sequence[int],
    rank: int,
    local_world: int = 1,
    known: Callable[[int], mmap.mmap | None] = lambda fd: None,
) -> Opened:
    """Open a snapshot in the slots of this node's ranks. Takes the descriptors over.

    ``known`` gives this process's own mapping of what a descriptor stands for, if it has one: through a fresh mapping everything
    takes nearly twice as long.
    """
    try:
        rooms = [known(fd) or mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)
    source, check = Source(), Check(share_of_cores(local_world))
    values: list[Any] = []
    rank = int(message.get("giver", rank))
    for peer, room in zip(message["peers"], rooms, strict=True):
        view = memoryview(room)
        header = _sealed(view, peer["header"], f"the header of rank {peer['rank']} in memory is")
        source.add(Shard(bytes_of(room), shards.parse_header(header, peer["data"])), peer["rank"] == rank)
        if "digests" in peer:
            data = view[: peer["data"]]
            check.add(data, digest.chunk_size(len(data)), peer["digests"], "memory")
        if peer["rank"] == rank:
            values.append(decode(_sealed(view, message["values"], f"the values of rank {rank} in memory are")))
    if not values:
        raise CheckpointError(f"the snapshot in memory has nothing of rank {rank}")
    return Opened(source, values[0], check, int(message["world"]), bool(message.get("stranger")))


def _sealed(memory: memoryview, where: Sequence[int], what: str) -> memoryview:
    at, length, known = where
    found = memory[at : at + length]
    if digest.short(found) != known:
        raise CheckpointError(f"{what} not what was sealed")
    return found


def open_disk(path: Where, manifest: Manifest, rank: int) -> Opened:
    """Open a checkpoint on disk. Everything that is read is checked; files that this rank needs nothing of are not opened. A rank
    that it knows nothing of is given what rank 0 had."""
    source, check = Source(), Check()
    stranger = rank >= manifest.world
    rank = 0 if stranger else rank
    for file in manifest.shards:
        if file.rank == rank:
            source.add(_shard(path, file, check), own=True)
        else:
            source.add_later(functools.partial(_shard, path, file, check))
    mine = next(file for file in manifest.values if file.rank == rank)
    with _named(mine):
        data = _contents(path / mine.name, mine)
        if digest.digests(memoryview(data), mine.chunk) != list(mine.digests):
            raise CheckpointError(f"{mine.name}: the digest is wrong")
        return Opened(source, decode(memoryview(data)), check, manifest.world, stranger)


def _shard(path: Where, file: File, check: Check) -> Shard:
    """Open a shard. Its data is had, and checked, when it is first wanted."""
    with _named(file):
        head = _head(path / file.name, file)
        if shards.header_length(head[:8], file.nbytes) != file.head or digest.digest(head) != file.digests[0]:
            raise CheckpointError(f"{file.name}: the header is not the one that was written")
        pieces = shards.parse_header(head, file.nbytes - file.head)

    def data() -> torch.Tensor:
        with _named(file):
            room, memory = _mapped(path / file.name, file)
        check.add(memoryview(room)[file.head :], file.chunk, file.digests[1:], file.name)
        return memory[file.head :]

    return Shard(data, pieces)


@contextlib.contextmanager
def _named(file: File) -> Iterator[None]:
    """Say which file it is that something is wrong with."""
    try:
        yield
    except UnknownCodec:
        raise  # nothing is wrong with the file
    except CheckpointError as error:
        if file.name in str(error):
            raise
        raise CheckpointError(f"{file.name}: {error}") from error


@contextlib.contextmanager
def _opened(path: Path, file: File) -> Iterator[BinaryIO]:
    """Open a file of the size that it should have."""
    with files.opened(path) as (opened, nbytes):
        if nbytes != file.nbytes:
            raise CheckpointError(f"{file.name} has another size than it should")
        yield opened


def _head(path: Where, file: File) -> memoryview:
    """Return the header of a shard, as long as it should be."""
    if isinstance(path, Url):
        from resilience.checkpoint.stores import download  # noqa: PLC0415 - fsspec, only for those who want it

        return memoryview(download.beginning(path, file.head))
    with _opened(path, file) as opened:
        if file.nbytes == 0:
            raise CheckpointError(f"{file.name} is empty")
        return memoryview(opened.read(file.head))


def _contents(path: Where, file: File) -> bytes:
    """Return a file as it is."""
    if isinstance(path, Url):
        from resilience.checkpoint.stores import download  # noqa: PLC0415 - fsspec, only for those who want it

        return download.contents(path, file.nbytes)
    with _opened(path, file) as opened:
        return opened.read(file.nbytes)


def _mapped(path: Where, file: File) -> tuple[mmap.mmap, torch.Tensor]:
    if isinstance(path, Url):
        from resilience.checkpoint.stores import download  # noqa: PLC0415

        room = download.mapped(path, file.nbytes)
        return room, bytes_of(room)
    with _opened(path, file) as opened:
        room = mmap.mmap(opened.fileno(), file.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    room.madvise(mmap.MADV_SEQUENTIAL)
    return room, bytes_of(room)


def bytes_of(room: mmap.mmap) -> torch.Tensor:
    """Return mapped memory as a tensor of bytes. It is only read, whatever torch may fear."""
    import warnings  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "the given buffer is not writable"
        return torch.frombuffer(room, dtype=torch.uint8)


def decode(data: memoryview) -> Any:
    """Return a state with a :class:`Ref` for every tensor."""
    return decoding.decode(data, lambda name, form: Ref(name, tuple(form)))
