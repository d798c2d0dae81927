"""The ranks of this node as their saver knows them: their memory, and the snapshots that are in it."""

from __future__ import annotations

from dataclasses import dataclass

from resilience.checkpoint.arena import Slot
from resilience.checkpoint.decisions import Key, RankView
from resilience.checkpoint.ledger import L_ATTEMPT, L_COMPLETE, L_GENERATION, Ledger, Seal, fence
from resilience.checkpoint.slots import COMPLETE, VOID


@dataclass
class Member:
    """One rank of this node: its memory, and whether it is there."""

    rank: int
    ledger: Ledger
    slots: list[Slot]
    cycle: int = -1
    pid: int = 0
    said_bye: bool = False
    gone: bool = False

    def seals(self) -> dict[Key, Seal]:
        """Return its sealed snapshots."""
        return {seal.key: seal for seal in self.ledger.seals()}

    def usable(self, world: int) -> dict[Key, Seal]:
        """Return its snapshots that can be combined with those of the other ranks."""
        return {key: seal for key, seal in self.seals().items() if seal.world == world and seal.decision != VOID}

    def complete(self) -> list[Key]:
        """Return its snapshots of which it was told that all ranks have them."""
        return [seal.key for seal in self.ledger.seals() if seal.decision == COMPLETE]

    def holds(self, seal: Seal) -> bool:
        """Whether the rank can't overwrite a slot before it is leased: it is already, or holds W or newer."""
        return self.ledger.is_leased(seal) or seal.serial >= self.ledger.words[L_COMPLETE]

    def fds(self) -> tuple[int, ...]:
        """Return the descriptors of its memory, to be handed on."""
        return (self.ledger.fd, *(slot.fd for slot in self.slots))

    def close(self) -> None:
        """Let go of its memory."""
        self.ledger.close()
        for slot in self.slots:
            slot.close()


def view(member: Member, world: int) -> RankView:
    """Read what a rank's ledger says: what it tried first, then what it sealed, so that no seal is missed. What was sealed in a
    world of another size, or is void, does not count any more."""
    generation, attempt = member.ledger.words[L_GENERATION], member.ledger.words[L_ATTEMPT]
    fence()
    return RankView(generation, attempt, list(member.usable(world)), member.gone or member.said_bye)


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that all ranks of the node have sealed."""

    key: Key
    seals: dict[int, Seal]

    @property
    def is_complete(self) -> bool:
        """Whether its ranks were told that all ranks have it."""
        return all(seal.decision == COMPLETE for seal in self.seals.values())

    @property
    def is_durable(self) -> bool:
        """Whether its ranks were told that it is on disk."""
        return all(seal.is_durable for seal in self.seals.values())

    def serials(self) -> dict[int, int]:
        """Return the serial of each rank's seal."""
        return {rank: seal.serial for rank, seal in self.seals.items()}

    def edition(self) -> int:
        """Return a number that grows whenever a rank saves the same step once more."""
        return sum(seal.serial for seal in self.seals.values())
