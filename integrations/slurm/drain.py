"""Faulty nodes out of scheduling: ``scontrol update NodeName=… State=DRAIN``, once, with a reason that people can read.

Draining needs Slurm's operator rights, and a training job has none. Two ways, and the second is the one to prefer:

1) (job) ``SlurmErrorMonitor`` drains by itself, where jobs run as a user who may (``AdminLevel=Operator``, or root)
2) (job) leaves the fault in a folder of the node; (root, in Slurm's ``Epilog``) ``resilience slurm epilog`` drains that node

Rule: in the second a user can get a node drained that their own job ran on, and no other, whatever the file claims. A node that
somebody else has taken out keeps their reason.

Hazard: several nodes may see the same folder. An epilog acts on what its own node left, and leaves the rest to the epilogs of the
others. That is told by the file's name, which has Slurm's name of the node in it: the fault may name the node as its user likes
(``--ft-node-name``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import re
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from resilience.integrations.slurm.scontrol import TIMEOUT_S, SlurmDenied, SlurmError, field, insist, scontrol

from resilience import config
from resilience.command import Parser
from resilience.failover.error_monitor import ErrorMonitor, NodeFault, from_message

_LOG = logging.getLogger("resilience.slurm")
SIGN = "resilience:"
_LONGEST = 200  # of a reason, which Slurm shows in one column
_OUT = ("DRAIN", "FAIL")  # a node that is only DOWN may come back by itself
_MOST_BYTES = 8192
_EPILOG_S = 20.0
_LEAST_S = 5.0  # for one answer, be there no patience for a second try
REMEDY = (
    "Draining needs Slurm's operator rights (sacctmgr modify user NAME set adminlevel=Operator), or, better, have Slurm's Epilog "
    "do it: `resilience slurm epilog`, and --fault-dir for the job (docs/slurm.md)"
)


class SlurmErrorMonitor(ErrorMonitor):
    """Drains nodes directly, for jobs of users who may."""

    def mark(self, fault: NodeFault) -> None:
        """See base class."""
        drain(fault.node, fault)


def drain(node: str, fault: NodeFault, timeout: float = TIMEOUT_S) -> bool:
    """Take a node out of scheduling; return False where it is out already. Raises :class:`SlurmError`."""
    try:
        state = field(scontrol("show", "node", node, "-o", timeout=timeout), "State")
        if any(word in state for word in _OUT):
            return False
        scontrol("update", f"NodeName={node}", "State=DRAIN", f"Reason={reason(fault)}", timeout=timeout)
    except SlurmDenied as error:
        raise SlurmDenied(f"{error}. {REMEDY}") from error
    except SlurmError as error:
        if "not found" in str(error).lower() or "invalid node name" in str(error).lower():
            raise SlurmError(
                f"Slurm has no node {node!r}. Give the name that sinfo shows with --ft-node-name"
            ) from error
        raise
    return True


def reason(fault: NodeFault) -> str:
    """Return one line for people: who says so, what it is, and what was seen."""
    run = f" (job {fault.run})" if fault.run else ""
    text = " ".join(f"{SIGN} {fault.reason}: {fault.message}{run}".split())
    plain = "".join(letter if letter.isprintable() and letter not in "\"'\\" else " " for letter in text)
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 1]}…"


class Drainer:
    """Drains behind the back of whoever tells it; tries again as long as slurmctld is away. ``close`` waits for what is open."""

    def __init__(self, act: Callable[[str, NodeFault], bool] = drain) -> None:
        self._act = act
        self._told: set[str] = set()
        self._open: queue.Queue[NodeFault | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def tell(self, fault: NodeFault) -> None:
        """Have a node drained; a node is drained once."""
        if fault.node not in self._told:
            self._told.add(fault.node)
            self._open.put(fault)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="resilience-drain", daemon=True)
                self._thread.start()

    def close(self, limit: float) -> None:
        """Wait until all are drained; say which are not."""
        if self._thread is None:
            return
        self._open.put(None)
        self._thread.join(limit)
        if self._thread.is_alive():
            _LOG.error(
                "slurmctld has been away for %g s: of %s some are NOT drained.", limit, ", ".join(sorted(self._told))
            )

    def _work(self) -> None:
        while (fault := self._open.get()) is not None:
            try:
                new = insist(functools.partial(self._act, fault.node, fault), math.inf, _LOG.warning)
                _LOG.info(
                    "node %s is %s (%s).", fault.node, "drained" if new else "out of scheduling already", fault.reason
                )
            except SlurmError as error:
                _LOG.error(
                    "node %s is NOT drained (%s): %s. What is wrong: %s", fault.node, fault.reason, error, fault.message
                )


def epilog(argv: list[str]) -> int:
    """``resilience slurm epilog --fault-dir DIR``: in Slurm's Epilog, as root, on the node where a job has just ended."""
    parser = Parser(
        prog="resilience slurm epilog",
        description="For Slurm's Epilog: drain this node if the job that has just ended left word that it is faulty.",
    )
    parser.add_argument("--fault-dir", required=True, help="folder of this node, root's, with mode 1733")
    parser.add_argument(
        "--patience", default=str(_EPILOG_S), metavar="S", help="with a slurmctld that is away (default: 20 s)"
    )
    asked = parser.parse_args(argv)
    variables = config.environment()
    job, user, node = (variables.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_JOB_UID", "SLURMD_NODENAME"))
    if not (job.isdecimal() and user.isdecimal() and node):
        _tell("there is no SLURM_JOB_ID, SLURM_JOB_UID or SLURMD_NODENAME here.")
        return 0  # an epilog that fails drains its node, whatever the reason
    found = {path: _left(path, int(user)) for path in _of_job(Path(asked.fault_dir), job)}
    ours = {path: fault for path, fault in found.items() if is_of_node(path.name, fault, job, node)}
    fault = next((fault for fault in ours.values() if fault is not None), None)
    if fault is not None and not _drained(node, fault, _patience(asked.patience)):
        return 0  # what was left stays: it is what there is to go by
    for path in ours:
        with contextlib.suppress(OSError):
            path.unlink()
    return 0


def is_of_node(name: str, fault: NodeFault | None, job: str, node: str) -> bool:
    """Whether a file of the job was left by this node: its name says so (:func:`message_name`), or the fault does. Pure."""
    marked = re.fullmatch(rf"{re.escape(message_name(job, node))}(\.[0-9a-f]{{16}})?", name)
    return marked is not None or (fault is not None and fault.node == node)


def message_name(job: str, node: str) -> str:
    """Return the name of the file in which a node of a job leaves its fault; ``leave_message`` may add to it. Pure."""
    return f"{job}.{node}" if node else job


def _patience(text: str) -> float:
    """Return how long to try. An epilog that fails drains its node: what is no number of seconds is said, and the default taken."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 0 <= seconds < math.inf:
        return seconds
    _tell(f"--patience={text} is no number of seconds, from 0 on: {_EPILOG_S:g} s are taken.")
    return _EPILOG_S


def _tell(text: str) -> None:
    sys.stderr.write(f"resilience slurm epilog: {text}\n")


def _of_job(folder: Path, job: str) -> list[Path]:
    """Return what is there under a job's number; some of it others may have put there (``leave_message``)."""
    try:
        return sorted(path for path in folder.iterdir() if path.name == job or path.name.startswith(f"{job}."))
    except OSError:
        return []


def _drained(node: str, fault: NodeFault, patience: float) -> bool:
    """Drain the node; while slurmctld is away try again, not for long: the node is kept from other jobs meanwhile."""
    try:
        insist(lambda: drain(node, fault, timeout=max(patience, _LEAST_S)), patience, _tell)
    except SlurmError as error:
        _tell(f"node {node} is NOT drained ({fault.reason}): {error}. Drain it by hand. What is wrong: {fault.message}")
        return False
    return True


def _left(path: Path, user: int) -> NodeFault | None:
    """Return what a job left, if it is a plain file of that job's user. The folder is open to all: no link is followed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != user or found.st_nlink != 1:
            return None
        return from_message(os.read(fd, _MOST_BYTES).decode("utf-8", "replace"))
    except OSError:
        return None
    finally:
        os.close(fd)
