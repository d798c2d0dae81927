"""Who is to blame? A pure function of what the ranks of a job testify and how they ended.

In lockstep training all ranks wait for the slowest. The one that is furthest behind is the culprit, the others that are
silent are its victims, however their clocks expired. A rank that died comes before any that hangs: the hang is its doing.
Of several that died, one that ended by itself comes before those whose collectives broke because it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from resilience.failover.failure import EXIT, HARDWARE_CODES, RankFailure

_WAITING = (
    "distributed/distributed_c10d.py",
    "distributed/rendezvous.py",
    "torch/autograd/graph.py",  # backward: gradient reduction waits in there
    "torch/nn/parallel/distributed.py",
)


@dataclass(frozen=True)
class Blame:
    """Who, why in one word, and who only waited."""

    rank: int | None
    kind: str  # hang, exit, signal, oom, exception, node, left
    victims: tuple[int, ...]


def blame(
    testimonies: Sequence[dict[str, Any]], deaths: Sequence[RankFailure], hung: Sequence[int], lost: Sequence[int] = ()
) -> Blame:
    """Name the culprit of a cycle.

    ``hung``: ranks whose monitor gave a verdict. ``lost``: ranks of nodes that are silent.
    """
    everyone = {int(item["rank"]) for item in testimonies} | {death.rank for death in deaths} | set(hung) | set(lost)
    first = first_cause(deaths)
    if lost and (first is None or first.echo or _may_be_an_echo(first)):
        # Ranks that raise because a peer is gone are its victims; a signal is a cause of its own.
        return Blame(min(lost), "node", tuple(sorted(everyone - set(lost))))
    if first is not None and first.echo:
        gone = [item for item in testimonies if item["state"] == "gone" and item["rank"] not in _ranks(deaths)]
        if gone:  # everybody who failed fell over somebody, and this one left in peace before
            early = min(gone, key=lambda item: (item["step"] if item["step"] is not None else -1, item["rank"]))
            return Blame(int(early["rank"]), "left", _others(everyone, int(early["rank"])))
    if first is not None:
        return Blame(first.rank, first.kind, _others(everyone, first.rank))
    if not testimonies:
        culprit = min(hung) if hung else None
        return Blame(culprit, "hang", _others(everyone, culprit))
    shared = _shared_sections(testimonies)
    worst = min(testimonies, key=lambda item: _standing(item, shared, hung))
    return Blame(int(worst["rank"]), "hang", _others(everyone, int(worst["rank"])))


def first_cause(deaths: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure that came first of those that are no echo of another; of echoes alone the first."""
    return min(deaths, key=lambda death: (death.echo, death.at_ns, death.rank), default=None)


def _may_be_an_echo(death: RankFailure) -> bool:
    """Whether a failure could come from a lost peer: it left no words, or only that a connection broke."""
    if death.kind == EXIT:
        return death.exit_code not in HARDWARE_CODES
    return death.exit_code > 0 and death.signature.startswith(("Connection", "OSError", "TimeoutError", "BrokenPipe"))


def _ranks(deaths: Sequence[RankFailure]) -> set[int]:
    return {death.rank for death in deaths}


def _others(everyone: set[int], culprit: int | None) -> tuple[int, ...]:
    return tuple(sorted(everyone - {culprit}))


def _shared_sections(testimonies: Sequence[dict[str, Any]]) -> list[str]:
    """Sections that every rank that called us has entered: only those can be compared."""
    tables = [set(item["entries"]) for item in testimonies if item["adopted"]]
    return sorted(set.intersection(*tables)) if tables else []


def _standing(item: dict[str, Any], shared: list[str], hung: Sequence[int]) -> tuple[Any, ...]:
    """Order ranks from the most to the least to blame."""
    stopped = item["state"] in ("T", "t")
    finished = item["finishing"]
    done = sum(item["entries"].get(name, 0) for name in shared)
    step = item["step"] if item["step"] is not None else -1
    return (
        not stopped,
        finished and item["rank"] not in hung,
        item["adopted"],
        step,
        item["beats"],
        done,
        _waits(item["stack"]),
        -item["quiet"],
        item["rank"],
    )


def _waits(stack: str) -> bool:
    """Whether the main thread's innermost frames are in a collective: such a rank waits for another one."""
    mark = "most recent call first"
    main = stack[stack.find("Current thread ") + 1 :]  # helper threads come before it, or after it
    main = main.partition(mark)[2].partition(mark)[0] or main
    innermost = [line for line in main.splitlines() if line.strip().startswith("File")][:3]
    return any(path in line for line in innermost for path in _WAITING)
