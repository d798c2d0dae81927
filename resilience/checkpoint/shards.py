"""Shards: safetensors files whose data section is, byte for byte, what a slot holds.

The header is padded with spaces so that the data begins at a multiple of 4096, for direct writes out of a slot. Tensors are packed
by falling item size: no holes, and every one is aligned. A piece of a larger tensor says where it begins in it, under torch's own
key for that (``DCP_SHARDING_INFO``), so that torch's Hugging Face reader opens the files unaided.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from resilience.checkpoint.boxes import Box
from resilience.errors import CheckpointError

ALIGN = 4096
ITEM_SIZES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}
_KEY = "resilience"
_MAX_HEADER = 100_000_000  # of the safetensors library
_MAX_DIMENSIONS = 64
_NUMBERS = frozenset({int})


class ShardError(CheckpointError):
    """A shard whose header is not what it should be."""


class Piece(NamedTuple):
    """A tensor, or a part of one, in the data section of a shard."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    start: int
    nbytes: int
    whole: tuple[int, ...]  # shape of the tensor that it is a piece of
    offsets: tuple[int, ...]  # where in that it begins

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.shape == self.whole

    @property
    def box(self) -> Box:
        """Which part of the whole tensor it is."""
        return Box(self.offsets, self.shape)


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole blocks."""
    return -(-nbytes // ALIGN) * ALIGN


def build_header(pieces: Sequence[Piece]) -> bytes:
    """Return the header of a shard: the length, and the padded JSON."""
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps({piece.name: {"saved_offsets": piece.offsets} for piece in pieces}),
            _KEY: json.dumps({"whole": {piece.name: piece.whole for piece in pieces if not piece.is_whole}}),
        }
    }
    for piece in pieces:
        entries[piece.name] = {
            "dtype": piece.dtype,
            "shape": piece.shape,
            "data_offsets": [piece.start, piece.start + piece.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(aligned(len(text) + 8) - 8, b" ")
    if len(text) + 8 > _MAX_HEADER or len(entries) != len(pieces) + 1:
        raise ShardError(
            f"{len(pieces)} tensors make a header of {len(text)} bytes, or two have one name; nothing was saved."
        )
    return len(text).to_bytes(8, "little") + text


def header_length(prefix: bytes | memoryview, limit: int) -> int:
    """Return how long the whole header is (its own length included), from the first 8 bytes of a shard of ``limit`` bytes."""
    length = int.from_bytes(prefix[:8], "little") + 8
    if len(prefix) < 8 or length > min(limit, _MAX_HEADER):
        raise ShardError(f"the header would be {length} bytes long")
    return length


def parse_header(header: bytes | memoryview, data_bytes: int) -> list[Piece]:
    """Return what a shard holds, by place. Everything is checked: sizes, offsets, holes, overlaps. Raises :class:`ShardError`."""
    try:
        entries = json.loads(bytes(header[8:]))
        metadata = entries.pop("__metadata__")
        offsets = json.loads(metadata["DCP_SHARDING_INFO"])
        wholes = json.loads(metadata[_KEY])["whole"]
        pieces = [
            _piece(name, entry, offsets[name]["saved_offsets"], wholes.get(name)) for name, entry in entries.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(f"the header can't be read: {type(error).__name__}: {error}") from error
    end = 0
    pieces.sort(key=lambda piece: (piece.start, piece.nbytes))
    for piece in pieces:
        if piece.start != end:
            raise ShardError(f"tensor {piece.name!r} begins at {piece.start}, not at {end}")
        end += piece.nbytes
    if end != data_bytes:
        raise ShardError(f"the tensors take {end} bytes, the data {data_bytes}")
    return pieces


def _piece(name: str, entry: Any, offsets: Any, whole: Any) -> Piece:
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    whole, offsets = shape if whole is None else tuple(whole), tuple(offsets)
    numbers = [*shape, *whole, start, end, *offsets]
    if not _NUMBERS.issuperset(map(type, numbers)) or min(numbers) < 0 or max(numbers) >> 63:
        raise ShardError(f"tensor {name!r} has a number in it that is none")
    item = ITEM_SIZES[entry["dtype"]]
    if math.prod(shape) * item != end - start or start % item or len(shape) > _MAX_DIMENSIONS:
        raise ShardError(f"tensor {name!r} has bytes {start} to {end} for shape {list(shape)} of {entry['dtype']}")
    if not Box(offsets, shape).fits(whole):
        raise ShardError(f"tensor {name!r} of shape {list(shape)} is no piece of {list(whole)} at {list(offsets)}")
    return Piece(name, entry["dtype"], shape, start, end - start, whole, offsets)


# -- who stages what --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Some rows of a tensor that a rank stages: ``rows`` of ``None`` is all of it."""

    index: int
    rows: tuple[int, int] | None = None


def split(tensors: Sequence[tuple[tuple[int, ...], int]], parts: int, mine: int) -> list[Part]:
    """Divide tensors, given by shape and item size, over ``parts`` ranks by rows; return what is ``mine``. Pure.

    Every rank gets about the same number of bytes, every row belongs to exactly one, and all ranks come to the same result.
    """
    sizes = [math.prod(shape) * item for shape, item in tensors]
    total, at = sum(sizes), 0
    low, high = total * mine // parts, total * (mine + 1) // parts
    found = []
    for index, ((shape, _), nbytes) in enumerate(zip(tensors, sizes, strict=True)):
        if nbytes == 0 or not shape or shape[0] == 1:  # can't be divided: it belongs to whoever has its first byte
            if _owner(at, total, parts) == mine:
                found.append(Part(index))
        else:
            row = nbytes // shape[0]
            first, last = (max(0, min(shape[0], -(-(edge - at) // row))) for edge in (low, high))
            if first < last:
                found.append(Part(index, None if (first, last) == (0, shape[0]) else (first, last)))
        at += nbytes
    return found


def _owner(at: int, total: int, parts: int) -> int:
    """Return who has the byte ``at``."""
    for part in range(parts):
        if at < total * (part + 1) // parts:
            return part
    return parts - 1


class Wanted(NamedTuple):
    """A piece that has no place yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offsets: tuple[int, ...]


def lay_out(wanted: Iterable[Wanted]) -> list[Piece]:
    """Pack pieces by falling item size; return them with their places."""
    found, at = [], 0
    for name, dtype, shape, whole, offsets in sorted(wanted, key=lambda item: -ITEM_SIZES[item.dtype]):
        nbytes = math.prod(shape) * ITEM_SIZES[dtype]
        found.append(Piece(name, dtype, shape, at, nbytes, whole, offsets))
        at += nbytes
    return found
