"""Which nodes are tried together next, and what the trials say about each of them. Pure: no clock, no store, no torch.

A trial is a collective in a small group. One that fails says that one of its nodes is bad, not which one:

1) ``first``      round 1 tries neighbours together, the last three of an odd number as one group
2) ``following``  later rounds try each suspect with a node that is known to be good, in other company than before; suspects for
                  whom no good node is left are tried with each other: two that pass are both good
3) ``standing``   what is known of every node, after any number of rounds

Rule: a node is faulty only when it failed twice, at least once with nodes that passed elsewhere. What can't be told (two nodes
whose only pair fails, or nobody who passes with anybody) is ``undecided``, and nobody is blamed for it.

Hazard: a trial in which a node vanished says nothing about the others in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

HEALTHY, FAULTY, STRAGGLER, UNDECIDED, VANISHED = "healthy", "faulty", "straggler", "undecided", "vanished"
MOST_ROUNDS = 6
_RETRIES = 2  # trials of the same company: once more, since the first failure may have been a passing one

Group = tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """One group that was tried together. ``seconds`` is what it took where it passed, ``words`` what its nodes say went wrong, in
    the group's order; empty for those with nothing to say."""

    group: Group
    passed: bool
    seconds: float = 0.0
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """What makes a straggler: more than ``factor`` times the median, and by more than ``floor`` seconds (clocks and schedulers
    are not exact: of two tasks that take a millisecond one may take three). The host's processors are shared with everything that
    runs there, an accelerator is not: its floor is :data:`DEVICE_FLOOR`."""

    factor: float = 2.0
    floor: float = 0.05

    def slow(self, seconds: float, median: float) -> bool:
        """Whether a time is out of line."""
        return seconds > self.factor * median and seconds - median > self.floor


USUAL = Rule()
DEVICE_FLOOR = 0.002


def typical(seconds: Iterable[float]) -> float | None:
    """Return the median, of an even number the lower one: of two nodes the quicker sets the measure."""
    known = list(seconds)
    return statistics.median_low(known) if known else None


def slow_ones(seconds: Mapping[int, float], rule: Rule) -> frozenset[int]:
    """Return the nodes whose own time is out of line with the others'. One node alone never is."""
    median = typical(seconds.values())
    return frozenset(node for node, it in seconds.items() if median is not None and rule.slow(it, median))


def first(nodes: Sequence[int]) -> tuple[Group, ...]:
    """Return the groups of round 1: neighbours, so that what shares a switch is tried first; none for a lone node."""
    pairs = [tuple(nodes[at : at + 2]) for at in range(0, len(nodes) - 1, 2)]
    if len(nodes) % 2 and pairs:
        pairs[-1] = (*pairs[-1], nodes[-1])
    return tuple(pairs)


class Evidence:
    """All trials so far, of the nodes that came, have not ``vanished`` and are still sound: one that tried once more by itself, and
    failed at that, is no partner to learn from."""

    def __init__(
        self, nodes: Iterable[int], trials: Iterable[Trial], vanished: Iterable[int] = (), rule: Rule = USUAL
    ) -> None:
        self.vanished = frozenset(vanished)
        self.nodes = [node for node in nodes if node not in self.vanished]
        self.trials = [trial for trial in trials if set(trial.group) <= set(self.nodes)]
        self.median = typical(trial.seconds for trial in self.trials if trial.passed)
        self.rule = rule
        self.passed = {node for trial in self.trials if trial.passed for node in trial.group}
        self.good = {node for trial in self.trials if trial.passed and not self.is_slow(trial) for node in trial.group}
        self.tried: dict[int, list[Trial]] = {node: [] for node in self.nodes}
        for trial in self.trials:
            for node in trial.group:
                self.tried[node].append(trial)

    def is_slow(self, trial: Trial) -> bool:
        """Whether a trial passed, but took much longer than the others."""
        return self.median is not None and self.rule.slow(trial.seconds, self.median)

    def bad(self, node: int) -> bool:
        """Whether a node failed twice, at least once in good company."""
        failures = [trial for trial in self.tried[node] if not trial.passed]
        if node in self.passed or len(failures) < 2:
            return False
        return any(set(trial.group) - {node} <= self.passed for trial in failures)

    def slow(self, node: int) -> bool:
        """Whether a node passed, but never quickly, though it had a partner that is quick with others."""
        if node in self.good or node not in self.passed or len(self.tried[node]) < 2:
            return False
        return any(set(trial.group) - {node} <= self.good for trial in self.tried[node] if trial.passed)

    def open(self) -> list[int]:
        """Return the nodes of whom too little is known."""
        return [node for node in self.nodes if node not in self.good and not self.bad(node) and not self.slow(node)]

    def seconds(self, node: int) -> float | None:
        """Return the best time of a node in a trial that passed."""
        return min((trial.seconds for trial in self.tried.get(node, ()) if trial.passed), default=None)

    def words(self, node: int) -> str:
        """Return what a node says of its last failure; else what somebody in its company does."""
        for trial in reversed([it for it in self.tried.get(node, ()) if not it.passed]):
            said = dict(zip(trial.group, trial.words, strict=False))
            heard = [f"node {other} says: {words}" for other, words in said.items() if words]
            if said.get(node) or heard:
                return said.get(node) or heard[0]
        return ""


def following(evidence: Evidence, rounds: int) -> tuple[Group, ...]:
    """Return the next round's groups after so many ``rounds``; none when everything is known, or can't be."""
    if rounds >= MOST_ROUNDS or len(evidence.nodes) < 2:
        return ()
    met: dict[frozenset[int], int] = {}
    for trial in evidence.trials:
        company = frozenset(trial.group)
        met[company] = met.get(company, 0) + 1
    suspects = evidence.open()
    helpers = [node for node in evidence.nodes if node in evidence.good]
    groups: list[Group] = []
    left: list[int] = []
    for suspect in suspects:
        partner = _partner(suspect, helpers, met)
        if partner is None:
            left.append(suspect)
        else:
            helpers.remove(partner)
            groups.append((suspect, partner))
    least_tried = sorted(left, key=lambda node: len(evidence.tried[node]))
    return (*groups, *_among_themselves(least_tried, met))


def _partner(node: int, others: Sequence[int], met: Mapping[frozenset[int], int]) -> int | None:
    """Return somebody whom a node has met least, and not too often."""
    if not others:
        return None
    best = min(others, key=lambda other: met.get(frozenset((node, other)), 0))
    return best if met.get(frozenset((node, best)), 0) < _RETRIES else None


def _among_themselves(nodes: list[int], met: Mapping[frozenset[int], int]) -> list[Group]:
    """Return pairs of nodes that have not met, as far as there are any."""
    waiting = list(nodes)
    groups: list[Group] = []
    while len(waiting) > 1:
        node = waiting.pop(0)
        partner = _partner(node, waiting, met)
        if partner is not None:
            waiting.remove(partner)
            groups.append((node, partner))
    return groups


def standing(evidence: Evidence) -> dict[int, str]:
    """Return what the trials say about every node. A lone node has none, and nothing against it."""
    found = dict.fromkeys(evidence.vanished, VANISHED)
    alone = len(evidence.nodes) < 2
    for node in evidence.nodes:
        if node in evidence.good or alone:
            found[node] = HEALTHY
        elif evidence.bad(node):
            found[node] = FAULTY
        elif evidence.slow(node):
            found[node] = STRAGGLER
        else:  # one that passed slowly, and nobody is quick, is as good as the others
            found[node] = HEALTHY if node in evidence.passed else UNDECIDED
    return found


def cannot_tell(nodes: int, undecided: Sequence[int]) -> str:
    """Say in words what so few nodes, or such results, leave open; empty where nothing is."""
    if nodes == 1:
        return "one node alone: that it reaches others, and whether it is slower than others, can't be told"
    if undecided and nodes == 2:
        return (
            "the two nodes do not get through to each other, each is fine alone: which of them it is, or the network between "
            "them, can't be told with two nodes; a third one would tell"
        )
    if undecided:
        return (
            f"nodes {', '.join(map(str, undecided))} got through to nobody who gets through to others: that is more than a "
            "faulty node; look at the network, at its name resolution and at the backend's settings (NCCL_SOCKET_IFNAME, "
            "GLOO_SOCKET_IFNAME)"
        )
    return "two nodes have one pair: whether its network is slow can't be told" if nodes == 2 else ""
