"""An actor that has a node and does not come up, is out of reach, or can't start its launcher: nobody waits for it for ever. Pure.

Ray has placed it, so its node lives and has room; but workers there may hang while they start, as on a file system that is stuck,
and a launcher that even SIGKILL does not end keeps the next one from starting. Such a node is lost to the job, which takes another
one and avoids this one for a while.

Rule: silence counts only while somebody listens, and the more nodes are avoided the longer it must be: where actors are slow
to start everywhere no other node would help.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from resilience.integrations.ray import claims
from resilience.integrations.ray.state import Phase, Slot, State, waiting

if TYPE_CHECKING:
    from resilience.integrations.ray.plan import Rules, Seen

START_S = 180.0
AVOIDED_S = 1800.0
_TOLD_S = 30.0
_SETUP_S = 600.0  # what Ray itself grants a runtime_env, if nothing else is said


def setup_s(runtime_env: Mapping[str, Any]) -> float:
    """Return how long Ray may take to install things before a process can start."""
    if not set(runtime_env) - {"config", "env_vars"}:
        return 0.0
    said = float((runtime_env.get("config") or {}).get("setup_timeout_seconds", _SETUP_S))
    return said if said > 0 else float("inf")


def listen(state: State, seen: Seen, now: float) -> State:
    """Note which actors are mute, or have not begun what they were told, and since when; and forget the nodes that were avoided
    long enough."""
    if any(until <= now for until in state.avoided.values()):
        state = dataclasses.replace(state, avoided={node: at for node, at in state.avoided.items() if at > now})
    for slot in state.slots:
        known = seen.claims.get(slot.claim)
        mute = known is None or not known.life or (known.life == slot.life and known.launch < slot.launch)
        mute = mute and bool(slot.claim and slot.node) and not slot.finished
        if mute != bool(slot.mute_at):
            state = state.with_slot(dataclasses.replace(slot, mute_at=now if mute else 0.0))
    return state


def give_up_the_mute(rules: Rules, state: State, seen: Seen, now: float) -> State:
    """Lose the nodes whose actors have been mute for too long."""
    for slot in state.slots:
        if state.phase not in (Phase.GATHERING, Phase.RUNNING) or not slot.mute_at:
            continue
        patience = rules.start_s * (1 + len(state.avoided))
        if now - slot.mute_at > patience:
            why = f"{_what(slot, seen, patience)}; the node is avoided for {AVOIDED_S / 60:.0f} minutes"
            state = dataclasses.replace(state, avoided={**state.avoided, slot.node: now + AVOIDED_S})
            state = claims.lose(rules, state, slot.rank, now, why)
    return state


def _is_there(slot: Slot, seen: Seen) -> bool:
    """Return whether the slot's actor answers: then it is its launcher that does not start."""
    known = seen.claims.get(slot.claim)
    return known is not None and bool(known.life)


def _what(slot: Slot, seen: Seen, patience: float) -> str:
    """Say what was awaited in vain, and where to look."""
    if _is_there(slot, seen):
        look = f"the one before it may not have ended: `ps` on {slot.host}"
        return f"its actor has not started its launcher within {patience:.0f} s ({look})"
    look = f"`ray list actors`, and the logs of Ray on node {slot.node[:16]}"
    return f"Ray has not brought its actor up within {patience:.0f} s ({look})"


def tell(state: State, seen: Seen, now: float) -> State:
    """Have the reason say which actors are awaited, and how many nodes are avoided, beside what else is waited for."""
    awaited = []
    for there, words in ((False, "Ray has not brought up the actor"), (True, "the actor has not started the launcher")):
        late = [slot for slot in state.slots if slot.mute_at and now - slot.mute_at > _TOLD_S]
        who = [str(slot.rank) for slot in late if _is_there(slot, seen) is there]
        more = "s" * (len(who) > 1)
        awaited += [f"{words}{more} of node{more} {', '.join(who)} yet"] if who else []
    number = len(state.avoided)
    avoided = [f"avoided for actors that did not come up: {number} node{'s' * (number > 1)}"] if number else []
    told = [*awaited, *(avoided if state.reason or awaited else [])]
    return waiting(state, "; ".join(filter(None, [state.reason, *told]))) if told else state


def without_the_avoided(state: State, seen: Seen) -> Seen:
    """Return what is seen, with no room on the nodes that are avoided."""
    if not state.avoided:
        return seen
    nodes = tuple(dataclasses.replace(node, room=node.room and node.id not in state.avoided) for node in seen.nodes)
    return dataclasses.replace(seen, nodes=nodes)
