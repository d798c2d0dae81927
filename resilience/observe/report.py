"""The report of a cycle that ended in a failure: root cause first, victims in one line, then what was done and what to do.

:func:`compose` is pure. The JSON form (``cycles/<n>.json`` in the run's directory) is what tools read; :func:`as_text` is
what a person reads at three in the morning.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.failover.culprit import Blame, blame
from resilience.failover.failure import HARDWARE_CODES, OOM, RankFailure
from resilience.pulse.timeouts import EXIT, HEARTBEAT, INITIAL, OUTSIDE, SECTION

Report = dict[str, Any]
_STACK_LINES = 24


@dataclass(frozen=True)
class Evidence:
    """All that is known about a cycle that failed, over all nodes.

    ``failures``: ranks that ended badly, at times of one clock. ``hangs``: verdicts by rank. ``lost``: ranks of silent nodes,
    with a sentence. ``nodes``: (number, host) by rank. A testimony may carry the end of its rank's log.
    """

    cycle: int
    testimonies: Sequence[Mapping[str, Any]] = ()
    failures: Sequence[RankFailure] = ()
    hangs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    nodes: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    lost: Mapping[int, str] = field(default_factory=dict)


def compose(evidence: Evidence) -> Report:
    """Make the report of one cycle; :func:`conclude` says what was done about it."""
    known = [dict(item) for item in evidence.testimonies]
    found = blame(known, evidence.failures, list(evidence.hangs), list(evidence.lost))
    rank = -1 if found.rank is None else found.rank
    witness = next((item for item in known if item["rank"] == rank), {})
    failure = next((item for item in evidence.failures if item.rank == rank), None)
    kind, message = _cause(found, failure, witness, evidence)
    node, host = evidence.nodes.get(rank, (-1, "unknown"))
    culprit = {
        "rank": found.rank,
        "kind": kind,
        "host": host,
        "node": node,
        "pid": witness.get("pid") or evidence.pids.get(rank),
        "step": witness.get("step"),
        "sections": witness.get("sections", []),
        "message": message,
        "stack": witness.get("stack", ""),
        "exit_code": 0 if found.kind == "left" else None,
        "log": list(witness.get("log", ())),
        "log_path": witness.get("log_path"),
    }
    if failure is not None:
        culprit |= _own_words(failure, culprit)
    return {
        "cycle": evidence.cycle,
        "culprit": culprit,
        "victims": list(found.victims),
        "action": "",
        "action_detail": "",
        "strategy": "",
        "remedy": remedy(kind, culprit, evidence.hangs.get(rank)),
        "waiting": _waiting(known, found, evidence.failures),
        "failures": _timeline(evidence.failures, failure),
        "lost": sorted(evidence.lost),
        "ranks": known,
    }


def conclude(report: Report, action: str, detail: str, strategy: str = "") -> Report:
    """Add what was done: ``action`` in a word (restart, stop, node, abort, wait, shutdown, preempted), ``detail`` in a sentence."""
    return {**report, "action": action, "action_detail": detail, "strategy": strategy}


def put_late_leaver(report: Report, grace: float) -> None:
    """Make a report that of a rank that did not leave in time after the job was asked to stop."""
    never = [item["rank"] for item in report["ranks"] if item["state"] != "gone" and not item.get("stop_calls")]
    longer = "give more time with --ft-stop-grace=SECONDS"
    report["remedy"] = f"Leave sooner after stop_requested(), or {longer}."
    report["culprit"]["message"] = f"it had not left {grace:g} s after the job was asked to stop"
    if never and len(never) < len(report["ranks"]):
        report["remedy"] = f"Call stop_requested() once per step on every rank: {ranks_in_words(never)} never did."
        report["culprit"]["message"] += f"; {ranks_in_words(never)} never called stop_requested()"


def _own_words(failure: RankFailure, culprit: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a dead rank itself left, where it says more than the page."""
    return {
        "step": failure.step if failure.step is not None else culprit["step"],
        "sections": [dict(item) for item in failure.sections] or culprit["sections"],
        "stack": failure.traceback or culprit["stack"],
        "exit_code": failure.exit_code,
        "error_code": failure.error_code,
        "began": failure.began,
        "context": dict(failure.context),
        "chain": [dict(item) for item in failure.chain],
        "versions": dict(failure.versions),
        "log": list(failure.log) or culprit["log"],
        "log_path": failure.log_path or culprit["log_path"],
    }


def _timeline(failures: Sequence[RankFailure], first: RankFailure | None) -> list[dict[str, Any]]:
    """Return all failed ranks in the order of their times; ``after_s`` counts from the cause."""
    start = first.at_ns if first is not None else min((item.at_ns for item in failures), default=0)
    return [
        {
            "rank": item.rank,
            "kind": item.kind,
            "message": item.message,
            "exit_code": item.exit_code,
            "error_code": item.error_code,
            "signature": item.signature,
            "echo": item.echo,
            "began": item.began,
            "after_s": round((item.at_ns - start) / 1e9, 6),
        }
        for item in sorted(failures, key=lambda item: item.at_ns)
    ]


def _cause(
    found: Blame, failure: RankFailure | None, witness: Mapping[str, Any], evidence: Evidence
) -> tuple[str, str]:
    """Return the kind and the sentence that says what happened."""
    rank = -1 if found.rank is None else found.rank
    if rank in evidence.lost and found.kind == "node":
        return "node", evidence.lost[rank]
    if found.kind == "left":
        return "exit", "ended with exit code 0 while other ranks still needed it"
    if failure is not None:
        return failure.kind, failure.message
    stopped = "stopped by a signal, " if witness.get("state") in ("T", "t") else ""
    if rank in evidence.hangs:
        return "hang", stopped + str(evidence.hangs[rank]["message"])
    others = ", ".join(str(other) for other in sorted(evidence.hangs))
    waited = f"; rank {others} ran into a timeout waiting for it" if others else ""
    return "hang", f"{stopped}furthest behind: {_place(witness)}{waited}"


def _place(witness: Mapping[str, Any]) -> str:
    sections = witness.get("sections") or []
    if sections:
        return f"in section {sections[-1]['name']!r} for {sections[-1]['age_s']:.1f} s"
    return f"no sign of life for {witness.get('quiet', 0.0):.1f} s"


def _waiting(testimonies: Sequence[Mapping[str, Any]], found: Blame, failures: Sequence[RankFailure]) -> str:
    """Return the victims in one line, grouped by where they wait or how they fell."""
    places: dict[str, list[int]] = {}
    fallen = {item.rank: item.kind for item in failures}
    for item in testimonies:
        rank = int(item["rank"])
        if rank in found.victims:
            inner = f"in {item['sections'][-1]['name']!r}" if item["sections"] else "in no section"
            if rank in fallen:
                inner = f"fell after it ({fallen[rank]})"
            elif item["state"] == "gone":
                inner = "ended already"
            places.setdefault(inner, []).append(rank)
    return "; ".join(f"{ranks_in_words(ranks)} {place}" for place, ranks in places.items())


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0 to 6, 9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(words)


_FLAGS = {
    INITIAL: "--ft-initial-rank-heartbeat-timeout=SECONDS",
    HEARTBEAT: "expect_heartbeats(timeout=SECONDS) or --ft-rank-heartbeat-timeout=SECONDS",
    OUTSIDE: "--ft-rank-out-of-section-timeout=SECONDS",
    EXIT: "--ft-rank-exit-timeout=SECONDS",
}


def remedy(kind: str, culprit: Mapping[str, Any], hang: Mapping[str, Any] | None = None) -> str:
    """Say what to do."""
    if kind == "hang":
        return _hang_remedy(culprit, hang or {})
    if kind == OOM:
        return _memory_remedy(culprit)
    code, message = culprit["exit_code"], culprit["message"]
    special = {
        "Have the device looked at; the node should not be used again before.": code in HARDWARE_CODES
        or culprit.get("error_code") in HARDWARE_CODES,
        "The script can't take these arguments: the last lines of its log say which.": "refused its arguments"
        in message,
        "Nothing of the script has run: look at its name, its folder and its syntax.": not culprit.get("began", True),
        "The ranks' Python has no such module: install it in their environment, or look at PYTHONPATH.": message.startswith(
            "ModuleNotFoundError"
        ),
        "The script ended itself: look at its call of sys.exit, and at its output before.": "(sys.exit" in message,
        "Nothing, if whoever ended that launcher meant it; a new one on that node may join again.": kind == "node"
        and "left the job" in message,
        "Neither this launcher nor the OOM killer of its control group sent it: look at who else may end processes.": kind
        == "signal"
        and code == -signal.SIGKILL,
        "All ranks must make the same number of steps: look at why this one ended its loop (uneven data, mostly).": kind
        == "exit"
        and code == 0,
    }
    silent = "It wrote nothing to stderr. Look for os._exit and for native code that ends the process."
    general = _OTHER_REMEDIES.get(kind) or ("Look at the last lines of the rank's log." if culprit["log"] else silent)
    return next((text for text, fits in special.items() if fits), general)


_OTHER_REMEDIES = {
    "node": "Look at the node and its network; the launcher on it does not answer.",
    "exception": "Look at the innermost frame of your own code in the traceback.",
    "signal": "Look at the innermost frame: the native code below it crashed, or somebody sent the signal.",
}


def _memory_remedy(culprit: Mapping[str, Any]) -> str:
    if culprit["exit_code"] is not None and culprit["exit_code"] < 0:
        return "Host memory ran out: fewer loader workers, smaller prefetch or batches, or a larger limit for the container."
    return "Memory ran out: a smaller batch, activation checkpointing, or sharding (FSDP) of what is replicated."


def _hang_remedy(culprit: Mapping[str, Any], hang: Mapping[str, Any]) -> str:
    if "stopped by a signal" in culprit["message"]:
        return "Somebody stopped this process (SIGSTOP, a debugger, a freezer); it was continued to testify, and ended."
    inner = culprit["sections"][-1]["name"] if culprit["sections"] else None
    clock = str(hang.get("clock") or (SECTION + inner if inner else ""))
    if clock.startswith(SECTION):
        name = clock[len(SECTION) :]
        where = f"section {name!r}"
        longer = f"section({name!r}, timeout=SECONDS) or --ft-rank-section-timeouts={name}:SECONDS"
    else:
        where = "the top of the stack"
        longer = _FLAGS.get(clock, "a timeout of its own")
    doubled = (
        " A learned timeout is doubled in the next cycle." if hang.get("source") in ("learned", "unlearned") else ""
    )
    return f"Look at {where}. If it is only slow, give it longer: {longer}.{doubled}"


def as_text(report: Report, run_dir: str) -> str:
    """Return the block that closes a cycle."""
    culprit = report["culprit"]
    who = f"rank {culprit['rank']}" if culprit["rank"] is not None else "unknown rank"
    who = f"node {culprit['node']}" if culprit["kind"] == "check" else who
    sections = " > ".join(f"{item['name']} ({item['age_s']:.1f} s)" for item in culprit["sections"]) or "none open"
    step = f"after step {culprit['step']}" if culprit["step"] is not None else "step unknown"
    pid = f", pid {culprit['pid']}" if culprit["pid"] is not None else ""
    lines = [
        f"culprit   {who} on {culprit['host']}{pid}: {culprit['kind']}, {culprit['message']}",
        f"where     {step}, sections: {sections}",
    ]
    causes = [
        f"{link['type']}: {link['message'].splitlines()[0]}" for link in culprit.get("chain", ())[1:] if link["message"]
    ]
    if causes:
        lines.append(f"because   {' ← '.join(causes)}")
    if culprit["kind"] == "check":  # nothing ran yet
        lines = [*lines[:1], *([f"but       {report['note']}"] if report["note"] else [])]
    if report["victims"]:
        lines.append(f"victims   {report['waiting'] or ranks_in_words(report['victims'])}")
    if culprit["stack"]:
        stack = culprit["stack"].splitlines()
        lines += ["stack", *(f"    {line}" for line in _short(stack))]
    elif culprit["log"]:
        lines += ["last lines of its log", *(f"    {line}" for line in culprit["log"])]
    if culprit.get("log_path"):
        lines.append(f"log       {culprit['log_path']}")
    if report.get("collectives"):
        lines += ["torch's flight recorder says", *(f"    {line}" for line in report["collectives"].splitlines()[-8:])]
    context = ", ".join(f"{name}={value}" for name, value in culprit.get("context", {}).items())
    if context:
        lines.append(f"context   {context}")
    lines += [
        f"done      {report['action_detail']}",
        f"to do     {report['remedy']}",
        f"report    {run_dir}/cycles/{report['cycle']}.json",
    ]
    width = 78
    title = f" cycle {report['cycle']} failed "
    return "\n".join([title.center(width, "="), *lines, "=" * width])


def is_run(folder: Path) -> bool:
    """Whether it is the directory of a run."""
    return any((folder / name).is_dir() for name in ("cycles", "logs"))


def as_line(report: Report) -> str:
    """Return it in a line, for a log in which another node's launcher prints the block."""
    culprit = report["culprit"]
    who = f"rank {culprit['rank']} on {culprit['host']}" if culprit["rank"] is not None else culprit["host"]
    message = culprit["message"].partition("\n")[0]
    return f"cycle {report['cycle']} failed: {who}: {culprit['kind']}, {message}; {report['action_detail']}."


def speaker(ranks: Sequence[Iterable[int]], lost: Iterable[int]) -> int:
    """Return which node prints a report whole where all write to one log: the first that is not lost. ``ranks``: of each node."""
    return next((node for node, own in enumerate(ranks) if not set(own) & set(lost)), 0)


def _short(stack: list[str]) -> list[str]:
    """Return the first thread of a stack, or the last of chained tracebacks; of a very long one its ends."""
    heads = [number for number, line in enumerate(stack) if line.startswith("Traceback (most recent call last)")]
    if heads:
        first, others = stack[heads[-1] :], len(heads) - 1
    else:
        first, others = stack[: stack.index("")] if "" in stack else stack, stack.count("")
    if len(first) > _STACK_LINES:
        first = [*first[: _STACK_LINES // 2], "  …", *first[-_STACK_LINES // 2 :]]
    return [*first, f"(and {others} more in the report)"] if others else first


def write(report: Report, run_dir: Path) -> None:
    """Write ``cycles/<n>.json``, whole or not at all."""
    folder = run_dir / "cycles"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{report['cycle']}.json"
    earlier = _earlier(target, report)
    report = {**report, "earlier": earlier} if earlier else report
    partial = folder / f".{report['cycle']}.{os.getpid()}.partial"
    partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    partial.replace(target)


def _earlier(target: Path, report: Report) -> list[Report]:
    """Return what was reported of the same cycle before: with ``min-healthy`` a node may fail while the cycle goes on."""
    try:
        before: Report = json.loads(target.read_text(encoding="utf-8"))
        kept: list[Report] = before.pop("earlier", [])
        same = before["culprit"] == report["culprit"] and before["action"] == report["action"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return kept if same else [*kept, {**before, "ranks": []}]


def read_all(run_dir: Path) -> list[Report]:
    """Return the reports of a run, in the order of their cycles."""
    paths = sorted((run_dir / "cycles").glob("*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
