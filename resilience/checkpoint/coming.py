"""How a rank comes by its snapshot memory: the saver has it from an earlier life, or it is made here, before step 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from resilience.checkpoint import memory, plan, stores
from resilience.checkpoint.arena import make_slots
from resilience.checkpoint.assembly import assemble
from resilience.checkpoint.ledger import Ledger
from resilience.checkpoint.link import Link, Place
from resilience.checkpoint.plan import SHARED, Collected, Plan
from resilience.checkpoint.shards import aligned
from resilience.checkpoint.stager import Stager
from resilience.checkpoint.state import Part
from resilience.errors import CheckpointError

_LOG = logging.getLogger("resilience.checkpoint")
_UNPLANNED = 1 << 20  # bytes of a slot for a state that is not known yet


def come(
    link: Link,
    place: Place,
    *,
    directory: stores.Where,
    number: int,
    parts: Sequence[Part],
    collect: Callable[[], tuple[Collected, bytes]],
    timeout: float,
    replicas: int = 0,
) -> Stager:
    """Get this rank's memory from the saver, or make it. Raises for what does not fit, and for what the saver refuses."""
    known = link.come(number)
    if not place.alone:
        assemble(link, place, timeout)
    state, values = collect()
    made = plan.make_plan(state, place.local_rank, place.local_world)
    if known is not None:
        return Stager(place, *known, link.generation, made)
    need, own = _estimate(made, len(values), parts, place, directory)
    copies, beside = 2 * own * replicas, ""
    if copies:
        beside = f" and {copies / 1e9:.2f} GB for copies of other nodes' ranks"
    memory.check(
        need * number + copies, f"{number} slots of {need / 1e9:.2f} GB{beside} (rank {place.rank})", link.announce
    )
    try:
        held = make_slots(number, need)
    except OSError as error:
        raise CheckpointError(
            f"the snapshot memory, {number} slots of {need / 1e9:.2f} GB, can't be had: {error.strerror} (rank {place.rank}). "
            "Nothing was set up. Look at the limits of this process (ulimit -a) and of its container."
        ) from error
    _LOG.info("snapshot memory: %s slots of %.2f GB%s (rank %s).", number, need / 1e9, beside, place.rank)
    ledger = Ledger.create(number, place.rank, place.world)
    stager = Stager(place, ledger, held, link.generation, made)
    link.deposit(ledger, held)
    return stager


def _estimate(made: Plan, values: int, parts: Sequence[Part], place: Place, directory: stores.Where) -> tuple[int, int]:
    """Return how large a slot has to be, optimizer state that is yet to come included, and how much of it is this rank's own."""
    if not parts:
        return _UNPLANNED, _UNPLANNED
    missing, own = memory.missing_optimizer_state(parts, place.local_world)
    own += sum(
        piece.nbytes for piece, part in zip(made.pieces, made.parts, strict=True) if made.owners[part.index] != SHARED
    )
    own = aligned(own) + aligned(len(made.header) * 4) + aligned(2 * values + (1 << 16))
    total = aligned(made.data_bytes + missing) + aligned(len(made.header) * 4) + aligned(2 * values + (1 << 16))
    free = stores.opened(directory).free_bytes()
    if free is not None and free < total * place.local_world:
        _LOG.warning(
            "%s has %.2f GB left, one checkpoint of this node takes about %.2f GB.",
            directory,
            free / 1e9,
            total * place.local_world / 1e9,
        )
    return total, min(own, total)
