"""Some tensors of a sealed slot as a shard of their own: what is a rank's alone, for other nodes to keep, or what all nodes share.

The bytes are not copied: an excerpt is a new header, and spans of the slot that follow each other in the new data section. Pieces
keep their order, so they stay aligned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from resilience.checkpoint import ownership, shards
from resilience.checkpoint.arena import Slot
from resilience.checkpoint.ledger import Seal
from resilience.checkpoint.ownership import Span
from resilience.checkpoint.saver import clerk


@dataclass(frozen=True)
class Outline:
    """Which tensors, and where they are in the slot."""

    header: bytes
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes the tensors have."""
        return sum(end - start for start, end in self.spans)


class Outlines:
    """Makes outlines; keeps the last ones, for a plan holds for many steps."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, bytes, bool], Outline] = {}

    def of(self, header: memoryview, header_sum: int, data: int, owned: memoryview, own: bool) -> Outline:
        """Return the outline of what is the rank's own, or of the rest."""
        key = (header_sum, data, bytes(owned), own)
        found = self._known.get(key)
        if found is None:
            if len(self._known) > 64:
                self._known.clear()
            found = self._known[key] = outline(header, data, ownership.unpack(owned, data), own)
        return found


def outline(header: bytes | memoryview, data: int, owned: Sequence[Span], own: bool) -> Outline:
    """Return the outline of the tensors of a shard that lie in ``owned``, or with ``own=False`` of those that do not."""
    chosen, spans, at = [], [], 0
    for piece in sorted(shards.parse_header(header, data), key=lambda piece: (piece.start, piece.nbytes)):
        if piece.nbytes and ownership.within(piece.start, piece.nbytes, owned) != own:
            continue
        chosen.append(piece._replace(start=at))
        spans.append((piece.start, piece.start + piece.nbytes))
        at += piece.nbytes
    return Outline(shards.build_header(chosen), tuple(ownership.merged(spans)))


@dataclass(frozen=True)
class Excerpt:
    """What goes out of one slot: header, values and tensors."""

    header: bytes
    values: memoryview
    memory: memoryview
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes the tensors have."""
        return sum(end - start for start, end in self.spans)

    def pieces(self, most: int) -> Iterator[memoryview]:
        """Yield the tensors' bytes, at most so many at once."""
        for start, end in self.spans:
            for at in range(start, end, most):
                yield self.memory[at : min(at + most, end)]


def excerpt(slot: Slot, seal: Seal, outlines: Outlines, own: bool) -> Excerpt:
    """Return what is the rank's own of a sealed slot, with its values; or the rest, without. Raises ``CheckpointError`` if header
    or values are not what was sealed."""
    header, data, values = clerk.parts_of(slot, seal)
    owned = memoryview(slot.map)[seal.header_at + seal.header : seal.values_at]
    found = outlines.of(header, seal.header_sum, seal.data, owned, own)
    return Excerpt(found.header, values if own else values[:0], data, found.spans)
