"""Digests: XXH3 with 128 bits, one per chunk, so that they can be computed and checked beside a copy and in parallel.

They find damage, not intent: whoever can write a checkpoint can write its digests too.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

NAME = "xxh3-128"
_CHUNK = 16 << 20
_MAX_CHUNKS = 1024


def chunk_size(nbytes: int) -> int:
    """Return the size of the chunks of ``nbytes``: 16 MiB, more where that would make too many."""
    size = _CHUNK
    while size * _MAX_CHUNKS < nbytes:
        size *= 2
    return size


def chunks(nbytes: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield where each chunk begins and ends."""
    for start in range(0, nbytes, size):
        yield start, min(start + size, nbytes)


def digest(data: bytes | memoryview) -> str:
    """Return the digest of some bytes. Lets go of the interpreter while it computes."""
    return xxhash.xxh3_128_hexdigest(data)


def short(data: bytes | memoryview) -> int:
    """Return a digest that fits into a word, for what is small."""
    return xxhash.xxh3_64_intdigest(data)


def digests(data: memoryview, size: int) -> list[str]:
    """Return the digest of every chunk."""
    return [digest(data[start:end]) for start, end in chunks(len(data), size)]
