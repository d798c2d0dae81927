"""From an incident to a verdict: hear everybody, name the culprit, ask the extension, apply the rules, tell all nodes.

Deciding is pure and elsewhere (:mod:`culprit`, :mod:`policy`, :mod:`sentence`); this collects what they need, in order:

1) raise the alarm: whoever is first owns the verdict, the others testify and wait for it
2) this node's testimony: stacks and pages of all ranks, failures of the dead, requests
3) the other nodes' testimony
4) report, decision, verdict
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilience.config import Settings
from resilience.failover.extension import Extension
from resilience.failover.failure import RankFailure
from resilience.failover.history import History, Past
from resilience.failover.policy import FailureState, decide
from resilience.failover.sentence import (
    NODE,
    RESTART,
    SHUTDOWN_WORKLOAD,
    STOP,
    Scene,
    Sentence,
    broken_devices,
    interrupted,
    on_request,
    preempted,
    pronounce,
    stranded,
    together,
    waits,
    with_broken,
)
from resilience.failover.strategy import AgentFailureInfo, FailoverStrategy
from resilience.launcher import cuda
from resilience.launcher.coroner import Coroner
from resilience.launcher.hub import Hub
from resilience.launcher.link import Link
from resilience.observe import report as reports

Verdict = dict[str, Any]
_HURRY_S = 1.0


@dataclass(frozen=True)
class Cycle:
    """The cycle that a case is about. ``offset_ns``: this node's clock less node 0's."""

    number: int = 0
    offset_ns: int = 0
    history: History = History()


class Court:
    """One per launcher."""

    def __init__(
        self,
        hub: Hub,
        coroner: Coroner,
        settings: Settings,
        *,
        max_restarts: int,
        extension: Extension | None = None,
        flight: Path | None = None,
        fixed: bool = False,
    ) -> None:
        """``fixed``: the nodes never come together anew, so none can leave without the others' end."""
        self._hub = hub
        self._coroner = coroner
        self._settings = settings
        self._max_restarts = max_restarts
        self._extension = extension
        self._flight = flight
        self._fixed = fixed
        self.asked: Callable[[], str] = str  # the signal that this launcher is to end by, or ""
        self.let_go: Callable[[], None] = lambda: None  # raises if there is one

    # -- testimony --------------------------------------------------------------------------------------------------

    def testify(
        self, cycle: Cycle, node: int, exit_codes: Mapping[int, int] | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Return everything that this node has to say. Also called from the link's thread, when another node asks."""
        hangs = self._hub.hangs()
        if hangs and self._flight is not None:
            cuda.ask_for_dumps(self._flight, self._hub.pids())
        testimonies = self._hub.testify(timeout or self._settings.monitor.testimony_timeout)
        codes = {**self._coroner.dying(testimonies), **(self._coroner.dead() if exit_codes is None else exit_codes)}
        failures = self._coroner.examine(codes, self._hub.ended_at(), testimonies)
        for item in testimonies:
            item["log"], item["log_path"] = self._coroner.log_of(item["rank"])
        corrected = [dataclasses.replace(item, at_ns=item.at_ns - cycle.offset_ns).as_json() for item in failures]
        return {
            "node": node,
            "testimonies": testimonies,
            "failures": corrected,
            "hangs": {str(rank): _plain(hang) for rank, hang in hangs.items()},
            "collectives": self._collectives() if hangs else "",
            "pids": {str(rank): pid for rank, pid in self._hub.pids().items()},
            "control": self._hub.request(),
            "adopted": self._hub.adopted(),
        }

    def _collectives(self) -> str:
        timeout = self._settings.monitor.testimony_timeout
        return cuda.analyse(self._flight, timeout) if self._flight is not None else ""

    # -- verdict ----------------------------------------------------------------------------------------------------

    def try_alone(
        self, link: Link, cycle: Cycle, exit_codes: Mapping[int, int] | None, whole: int, min_nodes: int
    ) -> Verdict | None:
        """Return a verdict that concerns this node only (``min-healthy``); None when it concerns everybody."""
        said = [self.testify(cycle, link.me, exit_codes)]
        report = self._report(said, link, cycle)
        chosen = self._sentence(said, report, link, cycle)
        if chosen.action in (RESTART, STOP) and chosen.strategy == FailoverStrategy.NORMAL_FAILOVER.value:
            chosen = waits(chosen, whole, min_nodes)  # no restart is due, so no budget is needed
        elif chosen.action != NODE:
            return None
        return self._verdict(report, chosen, link, cycle)

    def try_case(
        self, link: Link, cycle: Cycle, exit_codes: Mapping[int, int] | None = None, stopping: str = ""
    ) -> Verdict:
        """Return the verdict on whatever happened; the same on every node. ``stopping``: why the job is to stop, if it is."""
        timeout = self._settings.monitor.testimony_timeout
        owner = link.raise_alarm({"cycle": cycle.number})
        if stopping:
            timeout = min(timeout, _HURRY_S)  # what a scheduler gives does not wait for testimony
        said = [self.testify(cycle, link.me, exit_codes, timeout)]
        if not owner:
            given = link.await_verdict(3 * timeout + self._settings.failover.failover_timeout, self.let_go)
            if given is not None:
                return given
        # A node that waits for a stopped monitor needs all of the time.
        said += link.collect(timeout if stopping else timeout + 2.0)
        report = self._report(said, link, cycle)
        report["collectives"] = next((item["collectives"] for item in said if item["collectives"]), "")
        chosen = self._when_stopping(said, report, stopping) if stopping else None
        chosen = chosen or self._sentence(said, report, link, cycle)
        chosen = stranded(chosen) if self._fixed and link.company else chosen
        if self.asked() and not link.company and chosen.restarts:
            chosen = interrupted(self.asked(), self._hub.adopted())
        chosen = dataclasses.replace(chosen, codes={str(node): code for node, code in _broken(said).items()})
        return link.give_verdict(self._verdict(report, chosen, link, cycle))

    def _when_stopping(self, said: list[dict[str, Any]], report: reports.Report, why: str) -> Sentence | None:
        """Return the sentence while the job is to stop; ``None`` if a rank asked for the end of the job, which goes before it."""
        requests = [(node["control"], node["node"]) for node in said if node["control"]]
        if any(request["action"] == SHUTDOWN_WORKLOAD for request, _ in requests):
            return None
        if not report["failures"] and not report["lost"]:
            reports.put_late_leaver(report, self._settings.failover.stop_grace)
        return preempted(why, next((node for _, node in requests), None))

    def _report(self, said: list[dict[str, Any]], link: Link, cycle: Cycle) -> reports.Report:
        lost = {rank: why for node, why in link.lost_nodes().items() for rank in link.nodes[node].ranks}
        places = {rank: (number, node.title) for number, node in enumerate(link.nodes) for rank in node.ranks}
        evidence = reports.Evidence(
            cycle=cycle.number,
            testimonies=[item for node in said for item in node["testimonies"]],
            failures=[RankFailure.from_json(item) for node in said for item in node["failures"]],
            hangs={int(rank): hang for node in said for rank, hang in node["hangs"].items()},
            nodes=places,
            pids={int(rank): pid for node in said for rank, pid in node["pids"].items()},
            lost=lost,
        )
        return reports.compose(evidence)

    def _sentence(self, said: list[dict[str, Any]], report: reports.Report, link: Link, cycle: Cycle) -> Sentence:
        requests = [(node["control"], node["node"]) for node in said if node["control"]]
        if requests:
            request, node = max(requests, key=lambda item: item[0]["action"] == SHUTDOWN_WORKLOAD)
            _put_request(report, request, node, link.nodes[node].title)
            chosen = on_request(request, node, link.nodes[node].title)
            others = [
                (on_request(it, at, link.nodes[at].title), at) for it, at in requests if at != node and chosen.excluded
            ]
            return together(chosen, others)
        culprit, own = report["culprit"], _own_failure(report)
        state = FailureState(
            now=self._past(report, link),
            history=cycle.history,
            max_restarts=self._max_restarts,
            max_node_restarts=self._settings.failover.max_node_restarts,
            adopted=any(node["adopted"] for node in said),
            began=bool(own.get("began", True)),
            error_code=culprit.get("error_code"),
            echo=bool(own.get("echo")),
        )
        asked, who = self._ask(report, link, cycle)
        scene = Scene(
            node=culprit["node"],
            host=culprit["host"],
            exit_code=culprit["exit_code"],
            error_code=culprit.get("error_code"),
            used=cycle.history.counted(state.now.step),
            max_restarts=self._max_restarts,
            fixed=self._fixed,
        )
        broken = {node: (link.nodes[node].title, code) for node, code in _broken(said).items()}
        return with_broken(pronounce(decide(state, asked, who), scene), broken)

    def _past(self, report: reports.Report, link: Link) -> Past:
        culprit, own = report["culprit"], _own_failure(report)
        inner = culprit["sections"][-1]["name"] if culprit["sections"] else ""
        steps = [item["step"] for item in report["ranks"] if item["step"] is not None]
        node = culprit["node"]
        return Past(
            cycle=report["cycle"],
            kind=culprit["kind"],
            signature=own.get("signature") or f"{culprit['kind']}|{inner}",
            node=(link.nodes[node].name or link.nodes[node].host) if 0 <= node < len(link.nodes) else "",
            rank=culprit["rank"],
            exit_code=culprit["exit_code"],
            step=max(steps, default=None),
            message=culprit["message"],
        )

    def _ask(self, report: reports.Report, link: Link, cycle: Cycle) -> tuple[FailoverStrategy, str]:
        if self._extension is None:
            return FailoverStrategy.NORMAL_FAILOVER, ""
        culprit = report["culprit"]
        info = AgentFailureInfo(
            node_rank=culprit["node"],
            timestamp=time.time(),
            log_content="\n".join(culprit["log"]),
            extra_info={"stack": culprit["stack"], **culprit.get("context", {})},
            host=culprit["host"],
            rank=culprit["rank"],
            kind=culprit["kind"],
            message=culprit["message"],
            exit_code=culprit["exit_code"],
            error_code=culprit.get("error_code"),
            cycle=cycle.number,
            step=self._past(report, link).step,
            restart_count=cycle.history.total,
            max_restarts=self._max_restarts,
            failures=report["failures"],
            history=[dataclasses.asdict(item) for item in cycle.history.past],
            report=report,
        )
        return self._extension.ask(info, lambda: bool(self.asked())), f"the extension {self._extension.path}"

    def _verdict(self, report: reports.Report, chosen: Sentence, link: Link, cycle: Cycle) -> Verdict:
        past = self._past(report, link)
        lost = [link.nodes[node].id for node in link.lost_nodes()]
        leavers = [node for node in (chosen.leaver, *chosen.also) if node is not None]
        return {
            "report": reports.conclude(report, chosen.action, chosen.detail, chosen.strategy),
            "sentence": dataclasses.asdict(chosen),
            "history": cycle.history.after(past, chosen.restarts, chosen.counts).as_json(),
            "leavers": [link.nodes[node].id for node in leavers if link.nodes[node].id],
            "excluded": [link.nodes[node].name for node in leavers if chosen.excluded],
            "departed": [ident for ident in lost if ident],
        }


def _broken(said: list[dict[str, Any]]) -> dict[int, int]:
    return broken_devices({node["node"]: node["failures"] for node in said})


def _own_failure(report: reports.Report) -> dict[str, Any]:
    found: list[dict[str, Any]] = [it for it in report["failures"] if it["rank"] == report["culprit"]["rank"]]
    return found[0] if found else {}


def _put_request(report: reports.Report, request: Mapping[str, Any], node: int, host: str) -> None:
    """Make a report that of a rank that asked for something, unless the culprit failed by itself."""
    report["remedy"] = "Nothing: it was asked for. The description says why."
    if report["culprit"]["rank"] == request["rank"] and report["culprit"]["kind"] != "hang":
        return
    witness: dict[str, Any] = next((item for item in report["ranks"] if item["rank"] == request["rank"]), {})
    report["culprit"] = {
        "rank": request["rank"],
        "kind": "request",
        "host": host,
        "node": node,
        "pid": witness.get("pid"),
        "step": witness.get("step"),
        "sections": witness.get("sections", []),
        "message": f"asked for {request['action']}: {request['description']}",
        "stack": "",
        "exit_code": None,
        "log": [],
        "log_path": witness.get("log_path"),
    }
    report["victims"], report["waiting"] = [], ""


def _plain(hang: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in hang.items() if name != "testimony"}
