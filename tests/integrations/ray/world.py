"""A cluster that does what a job's state wants, without Ray and without time: nodes, claims, actors, launchers, a store."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from resilience.integrations.ray.claims import to_avoid
from resilience.integrations.ray.layout import Node
from resilience.integrations.ray.plan import ClaimSeen, Rules, Seen, decide
from resilience.integrations.ray.state import Phase, Slot, State

LABEL = "RACK_ID"


@dataclass
class World:
    """``nodes``: rack by node, empty without a label; each has room for one launcher. ``slow``: those that others have taken.
    ``stuck``: those whose workers hang when they start. ``deaf``: those whose actors answer, and start no launcher.
    ``avoids``: the nodes that a claim may not get, as it was told when it was made."""

    rules: Rules
    nodes: dict[str, str]
    state: State = field(default_factory=State)
    now: float = 1000.0
    slow: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    store: bool = True
    stop: bool = False
    driver_gone: bool = False
    grace_s: float = 0.0
    claims: dict[int, ClaimSeen] = field(default_factory=dict)
    avoids: dict[int, set[str]] = field(default_factory=dict)
    asked_to_stop: set[int] = field(default_factory=set)  # launches
    _lives: itertools.count[int] = field(default_factory=itertools.count)
    _lost_round: int = -1

    # -- what befalls it

    def kill_node(self, node: str) -> None:
        del self.nodes[node]

    def kill_actor(self, rank: int) -> None:
        claim = self.state.slots[rank].claim
        self.claims[claim] = replace(self.claims[claim], life=f"life-{next(self._lives)}", launch=0, code=None)

    def end(self, code: int, *ranks: int) -> None:
        """Have launchers end with a code: those of the ranks, or all."""
        for rank in ranks or range(len(self.state.slots)):
            claim = self.state.slots[rank].claim
            self.claims[claim] = replace(self.claims[claim], code=code)

    def silence(self, rank: int) -> None:
        """Have the actor of a rank out of reach, which says nothing of its launcher."""
        claim = self.state.slots[rank].claim
        self.claims[claim] = replace(self.claims[claim], life="", launch=0, code=None)

    def lose_store(self) -> None:
        self._lost_round = self.state.round

    # -- time

    def tick(self, seconds: float = 0.5) -> State:
        """Look, decide, act."""
        self.now += seconds
        nodes = tuple(self._node(name) for name in self.nodes)
        lost = self._lost_round == self.state.round and self.state.round > 0
        endpoint = f"host:{self.state.round}" if self.store and self.state.round and not lost else ""
        seen = Seen(nodes, dict(self.claims), endpoint, lost, self.stop, self.driver_gone, self.grace_s)
        # As a supervisor reads it.
        self.state = State.from_text(decide(self.rules, self.state, seen, self.now).as_text())
        self._act()
        return self.state

    def run(self, seconds: float, step: float = 0.5) -> State:
        for _ in range(int(seconds / step)):
            self.tick(step)
        return self.state

    # -- what is seen

    def node(self, rank: int) -> str:
        return self.state.slots[rank].node

    def racks(self) -> list[str]:
        return [self.nodes.get(slot.node, "") for slot in self.state.slots]

    def running(self) -> list[bool]:
        """Which launchers run the launch that is wanted."""
        found = []
        for slot in self.state.slots:
            seen = self.claims.get(slot.claim)
            found.append(bool(seen and slot.launch and seen.launch == slot.launch and seen.code is None))
        return found

    # -- what the cluster does

    def _node(self, name: str) -> Node:
        used = {seen.node for seen in self.claims.values()}
        return Node(name, "127.0.0.1", {LABEL: self.nodes[name]}, name not in used, name in self.leaving)

    def _act(self) -> None:
        wanted = {slot.claim: slot for slot in self.state.slots if slot.claim}
        if wanted.keys() - self.avoids.keys():
            avoid = to_avoid(self.state, [self._node(name) for name in self.nodes], self.rules.label)
            self.avoids = {claim: self.avoids.get(claim, avoid) for claim in wanted}
        self.claims = {claim: seen for claim, seen in self.claims.items() if claim in wanted}
        for claim, slot in wanted.items():
            seen = self.claims.get(claim, ClaimSeen())
            if not seen.node or seen.node not in self.nodes:
                seen = self._placed(slot)
            if slot.launch > seen.launch and slot.life == seen.life and seen.node not in self.deaf:
                seen = replace(seen, launch=slot.launch, code=None)
            if seen.launch and (slot.leave or self.state.phase is Phase.STOPPING):
                self.asked_to_stop.add(seen.launch)
            self.claims[claim] = seen

    def _placed(self, slot: Slot) -> ClaimSeen:
        used = {seen.node for seen in self.claims.values()}
        rack = self.state.racks[slot.group]
        fits = [
            name
            for name, its in sorted(self.nodes.items())
            if name not in used and name not in self.slow and (not rack or its == rack)
        ]
        fits = [name for name in fits if (name == slot.pinned if slot.pinned else name not in self.avoids[slot.claim])]
        if not fits:
            return ClaimSeen()
        return ClaimSeen(fits[0], "" if fits[0] in self.stuck else f"life-{next(self._lives)}")


def world(racks: str, nodes: int, threshold: float | None = 300.0, size: int | None = None, failures: int = 8) -> World:
    """A cluster with a node for each letter, which is its rack, and a job of so many nodes that runs."""
    label = LABEL if threshold is not None else None
    rules = Rules("job", nodes, nodes, {}, label, threshold or 300.0, size, failures)
    return World(rules, {f"n{number}{rack}": rack for number, rack in enumerate(racks)})


def running(
    racks: str, nodes: int, threshold: float | None = 300.0, size: int | None = None, failures: int = 8
) -> World:
    made = world(racks, nodes, threshold, size, failures)
    made.run(3)
    assert made.state.phase is Phase.RUNNING
    assert all(made.running())
    return made
