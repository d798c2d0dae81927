"""Which bytes of a slot are this rank's alone: what other nodes have to be given of it. The rest each node holds itself.

They are a few spans of the data section, for tensors lie in it by falling item size. The rank writes them into its slot, between
header and values, with their digest before them; where there are none everything counts as the rank's own. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from resilience.checkpoint import digest
from resilience.errors import CheckpointError

_SUM = 8
Span = tuple[int, int]  # first byte, and the one after the last


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, those that touch made one, empty ones left out."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif start < end:
            found.append((start, end))
    return found


def pack(spans: Iterable[Span]) -> bytes:
    """Return spans as a slot holds them."""
    text = json.dumps(merged(spans), separators=(",", ":")).encode()
    return digest.short(text).to_bytes(_SUM, "little") + text


def unpack(data: bytes | memoryview, data_bytes: int) -> list[Span]:
    """Return the spans that a slot of so many bytes of tensors holds. Raises ``CheckpointError`` if they are damaged."""
    if not data:
        return merged([(0, data_bytes)])
    text = bytes(data[_SUM:])
    if digest.short(text).to_bytes(_SUM, "little") != bytes(data[:_SUM]):
        raise CheckpointError("what the memory says of whose its tensors are has changed since it was sealed")
    try:
        spans = [(int(start), int(end)) for start, end in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"what the memory says of whose its tensors are can't be read: {error}") from error
    if merged(spans) != spans or any(not 0 <= start < end <= data_bytes for start, end in spans):
        raise CheckpointError("what the memory says of whose its tensors are makes no sense")
    return spans


def within(start: int, nbytes: int, spans: Iterable[Span]) -> bool:
    """Whether a piece lies in one of the spans. One without bytes lies everywhere."""
    return not nbytes or any(begin <= start and start + nbytes <= end for begin, end in spans)
