"""What Slurm is asked about the job, and asked to do with it: its state, a requeue, nodes that it is not to get again.

Rule: slurmctld may be away for a while, and somebody may end the job meanwhile. So its state is asked for before every attempt to
requeue it: Slurm would requeue a job that was cancelled a moment ago too. One that runs is requeued as ``incomplete``: Slurm then
leaves it alone, without a word, if it is cancelled between the two.

Hazard: a node that Slurm has given up may live on, and its follower with it. The job that runs then is another start of it, and no
business of theirs: which start Slurm means is compared too.

Hazard: a slurmctld that is killed forgets what it has accepted in the last seconds. So a requeue is looked at again
(:func:`put_back`).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from resilience.integrations.slurm import chain
from resilience.integrations.slurm.scontrol import SlurmAway, SlurmError, insist, scontrol
from resilience.integrations.slurm.scontrol import field as slurm_field

_LOG = logging.getLogger("resilience.slurm")
_PATIENCE_S = 600.0  # with a slurmctld that does not answer
_EXCLUDE_TRIES = 5
_PAUSE_S = 1.0
SAVED_S = 8.0  # slurmctld writes down what it has accepted within 5 s (SAVE_MAX_WAIT)
_PUT_BACK_TRIES = 3
REQUEUED = "REQUEUED"


class Ended(SlurmError):  # noqa: N818 - reads as what it is
    """Somebody has ended the job, or requeued it: it is not for us to do so."""


@dataclass(frozen=True)
class Seen:
    """What Slurm says of a job. ``preempted``: it has to leave, and may have some time to."""

    state: str = chain.RUNNING
    preempted: bool = False


def look(job: str, restart: int | None = None) -> Seen:
    """Return what Slurm says of the job; that it runs where there is no answer, since nobody has said otherwise.

    ``restart``: the start that is meant; a job that has been requeued since is said to be so, whatever its new start does.
    """
    try:
        text = scontrol("show", "job", "-o", job)
    except SlurmError as error:
        _LOG.warning("%s", error)
        return Seen()
    return Seen(job_state(text, restart), is_preempted(text))


def requeue(job: str, restart: int | None = None, patience: float = _PATIENCE_S) -> None:
    """Put the job into the queue again, if its start is the one that is meant.

    Raises :class:`Ended` where it was ended or requeued by others, else a :class:`SlurmError`.
    """
    tries = 0

    def once() -> None:
        nonlocal tries
        found = job_state(scontrol("show", "job", "-o", job), restart)
        if not chain.may_go_on(found):
            if tries:  # one that was not answered may have come through
                _LOG.info("Slurm says %s of the job by now: an earlier try was heard, or somebody has ended it.", found)
                return
            raise Ended(f"Slurm is ending the job ({found}: cancelled, requeued or preempted)")
        tries += 1
        scontrol("requeue", *(["incomplete"] if found == chain.RUNNING else []), job)

    insist(once, patience, _LOG.warning)


def put_back(job: str, restart: int | None, out: Sequence[str] = (), patience: float = _PATIENCE_S) -> None:
    """Requeue the job without the nodes ``out``, and see that it stays so. Raises as :func:`requeue` does.

    What slurmctld has accepted it may not have written down yet. One that is killed then, and started anew, shows the job as
    running, and takes the end of its batch script for the job's.
    """
    for _ in range(_PUT_BACK_TRIES):
        requeue(job, restart, patience)
        if out:
            exclude(job, out, patience)
        time.sleep(SAVED_S)
        if not _is_forgotten(job, restart, patience):
            return
        _LOG.warning("slurmctld was started anew, and has forgotten that the job is requeued: it is requeued again.")
    raise SlurmError(f"Slurm has accepted {_PUT_BACK_TRIES} requeues, and shows the job as running after each")


def _is_forgotten(job: str, restart: int | None, patience: float) -> bool:
    try:
        text = insist(lambda: scontrol("show", "job", "-o", job), patience, _LOG.warning)
    except SlurmError as error:
        _LOG.warning("whether the job stays requeued can't be seen: %s.", error)
        return False
    return job_state(text, restart) == chain.RUNNING


def was_away(job: str, patience: float = _PATIENCE_S) -> bool:
    """Whether slurmctld does not answer; returns when it does again. Raises :class:`SlurmAway` where it does not in time."""
    try:
        scontrol("show", "job", "-o", job)
    except SlurmAway:
        insist(lambda: scontrol("show", "job", "-o", job), patience, _LOG.warning)
        return True
    except SlurmError:
        return False
    return False


def exclude(job: str, nodes: Sequence[str], patience: float = _PATIENCE_S) -> None:
    """Have the job not get these nodes again: a user may do that, where draining is an operator's right."""

    def once() -> None:
        before = slurm_field(scontrol("show", "job", "-o", job), "ExcNodeList")
        names = ",".join([*([before] if before else []), *nodes])
        scontrol("update", f"JobId={job}", f"ExcNodeList={names}")

    for attempt in range(_EXCLUDE_TRIES):
        try:
            insist(once, patience, _LOG.warning)
            _LOG.info(
                "the job does not get %s again (ExcNodeList). Where too few others are left it waits: `scontrol update JobId=%s "
                "ExcNodeList=` lets it have all of them.",
                ", ".join(nodes),
                job,
            )
            return
        except SlurmError as error:
            if isinstance(error, SlurmAway) or attempt == _EXCLUDE_TRIES - 1:
                _LOG.error("the job may get %s again: %s.", ", ".join(nodes), error)
                return
            time.sleep(_PAUSE_S)


def is_preempted(text: str) -> bool:
    """Whether ``scontrol show job`` says that this start of the job is preempted; an earlier one may have been. Pure."""
    when, start = (slurm_field(text, name) for name in ("PreemptTime", "StartTime"))
    return when[:1].isdigit() and when >= start


def job_state(text: str, restart: int | None = None) -> str:
    """Return the state of a job in what ``scontrol show job`` prints; REQUEUED where it speaks of a later start. Pure.

    Slurm shows COMPLETING for a job that it ends, whatever the reason. One that has used up its time may be requeued; that it was
    cancelled, preempted or requeued by somebody is the other case.
    """
    state = slurm_field(text, "JobState") or chain.RUNNING
    start = slurm_field(text, "Restarts")
    if restart is not None and start.isdecimal() and int(start) != restart:
        return REQUEUED
    ran, limit = (_seconds(slurm_field(text, name)) for name in ("RunTime", "TimeLimit"))
    used_up = ran is not None and limit is not None and ran >= limit
    return chain.TIMED_OUT if state == "COMPLETING" and used_up else state


def _seconds(text: str) -> int | None:
    """Return Slurm's ``D-HH:MM:SS`` as seconds; None for words, as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
