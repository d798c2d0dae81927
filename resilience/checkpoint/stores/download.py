"""Objects on their way into memory: many ranges at a time, each put where it belongs; nothing is kept twice.

Rule: what comes in is not checked here. Whoever reads a checkpoint checks the digests of all that it reads, wherever it is from.
"""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor

from resilience.checkpoint import digest
from resilience.checkpoint.stores import Url
from resilience.checkpoint.stores.client import Client
from resilience.errors import CheckpointError

_RANGE = 8 << 20
_AT_ONCE = 8


def mapped(url: Url, nbytes: int) -> mmap.mmap:
    """Return an object in memory of its own. Raises ``OSError``, and ``CheckpointError`` if it has another size."""
    client, name = _client(url)
    if nbytes == 0:
        raise CheckpointError(f"{url.name} is empty")
    room = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(room)

    def fetch(span: tuple[int, int]) -> None:
        start, end = span
        found = client.read(name, start, end)
        if len(found) != end - start:
            raise CheckpointError(f"{url.name} has another size than it should")
        view[start:end] = found

    with ThreadPoolExecutor(_AT_ONCE, "resilience-download") as pool:
        for done in [pool.submit(fetch, span) for span in digest.chunks(nbytes, _RANGE)]:
            done.result()
    return room


def contents(url: Url, nbytes: int) -> bytes:
    """Return an object that should have so many bytes. Raises as :func:`mapped` does."""
    return bytes(mapped(url, nbytes)) if nbytes else b""


def beginning(url: Url, nbytes: int) -> bytes:
    """Return the first bytes of an object. Raises as :func:`mapped` does."""
    client, name = _client(url)
    found = bytes(client.read(name, 0, nbytes)) if nbytes else b""
    if len(found) != nbytes:
        raise CheckpointError(f"{url.name} has another size than it should")
    return found


def _client(url: Url) -> tuple[Client, str]:
    return Client(Url(str(url).rpartition("/")[0])), url.name
