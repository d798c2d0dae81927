"""Who belongs to the job: a pure state machine over one small record that all launchers share.

Every function takes a :class:`Roster` and returns the next one; ``meeting.py`` writes it back with compare-and-set, so
whoever comes second starts again from what the first one wrote. There is no clock in here, and no leader is needed: whoever
finds that a round is ready completes it.

1) ``arrive``    (launcher) wants to be in the next round: it joins, or it waits because the job is full
2) ``complete``  (whoever notices) fixes the members of the round and their ranks
3) ``depart``    (whoever decided it, or the node itself) a node is gone; its place is free
4) ``close``     (whoever decided it) the job is over, for the nodes that wait too
5) ``reopen``    (a new launcher) the job is over and nobody of it lives: this is its next run, in a store that outlived it

A place belongs to its node until the node departs: a spare that waits never takes the place of a node that only restarts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from resilience.launcher.ranks import assign


@dataclass(frozen=True)
class Member:
    """One launcher. ``name`` is its node's; ``infra`` the rank that the infrastructure gave it, if it gave one; ``group`` and
    ``group_index`` say which nodes it belongs together with, where that is known."""

    id: str
    name: str
    infra: int | None = None
    rank: int | None = None  # in the last round it was part of
    group: str = ""
    group_index: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How the job ended: the exit code of every launcher, and why."""

    exit_code: int
    why: str


@dataclass(frozen=True)
class Rules:
    """What ``--nnodes`` and ``--ft-use-infra-group-rank`` ask for."""

    min_nodes: int
    max_nodes: int
    by_infra: bool = True


@dataclass(frozen=True)
class Roster:
    """The job's nodes. ``expected``: those of the round before that have not departed. ``vacated``: places of departed nodes
    that only a node with the same rank from the infrastructure may take."""

    round: int = 0
    is_complete: bool = False
    members: Mapping[str, Member] = field(default_factory=dict)
    expected: Mapping[str, Member] = field(default_factory=dict)
    waiting: Mapping[str, Member] = field(default_factory=dict)
    vacated: tuple[int, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    outcome: Outcome | None = None

    def as_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Roster:
        """Read what :meth:`as_text` wrote."""
        data: dict[str, Any] = json.loads(text)
        people = {
            name: {key: Member(**item) for key, item in data[name].items()}
            for name in ("members", "expected", "waiting")
        }
        outcome = Outcome(**data["outcome"]) if data["outcome"] else None
        return cls(**{**data, **people, "vacated": tuple(data["vacated"]), "outcome": outcome})

    def place_of(self, node: str) -> str:
        """Return where a node stands: ``member``, ``waiting`` or ``outside``."""
        return "member" if node in self.members else "waiting" if node in self.waiting else "outside"

    def newcomers(self, rules: Rules) -> int:
        """Return how many of the waiting nodes the next round would take in."""
        everybody = {**self.expected, **self.members}
        return len(_admissible(dataclasses.replace(self, expected=everybody, members={}), rules))


def arrive(roster: Roster, me: Member, rules: Rules) -> Roster:
    """Enter ``me`` into the round that is forming, or open the next one; without a place it waits. Nothing happens when the
    job is over or the node is excluded."""
    if roster.outcome is not None or me.name in roster.excluded:
        return roster
    me = dataclasses.replace(me, rank=None)
    if roster.is_complete:
        if me.id not in roster.members:
            return dataclasses.replace(roster, waiting={**roster.waiting, me.id: me})
        roster = dataclasses.replace(
            roster, round=roster.round + 1, is_complete=False, members={}, expected=roster.members
        )
    known = roster.expected.get(me.id)
    me = known if known is not None else me
    if me.id not in roster.members:
        roster = dataclasses.replace(roster, waiting={**roster.waiting, me.id: me})
    return _seat(roster, rules)


def _seat(roster: Roster, rules: Rules) -> Roster:
    """Give a place to everybody who waits and may have one."""
    admitted = _admissible(roster, rules)
    if not admitted:
        return roster
    taken = {member.infra for member in admitted.values()}
    return dataclasses.replace(
        roster,
        members={**roster.members, **admitted},
        waiting={key: member for key, member in roster.waiting.items() if key not in admitted},
        vacated=tuple(infra for infra in roster.vacated if infra not in taken),
    )


def _admissible(roster: Roster, rules: Rules) -> dict[str, Member]:
    """Return those who wait and have a place: first the expected ones, whose places are kept, then as many as there is room."""
    found = {key: member for key, member in roster.waiting.items() if key in roster.expected}
    seated = {**roster.members, **found}
    absent = [key for key in roster.expected if key not in seated]
    vacated = list(roster.vacated) if rules.by_infra else []
    for key, member in roster.waiting.items():
        if key in seated:
            continue
        successor = member.infra is not None and member.infra in vacated
        kept = len(absent) + sum(1 for infra in vacated if infra != member.infra)
        if len(seated) + (len(absent) if successor else kept) >= rules.max_nodes:
            continue
        if successor:
            vacated.remove(member.infra)  # type: ignore[arg-type]  # it is not None
        found[key] = seated[key] = member
    return found


def ready(roster: Roster, rules: Rules, waited: bool) -> bool:
    """Whether the round can be completed. ``waited``: the last call for more nodes is over."""
    if roster.is_complete or roster.outcome is not None or len(roster.members) < rules.min_nodes:
        return False
    if len(roster.members) >= rules.max_nodes:
        return True
    everybody_is_back = bool(roster.expected) and set(roster.expected) <= set(roster.members)
    return everybody_is_back or waited


def complete(roster: Roster, rules: Rules) -> Roster:
    """Fix the round: its members get their ranks."""
    ranks = assign(list(roster.members.values()), rules.by_infra)
    members = {key: dataclasses.replace(member, rank=ranks[key]) for key, member in roster.members.items()}
    return dataclasses.replace(roster, is_complete=True, members=members, expected={})


def depart(roster: Roster, nodes: Iterable[str], rules: Rules) -> Roster:
    """Take nodes out: they left, or were found lost. Their places go to whoever waits, when the next round forms."""
    gone = set(nodes)
    known = {**roster.members, **roster.expected}
    infra = [known[key].infra for key in sorted(gone & set(known))]
    held = {*roster.vacated, *(member.infra for key, member in known.items() if key not in gone)}
    kept = tuple(item for item in infra if item is not None and item not in held)

    def without(people: Mapping[str, Member]) -> dict[str, Member]:
        return {key: member for key, member in people.items() if key not in gone}

    left = dataclasses.replace(
        roster,
        members=without(roster.members),
        expected=without(roster.expected),
        waiting=without(roster.waiting),
        vacated=roster.vacated + kept if rules.by_infra else (),
    )
    if roster.is_complete and not left.members:  # everybody is gone: those who wait begin a new round
        left = dataclasses.replace(left, round=roster.round + 1, is_complete=False)
    return left if left.is_complete else _seat(left, rules)


def exclude(roster: Roster, name: str, why: str) -> Roster:
    """Keep a node out of the job from now on, in whatever launcher it comes back."""
    return dataclasses.replace(roster, excluded={**roster.excluded, name: why})


def reopen(roster: Roster) -> Roster:
    """Begin anew after a job that is over and whose launchers are all gone; who was excluded stays so."""
    return roster if roster.outcome is None else Roster(round=roster.round + 1, excluded=roster.excluded)


def close(roster: Roster, outcome: Outcome) -> Roster:
    """End the job; the first outcome stands."""
    return roster if roster.outcome is not None else dataclasses.replace(roster, outcome=outcome)
