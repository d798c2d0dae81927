"""Which rank a node gets. Pure: the members of a round in, one rank each out; a node's workers then stand next to each other.

Where groups of nodes are known, a group's nodes stand next to each other too, and the groups keep their order over restarts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilience.launcher.roster import Member

_LOG = logging.getLogger("resilience.launcher")
_MAX_DIGITS = 9
INFRA_VARIABLES = ("SLURM_PROCID", "GROUP_RANK", "JOB_COMPLETION_INDEX")


def infra_rank(variables: Mapping[str, str]) -> int | None:
    """Return the rank that the infrastructure gave this node: Slurm's, a launcher's around us, an indexed Kubernetes job's."""
    for name in INFRA_VARIABLES:
        text = variables.get(name, "")
        if text.isdecimal() and len(text) <= _MAX_DIGITS:
            return int(text)
    return None


def assign(members: Sequence[Member], by_infra: bool) -> dict[str, int]:
    """Return the rank of every member.

    ``by_infra``: in the order of the infrastructure's ranks, whatever a node had before; nodes without one, and nodes that
    claim the same one, follow in the order of their descriptors. Otherwise, and where no node has one: a node keeps the rank it
    had, gaps are filled by newcomers in the order of their descriptors.

    Where that would tear a group of nodes apart, or change the groups' order, each group is a block of ranks, the rules above hold
    within it, and nodes without a group follow.
    """
    given = by_infra and any(member.infra is not None for member in members)
    plain = _by_infra(members) if given else _by_descriptor(members)
    if _keeps_groups(members, plain):
        return plain
    ranks: dict[str, int] = {}
    for block in _blocks(members):
        ranks.update(_by_infra(block, len(ranks)) if given else _by_descriptor(block, len(ranks)))
    return ranks


def _group(member: Member) -> tuple[int, str] | None:
    """Return what tells a member's group from others: its index, which stays when the group moves, else its name."""
    if member.group_index is not None:
        return (member.group_index, "")
    return (-1, member.group) if member.group else None


def _keeps_groups(members: Sequence[Member], ranks: Mapping[str, int]) -> bool:
    """Whether with these ranks every group is one block, and the groups stand in their order."""
    order = [_group(member) for member in sorted(members, key=lambda it: ranks[it.id])]
    found = [key for place, key in enumerate(order) if key is not None and (place == 0 or order[place - 1] != key)]
    indices = [index for index, name in found if not name]
    before = [_first([it for it in members if _group(it) == key]) for key in found if key[1]]
    known = [first for first in before if first >= 0]
    return len(found) == len(set(found)) and indices == sorted(indices) and known == sorted(known)


def _blocks(members: Sequence[Member]) -> list[list[Member]]:
    """Return the members by group, in the groups' order, those without one last.

    Groups with an index come in its order. Those with only a name stand where they stood: one that is new, as one that moved to
    another rack is, takes a gap that is large enough, else it follows.
    """
    found: dict[tuple[int, str] | None, list[Member]] = {}
    for member in members:
        found.setdefault(_group(member), []).append(member)
    rest = found.pop(None, [])
    indexed = [found[key] for key in sorted(key for key in found if key is not None and not key[1])]
    named = [
        found[key]
        for key in sorted((key for key in found if key is not None and key[1]), key=lambda it: _natural(it[1]))
    ]
    order, at = indexed, sum(len(block) for block in indexed)
    known = sorted((_first(block), index) for index, block in enumerate(named) if _first(block) >= 0)
    fresh = [block for block in named if _first(block) < 0]
    for first, index in known:
        for block in list(fresh):
            if at + len(block) <= first:
                order.append(block)
                fresh.remove(block)
                at += len(block)
        order.append(named[index])
        at += len(named[index])
    return [*order, *fresh, *([rest] if rest else [])]


def _first(block: Sequence[Member]) -> int:
    """Return the first rank that a group had in the round before, or -1 where it was not there."""
    return min((member.rank for member in block if member.rank is not None), default=-1)


def _by_infra(members: Sequence[Member], first: int = 0) -> dict[str, int]:
    given = [member.infra for member in members if member.infra is not None]
    if len(set(given)) < len(given):
        _LOG.warning("several nodes claim the same rank from the infrastructure (%s); they are put in order.", given)
    order = sorted(members, key=lambda it: (it.infra is None, it.infra or 0, _natural(it.id), it.id))
    return {member.id: rank for rank, member in enumerate(order, first)}


def _by_descriptor(members: Sequence[Member], first: int = 0) -> dict[str, int]:
    ranks: dict[str, int] = {}
    taken: set[int] = set()
    order = sorted(members, key=lambda it: (_natural(it.id), it.id))
    for member in order:
        if member.rank is not None and first <= member.rank < first + len(members) and member.rank not in taken:
            ranks[member.id] = member.rank
            taken.add(member.rank)
    gaps = iter(rank for rank in range(first, first + len(members)) if rank not in taken)
    for member in order:
        if member.id not in ranks:
            ranks[member.id] = next(gaps)
    return ranks


def _natural(descriptor: str) -> list[tuple[int, int, str]]:
    """Sort ``node-9`` before ``node-10``."""
    parts: list[tuple[int, int, str]] = []
    word = ""
    for char in descriptor + "\0":
        if word and (char.isdecimal() != word[-1].isdecimal() or char == "\0"):
            parts.append((0, int(word), "") if word.isdecimal() else (1, 0, word))
            word = ""
        word += char
    return parts
