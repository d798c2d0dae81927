"""Nodes that are not fit to train, and who is told so.

A launcher that finds its own node faulty (its check failed, or its workers ended with a code of the hardware) says so in three
ways: by its exit code, by a termination message that a controller reads, and to the configured :class:`ErrorMonitor`.

1) (launcher) makes a :class:`NodeFault`
2) (launcher) writes it as JSON to the container's termination log, where there is one
3) (launcher) calls ``ErrorMonitor.mark(fault)`` of the configured monitor, with a deadline; a failure to mark is logged
4) (controller, on Kubernetes) reads the message with :func:`from_message` and marks the node: training pods have no right to

Rule: marking is idempotent. The same fault told twice marks once.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from resilience.failover.failure import HARDWARE_CODES

CHECK_FAILED = "NodeCheckFailed"
STRAGGLER = "NodeIsStraggler"
_BY_CODE = {14: "InfoROMCorrupted", 128: "UnknownDevice", 201: "DriverError", 202: "ResidualProcesses"}
_MARK = "resilience"  # the key that tells our termination message from anybody's
_VERSION = 1
_TEXT = 2000
_WORD = 253  # the longest name that Kubernetes has
_YEAR_9999 = 253_370_764_800
_MOST_BYTES = 4096  # what Kubernetes keeps of a termination message


@dataclass(frozen=True)
class NodeFault:
    """What is wrong with a node. ``node`` is its name where nodes are scheduled, ``reason`` one word that a taint can hold,
    ``message`` a sentence for people, ``code`` the exit code of the worker that told, ``at`` seconds since 1970."""

    node: str
    reason: str
    message: str
    code: int | None = None
    run: str = ""
    at: float = 0.0

    def as_message(self) -> str:
        """Return it as a termination message, short enough to be kept whole."""
        room = _TEXT
        while True:
            fields = {**dataclasses.asdict(self), "message": self.message[:room]}
            text = json.dumps({_MARK: _VERSION, "fault": fields})
            if len(text) <= _MOST_BYTES or room < 2:
                return text
            room //= 2  # letters that JSON spells with six characters each


def of_code(node: str, code: int, *, run: str = "", at: float = 0.0) -> NodeFault | None:
    """Return the fault that a worker's exit code tells of, or None where the code is not one of the hardware's."""
    if code not in HARDWARE_CODES:
        return None
    message = f"a worker ended with exit code {code}: {HARDWARE_CODES[code]}"
    return NodeFault(node, _BY_CODE[code], message, code=code, run=run, at=at)


def from_message(text: str) -> NodeFault | None:
    """Return the fault in a termination message, or None where it is not one of ours. The text is anybody's: nothing is trusted."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):  # the latter: brackets without end
        return None
    if not isinstance(told, dict) or told.get(_MARK) != _VERSION or not isinstance(told.get("fault"), dict):
        return None
    return _checked(told["fault"])


def _checked(found: dict[str, Any]) -> NodeFault | None:
    words = [found.get(name) for name in ("node", "reason", "message")]
    code, run, at = found.get("code"), found.get("run", ""), found.get("at", 0.0)
    if not all(isinstance(word, str) and word for word in words) or not isinstance(run, str):
        return None
    if not (code is None or type(code) is int) or type(at) not in (int, float):
        return None
    node, reason, message = (_plain(str(word), most) for word, most in zip(words, (_WORD, _WORD, _TEXT), strict=True))
    if not (node and reason and message):
        return None
    return NodeFault(node, reason, message, code, _plain(run, _WORD), float(at) if 0 <= at < _YEAR_9999 else 0.0)


def _plain(text: str, most: int) -> str:
    """Return a text of bounded length that is one line wherever it is shown: it can forge no line and tell no terminal anything."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:most]).strip()


class ErrorMonitor(ABC):
    """Takes faulty nodes out of scheduling. Derive from it for a cluster of your own."""

    @abstractmethod
    def mark(self, fault: NodeFault) -> None:
        """Mark the node unschedulable, once however often it is told; raise where that failed, and it is tried again."""

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of whatever is held."""
