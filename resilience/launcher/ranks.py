"""Which rank a node gets. Pure: the members of a round in, one rank each out; a node's workers then stand next to each other."""

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
    """
    given = any(member.infra is not None for member in members)
    return _by_infra(members) if by_infra and given else _by_descriptor(members)


def _by_infra(members: Sequence[Member]) -> dict[str, int]:
    given = [member.infra for member in members if member.infra is not None]
    if len(set(given)) < len(given):
        _LOG.warning("several nodes claim the same rank from the infrastructure (%s); they are put in order.", given)
    order = sorted(members, key=lambda it: (it.infra is None, it.infra or 0, _natural(it.id), it.id))
    return {member.id: rank for rank, member in enumerate(order)}


def _by_descriptor(members: Sequence[Member]) -> dict[str, int]:
    ranks: dict[str, int] = {}
    taken: set[int] = set()
    order = sorted(members, key=lambda it: (_natural(it.id), it.id))
    for member in order:
        if member.rank is not None and member.rank < len(members) and member.rank not in taken:
            ranks[member.id] = member.rank
            taken.add(member.rank)
    gaps = iter(rank for rank in range(len(members)) if rank not in taken)
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
