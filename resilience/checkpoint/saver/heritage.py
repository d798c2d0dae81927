"""What another number of ranks left in the memory of this node: their snapshots can be gone on from where all of it is here.

It may be spread over ranks that live here, ranks that did, and copies of ranks of other nodes. A rank is given the values of the
one that had its number; where those were lost with their node, or there was none, it counts as new, and is shown those of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from resilience.checkpoint import boxes, shards
from resilience.checkpoint.boxes import Box
from resilience.checkpoint.decisions import Key
from resilience.checkpoint.ledger import Seal
from resilience.checkpoint.saver import clerk
from resilience.checkpoint.saver.member import Member
from resilience.checkpoint.saver.replicas import Replica, Replicas
from resilience.checkpoint.saver.roll import Roll
from resilience.checkpoint.shards import Piece
from resilience.checkpoint.slots import VOID
from resilience.errors import CheckpointError


@dataclass(frozen=True)
class Share:
    """What one rank left: where its tensors and its values are, and what their bytes should be."""

    rank: int
    fd: int
    tensors: dict[str, Any]
    values: Sequence[int]
    pieces: Sequence[Piece]
    digests: Callable[[], list[str]]


@dataclass(frozen=True)
class Estate:
    """A snapshot that another number of ranks made, as far as it is here."""

    key: Key
    world: int  # so many ranks made it
    shares: dict[int, Share]

    def is_whole(self) -> bool:
        """Whether every tensor that is known here is here in full."""
        return not lacking(piece for share in self.shares.values() for piece in share.pieces)

    def giver(self, rank: int) -> int:
        """Return whose values a rank is given: its own, as far as they are here."""
        mine = rank if rank < self.world else 0
        return mine if mine in self.shares else min(self.shares)

    def is_exact(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks are given what they would be given from disk."""
        return all(self.giver(rank) == (rank if rank < self.world else 0) for rank in ranks)

    def describe(self, rank: int, ranks: Sequence[int]) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Say where everything is, to one of the ranks that want it. Each checks the digests of some shares."""
        giver, turn = self.giver(rank), ranks.index(rank)
        peers, fds = [], []
        for number, share in enumerate(self.shares.values()):
            known = {"digests": share.digests()} if number % len(ranks) == turn else {}
            peers.append({**share.tensors, **known})
            fds.append(share.fd)
        base = {"found": "memory", "generation": self.key[0], "step": self.key[1], "world": self.world}
        mine = {"giver": giver, "stranger": giver != rank, "values": self.shares[giver].values}
        return {**base, **mine, "peers": peers}, tuple(fds)


def lacking(pieces: Iterable[Piece]) -> list[str]:
    """Return the names of the tensors of which something is missing. Pure."""
    found: dict[str, dict[tuple[Any, ...], list[Box]]] = {}
    for piece in pieces:
        found.setdefault(piece.name, {}).setdefault((piece.whole, piece.dtype), []).append(piece.box)
    return [name for name, kinds in found.items() if not any(_covered(kind[0], have) for kind, have in kinds.items())]


def _covered(whole: tuple[int, ...], have: list[Box]) -> bool:
    try:
        boxes.cover(Box.whole(whole), have)
    except boxes.Gap:
        return False
    return True


def estates(roll: Roll, replicas: Replicas) -> list[Estate]:
    """Return the snapshots of other numbers of ranks that are whole here."""
    found: dict[Key, dict[int, tuple[Member, Seal]]] = {}
    for rank, member in sorted(roll.members.items()):
        for seal in member.ledger.seals():
            if seal.world != roll.cycle.world and seal.decision != VOID:
                found.setdefault(seal.key, {})[rank] = member, seal
    made = [_estate(key, sealed, replicas) for key, sealed in found.items()]
    return [estate for estate in made if estate is not None and estate.is_whole()]


def estate_of(roll: Roll, replicas: Replicas, key: Key) -> Estate:
    """Return a snapshot of another number of ranks. Raises ``CheckpointError`` if it is not here any more."""
    found = next((estate for estate in estates(roll, replicas) if estate.key == key), None)
    if found is None:
        raise CheckpointError(f"step {key[1]} is not in the memory of this node any more")
    return found


def _estate(key: Key, sealed: dict[int, tuple[Member, Seal]], replicas: Replicas) -> Estate | None:
    """Return what is here of a snapshot; ``None`` if it was damaged."""
    world = next(iter(sealed.values()))[1].world
    try:
        shares = {rank: _share(rank, *place) for rank, place in sealed.items()}
        shares |= {copy.rank: _copied(copy) for copy in _copies(key, world, replicas) if copy.rank not in shares}
    except (CheckpointError, ValueError):
        return None
    return Estate(key, world, dict(sorted(shares.items())))


def _copies(key: Key, world: int, replicas: Replicas) -> Iterator[Replica]:
    for rank in range(world):
        found = replicas.find(key, rank)
        if found is not None:
            yield found


def _share(rank: int, member: Member, seal: Seal) -> Share:
    slot = member.slots[seal.slot]
    header, _, _ = clerk.parts_of(slot, seal)
    tensors = {"rank": rank, "data": seal.data, "header": [seal.header_at, seal.header, seal.header_sum]}
    values = [seal.values_at, seal.values, seal.values_sum]
    pieces = shards.parse_header(header, seal.data)
    return Share(rank, slot.fd, tensors, values, pieces, lambda: clerk.digests_of(slot, seal))


def _copied(copy: Replica) -> Share:
    header, _, _ = copy.sizes.views(copy.slot)
    pieces = shards.parse_header(header, copy.sizes.data)
    return Share(copy.rank, copy.slot.fd, copy.described(), copy.values(), pieces, lambda: copy.digests)
