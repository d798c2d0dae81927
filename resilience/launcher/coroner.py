"""Examines the dead of this node, before torch buries them: exit status, error file, log, the kernel's word on memory."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.failover.failure import RankFailure, examine
from resilience.launcher.logs import tail_of
from resilience.launcher.memory import OomWatch

_MAX_ERROR_FILE = 4 << 20
_AFTERGLOW_NS = 100_000_000  # sections that close while the exception is recorded


@dataclass(frozen=True)
class Papers:
    """Where the workers of a cycle leave their words, by rank."""

    pids: Mapping[int, int] = field(default_factory=dict)
    logs: Mapping[int, str] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)


class Coroner:
    """Knows the dead of one cycle at a time."""

    def __init__(self) -> None:
        self._oom = OomWatch()
        self._papers = Papers()
        self._known: dict[int, RankFailure] = {}

    def begin(self, papers: Papers) -> None:
        """A new cycle: these are its workers."""
        self._papers = papers
        self._known = {}
        self._oom.begin(next(iter(papers.pids.values()), 0))

    def dead(self) -> dict[int, int]:
        """Return the workers that ended with a failure, by rank, with their exit codes; torch still finds them to reap."""
        found = {}
        for rank, pid in self._papers.pids.items():
            try:
                info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                continue
            if info is not None and info.si_status != 0:
                found[rank] = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        return found

    def dying(self, testimonies: list[dict[str, Any]]) -> dict[int, int]:
        """Return the workers that have recorded what ends them but have not ended yet, by rank, with the code they will have.

        One that raised first may end last: its exception is on its way through clean-up code. One that was caught is not.
        """
        last = {int(witness["rank"]): self._last_words(witness) for witness in testimonies if witness.get("in_flight")}
        return {rank: code_to_come(error) for rank, error in last.items() if recorded_at(error)}

    def _last_words(self, witness: Mapping[str, Any], killed: bool = False) -> dict[str, Any] | None:
        """Return a rank's error file, unless it is of a child of the rank, or of something that the rank got over: there were
        signs of life after it."""
        error = read_error_file(self._papers.errors.get(int(witness["rank"])))
        ours = (error or {}).get("resilience")
        if not isinstance(ours, dict):
            return error
        if ours.get("pid") not in (witness.get("pid"), self._papers.pids.get(int(witness["rank"]))):
            return None
        if killed and not witness.get("in_flight", True):
            return None  # it was caught, and something else ended the rank
        sign_ns = witness.get("sign_ns", 0)
        return None if sign_ns > recorded_at(error) + _AFTERGLOW_NS else error

    def examine(
        self, exit_codes: Mapping[int, int], ended_ns: Mapping[int, int], testimonies: list[dict[str, Any]]
    ) -> list[RankFailure]:
        """Say how ranks ended. What was found out once stays as it was: the log may be rotated, the page be gone."""
        known = {int(item["rank"]): item for item in testimonies}
        killed = sorted(
            (rank for rank in exit_codes if exit_codes[rank] == -signal.SIGKILL), key=lambda r: ended_ns.get(r, 0)
        )
        oom = self._oom.verdict([self._papers.pids[rank] for rank in killed if rank in self._papers.pids])
        for rank, code in exit_codes.items():
            if rank not in self._known:
                path = self._papers.logs.get(rank)
                self._known[rank] = examine(
                    rank,
                    code,
                    ended_ns.get(rank) or time.monotonic_ns(),
                    error=self._last_words(
                        known.get(rank, {"rank": rank, "pid": self._papers.pids.get(rank)}), killed=code < 0
                    ),
                    log=tail_of(Path(path)) if path else "",
                    log_path=path,
                    oom=oom.get(self._papers.pids.get(rank, 0)),
                    sections=known[rank]["sections"] if rank in known else (),
                )
        return [self._known[rank] for rank in exit_codes]

    def log_of(self, rank: int) -> tuple[list[str], str | None]:
        """Return the last lines of a rank's log, and where it is."""
        path = self._papers.logs.get(rank)
        return (tail_of(Path(path)).splitlines()[-12:] if path else [], path)

    def close(self) -> None:
        """Let go of what is open."""
        self._oom.close()


def recorded_at(error: Mapping[str, Any] | None) -> int:
    """Return when an exception was recorded (CLOCK_MONOTONIC), or 0; the file may hold anything."""
    ours = (error or {}).get("resilience")
    told = ours.get("mono_ns") if isinstance(ours, dict) else None
    return told if isinstance(told, int) and not isinstance(told, bool) else 0


def code_to_come(error: Mapping[str, Any] | None) -> int:
    """Return the code that a process ends with once its recorded exception has left it: that of ``sys.exit(N)``, or Python's 1."""
    ours = (error or {}).get("resilience")
    told = str(ours.get("message")) if isinstance(ours, dict) and ours.get("type") == "SystemExit" else ""
    return int(told) if told.isdecimal() and len(told) < 4 and 0 < int(told) < 256 else 1


def torch_can_read(path: str) -> bool:
    """Whether torch's ``ProcessFailure`` can take an error file: a message in words, or with the time that torch gives it."""
    message = (read_error_file(path) or {}).get("message")
    if not isinstance(message, dict):
        return isinstance(message, str)
    extra = message.get("extraInfo")
    return isinstance(extra, dict) and str(extra.get("timestamp", "")).isdecimal()


def read_error_file(path: str | None) -> dict[str, Any] | None:
    """Return what a worker left in its error file. Whatever stands there can't hurt: it is JSON, and bounded."""
    if not path:
        return None
    if not Path(path).is_file():  # /dev/null, when there are no logs; a pipe would block
        return None
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            data = json.loads(file.read(_MAX_ERROR_FILE))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
