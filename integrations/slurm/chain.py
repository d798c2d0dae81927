"""What follows when the launchers of a Slurm job have ended: it is over, or it is put into the queue again.

Pure. :func:`decide` is told how everything ended and returns what to do, in words.

Rule: a requeue that follows a request to stop is free, unless the job fails at its stop in the same way as at the last one. Every
other one is counted, and there are so many until the job gets further than ever before; then the count begins anew. The same
failure twice without progress ends the chain.

Rule: a 0 counts where a launcher has said it. srun ends with 0 too when Slurm has given up its node. And it counts as the job's end
only where enough have said it: what one node says is not what another one does.

Hazard: what Slurm requeues by itself (the first node is lost, a preemption without grace) never comes by here, and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from resilience.failover import exits
from resilience.failover.ends import NodeEnd
from resilience.failover.failure import HARDWARE_CODES

# Nothing changes by trying again; the first of them is the chain's code.
STOPS = (exits.ABORTED, exits.SHUT_DOWN, exits.USAGE)
LEFT = (*HARDWARE_CODES, exits.NODE_LEFT, exits.UNFIT)  # codes of a node that is out while the job may go on
_MISSED = (*LEFT, exits.CUT_OFF)  # the same, of one too that the others have given up
RUNNING, TIMED_OUT = "RUNNING", "TIMEOUT"
MAX_REQUEUES = 3


@dataclass(frozen=True)
class History:
    """What is remembered from one start of the job to the next."""

    counted: int = 0  # requeues since there was progress
    cause: str = ""  # of the last failure, without its numbers
    step: int = -1  # the highest that was ever told of


@dataclass(frozen=True)
class Situation:
    """All that a decision depends on. ``ends`` has the nodes whose launchers said something at their end; the others were killed.

    ``asked``: the job was told to stop. ``gave_up``: we ended it, since too few nodes were left. ``finished``: the marker is there,
    or None where there is none to look for. ``cause``: of the last failure, without numbers; empty where it can't repeat itself.
    ``broken``: what failed beside the launchers, in words. ``stop_failure``: what failed after the request to stop, in words.
    ``culprit``: who ended this start, what it said and where more is to be read, in words; empty where no report tells.
    ``nodes`` are in the job, ``most`` of them train at once, and with fewer than ``needed`` it can't go on.
    """

    code: int
    ends: tuple[NodeEnd, ...] = ()
    nodes: int = 1
    needed: int = 1
    most: int = 1
    state: str = RUNNING
    asked: bool = False
    gave_up: bool = False
    finished: bool | None = None
    cause: str = ""
    step: int = -1
    broken: str = ""
    stop_failure: str = ""
    culprit: str = ""
    history: History = History()
    max_requeues: int = MAX_REQUEUES


_AT_STOP = "at the stop: "  # begins the cause of a failure after a request to stop


@dataclass(frozen=True)
class Decision:
    """``requeue`` or end with ``code``. ``exclude``: nodes that the job is not to get again."""

    requeue: bool
    code: int
    why: str
    exclude: tuple[str, ...] = ()
    history: History = History()
    counted: bool = False
    failed_at_stop: bool = False  # free, unless it was so at the last stop too


def without_memory(decision: Decision, restart: int, max_requeues: int) -> Decision:
    """Return what follows where nothing can be remembered: all starts of the job are counted instead, those after progress too.

    A stop that failed counts as well: nobody knows whether it is the first.
    """
    counts = decision.counted or decision.failed_at_stop
    if not (decision.requeue and counts) or restart < max_requeues:
        return decision
    most = f"it has been requeued {restart} times, and {max_requeues} are the most"
    why = f"{decision.why}, of which nothing can be remembered; {most}"
    return replace(decision, requeue=False, why=why)


def decide(now: Situation) -> Decision:
    """Say what follows."""
    over = _over(now)
    if over is not None:
        return over
    codes = _codes(now)
    out = _out(now)
    progress = now.step > now.history.step
    kept = History(step=now.step) if progress else now.history
    if now.asked or (exits.PREEMPTED in codes and not now.gave_up):
        return _stopped(now, out, kept)
    what = _what(now, codes)
    same = bool(now.cause) and now.cause == kept.cause and not out
    if same:
        where = f"no step beyond {kept.step}" if kept.step >= 0 else "no step"
        why = f"{what}: the same failure as before the last requeue, and {where} since. Starting again can't help"
        return Decision(False, _worst(now), why, out, kept)
    if kept.counted >= now.max_requeues:
        why = f"{what}: {kept.counted} requeues without progress are the most that are allowed (--max-requeues)"
        return Decision(False, _worst(now), why, out, kept)
    kept = replace(kept, counted=kept.counted + 1, cause="" if out else now.cause)
    why = f"{what}: requeue {kept.counted} of {now.max_requeues} without progress"
    return Decision(True, _worst(now), why, out, kept, counted=True)


def _out(now: Situation) -> tuple[str, ...]:
    """Return the nodes that are out. Where all of several are unfit it is something that they have in common, and none is out."""
    if len(now.ends) > 1 and len(now.ends) == now.nodes and all(end.code == exits.UNFIT for end in now.ends):
        return ()
    return tuple(sorted(end.node for end in now.ends if end.code in LEFT))


def _codes(now: Situation) -> list[int]:
    """Return the codes that count: those of the launchers; srun's where they said nothing, unless it is a 0."""
    return [end.code for end in now.ends] or [now.code] * (now.code != exits.FINISHED)


def _stopped(now: Situation, out: tuple[str, ...], kept: History) -> Decision:
    """Say what follows a request to stop. One that fails again, and no step further, is counted: be it with other words, which may
    have a random name in them."""
    goes_on = "it goes on when it is started again"
    failed = _failed_at_stop(now)
    if not failed:
        silent = not now.ends and now.code != exits.PREEMPTED
        how = f", and no launcher said how it ended (srun ended with {now.code})" if silent else ", and did"
        return Decision(True, exits.PREEMPTED, f"asked to stop{how}: {goes_on}", out, kept)
    code = _worst(now)
    code = exits.FAILED if code == exits.PREEMPTED else code
    what, cause = f"asked to stop, and failed at it ({failed})", f"{_AT_STOP}{now.cause or f'exit code {code}'}"
    if not kept.cause.startswith(_AT_STOP):
        why, kept = f"{what}: {goes_on}, from its last checkpoint", replace(kept, cause=cause)
        return Decision(True, code, why, out, kept, failed_at_stop=True)
    if kept.counted >= now.max_requeues:
        most = f"{kept.counted} requeues without progress are the most that are allowed (--max-requeues)"
        why = f"{what}, as at the last stop: {most}"
        return Decision(False, code, why, out, kept)
    kept = replace(kept, counted=kept.counted + 1, cause=cause)
    why = f"{what}, as at the last stop: requeue {kept.counted} of {now.max_requeues} without progress"
    return Decision(True, code, why, out, kept, counted=True)


def _failed_at_stop(now: Situation) -> str:
    """Return what failed after the request to stop, in words; empty where nothing did."""
    if now.stop_failure:
        return now.stop_failure
    fine = {exits.PREEMPTED, exits.FINISHED, *LEFT} | ({exits.FAILED} if _had_nothing_to_stop(now) else set())
    return _told(end for end in now.ends if end.code not in fine)


def _had_nothing_to_stop(now: Situation) -> bool:
    """Whether a 1 at the stop is that of a launcher without ranks that knew of us: no step was made yet, or it was a spare.

    Such a launcher is ended by the request itself. Of ranks that fail at a stop there is a report, and so a ``stop_failure``.
    """
    codes = [end.code for end in now.ends]
    return now.step < 0 or (exits.PREEMPTED in codes and codes.count(exits.FAILED) <= now.nodes - now.needed)


def _over(now: Situation) -> Decision | None:
    """Return how it ended for good, or None."""
    codes = _codes(now)
    if now.finished:
        return Decision(False, exits.FINISHED, "finished: the marker is there", history=now.history)
    if now.finished is None and _all_done(now):
        return Decision(False, exits.FINISHED, "finished: all workers ended with 0", history=now.history)
    if not may_go_on(now.state):
        why = f"Slurm is ending the job ({now.state}: cancelled, requeued or preempted): it is not requeued from here"
        return Decision(False, _worst(now), why, history=now.history)
    for code in STOPS:
        if code in codes:
            why = f"exit code {code}: {exits.MEANINGS[code]}{_by(now)}. It is not requeued"
            return Decision(False, code, why, history=now.history)
    return None


def _all_done(now: Situation) -> bool:
    """Whether those that ended with 0 were all that trained. Fewer than can train are so where the job may go on with so few, and
    the others are gone: they left, were cut off, or lost without a word.
    """
    done = sum(end.code == exits.FINISHED for end in now.ends)
    others = [end.code for end in now.ends if end.code != exits.FINISHED]
    return done > 0 and (done >= now.most or (done >= now.needed and all(code in _MISSED for code in others)))


def may_go_on(state: str) -> bool:
    """Whether a job in this state may be requeued: nobody has ended it."""
    return state in (RUNNING, TIMED_OUT)


def _what(now: Situation, codes: Sequence[int]) -> str:
    if now.broken:
        return now.broken
    if left := [end for end in now.ends if end.code in LEFT]:
        return f"too few nodes are left ({_told(left)})"
    if now.gave_up:
        return "a node was lost without a word, and nobody took its place"
    if exits.FINISHED in codes:
        return _who_finished(now)
    if not now.ends:
        where = f"at step {now.step} or later" if now.step >= 0 else "or nothing was started"
        return f"no launcher said how it ended, and srun ended with {now.code}: launchers were killed or nodes lost, {where}"
    code = _worst(now)
    return f"exit code {code}, {_meaning(code)}{_by(now)}"


def _who_finished(now: Situation) -> str:
    if _all_done(now):
        return "all workers ended with 0, and the marker that says that training is complete is not there"
    others = [end for end in now.ends if end.code != exits.FINISHED]
    done = len(now.ends) - len(others)
    return f"{done} of {now.most} nodes ended with 0, and the others did not ({_told(others) or 'killed, or lost'})"


def _by(now: Situation) -> str:
    return f" ({now.culprit})" if now.culprit else ""


def _told(ends: Iterable[NodeEnd]) -> str:
    return "; ".join(f"{end.node} ended with {end.code}, {_meaning(end.code)}" for end in ends)


def _meaning(code: int) -> str:
    return HARDWARE_CODES.get(code) or exits.MEANINGS.get(code) or "ended by a signal or by Slurm"


def _worst(now: Situation) -> int:
    """Return the code that says most: that of a node that was out only where nobody has another."""
    codes = [end.code for end in now.ends if end.code != exits.FINISHED]
    others = [code for code in codes if code not in (*LEFT, exits.PREEMPTED)]
    return max(others or codes, default=0) or now.code or exits.FAILED


def settled(ends: Sequence[NodeEnd], nodes: int, needed: int, most: int) -> bool:
    """Whether it is clear how this start of the job ends, though not all launchers have ended. ``most`` nodes train at once.

    Those that finish early wait for the others, and not for ever: one that still writes its last checkpoint is no spare.
    So nodes that finished settle it only if they are as many as can train; others do if those that run are fewer than needed.
    """
    finished = sum(end.code == exits.FINISHED for end in ends)
    if finished and len(ends) < nodes:
        return finished >= most
    return bool(ends) and nodes - len(ends) < needed


def too_few(ends: Sequence[NodeEnd], nodes: int, needed: int) -> bool:
    """Whether nodes have left, and those that run are fewer than the job needs: they would wait for one that nobody sends.

    While the job ends as a whole its launchers end one after another; there it is not for us to hurry them.
    """
    left = [end for end in ends if end.code in LEFT]
    return bool(left) and len(left) == len(ends) and nodes - len(ends) < needed
