"""From what the nodes tell to one judgement per node. Pure: everything comes as plain data, and goes as such.

What a node fails by itself (its devices, a wrong product, a full disk) is its own fault, and needs no second opinion. What fails
between nodes is judged by :mod:`pairing`.

Rule: where every node fails by itself, or nobody gets through to anybody, the check or the cluster is at fault: nobody is marked.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resilience.nodecheck import pairing
from resilience.nodecheck.pairing import FAULTY, HEALTHY, STRAGGLER, UNDECIDED, VANISHED, Evidence, Rule

_SHOWN = 32
# What reading another node's nonsense may raise.
ODD = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
CLOCK_S = 1.0  # clocks further apart than this are worth a word: they sign requests, and order logs


@dataclass(frozen=True)
class Alone:
    """What one node tells about itself. ``error`` is empty where its tasks went well; ``seconds`` is its slowest device's."""

    error: str = ""
    accelerator: str = ""
    devices: int = 0
    host_only: bool = False  # its devices are the host's own processors
    title: str = ""
    seconds: float = 0.0
    rate: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    ahead_s: float = 0.0  # its clock less node 0's
    wanted: int = 1  # devices that its own workers need: --nproc-per-node may differ between nodes

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Alone:
        """Read what :meth:`as_json` made; raise one of ``ODD`` for anything else."""
        found = cls(**{**told, "faults": tuple(told["faults"]), "warnings": tuple(told["warnings"])})
        for name, usual in dataclasses.asdict(cls()).items():
            value = getattr(found, name)
            if not isinstance(value, (int, float) if isinstance(usual, float) else type(usual)):
                raise ValueError(f"{name} is {value!r}")
        if not all(isinstance(text, str) for text in (*found.faults, *found.warnings)):
            raise ValueError("faults and warnings are texts")
        return found


@dataclass(frozen=True)
class Judgement:
    """What is thought of one node, and why. ``gather_s`` is its best all-gather's, where it had one."""

    node: int
    state: str
    why: str = ""
    warnings: tuple[str, ...] = ()
    gemm_s: float | None = None
    gflops: float | None = None
    gather_s: float | None = None
    clock_s: float = 0.0
    title: str = ""


@dataclass(frozen=True)
class Ruling:
    """The judgements on all nodes, in their order; what can't be told, in words; whether faulty nodes are to be marked."""

    judgements: tuple[Judgement, ...]
    note: str = ""
    mark: bool = True
    rounds: int = 0
    skipped: bool = False  # everybody had passed just before

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Ruling:
        """Read what :meth:`as_json` made."""
        found = tuple(Judgement(**{**item, "warnings": tuple(item["warnings"])}) for item in told["judgements"])
        return cls(**{**told, "judgements": found})

    def those(self, *states: str) -> tuple[Judgement, ...]:
        """Return the judgements of some kinds."""
        return tuple(item for item in self.judgements if item.state in states)

    def unfit(self, exclude_straggler: bool) -> tuple[Judgement, ...]:
        """Return who must not train."""
        return self.those(FAULTY, STRAGGLER) if exclude_straggler else self.those(FAULTY)


def own_fault(node: int, told: Mapping[int, Alone]) -> str:
    """Return what is wrong with a node by itself, or an empty string."""
    mine = told[node]
    if mine.error:
        return mine.error
    if mine.devices == 0:
        return f"it has no device of the kind {mine.accelerator!r}"
    shared = mine.host_only and mine.devices == 1  # any number of workers share the host's processors
    if not shared and mine.devices < mine.wanted:
        return f"it has {mine.devices} devices of the kind {mine.accelerator!r}, its workers need {mine.wanted}"
    others = {it.accelerator for it in told.values() if it.devices and not it.host_only and not it.error}
    if mine.host_only and others:
        return f"no device was found, only the host's processors, where other nodes have {', '.join(sorted(others))}"
    return "; ".join(mine.faults)


def sound(told: Mapping[int, Alone]) -> list[int]:
    """Return the nodes with nothing wrong by themselves: those that are tried together."""
    return [node for node in sorted(told) if not own_fault(node, told)]


def fitting(told: Mapping[int, Alone], rule: Rule) -> Rule:
    """Return the rule for what these nodes have."""
    hosts_only = all(it.host_only for it in told.values() if it.devices)
    return rule if hosts_only else dataclasses.replace(rule, floor=pairing.DEVICE_FLOOR)


def slow_alone(told: Mapping[int, Alone], rule: Rule) -> frozenset[int]:
    """Return the nodes whose devices take much longer than the others'. They try once more before they are judged."""
    return pairing.slow_ones({node: told[node].seconds for node in sound(told)}, rule)


def judge(nodes: int, told: Mapping[int, Alone], evidence: Evidence, rounds: int) -> Ruling:
    """Judge all nodes. ``told`` lacks those that vanished before they said a word."""
    by_trials = pairing.standing(evidence)
    slow = slow_alone(told, evidence.rule)
    median = pairing.typical(told[node].seconds for node in sound(told))
    clock = statistics.median(it.ahead_s for it in told.values()) if told else 0.0
    found = []
    for node in range(nodes):
        if node not in told or node in evidence.vanished:
            found.append(Judgement(node, VANISHED, "it was gone before the check was over"))
            continue
        mine = told[node]
        fault = own_fault(node, told)
        state, why = (FAULTY, fault) if fault else _by_trials(node, by_trials.get(node, HEALTHY), evidence)
        if state == HEALTHY and node in slow and median:
            state = STRAGGLER
            why = f"its GEMM takes {mine.seconds:.3g} s, {mine.seconds / median:.1f} times the median of {median:.3g} s"
        elif state == STRAGGLER:
            why = _slow_network(evidence, node)
        found.append(_judgement(Judgement(node, state, why), mine, evidence.seconds(node), mine.ahead_s - clock))
    undecided = [item.node for item in found if item.state == UNDECIDED]
    all_alone = nodes > 1 and bool(told) and not sound(told)
    note = pairing.cannot_tell(nodes, undecided) if undecided or any(item.state == HEALTHY for item in found) else ""
    if all_alone:
        note = "every node fails by itself: look at the check and at what they have in common; none is marked"
    return Ruling(tuple(found), note, not all_alone, rounds)


def _by_trials(node: int, state: str, evidence: Evidence) -> tuple[str, str]:
    """Say what its trials mean for a node, and in whose words they failed."""
    why = {
        FAULTY: "its all-gather failed with nodes that get through to others",
        UNDECIDED: "its all-gather failed, and with nobody to compare it can't be told whose fault that is",
    }
    return state, ": ".join(filter(None, (why[state], evidence.words(node)))) if state in why else ""


def _slow_network(evidence: Evidence, node: int) -> str:
    best, median = evidence.seconds(node) or 0.0, evidence.median or 0.0
    return f"its all-gather takes {best:.3g} s with nodes that are quick with others, {best / (median or 1):.1f} times the median"


def _judgement(plain: Judgement, mine: Alone, gather_s: float | None, clock_s: float) -> Judgement:
    """Add the figures to a judgement."""
    warnings = list(mine.warnings)
    if abs(clock_s) > CLOCK_S:
        warnings.append(f"its clock is {abs(clock_s):.1f} s {'ahead of' if clock_s > 0 else 'behind'} the others'")
    done = mine.seconds > 0
    return dataclasses.replace(
        plain,
        warnings=tuple(warnings),
        gemm_s=mine.seconds if done else None,
        gflops=mine.rate if done else None,
        gather_s=gather_s,
        clock_s=clock_s,
        title=mine.title,
    )


def as_table(ruling: Ruling, names: Sequence[str]) -> str:
    """Return the ruling as people read it: a line for each node (of many, for those that are not healthy), and what there is to
    say."""
    rows = [("node", "verdict", "device", "GEMM", "GFLOP/s", "all-gather", "clock")]
    healthy = ruling.those(HEALTHY)
    shown = (
        ruling.judgements
        if len(ruling.judgements) <= _SHOWN
        else [it for it in ruling.judgements if it.state != HEALTHY]
    )
    for item in shown:
        rate = f"{item.gflops:.0f}" if item.gflops is not None else "–"
        figures = (_ms(item.gemm_s), rate, _ms(item.gather_s), f"{item.clock_s:+.1f} s")
        rows.append((names[item.node], item.state, item.title or "–", *figures))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(shown) < len(ruling.judgements):
        times = [it.gemm_s for it in healthy if it.gemm_s is not None]
        both = f", GEMM {_ms(statistics.median(times))} (median), {_ms(max(times))} (slowest)" if times else ""
        lines.append(f"and {len(healthy)} healthy nodes{both}")
    for item in ruling.judgements:
        lines += [f"{names[item.node]}: {text}" for text in (item.why, *item.warnings) if text]
    return "\n".join([*lines, *([f"note: {ruling.note}."] if ruling.note else [])])


def _ms(seconds: float | None) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds is not None else "–"
