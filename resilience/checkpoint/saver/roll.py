"""The ranks of this node that save into one directory, and what is in their memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resilience.checkpoint import decisions
from resilience.checkpoint.decisions import Key, RankView
from resilience.checkpoint.ledger import L_ATTEMPT, L_COST, L_GENERATION, L_STAGE_FROM, L_WRITTEN
from resilience.checkpoint.saver.digests import Digests
from resilience.checkpoint.saver.member import Member, Snapshot, view
from resilience.checkpoint.slots import COMPLETE, PENDING, VOID


@dataclass(frozen=True)
class Cycle:
    """Which ranks of which job live on this node now."""

    number: int
    world: int
    first: int  # rank
    local: int  # ranks on this node

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.first, self.first + self.local)

    @property
    def alone(self) -> bool:
        """Whether there is no other node."""
        return self.local == self.world


class Roll:
    """Who is here in this cycle. Those of other cycles are kept as long as somebody may read their memory."""

    def __init__(self) -> None:
        self.cycle = Cycle(-1, 1, 0, 1)
        self.members: dict[int, Member] = {}
        self.digests = Digests()
        self._retired: list[Member] = []

    def begin(self, cycle: Cycle) -> None:
        """Begin a cycle: ranks that live elsewhere now have no memory here any more, unless there is another number of them now:
        then what they left may be gone on from."""
        others, self.cycle = cycle.world != self.cycle.world, cycle
        if not others:
            self.retire_others()

    def retire_others(self) -> None:
        """Take ranks off the roll that do not live here any more."""
        self.retire([rank for rank in self.members if rank not in self.cycle.ranks])

    def add(self, member: Member) -> None:
        """Take in a rank's memory."""
        if member.rank in self.members:
            self.retire([member.rank])
        self.members[member.rank] = member

    def retire(self, ranks: list[int]) -> None:
        """Take ranks off the roll; their memory goes with :meth:`let_go`."""
        for rank in ranks:
            self._retired.append(self.members.pop(rank))
            self.digests.forget(rank)

    def locals(self) -> dict[int, Member]:
        """Return the ranks of this node that have come."""
        return {rank: self.members[rank] for rank in self.cycle.ranks if rank in self.members}

    def let_go(self) -> tuple[list[int], int]:
        """Close the memory of those that were retired; return which of them are not here any more, and how much it was. Nobody may
        be reading it."""
        gone = [member.rank for member in self._retired if member.rank not in self.members]
        nbytes = sum(slot.nbytes for member in self._retired for slot in member.slots)
        for member in self._retired:
            with contextlib.suppress(OSError):
                member.close()
        self._retired = []
        return gone, nbytes

    def all_here(self) -> bool:
        """Whether all ranks of this node have come."""
        return len(self.locals()) == self.cycle.local

    def views(self) -> dict[int, RankView]:
        """Return what the ledgers say, by rank."""
        return {rank: view(member, self.cycle.world) for rank, member in self.locals().items()}

    def pending(self) -> list[Key]:
        """Return the snapshots that some rank has sealed and that are not decided, oldest first."""
        seals = [seal for member in self.locals().values() for seal in member.ledger.seals()]
        return sorted({seal.key for seal in seals if seal.decision == PENDING})

    def stragglers(self, before_ns: int) -> list[int]:
        """Return the ranks of this node that have not saved what others sealed before a moment, and that is not decided."""
        seals = [seal for member in self.locals().values() for seal in member.ledger.seals()]
        late = min(
            (seal.key for seal in seals if seal.decision == PENDING and seal.sealed_at < before_ns), default=None
        )
        if late is None:
            return []
        return [rank for rank in self.cycle.ranks if rank not in self.members or late not in self.members[rank].seals()]

    def generation(self) -> int:
        """Return the newest generation that the ledgers know of."""
        return max((member.ledger.words[L_GENERATION] for member in self.members.values()), default=0)

    def snapshot(self, key: Key) -> Snapshot | None:
        """Return a snapshot if every rank of this node has it."""
        found = {rank: member.usable(self.cycle.world).get(key) for rank, member in self.locals().items()}
        seals = {rank: seal for rank, seal in found.items() if seal is not None}
        return Snapshot(key, seals) if len(seals) == self.cycle.local else None

    def restorable(self) -> list[Key]:
        """Return the snapshots in memory that all ranks of this node have sealed, newest first."""
        seals = {rank: list(member.usable(self.cycle.world)) for rank, member in self.locals().items()}
        return decisions.restorable(seals, self.cycle.local)

    def newest(self) -> Snapshot | None:
        """Return the newest snapshot that all ranks of this node have sealed."""
        found = self.restorable()
        return self.snapshot(found[0]) if found else None

    def held(self) -> list[Snapshot]:
        """Return the snapshots that no rank can overwrite before they are leased."""
        found = [self.snapshot(key) for key in self.restorable()]
        return [item for item in found if item is not None and self.holds(item)]

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether no rank can overwrite a snapshot before it is leased."""
        return all(self.members[rank].holds(seal) for rank, seal in snapshot.seals.items())

    def is_unfinished(self, snapshot: Snapshot) -> bool:
        """Whether an earlier saver was writing it, or was still to."""
        return any(
            not seal.is_durable and (self.members[rank].ledger.is_leased(seal) or seal.on_disk)
            for rank, seal in snapshot.seals.items()
        )

    def pace(self) -> dict[str, Any]:
        """Return how far the ranks are, and what their last snapshot cost them."""
        words = [member.ledger.words for member in self.locals().values()]
        return {
            "step": max((word[L_ATTEMPT] for word in words), default=0),
            "cost_s": max((word[L_COST] for word in words), default=0) / 1e9,
        }

    def arm(self, step: int) -> None:
        """Have the ranks take a snapshot at this step, or at the next one that they save."""
        for member in self.locals().values():
            member.ledger.words[L_STAGE_FROM] = step + 1

    def show_written(self, written: int, total: int) -> None:
        """Let the ranks know how much of a snapshot is written. Called by the clerk's thread: a ledger may be gone by now."""
        with contextlib.suppress(ValueError, RuntimeError):
            for member in self.members.values():
                member.ledger.words[L_WRITTEN] = 1000 * written // max(total, 1)

    def void(self, key: Key) -> None:
        """Let the ranks know that a snapshot will never be whole."""
        for member in self.locals().values():
            seal = member.seals().get(key)
            if seal is not None and seal.decision == PENDING:
                member.ledger.decide(seal, VOID)

    def complete(self, key: Key, serials: Mapping[int, int] | None) -> None:
        """Let the ranks know that all have a snapshot: the seals that it was decided about, not later ones of the same step."""
        snapshot = self.snapshot(key)
        for rank, seal in snapshot.seals.items() if snapshot is not None else ():
            if serials is None or serials[rank] == seal.serial:
                self.members[rank].ledger.decide(seal, COMPLETE)

    def newest_complete(self) -> Key:
        """Return the newest snapshot of which a rank here was told that all have it."""
        return max((key for member in self.locals().values() for key in member.complete()), default=(0, -1))

    def newest_replicated(self) -> Key:
        """Return the newest snapshot of which a rank here was told that other nodes have copies."""
        found = [member.ledger.replicated() for member in self.locals().values()]
        return max((seal.key for seal in found if seal is not None), default=(0, -1))

    def go_back_to(self, key: Key | None) -> None:
        """Begin from a snapshot in memory (``None``: from disk, or afresh): whatever is newer is void. What another number of ranks
        left is kept only if it is begun from: until there is one of these ranks."""
        found = {rank: member.seals().get(key) if key is not None else None for rank, member in self.members.items()}
        for rank, member in self.members.items():
            member.ledger.go_back_to(found[rank])
        if not any(seal is not None and seal.world != self.cycle.world for seal in found.values()):
            self.retire_others()
