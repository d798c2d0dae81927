"""Which nodes a job stands on: nodes, groups and ranks. Pure.

Rules: one launcher per Ray node; ranks are contiguous in a group, and groups keep their order; a group is all of the job's nodes
with the same value of the label, so no two groups share one. What is broken, leaving or full is not chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from resilience.errors import nearest


@dataclass(frozen=True)
class Node:
    """A live Ray node. ``room``: what one launcher reserves is free there. ``leaving``: it is being drained. ``total``: all that it
    has, free or not."""

    id: str
    address: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    room: bool = True
    leaving: bool = False
    head: bool = False
    total: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Seat:
    """The place of one rank of nodes: in which group, of which rack, on which node."""

    rank: int
    group: int
    rack: str
    node: str


def usable(nodes: Sequence[Node], wanted: Mapping[str, str], avoid: Collection[str], label: str | None) -> list[Node]:
    """Return the nodes that a launcher could be put on, in a fixed order; with a ``label``, only those that have it."""
    return sorted(
        (
            node
            for node in nodes
            if node.room
            and not node.leaving
            and node.id not in avoid
            and all(node.labels.get(key) == value for key, value in wanted.items())
            and (label is None or node.labels.get(label))
        ),
        key=lambda node: node.id,
    )


_USUAL = ("CPU", "GPU", "memory")


def obstacle(nodes: Sequence[Node], bundle: Mapping[str, float], wanted: Mapping[str, str], label: str | None) -> str:
    """Say why no node of the cluster, as large as they are, could ever hold a launcher; empty where one could.

    An autoscaler may bring one that can, so this is a word for people and no error.
    """
    largest: dict[str, float] = {}
    for node in nodes:
        for name, amount in node.total.items():
            largest[name] = max(amount, largest.get(name, 0.0))
    for name, amount in bundle.items() if largest else ():
        if name not in largest:
            meant = nearest(name, [*largest, *_USUAL]) if name not in _USUAL else ""
            return f"no node of this cluster has any {name!r}.{meant}"
        if largest[name] < amount:
            return f"no node of this cluster has so much: {name}={amount:g} is wanted, and the largest has {largest[name]:g}"
    keys = sorted({key for node in nodes for key in node.labels})
    for key, value in wanted.items():
        if nodes and not any(node.labels.get(key) == value for node in nodes):
            return (
                f"no node of this cluster has the label {key}={value}.{nearest(key, keys) if key not in keys else ''}"
            )
    if nodes and label is not None and label not in keys:
        return f"no node of this cluster has a label {label!r}.{nearest(label, keys)}"
    return ""


def amounts(bundle: Mapping[str, float]) -> str:
    """Return what a launcher reserves, in words."""
    return ", ".join(f"{name}={amount:g}" for name, amount in bundle.items())


def by_rack(nodes: Sequence[Node], label: str) -> dict[str, list[Node]]:
    """Return nodes by the value of their label, in the order of the values."""
    found: dict[str, list[Node]] = {}
    for node in sorted(nodes, key=lambda node: (node.labels[label], node.id)):
        found.setdefault(node.labels[label], []).append(node)
    return found


def spread(number: int, room: Mapping[str, int], size: int | None = None) -> dict[str, int] | None:
    """Return how many nodes of each rack a job takes, in the order of the racks; ``None`` where there are too few.

    With a ``size`` that many of each. Without one evenly, over as few racks as have room for all: then what is left of each rack is
    as much as can be, and a lost node is replaced where it was.
    """
    if size is not None:
        fitting = sorted((rack for rack, free in room.items() if free >= size), key=lambda rack: (-room[rack], rack))
        chosen = sorted(fitting[: number // size])
        return dict.fromkeys(chosen, size) if len(chosen) * size == number else None
    largest = sorted(room, key=lambda rack: (-room[rack], rack))
    count = next((k for k in range(1, len(largest) + 1) if sum(room[rack] for rack in largest[:k]) >= number), 0)
    if not count:
        return None
    taken = dict.fromkeys(sorted(largest[:count]), 0)
    for _ in range(number):
        emptiest = min((rack for rack in taken if taken[rack] < room[rack]), key=lambda rack: taken[rack])
        taken[emptiest] += 1
    return taken


def seats(number: int, free: Sequence[Node], label: str | None, size: int | None = None) -> list[Seat] | None:
    """Return a seat for every rank of nodes, or ``None`` where there are too few nodes."""
    if label is None:
        return [Seat(rank, 0, "", free[rank].id) for rank in range(number)] if len(free) >= number else None
    racks = by_rack(free, label)
    taken = spread(number, {rack: len(nodes) for rack, nodes in racks.items()}, size)
    if taken is None:
        return None
    chosen = [(group, rack, node) for group, (rack, count) in enumerate(taken.items()) for node in racks[rack][:count]]
    return [Seat(rank, group, rack, node.id) for rank, (group, rack, node) in enumerate(chosen)]


def another_rack(size: int, free: Sequence[Node], label: str, not_these: Collection[str]) -> str | None:
    """Return a rack that has room for a whole group and none of the job's groups in it: the one with the most."""
    room = {
        rack: len(nodes) for rack, nodes in by_rack(free, label).items() if rack not in not_these and len(nodes) >= size
    }
    return min(room, key=lambda rack: (-room[rack], rack), default=None)


def home_of_the_store(nodes: Sequence[Node], training: Collection[str]) -> str | None:
    """Return the node that serves the rendezvous: the head, if it does not train; else any that does not; else the head."""
    staying = sorted((node for node in nodes if not node.leaving), key=lambda node: (not node.head, node.id))
    return next((node.id for node in staying if node.id not in training), staying[0].id if staying else None)


def selector(
    wanted: Mapping[str, str], label: str | None, rack: str, pinned: str, avoid: Collection[str]
) -> dict[str, str]:
    """Return the label selector of a claim: a node that is named, or, so that Ray looks for one, any but some."""
    found = dict(wanted)
    if label is not None and rack:
        found[label] = rack
    if pinned:
        found[NODE_ID] = pinned
    elif avoid:
        found[NODE_ID] = f"!in({','.join(sorted(avoid))})"
    return found


NODE_ID = "ray.io/node-id"  # a label that Ray gives every node
