"""Which group of nodes a node belongs to: a rack, a block, whatever shares a fast network and a fate.

A group has an index that stays when the group moves elsewhere, and a name, which is where it is now. Where there is an index, that
is the group; where there is none, the name is.

Sources: labels of a Kubernetes pod (:func:`from_labels`), Slurm's topology (:func:`from_slurm`), and settings or the environment
(:func:`given`). Others are one more function that returns a :class:`Place`.

Rule: what can't be meant (an index beyond the number of groups, a word for a number) is an error that says so, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resilience.errors import ConfigError

INDEX_LABEL = "scheduling/rack-group"
NAME_LABEL = "scheduling/rack-id"
COUNT_LABEL = "scheduling/rack-group-size"  # how many groups there are, not how many nodes are in one
_DIGITS = 9


@dataclass(frozen=True)
class Place:
    """Where a node stands: its group's ``name`` and ``index``, and of how many groups, as far as these are known."""

    name: str = ""
    index: int | None = None
    groups: int | None = None

    def __post_init__(self) -> None:
        if self.groups is not None and self.groups < 1:
            raise ConfigError(f"there can't be {self.groups} groups of nodes.")
        if self.index is not None and self.index < 0:
            raise ConfigError(f"group {self.index}: groups of nodes are counted from 0.")
        if self.index is not None and self.groups is not None and self.index >= self.groups:
            raise ConfigError(
                f"group {self.index} of {self.groups}: groups of nodes are counted from 0, so there is none with that index."
            )

    @property
    def known(self) -> bool:
        """Whether the node is in any group."""
        return self.index is not None or bool(self.name)

    @property
    def key(self) -> str:
        """Return what tells this group from the others of its job, also after it has moved; empty where there is none."""
        return str(self.index) if self.index is not None else self.name


NOWHERE = Place()


def from_labels(labels: Mapping[str, str]) -> Place:
    """Return where a pod's labels say it stands. Raises ``ConfigError`` for labels that can't be meant."""
    index = _number(labels, INDEX_LABEL)
    return Place(labels.get(NAME_LABEL, "").strip(), index, _number(labels, COUNT_LABEL))


def from_slurm(variables: Mapping[str, str]) -> Place:
    """Return where Slurm's topology says the node stands: below its last switch, or on its last block. Nowhere without a topology.

    Slurm tells each task the way to its node (``top.left.n1``) and what the words of it are (``switch.switch.node``). The name of
    the node is last, and may have dots in it.
    """
    kinds = variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    words = variables.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(kinds) - 1)
    if len(words) != len(kinds):
        return NOWHERE
    above = [word for kind, word in zip(kinds, words, strict=True) if kind in ("switch", "block")]
    return Place(above[-1].strip()) if above else NOWHERE


def given(name: str | None, index: int | None) -> Place:
    """Return where the settings say this node stands."""
    return Place((name or "").strip(), index)


def _number(labels: Mapping[str, str], label: str) -> int | None:
    text = labels.get(label, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > _DIGITS:
        raise ConfigError(f"label {label} is {text!r}, which is not a number.")
    return int(text)
