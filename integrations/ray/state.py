"""What is remembered of a job on Ray: the state that :mod:`plan` decides on, and its form on paper."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from resilience.failover import exits
from resilience.groups import escalation

KEPT_LINES = 100
SLOWEST_S = 30.0  # between two starts of what keeps ending
STOP_ASKED = "a stop was asked for"
STUMBLES = "the supervisor stumbles: "  # so begins a reason that only a step that goes well takes away


class Phase(str, Enum):
    """Where a job stands."""

    GATHERING = "GATHERING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    ENDING = "ENDING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True)
class Slot:
    """One place for a launcher. ``claim`` 0: none. ``node``: where the claim stands, once Ray has placed it; ``host``: its address.
    ``launch`` 0: none is to run yet. ``life``: of the actor that the launch was ordered from. ``leave``: its node is to be left.
    ``asks``: it is started also where it is too few: the store may know that the job has finished. ``mute_at``: since when its
    actor, which has a node, has not been heard of; 0 while it is."""

    rank: int
    group: int = 0
    claim: int = 0
    pinned: str = ""
    claimed_at: float = 0.0
    node: str = ""
    host: str = ""
    life: str = ""
    launch: int = 0
    round: int = 0
    ended: int | None = None
    ended_at: float = 0.0
    not_before: float = 0.0
    leave: bool = False
    asks: bool = False
    mute_at: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether its launcher has done its work."""
        return self.ended == exits.FINISHED

    @property
    def place(self) -> str:
        """Return how people find it."""
        return f"node {self.rank}" + f" ({self.host})" * bool(self.host)

    def vacated(self) -> Slot:
        """Return it without claim, node and launcher."""
        return Slot(self.rank, self.group, not_before=self.not_before)


@dataclass(frozen=True)
class State:
    """A job. ``racks``: the label's value of each group. ``claims``, ``launches``, ``round``: the newest number of each; a round
    has a rendezvous store of its own. ``excluded``: nodes that this job does not use again, and why; ``avoided``: those that it
    does not use until then. ``lines``: what happened.
    ``failures``: incidents in a row; ``struck``: the ranks that the newest has befallen.
    ``cut``: those that lost the round's store, each as often as it did. ``fenced_at``: when the launchers of lost nodes have surely
    ended. ``gathering_at``: when nodes were first looked for. ``unfit``, ``unfit_at``: the nodes that failed the newest check, and
    when the first did; ``unchecked``: the launches that were in it and have not ended. ``grace_s``: the longest that a launcher has
    promised its ranks when they are to stop."""

    phase: Phase = Phase.GATHERING
    since: float = 0.0
    reason: str = ""
    slots: tuple[Slot, ...] = ()
    racks: tuple[str, ...] = ()
    claims: int = 0
    launches: int = 0
    round: int = 0
    round_at: float = 0.0
    cut: tuple[int, ...] = ()
    cut_at: float = 0.0
    fenced_at: float = 0.0
    endpoint: str = ""
    excluded: Mapping[str, str] = field(default_factory=dict)
    avoided: Mapping[str, float] = field(default_factory=dict)
    failures: int = 0
    failed_at: float = 0.0
    incident_at: float = 0.0
    struck: tuple[int, ...] = ()
    attempts: int = 0
    gathering_at: float = 0.0
    unfit: tuple[str, ...] = ()
    unfit_at: float = 0.0
    unchecked: tuple[int, ...] = ()
    grace_s: float = 0.0
    groups: escalation.State = field(default_factory=escalation.State)
    outcome: Phase | None = None
    exit_code: int | None = None
    lines: tuple[str, ...] = ()

    def with_slot(self, slot: Slot) -> State:
        """Return it with another slot in the place of the one of that rank."""
        return dataclasses.replace(self, slots=(*self.slots[: slot.rank], slot, *self.slots[slot.rank + 1 :]))

    def again(self, slot: Slot, now: float) -> State:
        """Return it with the launcher of a slot to be started again where it is; later each time, if it keeps ending."""
        wait = min(SLOWEST_S, float(max(0, self.failures - 1)))
        again = dataclasses.replace(slot, launch=0, ended=None, leave=False, asks=False, not_before=now + wait)
        return self.with_slot(again)

    def as_text(self) -> str:
        """Return it as JSON."""
        return json.dumps({**dataclasses.asdict(self), "groups": self.groups.as_text()}, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> State:
        """Read what :meth:`as_text` wrote."""
        data = json.loads(text)
        slots = tuple(Slot(**one) for one in data.pop("slots"))
        phase, outcome = Phase(data.pop("phase")), data.pop("outcome")
        groups = escalation.State.from_text(data.pop("groups"))
        names = ("racks", "lines", "struck", "cut", "unfit", "unchecked")
        lists: dict[str, Any] = {name: tuple(data.pop(name, ())) for name in names}
        return cls(
            **data, **lists, phase=phase, outcome=Phase(outcome) if outcome else None, groups=groups, slots=slots
        )


def noted(state: State, now: float, what: str) -> State:
    """Return it with one more line; the same one twice in a row is one."""
    if state.lines and state.lines[-1].partition(" ")[2] == what:
        return state
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(now))} {what}"
    return dataclasses.replace(state, lines=(*state.lines, line)[-KEPT_LINES:])


def waiting(state: State, for_what: str) -> State:
    """Return it with what it waits for as its reason; empty: for nothing any more."""
    return state if state.reason.startswith(STUMBLES) else dataclasses.replace(state, reason=for_what)


def news(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines that were added; the oldest may have gone for them."""
    for count in range(len(after) + 1):
        if (before + after[len(after) - count :])[-KEPT_LINES:] == after:
            return after[len(after) - count :]
    return after


def recalled(text: str, now: float) -> State:
    """Return what was written, for whoever goes on from it. A job of which nothing can be read has failed: then nothing of it is
    wanted, and whatever it has is given back."""
    try:
        return State.from_text(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"its state in the cluster's store can't be read ({type(error).__name__}: {error}); submit it again"
        return noted(State(Phase.FAILED, now, why, exit_code=exits.FAILED), now, f"FAILED: {why}")
