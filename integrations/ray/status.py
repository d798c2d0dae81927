"""How a job on Ray stands, for people and programs; and the error that says what can't be done with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resilience.integrations.ray.silence import SHOWN_S
from resilience.integrations.ray.state import Phase, State

from resilience.errors import ResilienceError


class RayJobError(ResilienceError):
    """A job on Ray that can't be submitted, found or waited for."""


@dataclass(frozen=True)
class NodeStatus:
    """One of a job's nodes. ``node``: the id of its Ray node, empty while it has none; ``host``: its address. ``running``: its
    launcher runs."""

    rank: int
    group: int
    rack: str
    node: str
    running: bool
    exit_code: int | None
    host: str = ""


@dataclass(frozen=True)
class JobStatus:
    """A job. ``phase``: GATHERING, RUNNING, STOPPING, ENDING, SUCCEEDED, FAILED or STOPPED. ``launches``: of launchers so far, all
    nodes counted. ``moves``: of groups. ``history``: what happened, one line each, with the time. ``silent_s``: since the
    supervisor's last sign of life, where that is longer than a minute; else 0."""

    name: str
    phase: str
    reason: str
    exit_code: int | None
    nodes: tuple[NodeStatus, ...]
    excluded: Mapping[str, str]
    round: int
    launches: int
    moves: int
    history: tuple[str, ...]
    silent_s: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return Phase(self.phase).over

    @property
    def succeeded(self) -> bool:
        """Whether it has done its work."""
        return self.phase == Phase.SUCCEEDED.value

    def __str__(self) -> str:
        words = f"job {self.name}: {self.phase}" + f", {self.reason}" * bool(self.reason)
        silent = (
            f"its supervisor gave its last sign of life {self.silent_s:.0f} s ago; wait() and stop() have it replaced"
        )
        words += f", {silent}" * bool(self.silent_s)
        rows = [
            f"  node {it.rank}"
            + f" ({it.rack})" * bool(it.rack)
            + (f" on {it.host}, Ray node {it.node[:16]}" if it.node else " on no node yet")
            for it in self.nodes
        ]
        rows += [f"  Ray node {node[:16]} is not used again: {why}" for node, why in self.excluded.items()]
        rows += [f"  groups have moved: {self.moves}"] * bool(self.moves)
        return "\n".join([words, *rows, *(f"  {line}" for line in self.history[-10:])])


def status_of(name: str, state: State, silent_s: float = 0.0) -> JobStatus:
    """Return a state as people see it. ``silent_s``: since the supervisor's last sign of life."""
    nodes = tuple(
        NodeStatus(
            slot.rank,
            slot.group,
            state.racks[slot.group] if slot.group < len(state.racks) else "",
            slot.node,
            bool(slot.launch) and slot.ended is None and not state.phase.over,
            slot.ended,
            slot.host,
        )
        for slot in state.slots
    )
    return JobStatus(
        name,
        state.phase.value,
        state.reason,
        state.exit_code,
        nodes,
        dict(state.excluded),
        state.round,
        state.launches,
        state.groups.moves,
        state.lines,
        silent_s if silent_s > SHOWN_S and not state.phase.over else 0.0,
    )
