"""What a clock that is set back does to a job: pure. No wait may become longer than it was meant to be."""

from __future__ import annotations

import dataclasses

from resilience.integrations.ray.claims import FENCED_S, LONGEST_PAUSE_S
from resilience.integrations.ray.start import AVOIDED_S
from resilience.integrations.ray.state import SLOWEST_S, Phase, Slot, State

from resilience.groups import escalation

_MOMENTS = ("round_at", "cut_at", "failed_at", "incident_at", "gathering_at", "unfit_at")


def not_ahead(state: State, now: float) -> State:
    """Return a state in which no moment that has passed is yet to come, and nothing is awaited longer than it can be."""
    ahead = LONGEST_PAUSE_S if state.phase is Phase.GATHERING else 0.0  # until it asks for nodes again
    moments = {name: min(getattr(state, name), now) for name in _MOMENTS}
    return dataclasses.replace(
        state,
        **moments,
        since=min(state.since, now + ahead),
        fenced_at=min(state.fenced_at, now + FENCED_S),
        slots=tuple(_slot(slot, now) for slot in state.slots),
        avoided={node: min(until, now + AVOIDED_S) for node, until in state.avoided.items()},
        groups=escalation.not_ahead(state.groups, now),
    )


def _slot(slot: Slot, now: float) -> Slot:
    if max(slot.claimed_at, slot.mute_at, slot.ended_at) <= now and slot.not_before <= now + SLOWEST_S:
        return slot
    return dataclasses.replace(
        slot,
        claimed_at=min(slot.claimed_at, now),
        mute_at=min(slot.mute_at, now),
        ended_at=min(slot.ended_at, now),
        not_before=min(slot.not_before, now + SLOWEST_S),
    )
