"""Nodes for a job's slots: claim, lose, move. Pure; a part of :mod:`plan`.

A claim is one slot's reservation on one node. Where a node with room is known, the claim names it. Where none is, it says what it
needs and which nodes it must not have, so that Ray, and an autoscaler, look for one.

Rule: a claim that Ray has put where it must not be (a broken node, one that another slot has by now) is given back and made anew.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from resilience.integrations.ray import layout
from resilience.integrations.ray.state import SLOWEST_S, Phase, Slot, State, noted, waiting

from resilience.groups import escalation

if TYPE_CHECKING:
    from resilience.integrations.ray.plan import Rules, Seen

FENCED_S = 60.0  # by then a launcher on a node that Ray has given up has ended itself; see `node`
PINNED_S = 10.0  # a node that was seen to be free, and does not get our claim by then, has been taken by somebody else
# A job that waits for nodes keeps those that it has so long, and then lets others have them for a moment; longer each time, since
# Ray remembers every claim that there ever was.
HELD_S = 120.0
_HELD_LONGEST_S, _LONGER = 900.0, 1.5
_PAUSE_S = 3.0
_PAUSES = 8  # of different lengths, a second apart
LONGEST_PAUSE_S = _PAUSE_S + _PAUSES
_ANY = ("",)  # the rack of a job without groups, and of one that waits for nodes and does not know its groups yet


def settle(rules: Rules, state: State, seen: Seen, now: float) -> State:
    """Take note of where claims stand now, and of nodes that are gone."""
    alive, leaving = {node.id: node for node in seen.nodes}, {node.id for node in seen.nodes if node.leaving}
    labelled = _labelled(seen.nodes, rules.label)
    for rank in range(len(state.slots)):
        slot = state.slots[rank]
        if not slot.claim:
            continue
        known = seen.claims.get(slot.claim)
        if slot.node and slot.node not in alive:
            if slot.launch and slot.ended is None:  # Ray may be mistaken; then its launcher ends itself, by and by
                state = dataclasses.replace(state, fenced_at=now + FENCED_S)
            state = lose(rules, state, rank, now, "its Ray node died")
        elif slot.node in leaving and state.phase is Phase.GATHERING:  # one that trains is left at an agreed step
            state = lose(rules, state, rank, now, "its node is being drained")
        elif known is not None and (known.gone or (slot.node and known.node and known.node != slot.node)):
            state = lose(rules, state, rank, now, known.gone or "Ray has moved it")
            wait = min(SLOWEST_S, float(max(0, state.failures - 1))) if known.gone else 0.0
            state = state.with_slot(dataclasses.replace(state.slots[rank], not_before=now + wait))
        elif known is not None and known.node and not slot.node:
            taken = {other.node for other in state.slots if other.node}
            barred = {*taken, *leaving, *state.excluded, *state.avoided}
            if known.node in barred or known.node not in labelled:
                state = state.with_slot(slot.vacated())
            else:
                state = state.with_slot(dataclasses.replace(slot, node=known.node, host=alive[known.node].address))
                groups = escalation.placed(state.groups, str(slot.group), _member(rank))
                state = dataclasses.replace(state, groups=groups)
    return _without_the_stale(rules, state, seen, now)


def _labelled(nodes: Sequence[layout.Node], label: str | None) -> set[str]:
    """Return the live nodes that a claim may stand on."""
    return {node.id for node in nodes if label is None or node.labels.get(label)}


def _without_the_stale(rules: Rules, state: State, seen: Seen, now: float) -> State:
    """Give up the claims, not placed by Ray for a while, that are made anew: their node was taken, or one is free that they may not
    have. So many of these as there are such nodes: the others stand."""
    late = [slot for slot in state.slots if slot.claim and not slot.node and now - slot.claimed_at > PINNED_S]
    free = {rack: iter(nodes) for rack, nodes in _free(rules, state, seen).items()} if late else {}
    for slot in late:
        taken = slot.pinned and state.phase is Phase.RUNNING  # while nodes are gathered all are given back
        if taken or (not slot.pinned and next(free.get(_rack(rules, state, slot), iter(())), None) is not None):
            state = state.with_slot(slot.vacated())
    return state


def made(state: State, claims: Collection[int], now: float) -> State:
    """Note when Ray was asked for claims: what a supervisor takes for many of them does not count as Ray's silence."""
    slots = (dataclasses.replace(it, claimed_at=now) if it.claim in claims else it for it in state.slots)
    return dataclasses.replace(state, slots=tuple(slots))


def lose(rules: Rules, state: State, rank: int, now: float, why: str) -> State:
    """Note that a slot has no node any more. One that has finished needs none."""
    slot = state.slots[rank]
    if slot.finished:
        return state.with_slot(dataclasses.replace(slot, claim=0, node="", host=""))
    if state.phase is Phase.STOPPING and slot.launch and slot.ended is None:  # nobody will tell how it left
        state = dataclasses.replace(state, reason=f"{state.reason}; {slot.place} was lost: {why}")
    state = noted(state.with_slot(slot.vacated()), now, f"{slot.place} was lost: {why}")
    return missed(rules, state, slot, now, why)


def missed(rules: Rules, state: State, slot: Slot, now: float, why: str) -> State:
    """Have the slot's group wait for a node, and not for ever; the second time changes nothing."""
    if rules.label is None or state.phase is not Phase.RUNNING:
        return state
    groups = escalation.lost(state.groups, str(slot.group), _member(slot.rank), now, why)
    return dataclasses.replace(state, groups=groups)


def gather(rules: Rules, state: State, seen: Seen, now: float) -> State:
    """Have a node for every slot before anything runs; where fewer are enough, as many as there are after a while."""
    state = state if state.gathering_at else dataclasses.replace(state, gathering_at=now)
    if not state.slots:
        return _first_claims(rules, state, seen, now) if now >= state.since else state
    anywhere = rules.label is not None and state.racks == _ANY
    if anywhere and (seated := _seated(rules, state, seen, now)) is not None:
        return seated
    lacking = [slot for slot in state.slots if not slot.node]
    if not lacking and not anywhere:
        return _started(
            state, now, f"{rules.nodes} {'node has' if rules.nodes == 1 else 'nodes have'} room; the launchers start"
        )
    if rules.label is not None and not anywhere and not all(slot.claim for slot in state.slots):
        return dataclasses.replace(state, slots=(), racks=(), since=now)  # one was lost: other groups may fit better
    return _hold(rules, state, seen, lacking, now)


def _hold(rules: Rules, state: State, seen: Seen, lacking: Sequence[Slot], now: float) -> State:
    """Keep the nodes that there are while others are waited for; after a while begin with them, or let others have them."""
    pinned = (rules.label is None or state.racks != _ANY) and all(slot.pinned for slot in lacking)
    placed = rules.nodes - len(lacking)
    enough = rules.label is None and placed >= rules.min_nodes
    waited = now - min((slot.claimed_at for slot in lacking if slot.claim), default=now)
    nothing_held = not placed and not pinned
    if lacking and (nothing_held or waited <= _patience(pinned, 0 if enough else state.attempts)):
        return claim_missing(rules, waiting(state, _lack(rules, state, seen)), seen, now)
    if enough and (not pinned or now - state.gathering_at > HELD_S):  # however often they were given back meanwhile
        these = f"{placed} of {rules.nodes} nodes have room, and {rules.min_nodes} are enough; the launchers start"
        return _started(state, now, these)
    return _given_back(rules, state, now)


def _patience(pinned: bool, attempts: int) -> float:
    """Return how long claims are held that wait: of nodes that are known to be free, or of any."""
    first, longest = (PINNED_S, HELD_S) if pinned else (HELD_S, _HELD_LONGEST_S)
    return min(longest, first * _LONGER ** min(attempts, 20))


def _given_back(rules: Rules, state: State, now: float) -> State:
    """Let others have for a moment what this job holds, and can't use yet."""
    # Two jobs that wait for each other differ.
    pause = _PAUSE_S + zlib.crc32(f"{rules.name}/{state.attempts}".encode()) % _PAUSES
    state = dataclasses.replace(state, slots=(), racks=(), attempts=state.attempts + 1, since=now + pause)
    return noted(state, now, "not all nodes were to be had; those that were are given back for a moment")


def _started(state: State, now: float, why: str) -> State:
    return noted(dataclasses.replace(state, phase=Phase.RUNNING, since=now, round=1, round_at=now, reason=""), now, why)


def _first_claims(rules: Rules, state: State, seen: Seen, now: float) -> State:
    """Claim the nodes that have room. Where they are too few claim any, so that an autoscaler sees how many are wanted; which
    groups they will form is known when they are there."""
    seated = _seated(rules, state, seen, now)
    if seated is not None:
        return seated
    free = len(layout.usable(seen.nodes, rules.labels, state.excluded, rules.label))
    waits = _lack(rules, state, seen)
    if free >= rules.nodes:  # there are enough, and not where they are wanted: to hold them would bring no others
        return noted(dataclasses.replace(state, reason=waits), now, waits)
    slots = tuple(Slot(rank) for rank in range(rules.nodes))
    state = noted(dataclasses.replace(state, slots=slots, racks=_ANY, reason=waits), now, waits)
    return claim_missing(rules, state, seen, now)


def _lack(rules: Rules, state: State, seen: Seen) -> str:
    """Say what a job waits for that has not begun."""
    held = {slot.node for slot in state.slots if slot.node}
    if state.slots and all(slot.node or slot.pinned for slot in state.slots):
        return f"{len(held)} of {rules.nodes} nodes are held; it waits for Ray to give the others"
    free = {node.id for node in layout.usable(seen.nodes, rules.labels, state.excluded, rules.label)}
    number = len(held | free)
    room = "room" + f" for {layout.amounts(rules.bundle)}" * bool(rules.bundle)
    why = layout.obstacle(seen.nodes, rules.bundle, rules.labels, rules.label)
    never = f"; {why}" * bool(why)
    if rules.label is None:
        return f"{number} of {rules.nodes} nodes have {room}; it waits for the others{never}"
    labelled = (
        f"{number} nodes with a label {rules.label!r} have"
        if number != 1
        else f"1 node with a label {rules.label!r} has"
    )
    return f"{labelled} {room}, too few in their groups for {rules.nodes}; it waits{never}"


def seek(rules: Rules, state: State, seen: Seen, now: float) -> State:
    """Make the claims that are missing while the job runs, and say which nodes it waits for."""
    if sum(slot.finished for slot in state.slots) >= rules.min_nodes:
        return waiting(state, "")
    state = claim_missing(rules, state, seen, now)
    lacking = [slot for slot in state.slots if not slot.node and not slot.finished]
    if not lacking:
        return waiting(state, "")
    racks = sorted({state.racks[slot.group] for slot in lacking}) if rules.label is not None else []
    where = f" of {rules.label}={' or '.join(racks)}" * bool(racks)
    place = f"node{'s' * (len(lacking) > 1)} {', '.join(str(slot.rank) for slot in lacking)}"
    there = rules.nodes - len(lacking)
    enough = f", and {rules.min_nodes} are enough" * (there >= rules.min_nodes)
    excluded = f"; {len(state.excluded)} are excluded" * bool(state.excluded)
    needs = f" with room for {layout.amounts(rules.bundle)}" * bool(rules.bundle)
    words = f"it waits for another node{where}{needs} in the place of {place}; {there} of {rules.nodes} are there"
    return waiting(state, words + enough + excluded)


def _seated(rules: Rules, state: State, seen: Seen, now: float) -> State | None:
    """Return it with a claim for every seat, if the nodes that it has and those with room are enough. A claim that stands stays."""
    held = {slot.node: slot for slot in state.slots if slot.node}
    nodes = [dataclasses.replace(node, room=node.room or node.id in held) for node in seen.nodes]
    free = layout.usable(nodes, rules.labels, state.excluded, rules.label)
    seats = layout.seats(rules.nodes, free, rules.label, rules.size)
    if seats is None:
        return None
    slots, newest = [], state.claims
    for it in seats:
        newest += it.node not in held
        slot = held.get(it.node) or Slot(it.rank, claim=newest, claimed_at=now)
        slots.append(dataclasses.replace(slot, rank=it.rank, group=it.group, pinned=it.node))
    racks = tuple(dict.fromkeys(seat.rack for seat in seats))
    return dataclasses.replace(state, slots=tuple(slots), racks=racks, claims=newest, reason="")


def claim_missing(rules: Rules, state: State, seen: Seen, now: float) -> State:
    """Make a claim for every slot that has none: of a node that is known to be free, or of any that may come."""
    lacking = [slot for slot in state.slots if not (slot.claim or slot.finished or now < slot.not_before)]
    free = {rack: iter(nodes) for rack, nodes in _free(rules, state, seen).items()} if lacking else {}
    for slot in lacking:
        node = next(free.get(_rack(rules, state, slot), iter(())), None)
        claimed = dataclasses.replace(
            slot, claim=state.claims + 1, claimed_at=now, pinned=node.id if node is not None else ""
        )
        state = dataclasses.replace(state.with_slot(claimed), claims=claimed.claim)
        if node is None:
            rack = state.racks[slot.group]
            where = f" of {rules.label}={rack}" if rack else f" with a label {rules.label!r}" if rules.label else ""
            state = noted(state, now, f"node {slot.rank} waits: no other node{where} has room")
    return state


def _not_to_have(state: State) -> set[str]:
    """Return the nodes that are broken, avoided, or another slot's."""
    others = (node for slot in state.slots for node in (slot.node, slot.pinned) if node)
    return {*state.excluded, *state.avoided, *others}


def to_avoid(state: State, nodes: Sequence[layout.Node], label: str | None) -> set[str]:
    """Return the live nodes that no claim may get which names none."""
    labelled = _labelled(nodes, label)
    unfit = {node.id for node in nodes if node.leaving or node.id not in labelled}
    return (_not_to_have(state) | unfit) & {node.id for node in nodes}


def _free(rules: Rules, state: State, seen: Seen) -> Mapping[str | None, Sequence[layout.Node]]:
    """Return the nodes that a slot could have now, by rack; those of a job without groups have none."""
    free: dict[str | None, list[layout.Node]] = {}
    for node in layout.usable(seen.nodes, rules.labels, _not_to_have(state), None):
        free.setdefault(node.labels.get(rules.label) if rules.label is not None else None, []).append(node)
    return free


def _rack(rules: Rules, state: State, slot: Slot) -> str | None:
    return state.racks[slot.group] if rules.label is not None else None


def move_groups(rules: Rules, state: State, seen: Seen, now: float) -> State:
    """Move a group whose lost node has waited too long, as a whole, to where there is room for all of it."""
    if rules.label is None:
        return state
    # A move needs room elsewhere: that bounds it.
    limits = escalation.Rules(rules.threshold_s, state.groups.moves + len(state.racks))
    groups = escalation.renewed(state.groups, limits, now, list(state.groups.incidents))
    state = dataclasses.replace(state, groups=groups)
    for decision in escalation.due(state.groups, limits, now):
        group = int(decision.group)
        members = [slot for slot in state.slots if slot.group == group]
        free = layout.usable(seen.nodes, rules.labels, state.excluded, rules.label)
        rack = layout.another_rack(len(members), free, rules.label, state.racks)
        if rack is None:
            blocked = f"group {group} waits for a node, and no other {rules.label} has room for {len(members)}"
            state = noted(state, now, blocked) if not any(blocked in line for line in state.lines) else state
            continue
        left = state.racks[group]
        for slot in members:
            if not slot.finished:
                state = state.with_slot(slot.vacated())
        racks = (*state.racks[:group], rack, *state.racks[group + 1 :])
        groups = escalation.moved(
            state.groups, decision.group, [_member(slot.rank) for slot in members if not slot.finished], now
        )
        state = dataclasses.replace(state, racks=racks, groups=groups)
        why = decision.reason.partition(" (threshold")[0]
        state = noted(state, now, f"{why}: group {group} moves from {rules.label}={left} to {rack}")
    return state


def _member(rank: int) -> str:
    return f"node {rank}"
