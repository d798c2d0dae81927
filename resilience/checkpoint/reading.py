"""Reading a snapshot back, from slots or from files: the tensors by name, whichever shards their pieces are in."""

from __future__ import annotations

import argparse
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resilience.checkpoint import digest, encoding, plan, shards
from resilience.checkpoint.manifest import File, Manifest
from resilience.checkpoint.shards import Piece
from resilience.errors import CheckpointError

_THREADS = 4


@dataclass(frozen=True)
class Ref:
    """A tensor that is in the snapshot."""

    name: str
    form: tuple[Any, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether its bytes are those of the tensor as it was."""
        return not self.form

    def differs(self, where: str, tensor: torch.Tensor, source: Source) -> list[str]:
        """Say how a live tensor differs from it, if it does."""
        if not self.plain:
            return []
        shape, dtype = source.shape_of(self.name), source.dtype_of(self.name)
        if tuple(tensor.shape) == shape and tensor.dtype == dtype:
            return []
        return [f"{where} is {list(tensor.shape)} {tensor.dtype}, in the checkpoint {list(shape)} {dtype}"]


class Source:
    """The pieces of all tensors of a snapshot. ``first`` are this rank's own: they go before those of the same name elsewhere."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[torch.Tensor, Piece]]] = {}
        self._own: set[str] = set()

    def add(self, memory: torch.Tensor, pieces: Sequence[Piece], own: bool) -> None:
        """Add a shard: its data section as bytes, and what is in it."""
        for piece in pieces:
            if own and piece.is_whole:
                self._pieces[piece.name] = [(memory, piece)]
                self._own.add(piece.name)
            elif piece.name not in self._own:
                known = self._pieces.setdefault(piece.name, [])
                if not any(other.first_row == piece.first_row and other.shape == piece.shape for _, other in known):
                    known.append((memory, piece))

    def _of(self, name: str) -> list[tuple[torch.Tensor, Piece]]:
        try:
            return self._pieces[name]
        except KeyError:
            raise CheckpointError(f"tensor {name!r} is missing") from None

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._of(name)[0][1].whole

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type of a tensor's items."""
        return plan.DTYPES[self._of(name)[0][1].dtype]

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Copy a whole tensor into one that exists."""
        found = self._of(name)
        rows = sum(piece.shape[0] for _, piece in found) if found[0][1].shape else 1
        whole = found[0][1].whole
        if whole and rows != whole[0]:
            raise CheckpointError(f"tensor {name!r} has {rows} of {whole[0]} rows: a shard is missing")
        with torch.no_grad():
            for memory, piece in found:
                part = target if piece.is_whole else target[piece.first_row : piece.first_row + piece.shape[0]]
                part.copy_(plan.view_of(memory, piece))

    def fresh(self, tree: Any) -> Any:
        """Return a tree with tensors of its own in place of every :class:`Ref`."""
        if isinstance(tree, Ref):
            if tree.form[:1] == ("subclass",):
                raise CheckpointError(f"a tensor of class {tree.form[1]} can only be restored into one that exists")
            made = torch.empty(self.shape_of(tree.name), dtype=self.dtype_of(tree.name))
            self.copy_into(tree.name, made)
            return plan.whole_tensor(made, tree.form)
        kind = type(tree)
        if kind is list:
            return [self.fresh(item) for item in tree]
        if kind is tuple:
            return tuple(self.fresh(item) for item in tree)
        if isinstance(tree, dict):
            for key, value in tree.items():
                tree[key] = self.fresh(value)
        elif isinstance(tree, deque):
            return deque((self.fresh(item) for item in tree), tree.maxlen)
        elif isinstance(tree, argparse.Namespace):
            self.fresh(vars(tree))
        elif isinstance(tree, (set, frozenset)):
            return kind(self.fresh(item) for item in tree)
        return tree


class Check:
    """Digests that are being checked in threads, beside the copying."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS)
        self._wrong: list[str] = []
        self._lock = threading.Lock()

    def add(self, data: memoryview, chunk: int, wanted: Sequence[str], where: str) -> None:
        """Have some data checked, chunk by chunk."""
        spans = list(digest.chunks(len(data), chunk))
        if len(spans) != len(wanted):
            self._note(f"{where}: {len(wanted)} digests for {len(spans)} chunks")
            return
        for (start, end), known in zip(spans, wanted, strict=True):
            self._pool.submit(self._one, data[start:end], known, f"{where}, bytes {start} to {end}")

    def _one(self, data: memoryview, known: str, where: str) -> None:
        if digest.digest(data) != known:
            self._note(f"{where}: the digest is wrong")

    def _note(self, text: str) -> None:
        with self._lock:
            self._wrong.append(text)

    def wrong(self) -> str:
        """Wait for everything; return what is wrong, or an empty text."""
        self._pool.shutdown()
        return "; ".join(sorted(self._wrong)[:3])


@dataclass
class Opened:
    """A snapshot that is ready to be read: tensors, this rank's values, and the check that runs beside it."""

    source: Source
    values: Any
    check: Check


def open_memory(message: dict[str, Any], fds: Sequence[int], rank: int) -> Opened:
    """Open a snapshot in the slots of this node's ranks. Takes the descriptors over."""
    source, check = Source(), Check()
    values: Any = None
    for peer, fd in zip(message["peers"], fds, strict=True):
        room = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(fd)
        at, length = peer["header"]
        memory = bytes_of(room)
        pieces = shards.parse_header(memoryview(room)[at : at + length], peer["data"])
        source.add(memory, pieces, peer["rank"] == rank)
        if peer["rank"] == rank:
            data = memoryview(room)[: peer["data"]]
            check.add(data, digest.chunk_size(len(data)), message["digests"], "memory")
            at, length = message["values"]
            values = decode(memoryview(room)[at : at + length])
    return Opened(source, values, check)


def open_disk(path: Path, manifest: Manifest, rank: int) -> Opened:
    """Open a checkpoint on disk. Everything that is read is checked."""
    source, check = Source(), Check()
    for file in manifest.shards:
        room, memory = _mapped(path / file.name, file)
        view = memoryview(room)
        length = shards.header_length(view[:8], file.nbytes)
        if length != file.head or digest.digest(view[:length]) != file.digests[0]:
            raise CheckpointError(f"{file.name}: the header is not the one that was written")
        check.add(view[length:], file.chunk, file.digests[1:], file.name)
        source.add(memory[length:], shards.parse_header(view[:length], file.nbytes - length), file.rank == rank)
    mine = next(file for file in manifest.values if file.rank == (rank if rank < manifest.world else 0))
    data = (path / mine.name).read_bytes()
    if digest.digests(memoryview(data), mine.chunk) != list(mine.digests):
        raise CheckpointError(f"{mine.name}: the digest is wrong")
    return Opened(source, decode(memoryview(data)), check)


def _mapped(path: Path, file: File) -> tuple[mmap.mmap, torch.Tensor]:
    with open(path, "rb") as opened:
        if os.fstat(opened.fileno()).st_size != file.nbytes:
            raise CheckpointError(f"{file.name} has another size than it should")
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
    return encoding.decode(data, lambda name, form: Ref(name, tuple(form)))
