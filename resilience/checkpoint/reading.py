"""Reading a snapshot back, from slots or from files: the tensors by name, whichever shards their pieces are in.

Rule: nothing that is handed out shares memory with a slot or a file, and nothing is handed out of which a row is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from resilience.checkpoint import decoding, digest, files, plan, shards
from resilience.checkpoint.encoding import UnknownCodec
from resilience.checkpoint.manifest import File, Manifest
from resilience.checkpoint.shards import Piece
from resilience.errors import CheckpointError

_THREADS = 4  # at most for memory, whatever the cores; for files always: they wait for the disk
_LEAVES = frozenset({str, int, float, bool, type(None), bytes})


@dataclass(frozen=True, eq=False)
class Ref:
    """A tensor that is in the snapshot, or a value that is made of some. Every one is itself: it may be a key, or in a set."""

    name: str
    form: tuple[Any, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it can be copied into a tensor that exists, by its name."""
        return not self.form or self.form[0] == "subclass"

    def differs(self, where: str, tensor: torch.Tensor, source: Source) -> list[str]:
        """Say how a live tensor differs from it, if it does."""
        if not self.plain:
            return []
        parts = plan.parts_of(tensor)
        kind, names, context = self.form[1:4] if self.form else (plan.class_name(tensor), [""], None)
        if [name for name, _ in parts] != names or kind != plan.class_name(tensor):
            return [
                f"{where} is a {plan.class_name(tensor)}, in the checkpoint {kind if self.form else 'a plain tensor'}"
            ]
        if self.form and tensor.__tensor_flatten__()[1] != context:
            return [f"{where} is a {kind} with another context than in the checkpoint"]
        said = []
        for name, part in parts:
            shape, dtype = source.shape_of(self.name + name), source.dtype_of(self.name + name)
            if tuple(part.shape) != shape or part.dtype != dtype:
                said.append(
                    f"{where}{name} is {list(part.shape)} {part.dtype}, in the checkpoint {list(shape)} {dtype}"
                )
        return said


class Source:
    """The pieces of all tensors of a snapshot. A whole tensor of this rank's own goes before those of the same name elsewhere."""

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
                if not any(other.is_whole or _same_rows(other, piece) for _, other in known):
                    known.append((memory, piece))

    def _of(self, name: str) -> list[tuple[torch.Tensor, Piece]]:
        try:
            return self._pieces[name]
        except KeyError:
            raise CheckpointError(f"tensor {name!r} is missing") from None

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._of(name)[0][1].whole

    def shape_if_there(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a whole tensor, if the snapshot has one of that name."""
        return self._pieces[name][0][1].whole if name in self._pieces else None

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type of a tensor's items."""
        return plan.DTYPES[self._of(name)[0][1].dtype]

    def _all_of(self, name: str) -> list[tuple[torch.Tensor, Piece]]:
        """Return pieces of a tensor, in order, that have every row once. Nodes with different numbers of ranks cut it differently,
        and each has all of it: of everything that is there, this takes what fits together."""
        found = self._of(name)
        if len(found) == 1 and found[0][1].is_whole:  # nearly always, and there may be very many
            return found
        first = found[0][1]
        if any((piece.whole, piece.dtype) != (first.whole, first.dtype) for _, piece in found):
            raise CheckpointError(f"tensor {name!r} has pieces that do not belong together")
        spans = [(piece.first_row, piece.first_row + piece.shape[0]) for _, piece in found]
        chosen, rows = tile(spans, first.whole[0])
        if rows == first.whole[0]:
            return [found[index] for index in chosen]
        twice = [begin for begin, end in spans if begin < rows < end]
        if twice:
            raise CheckpointError(f"tensor {name!r} has row {min(twice)} twice")
        raise CheckpointError(f"tensor {name!r} lacks row {rows} of {first.whole[0]}: a shard is missing")

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Copy a whole tensor into one that exists, part by part where that is made of several."""
        if name not in self._pieces and type(target) is not torch.Tensor:
            for part, inner in plan.parts_of(target):
                self._copy(name + part, inner)
        else:
            self._copy(name, target)

    def _copy(self, name: str, target: torch.Tensor) -> None:
        found = self._all_of(name)
        if tuple(target.shape) != found[0][1].whole:
            there = list(found[0][1].whole)
            raise CheckpointError(f"tensor {name!r} has shape {there}, where it should go {list(target.shape)}")
        with torch.no_grad():
            for memory, piece in found:
                part = target if piece.is_whole else target[piece.first_row : piece.first_row + piece.shape[0]]
                part.copy_(plan.view_of(memory, piece))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the snapshot, whole, in memory of its own."""
        return {name: self.fresh(Ref(name)) for name in sorted(self._pieces)}

    def fresh(self, tree: Any, rooms: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Return a tree with tensors of its own in place of every :class:`Ref`: one for each name, however often it is there.

        ``rooms``: tensors that exist, by the name of what is written into them: they are used instead of new ones. Each has the
        right shape and type, and its memory to itself.
        """
        made: dict[str, Any] = dict(rooms or {})
        for name, room in made.items():
            self._copy(name, room)
        return self._fresh(tree, made)

    def _fresh(self, tree: Any, made: dict[str, Any]) -> Any:
        kind = type(tree)
        if kind in _LEAVES:
            return tree
        if kind is Ref:
            return self._made(tree, made)
        if kind in (list, tuple, set, frozenset):
            if _LEAVES.issuperset(map(type, tree)):
                return tree
            return kind(self._fresh(item, made) for item in tree)
        if kind is deque:
            return deque((self._fresh(item, made) for item in tree), tree.maxlen)
        if isinstance(tree, dict):
            items = [(self._fresh(key, made), self._fresh(value, made)) for key, value in tree.items()]
            tree.clear()
            for key, value in items:
                tree[key] = value
        elif kind is argparse.Namespace:
            self._fresh(vars(tree), made)
        return tree

    def _made(self, ref: Ref, made: dict[str, Any]) -> Any:
        kind = ref.form[0] if ref.form else ""
        if kind == "codec":
            return decoding.from_codec(ref.form[1], self._fresh(ref.form[2], made))
        if kind == "subclass":
            raise CheckpointError(
                f"{ref.name}: a {ref.form[1]} can only be restored into a module that has one. Where it stands elsewhere, say how "
                "it is made with resilience.checkpoint.encoding.register_codec before it is saved."
            )
        if ref.name not in made:
            self._all_of(ref.name)  # before memory is taken for a shape that nobody has
            # Arrays and generators' states are made of some: on the CPU, whatever torch.set_default_device says.
            tensor = torch.empty(self.shape_of(ref.name), dtype=self.dtype_of(ref.name), device="cpu")
            self._copy(ref.name, tensor)
            made[ref.name] = plan.whole_tensor(tensor, ref.form)
        return made[ref.name]


def tile(spans: Sequence[tuple[int, int]], rows: int) -> tuple[list[int], int]:
    """Choose spans (first row, row after the last) that follow each other without gap or overlap from row 0 to ``rows``. Pure.

    Returns their indices in order and where they end: at ``rows``, or as far as any come. Takes as few as there can be, and the
    longest first: which ones does not depend on the order in which they are given.
    """
    # By the row that is come to: with how many spans, and the last of them. All that lead to a row begin before it, so that
    # it is settled by the time when those that begin at it have their turn.
    best: dict[int, tuple[int, int]] = {0: (0, -1)}
    for index in sorted(range(len(spans)), key=lambda index: (spans[index][0], -spans[index][1])):
        begin, end = spans[index]
        if begin < end and begin in best and (end not in best or best[begin][0] + 1 < best[end][0]):
            best[end] = best[begin][0] + 1, index
    reached = at = rows if rows in best else max(best)
    chosen: list[int] = []
    while at:
        chosen.append(best[at][1])
        at = spans[chosen[-1]][0]
    return chosen[::-1], reached


def _same_rows(one: Piece, other: Piece) -> bool:
    return one.first_row == other.first_row and one.shape == other.shape


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
    """A snapshot that is ready to be read: tensors, this rank's values, and the check that runs beside it."""

    source: Source
    values: Any
    check: Check


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
    for peer, room in zip(message["peers"], rooms, strict=True):
        view = memoryview(room)
        header = _sealed(view, peer["header"], f"the header of rank {peer['rank']} in memory is")
        source.add(bytes_of(room), shards.parse_header(header, peer["data"]), peer["rank"] == rank)
        wanted = message["digests"] if peer["rank"] == rank else peer.get("digests")
        if wanted is not None:
            data = view[: peer["data"]]
            check.add(data, digest.chunk_size(len(data)), wanted, "memory")
        if peer["rank"] == rank:
            values.append(decode(_sealed(view, message["values"], f"the values of rank {rank} in memory are")))
    if not values:
        raise CheckpointError(f"the snapshot in memory has nothing of rank {rank}")
    return Opened(source, values[0], check)


def _sealed(memory: memoryview, where: Sequence[int], what: str) -> memoryview:
    at, length, known = where
    found = memory[at : at + length]
    if digest.short(found) != known:
        raise CheckpointError(f"{what} not what was sealed")
    return found


def open_disk(path: Path, manifest: Manifest, rank: int) -> Opened:
    """Open a checkpoint on disk. Everything that is read is checked. A rank that it knows nothing of is given what rank 0 had."""
    source, check = Source(), Check()
    rank = rank if rank < manifest.world else 0
    for file in manifest.shards:
        with _named(file):
            room, memory = _mapped(path / file.name, file)
            view = memoryview(room)
            length = shards.header_length(view[:8], file.nbytes)
            if length != file.head or digest.digest(view[:length]) != file.digests[0]:
                raise CheckpointError(f"{file.name}: the header is not the one that was written")
            check.add(view[length:], file.chunk, file.digests[1:], file.name)
            source.add(memory[length:], shards.parse_header(view[:length], file.nbytes - length), file.rank == rank)
    mine = next(file for file in manifest.values if file.rank == rank)
    with _named(mine):
        with _opened(path / mine.name, mine) as opened:
            data = opened.read(mine.nbytes)
        if digest.digests(memoryview(data), mine.chunk) != list(mine.digests):
            raise CheckpointError(f"{mine.name}: the digest is wrong")
        return Opened(source, decode(memoryview(data)), check)


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


def _mapped(path: Path, file: File) -> tuple[mmap.mmap, torch.Tensor]:
    with _opened(path, file) as opened:
        if file.nbytes == 0:  # has no header, and can't be mapped
            raise CheckpointError(f"{file.name} is empty")
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
