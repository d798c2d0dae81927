"""The report of a cycle that ended in a failure: root cause first, victims in one line, then what was done and what to do.

:func:`compose` is pure. The JSON form (``cycles/<n>.json`` in the run's directory) is what tools read; :func:`as_text` is
what a person reads at three in the morning.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.monitor.culprit import Blame, Death, blame
from resilience.pulse.timeouts import EXIT, HEARTBEAT, INITIAL, OUTSIDE, SECTION

Report = dict[str, Any]
_STACK_LINES = 24
_LOG_LINES = 12


@dataclass(frozen=True)
class Evidence:
    """All that is known about a cycle that failed, over all nodes.

    ``hangs``: verdicts by rank. ``logs``: the end of stderr by rank. ``lost``: ranks of silent nodes, with a sentence.
    """

    cycle: int
    testimonies: Sequence[Mapping[str, Any]] = ()
    deaths: Sequence[Death] = ()
    hangs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    logs: Mapping[int, str] = field(default_factory=dict)
    log_paths: Mapping[int, str] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    lost: Mapping[int, str] = field(default_factory=dict)


def compose(evidence: Evidence, action: str, action_detail: str) -> Report:
    """Make the report of one cycle."""
    known = [dict(item) for item in evidence.testimonies]
    found = blame(known, evidence.deaths, list(evidence.hangs), list(evidence.lost))
    rank = -1 if found.rank is None else found.rank
    witness = next((item for item in known if item["rank"] == rank), {})
    code = next((death.exit_code for death in evidence.deaths if death.rank == rank), None)
    log = evidence.logs.get(rank, "")
    kind, message = _cause(rank, code, witness, evidence)
    culprit = {
        "rank": found.rank,
        "kind": kind,
        "host": evidence.hosts.get(rank, "unknown"),
        "pid": witness.get("pid") or evidence.pids.get(rank),
        "step": witness.get("step"),
        "sections": witness.get("sections", []),
        "message": message,
        "stack": witness.get("stack", "") or last_traceback(log),
        "exit_code": code,
        "log": log.splitlines()[-_LOG_LINES:],
        "log_path": evidence.log_paths.get(rank),
    }
    return {
        "cycle": evidence.cycle,
        "culprit": culprit,
        "victims": list(found.victims),
        "action": action,
        "action_detail": action_detail,
        "remedy": remedy(kind, culprit, evidence.hangs.get(rank)),
        "waiting": _waiting(known, found),
        "ranks": known,
    }


def _cause(rank: int, code: int | None, witness: Mapping[str, Any], evidence: Evidence) -> tuple[str, str]:
    """Return the kind and the sentence that says what happened."""
    if rank in evidence.lost:
        return "node", evidence.lost[rank]
    if code is not None and code < 0:
        return "signal", f"ended by signal {-code} ({_signal_name(-code)})"
    if code is not None:
        raised = (
            last_exception(evidence.logs.get(rank, "")) if code == 1 else ""
        )  # what Python ends with on an exception
        return ("exception", raised) if raised else ("exit", f"ended with exit code {code}")
    stopped = "stopped by a signal, " if witness.get("state") in ("T", "t") else ""
    if rank in evidence.hangs:
        return "hang", stopped + str(evidence.hangs[rank]["message"])
    others = ", ".join(str(other) for other in sorted(evidence.hangs))
    return "hang", f"{stopped}furthest behind: {_place(witness)}; rank {others} ran into a timeout waiting for it"


def _place(witness: Mapping[str, Any]) -> str:
    sections = witness.get("sections") or []
    if sections:
        return f"in section {sections[-1]['name']!r} for {sections[-1]['age_s']:.1f} s"
    return f"no sign of life for {witness.get('quiet', 0.0):.1f} s"


def _waiting(testimonies: Sequence[Mapping[str, Any]], found: Blame) -> str:
    """Return the victims in one line, grouped by where they wait."""
    places: dict[str, list[int]] = {}
    for item in testimonies:
        if item["rank"] in found.victims:
            inner = f"in {item['sections'][-1]['name']!r}" if item["sections"] else "in no section"
            inner = "ended already" if item["state"] == "gone" else inner
            places.setdefault(inner, []).append(int(item["rank"]))
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
    if kind == "signal" and culprit["exit_code"] == -signal.SIGKILL:
        return "This launcher did not send it: look at the kernel's log for the OOM killer, and at who else may end processes."
    if kind == "node":
        return "Look at the node and its network; the launcher on it does not answer."
    if kind == "exception":
        return "Look at the innermost frame of your own code in the traceback."
    if not culprit["log"]:
        return "It wrote nothing to stderr. Look for os._exit and for crashes in native code (PYTHONFAULTHANDLER=1)."
    return "Look at the last lines of the rank's log."


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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_EXCEPTION_LINE = re.compile(r"^[A-Za-z_][\w.<>]*(:|$)")
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch marks tracebacks once a process group exists


def last_traceback(log: str) -> str:
    """Return the last Python traceback in a log, or an empty string."""
    _, mark, tail = _TORCH_PREFIX.sub("", log).rpartition("Traceback (most recent call last):")
    if not mark:
        return ""
    lines = tail.splitlines()
    end = next((i for i, line in enumerate(lines) if i and line and not line.startswith((" ", "\t"))), len(lines) - 1)
    return mark + "\n".join(lines[: end + 1])


def last_exception(log: str) -> str:
    """Return the line of the last traceback that names the exception, or an empty string."""
    trace = last_traceback(log)
    final = trace.splitlines()[-1].strip() if trace else ""
    return final if final and _EXCEPTION_LINE.match(final) else ""


def as_text(report: Report, run_dir: str) -> str:
    """Return the block that closes a cycle."""
    culprit = report["culprit"]
    who = f"rank {culprit['rank']}" if culprit["rank"] is not None else "unknown rank"
    sections = " > ".join(f"{item['name']} ({item['age_s']:.1f} s)" for item in culprit["sections"]) or "none open"
    step = f"after step {culprit['step']}" if culprit["step"] is not None else "step unknown"
    lines = [
        f"culprit   {who} on {culprit['host']}, pid {culprit['pid']}: {culprit['kind']}, {culprit['message']}",
        f"where     {step}, sections: {sections}",
    ]
    if report["victims"]:
        lines.append(f"victims   {report['waiting'] or ranks_in_words(report['victims'])}")
    if culprit["stack"]:
        stack = culprit["stack"].splitlines()
        lines += ["stack", *(f"    {line}" for line in _short(stack))]
    elif culprit["log"]:
        lines += ["last lines of its log", *(f"    {line}" for line in culprit["log"])]
    if culprit.get("log_path"):
        lines.append(f"log       {culprit['log_path']}")
    lines += [
        f"done      {report['action_detail']}",
        f"to do     {report['remedy']}",
        f"report    {run_dir}/cycles/{report['cycle']}.json",
    ]
    width = 78
    title = f" cycle {report['cycle']} failed "
    return "\n".join([title.center(width, "="), *lines, "=" * width])


def _short(stack: list[str]) -> list[str]:
    """Return the first thread of a stack; of a very long one its innermost and outermost frames."""
    first = stack[: stack.index("")] if "" in stack else stack
    others = stack.count("")
    if len(first) > _STACK_LINES:
        first = [*first[: _STACK_LINES // 2], "  …", *first[-_STACK_LINES // 2 :]]
    return [*first, f"(and {others} more in the report)"] if others else first


def write(report: Report, run_dir: Path) -> None:
    """Write ``cycles/<n>.json``, whole or not at all."""
    folder = run_dir / "cycles"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{report['cycle']}.json"
    partial = folder / f".{report['cycle']}.{os.getpid()}.partial"
    partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    partial.replace(target)


def read_all(run_dir: Path) -> list[Report]:
    """Return the reports of a run, in the order of their cycles."""
    paths = sorted((run_dir / "cycles").glob("*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
