"""What has failed so far, and what it cost: one record for the whole job, handed from cycle to cycle and from node to node.

Restarts are counted against progress: once the job gets further than ever before, the count starts again. Progress is the
highest step that any rank told; a script that tells none has none, and then every restart counts, as with torchrun.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KEPT = 32


@dataclass(frozen=True)
class Past:
    """One failed cycle. ``step`` is the highest one that the job had reached in it; ``node`` the culprit's."""

    cycle: int
    kind: str
    signature: str
    node: str = ""
    rank: int | None = None
    exit_code: int | None = None
    step: int | None = None
    message: str = ""


@dataclass(frozen=True)
class History:
    """All failures, and the restarts since the last progress: in all, and by the node that caused them."""

    total: int = 0
    since_progress: int = 0
    by_node: Mapping[str, int] = field(default_factory=dict)
    best_step: int | None = None
    past: tuple[Past, ...] = ()

    @property
    def last(self) -> Past | None:
        """The failure before this one."""
        return self.past[-1] if self.past else None

    def is_progress(self, step: int | None) -> bool:
        """Whether ``step`` is further than the job has ever been when a cycle failed."""
        return step is not None and (self.best_step is None or step > self.best_step)

    def counted(self, step: int | None) -> int:
        """Return the restarts that count, for a cycle that reached ``step``."""
        return 0 if self.is_progress(step) else self.since_progress

    def on_node(self, node: str, step: int | None) -> int:
        """Return the restarts that count and that ``node`` caused."""
        return 0 if self.is_progress(step) else self.by_node.get(node, 0)

    def after(self, failure: Past, restarted: bool, counts: bool = True) -> History:
        """Return the history with one more failure in it; ``counts``: the restart that follows is taken from the budget."""
        base = dataclasses.replace(self, since_progress=0, by_node={}) if self.is_progress(failure.step) else self
        one = int(restarted and counts)
        steps = [step for step in (self.best_step, failure.step) if step is not None]
        return History(
            total=self.total + int(restarted),
            since_progress=base.since_progress + one,
            by_node={**base.by_node, failure.node: base.by_node.get(failure.node, 0) + one},
            best_step=max(steps, default=None),
            past=(*self.past, failure)[-_KEPT:],
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> History:
        """Read what :meth:`as_json` made."""
        return cls(**{**data, "past": tuple(Past(**item) for item in data.get("past", ()))})

    @staticmethod
    def newest(several: list[History]) -> History:
        """Of what several nodes remember, return what knows most: a replaced node comes with nothing."""
        return max(several, key=lambda it: (it.total, it.last.cycle if it.last else -1), default=History())
