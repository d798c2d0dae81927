"""What a job on Ray does next: a pure state machine over what is seen, with the time passed in.

    decide(rules, state, seen, now) -> state

A state says what is wanted: which slot has a claim on which node, and which launch of its launcher is the newest. The supervisor
makes it so, as often as it takes (:mod:`cluster`), and shows what it sees. So a supervisor that was killed goes on from the last
state, and disturbs nothing that is as it should be.

1) GATHERING  claims for all nodes are made; nothing runs until all of them have one, or after a while as many as are needed
2) RUNNING    launchers run; whoever ends or is lost is started again, elsewhere if need be; a group that waits too long moves
3) STOPPING   a stop was asked for: the ranks agree on a step, save and leave
   ENDING     the job's outcome is known; the other launchers have a moment to end by themselves
4) SUCCEEDED, FAILED, STOPPED  nothing is wanted any more

Rule: no failure is the last by its number alone. What is counted are incidents within ten minutes of each other
(``max_failures``): a crash loop. What befalls several nodes at about the same time is one incident, however many they are; lost
nodes are none.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from resilience.integrations.ray import claims, clock, finishing, start
from resilience.integrations.ray.layout import Node
from resilience.integrations.ray.state import STOP_ASKED, Phase, Slot, State, noted

from resilience.failover import exits
from resilience.failover.failure import HARDWARE_CODES, signal_name
from resilience.groups import escalation

HEALTHY_S = 600.0  # failures with so much time in between are not a loop
INCIDENT_S = 60.0  # what befalls other nodes by then is the same incident; the same node again never is
# A launcher that was cut off waits so long: if the store hangs the others end too, and it needs another.
CUT_OFF_S = 5.0
ENDPOINT_S = 180.0  # for a store to serve
ENDING_S = 30.0
MARGIN_S = 15.0  # beyond the launchers' own grace
_EVERYWHERE = "the check fails on every node, so the check or the cluster is at fault"
_STORE = -1  # among the ranks that an incident has befallen
_NODE_AT_FAULT = {*HARDWARE_CODES, exits.NODE_LEFT, exits.UNFIT}
_OUTCOMES = {
    exits.FAILED: Phase.FAILED,
    exits.USAGE: Phase.FAILED,
    exits.ABORTED: Phase.FAILED,
    exits.SHUT_DOWN: Phase.STOPPED,
}


@dataclass(frozen=True)
class Rules:
    """What of the job's spec matters here."""

    name: str
    nodes: int
    min_nodes: int
    labels: Mapping[str, str] = field(default_factory=dict)
    label: str | None = None
    threshold_s: float = escalation.THRESHOLD_S
    size: int | None = None
    max_failures: int = 8
    stop_grace_s: float = 25.0
    join_s: float = 600.0  # so long a launcher waits for the others
    bundle: Mapping[str, float] = field(default_factory=dict)  # what each reserves
    start_s: float = start.START_S  # so long an actor may take to start


@dataclass(frozen=True)
class ClaimSeen:
    """What is known of one claim. ``node``: where Ray has put it. ``life``: of the actor, another after each of its restarts; empty
    while it does not answer. ``launch``, ``code``: the newest launch that it knows, and how that ended. ``gone``: why, if it is so
    for good. ``why``: the launch ended, as far as its node knows."""

    node: str = ""
    life: str = ""
    launch: int = 0
    code: int | None = None
    gone: str = ""
    why: str = ""


@dataclass(frozen=True)
class Seen:
    """What is seen of the cluster and the job at one moment. ``endpoint``: of the newest round's store, once it serves.
    ``grace_s``: the longest that a launcher has promised its ranks, as far as that was heard."""

    nodes: tuple[Node, ...] = ()
    claims: Mapping[int, ClaimSeen] = field(default_factory=dict)
    endpoint: str = ""
    store_lost: bool = False
    stop: bool = False
    driver_gone: bool = False
    grace_s: float = 0.0


def decide(rules: Rules, state: State, seen: Seen, now: float) -> State:
    """Return what is wanted now."""
    if state.phase.over:
        return state
    state = dataclasses.replace(state, grace_s=max(state.grace_s, seen.grace_s))
    rules = dataclasses.replace(rules, stop_grace_s=max(rules.stop_grace_s, state.grace_s))
    state = start.listen(clock.not_ahead(state, now), seen, now)
    if state.phase in (Phase.GATHERING, Phase.RUNNING) and (seen.stop or seen.driver_gone):
        why = "the program that submitted it is gone" if seen.driver_gone else STOP_ASKED
        state = noted(dataclasses.replace(state, phase=Phase.STOPPING, since=now, reason=why), now, why)
    steady = {"", *(node.id for node in seen.nodes if not node.leaving)}
    for slot in state.slots:
        known = seen.claims.get(slot.claim)
        counts = state.phase in (Phase.GATHERING, Phase.RUNNING) and not slot.finished
        if known is not None and known.gone and counts and slot.node in steady and not slot.leave:
            state = _counted(rules, state, now, f"the actor of node {slot.rank} is gone: {known.gone}", slot.rank)
    state = start.give_up_the_mute(rules, claims.settle(rules, state, seen, now), seen, now)
    seen = start.without_the_avoided(state, seen)
    if state.phase is Phase.GATHERING:
        return claims.gather(rules, state, seen, now)
    if state.phase is Phase.RUNNING:
        state = _store(rules, state, seen, now)
        for rank in range(len(state.slots)):
            if state.phase is Phase.RUNNING:
                state = _tend(rules, state, seen, rank, now)
        state = _preempted(rules, state, now)
        state = finishing.overdue(finishing.rejoined(rules, state, now), now)
    if state.phase is Phase.RUNNING:
        state = claims.move_groups(rules, state, seen, now)
        state = finishing.tell(start.tell(claims.seek(rules, state, seen, now), seen, now), now)
    return _wind_up(rules, state, seen, now)


def _store(rules: Rules, state: State, seen: Seen, now: float) -> State:
    """Know where the store is; without it the launchers end by themselves, and form again in another round."""
    late = not seen.endpoint and not state.endpoint and now - state.round_at > ENDPOINT_S
    if seen.store_lost or late:
        why = f"the rendezvous store did not serve within {ENDPOINT_S:g} s" if late else "the rendezvous store was lost"
        state = noted(_next_round(state, now), now, f"{why}; the launchers form again")
        return _counted(rules, state, now, why, _STORE)
    if seen.endpoint and not state.endpoint:
        return dataclasses.replace(state, endpoint=seen.endpoint)
    return state


def _next_round(state: State, now: float) -> State:
    """Have another store. Launchers of the round before end by themselves, and are started again in this one."""
    return dataclasses.replace(state, round=state.round + 1, round_at=now, endpoint="", cut=())


def _cut_off(rules: Rules, state: State, slot: Slot, now: float) -> State:
    """Start a launcher again that was cut off. If all were, it is the store that hangs, though it is there. If some were, again and
    again, they wait for those that are there and do not come: these hang, be it in the round before."""
    cut = (*(state.cut if now - state.cut_at < HEALTHY_S + rules.join_s else ()), slot.rank)
    state = dataclasses.replace(state, cut=cut, cut_at=now)
    mates = [it for it in state.slots if it.launch and it.ended is None]
    silent = [str(it.rank) for it in mates if it.rank not in cut]
    if silent and cut.count(slot.rank) < (2 if len(silent) <= len(set(cut)) else 3):
        again = state.again(slot, now)
        waits = max(again.slots[slot.rank].not_before, now + CUT_OFF_S)
        return again.with_slot(dataclasses.replace(again.slots[slot.rank], not_before=waits))
    why = "all launchers were cut off: they form again with another store"
    if silent:
        who = f"launcher{'s' * (len(silent) > 1)} of node{'s' * (len(silent) > 1)} {', '.join(silent)}"
        why = f"node {slot.rank} waited in vain, again, for the {who}: held for hung and ended; all form again"
    state = noted(_next_round(state, now), now, why)
    for mate in mates:  # those that were started again have only tried to join
        state = state.again(mate, now)
    return state


def _tend(rules: Rules, state: State, seen: Seen, rank: int, now: float) -> State:
    """Start the launcher of a slot, or do what follows from its end."""
    slot = state.slots[rank]
    known = seen.claims.get(slot.claim)
    if slot.finished or not slot.node or known is None or not known.life:
        return state
    if any(node.id == slot.node and node.leaving for node in seen.nodes) and not slot.leave:
        if not slot.launch:
            return claims.lose(rules, state, rank, now, "its node is being drained")
        state = noted(state, now, f"node {rank} is being drained: all are asked to stop, and go on without it")
        slot = dataclasses.replace(slot, leave=True)
        state = state.with_slot(slot)
    if slot.launch and slot.life != known.life:
        why = f"the actor of node {rank} died, and its launcher with it"
        state = _counted(rules, noted(state, now, why), now, why, rank)
        return state.again(dataclasses.replace(slot, ended=None), now)
    if slot.launch and slot.ended is None and known.launch == slot.launch and known.code is not None:
        return _ended(rules, state, slot, known, now)
    if not slot.launch and slot.ended is None and _may_start(rules, state, slot, now):
        slot = dataclasses.replace(slot, launch=state.launches + 1, life=known.life, round=state.round)
        return dataclasses.replace(state.with_slot(slot), launches=state.launches + 1)
    return state


def _may_start(rules: Rules, state: State, slot: Slot, now: float) -> bool:
    """Return whether a launcher is started now: not while it would only wait for nodes that there are not, nor when enough others
    have done the job's work."""
    enough = sum(it.finished for it in state.slots) >= rules.min_nodes
    if not state.endpoint or now < slot.not_before or slot.leave or enough:
        return False
    return slot.asks or sum(bool(it.node) for it in state.slots) >= rules.min_nodes


def _ended(rules: Rules, state: State, slot: Slot, known: ClaimSeen, now: float) -> State:
    """Do what the exit code of a launcher says; see docs/failover.md."""
    code = known.code or 0
    said = meaning(code, known.why)
    state = noted(state, now, _end_of(slot, code, known.why))
    if slot.launch in state.unchecked and code != exits.UNFIT:
        state = dataclasses.replace(state, unfit=(), unchecked=())
    if slot.leave and code in (
        exits.FAILED,
        -signal.SIGTERM,
    ):  # ended by our signal, before the script had said anything
        code = exits.PREEMPTED
    if code in (exits.FINISHED, exits.PREEMPTED):
        return _left(rules, state, slot, code, now)
    if code in _OUTCOMES:
        why = f"the launcher of {slot.place} ended with {code}: {said}"
        state = state.with_slot(dataclasses.replace(slot, ended=code))
        return dataclasses.replace(
            state, phase=Phase.ENDING, since=now, outcome=_OUTCOMES[code], exit_code=code, reason=why
        )
    why = f"the launcher of node {slot.rank} ended with {code}"
    if code in _NODE_AT_FAULT:
        return _at_fault(rules, state, slot, known, now)
    short = sum(bool(it.node) for it in state.slots) < rules.min_nodes
    if code == exits.CUT_OFF and (short or slot.round != state.round):  # it waited for a lost node; or that was counted
        return state.again(slot, now)
    state = _counted(rules, state, now, why, slot.rank)
    if code == exits.CUT_OFF and state.phase is Phase.RUNNING:
        return _cut_off(rules, state, slot, now)
    return state.again(slot, now)


def _at_fault(rules: Rules, state: State, slot: Slot, known: ClaimSeen, now: float) -> State:
    """Leave a node that is broken, and do not use it again; unless all nodes failed a check: then none is to blame."""
    code = known.code or 0
    said = meaning(code, known.why)
    why = f"the launcher of node {slot.rank} ended with {code}"
    before = f"; {_EVERYWHERE}" if code == exits.UNFIT and _failed_everywhere(state) else ""
    state = _checked(state, slot, now) if code == exits.UNFIT else state
    state = _counted(rules, state, now, f"{why}: {said}{before}", slot.rank)
    if state.phase is not Phase.RUNNING:
        return state.with_slot(dataclasses.replace(slot, ended=code, ended_at=now))
    state = dataclasses.replace(state, excluded={**state.excluded, slot.node: f"ended with {code}: {said}"})
    state = claims.lose(rules, state, slot.rank, now, why)
    if code != exits.UNFIT or not _failed_everywhere(state):
        return state
    excluded = {node: cause for node, cause in state.excluded.items() if node not in state.unfit}
    state = _next_round(dataclasses.replace(state, excluded=excluded), now)  # that store has excluded them too
    state = noted(state, now, f"{_EVERYWHERE}: no node is excluded for it, and all form again")
    for it in state.slots:
        state = state.again(it, now) if it.ended is None else state
    return state


def _checked(state: State, slot: Slot, now: float) -> State:
    """Note that a node failed its check, and whose end would show whether all did."""
    if slot.launch in state.unchecked and now - state.unfit_at < INCIDENT_S:
        rest = tuple(launch for launch in state.unchecked if launch != slot.launch)
        return dataclasses.replace(state, unfit=(*state.unfit, slot.node), unchecked=rest)
    others = tuple(it.launch for it in state.slots if it.launch and it.ended is None and it.rank != slot.rank)
    return dataclasses.replace(state, unfit=(slot.node,), unfit_at=now, unchecked=others)


def _failed_everywhere(state: State) -> bool:
    """Return whether all of several nodes failed the newest check; one that is alone has nobody to compare with."""
    return len(state.unfit) > 1 and not state.unchecked


def _left(rules: Rules, state: State, slot: Slot, code: int, now: float) -> State:
    """Note that a launcher has done its work, or left. One that asked and ends with 0, where too few run to have trained, was told
    by the store: the job has finished."""
    running = sum(bool(it.launch) and it.ended is None for it in state.slots)
    state = state.with_slot(dataclasses.replace(slot, ended=code, ended_at=now))
    if code != exits.FINISHED or not slot.asks or running >= rules.min_nodes:
        return state
    why = "the job had finished, as its store knows, before a node was lost"
    return dataclasses.replace(
        state, phase=Phase.ENDING, since=now, outcome=Phase.SUCCEEDED, exit_code=code, reason=why
    )


def meaning(code: int, why: str = "") -> str:
    """Return in words how a launcher ended. ``why``, if its node knows it, says more than the two codes that can be anything."""
    if why and code in (exits.FAILED, exits.USAGE):
        return why
    if code < 0:
        said = f"ended by {signal_name(-code)}"
    else:
        said = "finished" if code == 0 else exits.MEANINGS.get(code) or HARDWARE_CODES.get(code, "")
    return "; ".join(filter(None, (said, why)))


def _counted(rules: Rules, state: State, now: float, why: str, rank: int) -> State:
    """Count a failure of a node, unless it belongs to an incident that was counted."""
    if now - state.incident_at < INCIDENT_S and state.struck and rank not in state.struck:
        return dataclasses.replace(state, failed_at=now, struck=(*state.struck, rank))
    number = state.failures + 1 if now - state.failed_at < HEALTHY_S else 1
    state = dataclasses.replace(state, failures=number, failed_at=now, incident_at=now, struck=(rank,))
    if number <= rules.max_failures:
        return state
    reason = f"{why}; that is failure {number} within ten minutes of each other, and {rules.max_failures} are allowed"
    state = noted(state, now, reason)
    return dataclasses.replace(
        state, phase=Phase.ENDING, since=now, outcome=Phase.FAILED, exit_code=exits.FAILED, reason=reason
    )


def _preempted(rules: Rules, state: State, now: float) -> State:
    """Start the job again that left together by a signal of others; or the one launcher that did, where the rest goes on."""
    left = [slot for slot in state.slots if slot.ended == exits.PREEMPTED]
    if state.phase is not Phase.RUNNING or not left:
        return state
    running = [slot for slot in state.slots if slot.launch and slot.ended is None]
    late = now - max(slot.ended_at for slot in left) > rules.stop_grace_s + MARGIN_S
    if running and not late:
        return state
    if not running:
        state = noted(_next_round(state, now), now, "preempted; it is started again")
    for slot in left:
        lost = slot.leave
        state = claims.lose(rules, state, slot.rank, now, "its node is drained") if lost else state.again(slot, now)
    return state


def _wind_up(rules: Rules, state: State, seen: Seen, now: float) -> State:
    """End the job where there is nothing left to wait for."""
    if finishing.is_done(rules, state) and state.phase in (Phase.RUNNING, Phase.STOPPING) and now >= state.fenced_at:
        return over(state, Phase.SUCCEEDED, exits.FINISHED, "all launchers ended with 0", now)
    if state.phase not in (Phase.STOPPING, Phase.ENDING):
        return state
    state = _leavers(state, seen, now)
    running = [slot.rank for slot in state.slots if slot.launch and slot.node and slot.ended is None]
    patience = ENDING_S if state.phase is Phase.ENDING else rules.stop_grace_s + MARGIN_S
    if (running and now - state.since < patience) or now < state.fenced_at:
        return state
    if state.phase is Phase.ENDING and state.outcome is not None:
        return over(state, state.outcome, state.exit_code, state.reason, now)
    if finishing.is_done(rules, state):
        return over(state, Phase.SUCCEEDED, exits.FINISHED, "all launchers ended with 0", now)
    several = len(running) > 1
    who = f"launcher{'s' * several} of node{'s' * several} {', '.join(map(str, running))}"
    how = [f"the {who} {'were' if several else 'was'} ended"] if running else []
    agreed = (None, exits.FINISHED, exits.PREEMPTED)
    how += [f"that of node {slot.rank} ended with {slot.ended}" for slot in state.slots if slot.ended not in agreed]
    return over(state, Phase.STOPPED, exits.PREEMPTED, "; ".join([state.reason, *how]), now)


def _leavers(state: State, seen: Seen, now: float) -> State:
    """Take note of launchers that end while the job does."""
    for slot in state.slots:
        known = seen.claims.get(slot.claim)
        if not slot.launch or slot.ended is not None or known is None:
            continue
        if known.life not in (slot.life, ""):
            state = noted(state, now, f"the actor of node {slot.rank} died, and its launcher with it")
            state = state.with_slot(dataclasses.replace(slot, ended=-signal.SIGKILL, ended_at=now))
        elif known.launch == slot.launch and known.code is not None:
            state = noted(state, now, _end_of(slot, known.code, known.why))
            state = state.with_slot(dataclasses.replace(slot, ended=known.code, ended_at=now))
    return state


def _end_of(slot: Slot, code: int, why: str) -> str:
    said = meaning(code, why)
    return f"the launcher of {slot.place} ended with {code}" + f": {said}" * bool(said)


def over(state: State, phase: Phase, code: int | None, reason: str, now: float) -> State:
    """Return a state in which the job has ended and nothing of it is wanted any more."""
    slots = tuple(dataclasses.replace(slot, claim=0) for slot in state.slots)
    over = dataclasses.replace(state, phase=phase, exit_code=code, reason=reason, since=now, slots=slots)
    return noted(over, now, f"{phase.value}: {reason}")
