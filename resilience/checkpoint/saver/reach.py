"""Which snapshots can be brought together from the memory of all nodes, and who has to fetch what from whom. Pure.

A node that has a snapshot in its own memory needs nothing. One that has not, because it took a lost one's place, needs what is each
of its ranks' alone from whoever keeps a copy, and what all nodes have in common from any that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Key = tuple[int, int]
Need = dict[str, Any]  # "own": [[rank, nodes that have it]], "shared": nodes that have it


def reachable(asks: Mapping[int, Mapping[str, Any]]) -> dict[Key, dict[int, Need]]:
    """Return the snapshots that all nodes have or can fetch, and by node what is to be fetched. ``asks``: what each node says of
    its ``memory``, its ``ranks`` (the first, and how many) and the ``replicas`` that it keeps (generation, step, rank)."""
    memory = {node: {_key(item) for item in ask["memory"]} for node, ask in asks.items()}
    kept: dict[tuple[Key, int], list[int]] = {}
    for node, ask in sorted(asks.items()):
        for generation, step, rank in ask.get("replicas", ()):
            kept.setdefault(((int(generation), int(step)), int(rank)), []).append(node)
    found = {}
    for key in set().union(*memory.values()):
        having = sorted(node for node, keys in memory.items() if key in keys)
        needs = {node: _need(key, asks[node], kept, having) for node in asks if node not in having}
        if all(need is not None for need in needs.values()):
            found[key] = {node: need for node, need in needs.items() if need is not None}
    return found


def _need(
    key: Key, ask: Mapping[str, Any], kept: Mapping[tuple[Key, int], list[int]], having: list[int]
) -> Need | None:
    first, local = ask.get("ranks", (0, 0))
    own = [[rank, kept.get((key, rank), [])] for rank in range(int(first), int(first) + int(local))]
    return {"own": own, "shared": having} if own and all(nodes for _, nodes in own) else None


def inherited(asks: Mapping[int, Mapping[str, Any]]) -> dict[Key, bool]:
    """Return the snapshots of another number of ranks that every node has whole, and whether each rank finds its own values."""
    offers = [{_key(item[:2]): bool(item[2]) for item in ask.get("inherited", ())} for ask in asks.values()]
    common = set.intersection(*map(set, offers)) if offers else set()
    return {key: all(offer[key] for offer in offers) for key in common}


def _key(item: Iterable[int]) -> Key:
    generation, step = item
    return int(generation), int(step)
