"""What the launchers of a round agree on before it begins: the cycle's number, who is where, what was learned and has failed.

It also tells their clocks apart. Node 0 writes its time into the decision; the others have been waiting for it, and read
their own when it comes: the difference is the offset of their clocks, too large by the way of one message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilience.failover.history import History
from resilience.pulse.timeouts import from_json, merge, to_json


@dataclass(frozen=True)
class Node:
    """One node of the job in this cycle. ``id`` is its launcher's, ``name`` the node's own."""

    host: str
    ranks: tuple[int, ...]
    id: str = ""
    name: str = ""

    @property
    def title(self) -> str:
        """What people read: the host, and the node's own name where it has another one."""
        return self.host if self.name in ("", self.host) else f"{self.host} ({self.name})"


@dataclass(frozen=True)
class Agreement:
    """What all launchers of a cycle agree on. ``offset_ns``: this node's monotonic clock less node 0's."""

    cycle: int
    nodes: tuple[Node, ...]
    learned: dict[str, Any]
    history: History = field(default_factory=History)
    offset_ns: int = 0


def agree(store: Any, me: int, world: int, *, node: Node, cycle: int, learned: Any, history: History) -> Agreement:
    """Agree with the other nodes. Blocks as long as the store's own timeout at most."""
    if world == 1:
        return Agreement(cycle, (node,), learned, history)
    offer = {
        "cycle": cycle,
        "node": [node.host, node.ranks, node.id, node.name],
        "learned": learned,
        "history": history.as_json(),
    }
    store.set(f"resilience/offer/{me}", json.dumps(offer))
    if me == 0:
        offers = [json.loads(store.get(f"resilience/offer/{other}")) for other in range(world)]
        store.set("resilience/decision", json.dumps({**settle(offers), "clock_ns": time.monotonic_ns()}))
    decided = json.loads(store.get("resilience/decision"))
    offset = 0 if me == 0 else time.monotonic_ns() - int(decided["clock_ns"])
    nodes = tuple(Node(host, tuple(ranks), ident, name) for host, ranks, ident, name in decided["nodes"])
    return Agreement(decided["cycle"], nodes, decided["learned"], History.from_json(decided["history"]), offset)


def introduce(store: Any, me: int, world: int, node: Node) -> tuple[Node, ...]:
    """Tell the nodes of a static rendezvous who this one is; return all of them. Blocks until everybody has done it once: nobody
    changes there, so a later round finds what the first one left, and waits for nobody."""
    if world == 1:
        return (node,)
    store.set(f"resilience/node/{me}", json.dumps([node.host, node.ranks, node.name]))
    texts = store.multi_get([f"resilience/node/{other}" for other in range(world)])
    told = [json.loads(bytes(text)) for text in texts]
    return tuple(Node(host, tuple(ranks), name=name) for host, ranks, name in told)


def settle(offers: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Make one decision of the offers of all nodes. Pure."""
    learned: dict[str, Any] = {}
    for item in offers:
        learned = merge(learned, from_json(item["learned"]))
    return {
        "cycle": max(item["cycle"] for item in offers),
        "nodes": [item["node"] for item in offers],
        "learned": to_json(learned),
        "history": History.newest([History.from_json(item["history"]) for item in offers]).as_json(),
    }
