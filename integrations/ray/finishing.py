"""When the launchers of a job on Ray have ended with 0, and when not all of them do. Pure; a part of :mod:`plan`.

A launcher ends with 0 when all ranks of the job are done, and waits for the others as long as they live. So one that is still there
long after others have ended hangs, or what it still has to write does.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from resilience.integrations.ray import claims
from resilience.integrations.ray.state import Phase, Slot, State, noted, waiting

if TYPE_CHECKING:
    from resilience.integrations.ray.plan import Rules

OVERDUE_S = 1800.0  # what one writes last may be large
_TOLD_S = 60.0


def is_done(rules: Rules, state: State) -> bool:
    """Return whether the job has done its work: all launchers that there are have, and they are enough."""
    finished = [slot for slot in state.slots if slot.finished]
    return len(finished) >= rules.min_nodes and not any(slot.launch and not slot.finished for slot in state.slots)


def rejoined(rules: Rules, state: State, now: float) -> State:
    """Start those again that have finished, where another one has to form again and can't without them. A launcher ends with 0 when
    all ranks of the job are done; then the store tells whoever is started again. If it does not know it any more they are not, as
    far as anybody can tell, and the whole job goes on from its newest checkpoint."""
    finished = [slot for slot in state.slots if slot.finished]
    rest = [slot for slot in state.slots if not slot.finished]
    if state.phase is not Phase.RUNNING or not finished or len(finished) >= rules.min_nodes:
        return state
    newest = max(slot.round for slot in finished)
    if len(rest) >= rules.min_nodes or any(it.launch and it.ended is None and it.round <= newest for it in rest):
        return state
    state = noted(
        state, now, "launchers that have finished are started again: another one needs them, or is told so too"
    )
    for slot in (*finished, *(slot for slot in rest if not slot.launch)):
        again = state.again(slot, now) if slot.finished else state
        state = again.with_slot(dataclasses.replace(again.slots[slot.rank], asks=True))
        if not slot.node:
            state = claims.missed(rules, state, slot, now, "its node was lost after it had finished")
    return state


def overdue(state: State, now: float) -> State:
    """Have a launcher that hangs, while others have long finished, ended. If they are not enough the next one is told by the store
    that the job is done."""
    for slot in _late(state, now, OVERDUE_S) if state.phase is Phase.RUNNING else ():
        ago = f"{OVERDUE_S / 60:.0f} minutes after others had finished"
        why = f"the launcher of {slot.place} has not ended {ago}: held for hung and ended"
        state = noted(state, now, why).again(slot, now)
        state = state.with_slot(dataclasses.replace(state.slots[slot.rank], asks=True))
    return state


def tell(state: State, now: float) -> State:
    """Have the reason say which launchers are awaited by those that have finished."""
    late = [str(slot.rank) for slot in _late(state, now, _TOLD_S)]
    if not late:
        return state
    more = "s" * (len(late) > 1)
    when = f"others have finished; {OVERDUE_S / 60:.0f} minutes later"
    words = f"{when} the launcher{more} of node{more} {', '.join(late)} will be ended"
    return waiting(state, "; ".join(filter(None, [state.reason, words])))


def _late(state: State, now: float, patience: float) -> list[Slot]:
    """Return the slots whose launchers run in a round in which others have finished so long ago."""
    finished = [slot for slot in state.slots if slot.finished]
    newest = max((slot.round for slot in finished), default=-1)
    since = max((slot.ended_at for slot in finished), default=now)
    late = [it for it in state.slots if it.launch and it.ended is None and it.round <= newest]
    return [it for it in late if now - max(since, it.not_before) > patience]
