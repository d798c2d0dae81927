"""Whether this node, and the others, may train: the node check as the launcher runs it, before every start of the workers.

1) (session) ``Fitness(…)`` and ``load()`` at start: check processes load while the launcher does other things; an accelerator that
   can't be meant ends the launcher before anything is started
2) (agent)   ``warm()`` before each rendezvous
3) (agent)   ``examine(link, cycle)`` after each rendezvous; no process of it is left when it returns
4) (agent)   obeys: who is unfit is out of the roster before the others come together again

Rule: nobody is checked twice for one start. Nodes that passed, and come together again because others did not, go on.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from resilience import config
from resilience.config import NodeConfig, Settings
from resilience.failover import exits, sentence
from resilience.failover.error_monitor import CHECK_FAILED, STRAGGLER, NodeFault
from resilience.launcher import cuda
from resilience.launcher.agreement import Node
from resilience.launcher.link import Link
from resilience.launcher.roster import Outcome
from resilience.nodecheck import accelerators, pairing
from resilience.nodecheck.crew import Broken, Crew
from resilience.nodecheck.exchange import Examination, Interrupted, Terms
from resilience.nodecheck.judging import Judgement, Ruling, as_table
from resilience.nodecheck.pairing import Rule

_LOG = logging.getLogger("resilience.launcher")
_FREE_S = 10.0
_LOOK_AT_IT = "Have the node looked at; `resilience nodecheck` on it, with the same --accelerator, repeats the check."
STRANDED = "this rendezvous can't go on without it (one of --rdzv-backend=c10d could)"


@dataclass(frozen=True)
class Result:
    """What a check means for the round. ``outcome``: how this launcher ends, if it must. ``verdicts``: what each node that is out
    means for the roster, in the form that :meth:`venue.Venue.enact` takes."""

    may_start: bool
    outcome: Outcome | None = None
    fault: NodeFault | None = None
    verdicts: tuple[dict[str, Any], ...] = ()
    report: dict[str, Any] | None = None


class Fitness:
    """One per launcher that checks its node."""

    def __init__(self, settings: NodeConfig, *, run_dir: str, run_id: str, wanted: int, address: str | None) -> None:
        accelerators.check_name(settings.accelerator)
        self._settings = settings
        self._run_id = run_id
        self._terms = Terms(
            folder=run_dir,
            address=address or socket.getfqdn(),
            wanted=wanted,
            timeout=settings.node_check_timeout,
            rule=Rule(settings.straggler_factor),
        )
        self._crew = Crew(settings.accelerator, config.environment())
        self._passed = False
        self.warm()

    @property
    def limit(self) -> float:
        """How long a check may take, before the launcher is taken for stuck."""
        return self._terms.limit

    def load(self) -> None:
        """Wait for the first process; raise ``ConfigError`` for an accelerator that can't be meant. What is broken is a matter
        for the check, and for all nodes to know."""
        try:
            self._crew.load()
        except Broken as broken:
            _LOG.warning("the check of this node does not begin well: %s.", broken)
            return
        _LOG.info("the node check uses the accelerator %s: %s", self._crew.accelerator, _devices(self._crew.devices))

    def warm(self) -> None:
        """Start the processes for the next check, so that they are ready when the nodes have come together."""
        try:
            self._crew.start()
        except Broken as broken:
            _LOG.warning("%s.", broken)

    def begin(self) -> None:
        """The workers are about to be started (again): what was found out before is of no account."""
        self._passed = False
        self.warm()

    def examine(self, link: Link, cycle: int, fixed: bool) -> Result:
        """Check all nodes of the round. Returns the same on all of them, but for what concerns this one. ``fixed``: the nodes can't
        come together again without those that fail, so all end."""
        start = time.monotonic()
        if not self._passed:
            _LOG.info("this node and %s more are checked before the workers start.", len(link.nodes) - 1)
        names = [node.title for node in link.nodes]
        examination = Examination(link, link.me, names, crew=self._crew, terms=self._terms)
        try:
            ruling = examination.run(self._passed)
        except Interrupted as why:
            if fixed and link.company:
                return Result(False, Outcome(exits.CUT_OFF, f"the node check was interrupted: {why}; {STRANDED}"))
            _LOG.warning("the node check was interrupted: %s. The nodes come together again.", why)
            gone = list(link.lost_nodes()) or [0]
            return Result(False, verdicts=tuple(departed([link.nodes[node] for node in gone if node != link.me])))
        finally:
            pids = self._crew.pids()
            self.close()
            cuda.wait_until_free(pids, _FREE_S)  # the workers need all of the devices' memory
        if ruling.skipped:
            return Result(True)
        took = time.monotonic() - start
        _LOG.info("node check (%.1f s):\n%s", took, as_table(ruling, names))
        result = consequences(
            ruling,
            link.nodes,
            link.me,
            self._settings.exclude_straggler,
            run=self._run_id,
            cycle=cycle,
            at=time.time(),
            fixed=fixed,
        )
        self._passed = result.outcome is None
        return result

    def close(self) -> None:
        """End the check processes."""
        self._crew.close()


def consequences(
    ruling: Ruling,
    nodes: Sequence[Node],
    me: int,
    exclude_straggler: bool,
    *,
    run: str,
    cycle: int,
    at: float,
    fixed: bool = False,
) -> Result:
    """Say what a ruling means: who is out, how this launcher ends, what is reported. Pure."""
    unfit, lost = ruling.unfit(exclude_straggler), ruling.those(pairing.UNDECIDED, pairing.VANISHED)
    if not unfit and not lost:
        return Result(True)
    verdicts = [_verdict(nodes[item.node], f"it failed its node check: {item.why}", True) for item in unfit]
    verdicts += departed([nodes[item.node] for item in lost])
    outcome, fault = None, None
    mine = next((item for item in (*unfit, *lost) if item.node == me), None)
    if mine in unfit and mine is not None:
        name = nodes[me].name or nodes[me].host
        outcome = Outcome(exits.UNFIT, f"node {name} failed its check and does not train: {mine.why}")
        reason = STRAGGLER if mine.state == pairing.STRAGGLER else CHECK_FAILED
        fault = NodeFault(name, reason, f"node check: {mine.why}", run=run, at=at) if ruling.mark else None
    elif mine is not None:
        outcome = Outcome(exits.CUT_OFF, ruling.note or mine.why)
    elif fixed:
        who = ", ".join(f"node {item.node} ({nodes[item.node].title})" for item in (*unfit, *lost))
        outcome = Outcome(exits.CUT_OFF, f"{who} did not pass the node check; {STRANDED}")
    return Result(False, outcome, fault, tuple(verdicts), _report(ruling, (*unfit, *lost), nodes, cycle, fixed=fixed))


def own_fault(settings: Settings, why: str, run: str, at: float) -> NodeFault:
    """Return the fault of this node, as far as it can be told before the nodes have come together."""
    name = settings.failover.node_name or socket.gethostname()
    return NodeFault(name, CHECK_FAILED, f"node check: {why}", run=run, at=at)


def departed(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Return what nodes that are gone mean for the roster: they are out, and may come again."""
    return [_verdict(node, "", False) for node in nodes]


def _verdict(node: Node, why: str, excluded: bool) -> dict[str, Any]:
    order = {"action": sentence.NODE, "detail": why}
    return {"sentence": order, "leavers": [node.id], "excluded": [node.name] if excluded else []}


def _report(
    ruling: Ruling, out: Sequence[Judgement], nodes: Sequence[Node], cycle: int, *, fixed: bool
) -> dict[str, Any]:
    """Return the report of a start that did not happen, in the form of all reports."""
    worst = out[0]
    rest = f"; {STRANDED}, so the others end with {exits.CUT_OFF}" if fixed else "; the others go on without, or wait"
    codes = {pairing.UNDECIDED: exits.CUT_OFF, pairing.VANISHED: None}
    leave = [
        f"node {item.node} ({nodes[item.node].title}) "
        + (f"ends with exit code {code}" if code is not None else "is gone")
        + (f" ({item.state}: {item.why})" if item is not worst else "")  # the culprit's is said above
        for item in out
        for code in (codes.get(item.state, exits.UNFIT),)
    ]
    remedy = {
        pairing.UNDECIDED: "Look at the network between the nodes; start again, if possible with one node more.",
        pairing.VANISHED: "Look at why the launcher on that node ended.",
    }
    culprit: dict[str, Any] = {
        "rank": None,
        "kind": "check",
        "host": nodes[worst.node].title,
        "node": worst.node,
        "pid": None,
        "step": None,
        "sections": [],
        "message": f"{worst.state}, {worst.why}",
        "stack": "",
        "exit_code": None,
        "log": [],
        "log_path": None,
    }
    return {
        "cycle": cycle,
        "culprit": culprit,
        "victims": [],
        "action": sentence.NODE,
        "action_detail": f"no workers were started; {', '.join(leave)}{rest if len(nodes) > 1 else ''}",
        "strategy": "",
        "remedy": remedy.get(
            worst.state,
            _LOOK_AT_IT,
        ),
        "waiting": "",
        "failures": [],
        "lost": [],
        "ranks": [],
        "check": [{**dataclasses.asdict(item), "name": nodes[item.node].title} for item in ruling.judgements],
        "note": ruling.note,
    }


def _devices(number: int) -> str:
    return "1 device." if number == 1 else f"{number} devices."
