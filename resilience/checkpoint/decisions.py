"""What becomes of a snapshot: COMPLETE when every rank has sealed it, VOID when one never will. Pure.

The saver turns this over whatever it finds in the ledgers. Decisions are not kept anywhere else: a new saver comes to the same
ones from the same ledgers, and a restore looks at the seals themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resilience.checkpoint.slots import COMPLETE, PENDING, VOID

Key = tuple[int, int]  # generation, step


@dataclass(frozen=True)
class RankView:
    """What one rank's ledger says: its seals, oldest first, and the newest step that it tried to save in its generation."""

    generation: int
    attempt: int  # step + 1; 0: none yet
    seals: Sequence[Key]
    gone: bool = False  # its process has ended, or it took leave: it will seal nothing more


def decide(key: Key, ranks: Mapping[int, RankView], world: int) -> int:
    """Decide about one snapshot. ``ranks`` are those that are known; all ``world`` of them have to seal."""
    generation, step = key
    if any(view.generation > generation for view in ranks.values()):
        # The cycle is over. Whoever sealed it then is all there will ever be.
        whole = len(ranks) >= world and all(key in view.seals for view in ranks.values())
        return COMPLETE if whole else VOID
    missing = [view for view in ranks.values() if key not in view.seals and view.generation == generation]
    if any(view.attempt > step or view.gone for view in missing):
        return VOID  # tried, and skipped or failed; or it died
    if len(ranks) >= world and all(key in view.seals for view in ranks.values()):
        return COMPLETE
    return PENDING


def restorable(ranks: Mapping[int, Sequence[Key]], world: int) -> list[Key]:
    """Return the snapshots that every one of ``world`` ranks has sealed, newest first."""
    if len(ranks) < world:
        return []
    common = set.intersection(*(set(seals) for seals in ranks.values()))
    return sorted(common, reverse=True)
