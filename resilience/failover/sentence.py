"""From a decision to what every launcher does: the table of ``docs/failover.md``, as a pure function.

action      culprit's node                     the other nodes                exit code of those that end
restart     restarts its workers               restart theirs                 –
node        ends its workers and leaves        restart theirs, or wait        76, or the worker's hardware code
stop        ends                               end                            1
abort       ends                               end                            77
shutdown    ends                               end                            78
preempted   ends                               end                            79
wait        ends its workers, stays            go on untouched (min-healthy)  –
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resilience.failover import exits
from resilience.failover.failure import HARDWARE_CODES
from resilience.failover.policy import Decision
from resilience.failover.strategy import FailoverStrategy as Strategy

RESTART, NODE, STOP, ABORT, SHUTDOWN, FINISHED = "restart", "node", "stop", "abort", "shutdown", "finished"
PREEMPTED, WAIT = "preempted", "wait"
ENDS = (STOP, ABORT, SHUTDOWN, FINISHED, PREEMPTED)  # for every node
EXCLUDE_THIS_NODE, SHUTDOWN_WORKLOAD = "ExcludeThisNode", "ShutdownWorkload"


@dataclass(frozen=True)
class Sentence:
    """What is done. ``leaver``: the node that leaves; ``excluded``: it must not come back; ``counts``: against the budget."""

    action: str
    detail: str
    strategy: str = ""
    exit_code: int = exits.FINISHED
    leaver: int | None = None
    also: tuple[int, ...] = ()  # other nodes that leave with it
    codes: Mapping[str, int] = field(default_factory=dict)  # of nodes with broken devices, each its own; as JSON has it
    excluded: bool = False
    counts: bool = False
    strands: bool = False  # the other nodes can't go on without those that leave

    @property
    def restarts(self) -> bool:
        """Whether the job goes on."""
        return self.action in (RESTART, NODE)


@dataclass(frozen=True)
class Scene:
    """What a sentence needs to know besides the decision: who it is about, and how many restarts are counted."""

    node: int
    host: str
    exit_code: int | None
    error_code: int | None
    used: int
    max_restarts: int
    fixed: bool = False  # the nodes never come together anew


def pronounce(decision: Decision, scene: Scene) -> Sentence:
    """Turn a decision into what is done."""
    name = decision.strategy.value
    if not decision.restart:
        return Sentence(STOP, decision.reason, name, exits.FAILED)
    if decision.strategy is Strategy.ABORTION_FAILOVER:
        return Sentence(ABORT, f"the job was ended on every node: {decision.reason}", name, exits.ABORTED)
    if decision.strategy is Strategy.NODE_FAILOVER:
        codes = [code for code in (scene.exit_code, scene.error_code) if code in HARDWARE_CODES]
        code = codes[0] if codes and codes[0] is not None else exits.NODE_LEFT
        where = f"node {scene.node} ({scene.host})"
        rest = "" if scene.fixed else ", the others go on without it or wait"
        detail = f"{where} leaves the job with exit code {code}{rest}: {decision.reason}"
        return Sentence(NODE, detail, name, code, leaver=scene.node)
    who = "the workers of every node" if decision.strategy is Strategy.GLOBAL_FAILOVER else "all workers"
    budget = f"({scene.used + 1} of {scene.max_restarts} restarts used)"
    why = "" if decision.reason == "all workers are restarted" else f"; {decision.reason}"
    return Sentence(RESTART, f"{who} are restarted {budget}{why}", name, counts=True)


def with_broken(chosen: Sentence, broken: Mapping[int, tuple[str, int]]) -> Sentence:
    """Have every node leave whose worker said that its device is broken, each with its own code, and not the culprit's alone.
    ``broken``: by node, its host and the code. Where nobody goes on, or an extension has all start again, it is only noted."""
    chosen = dataclasses.replace(chosen, codes={str(node): code for node, (_, code) in broken.items()})
    others = [node for node in sorted(broken) if node != chosen.leaver]
    if not others or not chosen.restarts or chosen.strategy == Strategy.GLOBAL_FAILOVER.value:
        return chosen
    said = [
        f"node {node} ({broken[node][0]}) leaves the job with exit code {broken[node][1]}, {HARDWARE_CODES[broken[node][1]]}"
        for node in others
    ]
    leaver, code = (others[0], broken[others[0]][1]) if chosen.leaver is None else (chosen.leaver, chosen.exit_code)
    return dataclasses.replace(
        chosen,
        action=NODE,
        detail="; ".join([chosen.detail, *said]),
        exit_code=code,
        leaver=leaver,
        also=tuple(node for node in others if node != leaver),
    )


def stranded(chosen: Sentence) -> Sentence:
    """Say that no node can leave a static rendezvous alone: it has no rounds in which the others could come together without it."""
    if chosen.action != NODE:
        return chosen
    detail = (
        f"{chosen.detail}; a static rendezvous can't go on without it, so the other nodes end with exit code {exits.CUT_OFF} "
        "(with --rdzv-backend=c10d they could)"
    )
    return dataclasses.replace(chosen, detail=detail, strands=True)


def broken_devices(failures: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, int]:
    """Return which nodes' workers said that their device is broken, and by which code; ``failures`` are theirs, by node."""
    found: dict[int, int] = {}
    for node, items in failures.items():
        codes = [item.get(name) for name in ("exit_code", "error_code") for item in items]
        known = [code for code in codes if code in HARDWARE_CODES]
        if known and known[0] is not None:
            found[node] = known[0]
    return found


def preempted(why: str, excluded: int | None = None) -> Sentence:
    """A rank failed, or did not leave in time, while the job was to stop: nothing is started again. ``excluded``: a node that
    asked for it meanwhile, and must not come back."""
    detail = f"the job was to stop ({why}), nothing is restarted"
    return Sentence(PREEMPTED, detail, exit_code=exits.PREEMPTED, leaver=excluded, excluded=excluded is not None)


def interrupted(signal: str, adopted: bool) -> Sentence:
    """The only launcher of a job was told to end while it dealt with a failure: nothing is started again."""
    detail = f"{signal} came meanwhile: nothing is restarted"
    return Sentence(PREEMPTED if adopted else STOP, detail, exit_code=exits.PREEMPTED if adopted else exits.FAILED)


def waits(chosen: Sentence, whole: int, min_nodes: int) -> Sentence:
    """With ``min-healthy`` and enough whole nodes a restart is not due: this node's workers are ended, the others go on."""
    are = f"{whole} node is" if whole == 1 else f"{whole} nodes are"
    detail = f"the workers of this node were ended; {are} whole and --nnodes asks for {min_nodes}, so the others go on"
    return Sentence(WAIT, detail, chosen.strategy)


def together(chosen: Sentence, others: Sequence[tuple[Sentence, int]]) -> Sentence:
    """Add nodes that ask to be excluded at the same time, each with its reason."""
    details = "; ".join([chosen.detail, *(other.detail for other, _ in others)])
    return dataclasses.replace(chosen, detail=details, also=tuple(node for _, node in others))


def on_request(request: Mapping[str, Any], node: int, host: str) -> Sentence:
    """Turn a worker's control request into what is done."""
    said = f"rank {request['rank']} asked for it: {request['description']}"
    if request["action"] == SHUTDOWN_WORKLOAD:
        return Sentence(SHUTDOWN, f"the job was shut down on every node; {said}", exit_code=exits.SHUT_DOWN)
    detail = f"node {node} ({host}) is excluded from the job and leaves with exit code {exits.NODE_LEFT}; {said}"
    return Sentence(NODE, detail, exit_code=exits.NODE_LEFT, leaver=node, excluded=True)
