"""Bytes on their way into an object: straight from a slot, in parts, several at a time, each with its digests beside it.

Rule: an object that is there is whole. What fails leaves nothing behind that has to be paid for, unless the store is gone.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from resilience.checkpoint import digest
from resilience.checkpoint.stores.client import Client, Patience
from resilience.checkpoint.writing import PIECE, Stopwatch

_AT_ONCE = 4  # parts under way, each of them copied once
_AGAIN = 3  # uploads of one object, where the store forgets an upload that it had begun


@dataclass(frozen=True)
class Contents:
    """What an object is to hold: a header, then data. ``chunk``: of its digests."""

    head: bytes
    data: memoryview
    chunk: int
    digests: Sequence[str] = ()  # where they are known
    progress: Callable[[int], None] = lambda nbytes: None

    def parts(self) -> list[tuple[int, int]]:
        """Return where the parts of the data begin and end: whole chunks, some 32 MiB."""
        return list(digest.chunks(len(self.data), self.chunk * max(1, PIECE // self.chunk))) or [(0, 0)]

    def body(self, start: int, end: int) -> bytes:
        """Return a part as it is sent: a copy, since the interfaces want bytes. The first has the header in front."""
        return b"".join((self.head if start == 0 else b"", self.data[start:end]))

    def digested(self, start: int, end: int) -> list[str]:
        """Return the digests of a part."""
        if self.digests:
            return list(self.digests[start // self.chunk : -(-end // self.chunk)])
        return digest.digests(self.data[start:end], self.chunk)

    @property
    def nbytes(self) -> int:
        """The size of the object."""
        return len(self.head) + len(self.data)


def upload(client: Client, name: str, contents: Contents, clock: Stopwatch) -> list[str]:
    """Write an object; return the digests of its data. Raises ``OSError`` and whatever fsspec raises."""
    patience, parts = client.patience(), contents.parts()
    if len(parts) == 1:
        with clock("write"):
            client.put(name, contents.body(*parts[0]))
        contents.progress(len(contents.data))
        with clock("digest"):
            return contents.digested(*parts[0])
    for attempt in range(1, _AGAIN + 1):
        try:
            send = _in_parts if client.is_s3 else _as_stream
            with clock("write"):
                return send(client, name, contents, patience)
        except OSError as error:
            # A server that was killed may know nothing of an upload any more, nor of some of its parts.
            forgotten = isinstance(error, FileNotFoundError) or error.errno == errno.EINVAL
            if not forgotten or attempt == _AGAIN:
                raise
    raise AssertionError("not reached")


def _in_parts(client: Client, name: str, contents: Contents, patience: Patience) -> list[str]:
    with _multipart(client, name, patience) as upload_id:

        def send(number: int, start: int, end: int) -> tuple[dict[str, Any], list[str]]:
            body = contents.body(start, end)
            kwargs = {"UploadId": upload_id, "PartNumber": number, "Body": body}
            answer = client.s3("upload_part", name, patience, **kwargs)
            return {"PartNumber": number, "ETag": answer["ETag"]}, contents.digested(start, end)

        with _pool() as pool:
            spans = contents.parts()
            futures = [pool.submit(send, number, *span) for number, span in enumerate(spans, 1)]
            found = []
            for future, (start, end) in zip(futures, spans, strict=True):
                found.append(future.result())
                contents.progress(end - start)
        parts = {"Parts": [part for part, _ in found]}
        try:
            client.s3("complete_multipart_upload", name, patience, UploadId=upload_id, MultipartUpload=parts)
        except FileNotFoundError:  # completed already, and only the answer was lost?
            if client.size(name) != contents.nbytes:
                raise
        return [text for _, texts in found for text in texts]


@contextlib.contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that begin nothing more once something has failed."""
    pool = ThreadPoolExecutor(_AT_ONCE, "resilience-upload")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _multipart(client: Client, name: str, patience: Patience) -> Iterator[str]:
    """Begin an upload; abort it unless it is completed."""
    upload_id = str(client.s3("create_multipart_upload", name, patience)["UploadId"])
    try:
        yield upload_id
    except BaseException:
        with contextlib.suppress(Exception):  # the store is gone: what sweeps the folder later finds it
            client.hasty().s3("abort_multipart_upload", name, UploadId=upload_id)
        raise


def _as_stream(client: Client, name: str, contents: Contents, patience: Patience) -> list[str]:
    """Write part by part, as any file system of fsspec can; all over again if something goes wrong that may pass."""

    def send() -> list[str]:
        found: list[str] = []
        with client.opened_for_writing(name) as file:
            for start, end in contents.parts():
                file.write(contents.body(start, end))
                found += contents.digested(start, end)
        return found

    found = client.again(send, patience)
    contents.progress(len(contents.data))
    return found
