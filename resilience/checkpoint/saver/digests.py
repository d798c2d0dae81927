"""The digests of what is in memory, by rank and seal: computed while writing, or while nothing else is to be done."""

from __future__ import annotations

from collections.abc import Mapping

from resilience.checkpoint.saver.member import Member, Snapshot


class Digests:
    """Those that are known."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[str]] = {}  # by rank and serial, of the data's chunks

    def of(self, rank: int, serial: int) -> list[str] | None:
        """Return the digests of a seal, if they are known."""
        return self._known.get((rank, serial))

    def known(self, snapshot: Snapshot) -> dict[int, list[str]]:
        """Return those of a snapshot, by rank."""
        found = {rank: self.of(rank, seal.serial) for rank, seal in snapshot.seals.items()}
        return {rank: known for rank, known in found.items() if known is not None}

    def keep(self, snapshot: Snapshot, digests: Mapping[int, list[str]], members: Mapping[int, Member]) -> None:
        """Keep those of a snapshot as long as it is in memory."""
        held = {(rank, seal.serial) for rank, member in members.items() for seal in member.ledger.seals()}
        self._known = {key: known for key, known in self._known.items() if key in held}
        self._known |= {(rank, snapshot.seals[rank].serial): known for rank, known in digests.items()}

    def forget(self, rank: int) -> None:
        """Another memory takes this rank's place: its serials begin anew."""
        self._known = {key: known for key, known in self._known.items() if key[0] != rank}
