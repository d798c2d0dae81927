"""When a whole group moves: a pure state machine over what happened to a job's members, with the time passed in.

1) ``lost``    (controller) a member has failed or is gone: its replacement is awaited, the clock of the group's incident runs
2) ``placed``  (controller) a member, or its replacement, has a node: that much of the incident is over
   ``paused``  (controller) nothing holds a group where it was: it has ended, or may begin anywhere; nobody waits
3) ``due``     (controller) asks what follows now: move a group, or say once why it is not moved
4) ``moved``   (controller) the group's members were all told to go: they are awaited elsewhere
   ``renewed`` (controller) as long as the threshold later some are still missed, whom waiting does not bring: a new incident

Rule: a group moves once per incident. An incident begins with the first member that is lost and ends when every member has a node.
What is lost while a group moves belongs to its incident, until that is renewed.

Hazard: the clock is that of the API server's world, in seconds since 1970, and kept over restarts of the controller; it may jump.
A jump back delays a move, a jump ahead makes it early. Neither makes a second one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

THRESHOLD_S = 300.0
MAX_MOVES = 3


@dataclass(frozen=True)
class Rules:
    """How long a replacement may be blocked, and how often groups of one job may move in all."""

    threshold_s: float = THRESHOLD_S
    max_moves: int = MAX_MOVES


@dataclass(frozen=True)
class Absence:
    """A member without a node: since when, and why."""

    since: float
    why: str


@dataclass(frozen=True)
class Incident:
    """What a group suffers at present. ``absent``: members by name. ``moved_at``: when the group was told to go, if it was.
    ``refused``: that it may not move has been said."""

    absent: Mapping[str, Absence] = field(default_factory=dict)
    moved_at: float | None = None
    refused: bool = False

    @property
    def since(self) -> float:
        """Return when the longest absence began."""
        return min((item.since for item in self.absent.values()), default=0.0)


@dataclass(frozen=True)
class State:
    """All that is remembered of a job: the incidents by group, and how often groups have moved."""

    incidents: Mapping[str, Incident] = field(default_factory=dict)
    moves: int = 0

    def as_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> State:
        """Read what :meth:`as_text` wrote. Raises ``ValueError`` for anything else."""
        try:
            data: dict[str, Any] = json.loads(text)
            incidents = {
                str(group): Incident(
                    {str(name): Absence(float(it["since"]), str(it["why"])) for name, it in item["absent"].items()},
                    None if item["moved_at"] is None else float(item["moved_at"]),
                    bool(item["refused"]),
                )
                for group, item in data["incidents"].items()
            }
            return cls(incidents, int(data["moves"]))
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not the state of a job's groups: {error!r}") from error


@dataclass(frozen=True)
class Decision:
    """What follows for a group now. ``move``: else it is only said that, and why, it is not moved."""

    group: str
    move: bool
    reason: str


def lost(state: State, group: str, member: str, now: float, why: str) -> State:
    """A member has no node any more; the second time changes nothing."""
    incident = state.incidents.get(group, Incident())
    if member in incident.absent:
        return state
    absent = {**incident.absent, member: Absence(now, why)}
    return _with(state, group, dataclasses.replace(incident, absent=absent))


def placed(state: State, group: str, member: str) -> State:
    """A member has a node; with the last one the incident is over."""
    incident = state.incidents.get(group)
    if incident is None or member not in incident.absent:
        return state
    absent = {name: item for name, item in incident.absent.items() if name != member}
    if absent:
        return _with(state, group, dataclasses.replace(incident, absent=absent))
    return over(state, group)


def over(state: State, group: str) -> State:
    """Forget a group's incident: everybody is placed, or the group is no more."""
    return dataclasses.replace(state, incidents={key: it for key, it in state.incidents.items() if key != group})


def paused(state: State, groups: Collection[str]) -> State:
    """Forget the incidents of groups in which nobody waits: the clocks begin anew with the next loss. Those that move stay."""
    left = {group: it for group, it in state.incidents.items() if it.moved_at is not None or group not in groups}
    return dataclasses.replace(state, incidents=left)


def not_ahead(state: State, now: float) -> State:
    """Return it with no absence that is yet to begin: after a clock was set back nobody waits longer than the threshold."""
    incidents = {
        group: dataclasses.replace(
            it,
            absent={name: dataclasses.replace(one, since=min(one.since, now)) for name, one in it.absent.items()},
            moved_at=None if it.moved_at is None else min(it.moved_at, now),
        )
        for group, it in state.incidents.items()
    }
    return dataclasses.replace(state, incidents=incidents)


def due(state: State, rules: Rules, now: float, waiting: Mapping[str, str] | None = None) -> Sequence[Decision]:
    """Return what follows now, for each group that waits too long; nothing twice.

    ``waiting``: replacements that are there and have no node yet, by the member's name. They change the words only.
    """
    found, moves = [], state.moves
    for group, incident in sorted(state.incidents.items(), key=lambda it: (it[1].since, it[0])):
        if incident.moved_at is not None or incident.refused or now - incident.since < rules.threshold_s:
            continue
        who, item = min(incident.absent.items(), key=lambda it: (it[1].since, it[0]))
        waits = (waiting or {}).get(who)
        lacks = "node" if waits else "replacement"
        blocked = (
            f"{who} ({item.why}) has had no {lacks} for {now - item.since:.0f} s (threshold {rules.threshold_s:g} s)"
        )
        blocked += f", its replacement {waits} waits for one" if waits else ""
        if moves < rules.max_moves:
            moves += 1
            found.append(
                Decision(group, True, f"{blocked}; group {group} fails over as a whole ({moves} of {rules.max_moves})")
            )
        else:
            spent = f"groups of this job have failed over {moves} times already, and may not again; it waits for a node"
            found.append(Decision(group, False, f"{blocked}; {spent}"))
    return found


def moved(state: State, group: str, members: Sequence[str], now: float) -> State:
    """The whole group was told to go: every member is awaited elsewhere."""
    incident = state.incidents.get(group, Incident())
    absent = {name: incident.absent.get(name, Absence(now, "moved with its group")) for name in members}
    after = _with(state, group, dataclasses.replace(incident, absent={**incident.absent, **absent}, moved_at=now))
    return dataclasses.replace(after, moves=state.moves + 1)


def renewed(state: State, rules: Rules, now: float, groups: Collection[str]) -> State:
    """Begin a new incident for those of the groups that moved and have missed somebody for the threshold again."""
    for group in groups:
        incident = state.incidents.get(group)
        if incident is None or incident.moved_at is None or now - incident.moved_at < rules.threshold_s:
            continue
        since = incident.moved_at
        absent = {name: dataclasses.replace(item, since=since) for name, item in incident.absent.items()}
        state = _with(state, group, Incident(absent))
    return state


def refused(state: State, group: str) -> State:
    """It has been said that the group may not move."""
    incident = state.incidents.get(group)
    return state if incident is None else _with(state, group, dataclasses.replace(incident, refused=True))


def _with(state: State, group: str, incident: Incident) -> State:
    return dataclasses.replace(state, incidents={**state.incidents, group: incident})
