"""Which nodes keep copies of which: the next ones around a ring, those of other groups first. Pure.

In the ring the groups take turns: the first node of each, then the second of each, and so on. A node whose group is not known has
one to itself. Every saver comes to the same answer from the same list.
"""

from __future__ import annotations

from collections.abc import Mapping


def keepers(groups: Mapping[int, str], node: int, copies: int) -> list[int]:
    """Return the nodes that keep copies of ``node``. ``groups``: of each node, by its name (its first rank); "": not known.

    Nodes of one group fail together: each copy goes to a group that has none yet, while there is one; then to another group than
    the node's own, while there is one; then to whoever is left.
    """
    mine = {name: group or f"node {name}" for name, group in groups.items()}
    order = _ring(mine)
    at = order.index(node)
    left = order[at + 1 :] + order[:at]
    chosen: list[int] = []
    while left and len(chosen) < copies:
        used = {mine[node], *(mine[other] for other in chosen)}
        fresh = [other for other in left if mine[other] not in used]
        elsewhere = [other for other in left if mine[other] != mine[node]]
        chosen.append((fresh or elsewhere or left)[0])
        left.remove(chosen[-1])
    return chosen


def _ring(groups: Mapping[int, str]) -> list[int]:
    """Return all nodes, groups taking turns."""
    firsts: dict[str, int] = {}
    places: dict[int, int] = {}
    seen: dict[str, int] = {}
    for name in sorted(groups):
        group = groups[name]
        firsts.setdefault(group, name)
        places[name] = seen[group] = seen.get(group, -1) + 1
    return sorted(groups, key=lambda name: (places[name], firsts[groups[name]]))
