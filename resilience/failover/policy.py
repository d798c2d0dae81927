"""What follows a failure, when no extension says otherwise: small rules over one :class:`FailureState`, the first that speaks
decides.

Pure: no process, no clock. Each rule is a function of the state that returns a :class:`Decision` or ``None``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resilience.failover.failure import EXCEPTION, HARDWARE_CODES, NODE, OOM, SIGNAL
from resilience.failover.history import History, Past
from resilience.failover.strategy import FailoverStrategy as Strategy


@dataclass(frozen=True)
class FailureState:
    """The only argument that a rule ever gets.

    ``adopted``: the script calls us, so an unknown step means that none was made. ``began``: it got so far that it may have
    made one. ``echo``: what failed only fell over another rank, as far as can be told.
    """

    now: Past
    history: History = History()
    max_restarts: int = 0
    max_node_restarts: int | None = None
    adopted: bool = False
    began: bool = True
    error_code: int | None = None
    echo: bool = False


@dataclass(frozen=True)
class Decision:
    """What is to be done, and why. ``restart`` is False when it can't be done because the budget is spent."""

    strategy: Strategy
    reason: str
    restart: bool = True


Rule = Callable[[FailureState], Decision | None]


def hardware_code(state: FailureState) -> Decision | None:
    """A worker said that its device is broken: this node can't train."""
    for what, code in (("exit code", state.now.exit_code), ("error code", state.error_code)):
        if code is not None and code in HARDWARE_CODES:
            why = f"{what} {code} means {HARDWARE_CODES[code]}: the node is replaced"
            return Decision(Strategy.NODE_FAILOVER, why)
    return None


def same_failure_twice(state: FailureState) -> Decision | None:
    """The same failure again, and no step further than before: a third time would be no different."""
    before = state.history.last
    if before is None or before.signature != state.now.signature or not state.now.signature or state.echo:
        return None
    if state.now.kind == NODE:
        return None  # losing nodes is the infrastructure's doing, and another one may take over
    if state.now.step is None and (state.now.kind == SIGNAL or (state.began and not state.adopted)):
        return None  # whether there was progress can't be known; the budget of restarts ends it
    if state.history.is_progress(state.now.step):
        return None
    where = f"step {state.now.step}" if state.now.step is not None else "before the first step"
    return Decision(
        Strategy.ABORTION_FAILOVER,
        f"the same failure as in cycle {before.cycle} with no progress in between ({where}): restarting can't help",
    )


def user_error_before_the_first_step(state: FailureState) -> Decision | None:
    """The script fails on its way to the first step, for the second time: it has a mistake in it."""
    now, before = state.now, state.history.last
    if (
        now.kind != EXCEPTION
        or state.echo
        or not state.adopted
        or now.step is not None
        or state.history.best_step is not None
    ):
        return None
    if before is None or before.kind != EXCEPTION or before.step is not None:
        return None
    return Decision(
        Strategy.ABORTION_FAILOVER,
        "the script raised before its first step for the second time: look at the error first",
    )


def budget_of_the_job(state: FailureState) -> Decision | None:
    """No restarts are left."""
    used, total = state.history.counted(state.now.step), state.max_restarts
    if used < total:
        return None
    if total == 0:
        hint = "; with --max-restarts=N it would be restarted" if state.began else ""
        why = f"the job was ended, because --max-restarts is 0{hint}"
    else:
        further = " without getting further" if state.history.best_step is not None else ""
        why = f"the job was ended: all {total} restarts are used{further}"
    return Decision(Strategy.NORMAL_FAILOVER, why, restart=False)


def budget_of_the_node(state: FailureState) -> Decision | None:
    """This node has been restarted in place often enough: processes first, then the node."""
    limit = state.max_node_restarts
    used = state.history.on_node(state.now.node, state.now.step)
    if limit is None or used < limit:
        return None
    return Decision(
        Strategy.NODE_FAILOVER, f"all {limit} restarts in place of node {state.now.node} are used: the node is replaced"
    )


def out_of_memory(state: FailureState) -> Decision | None:
    """Memory ran out: it may have been a spike, so once more; the second time is :func:`same_failure_twice`."""
    if state.now.kind != OOM:
        return None
    return Decision(
        Strategy.NORMAL_FAILOVER, "it ran out of memory; if it does again without progress, the job is ended"
    )


def restart(state: FailureState) -> Decision:
    """Everything else."""
    del state
    return Decision(Strategy.NORMAL_FAILOVER, "all workers are restarted")


RULES: Sequence[Rule] = (
    hardware_code,
    same_failure_twice,
    user_error_before_the_first_step,
    budget_of_the_job,
    budget_of_the_node,
    out_of_memory,
    restart,
)


def decide(state: FailureState, asked: Strategy = Strategy.NORMAL_FAILOVER, who: str = "") -> Decision:
    """Decide what follows. ``asked``: what the extension ``who`` returned; anything but NORMAL goes before the rules."""
    if asked is not Strategy.NORMAL_FAILOVER:
        chosen = Decision(asked, f"{who} asks for {asked.value}")
        spent = budget_of_the_job(state) if asked is Strategy.GLOBAL_FAILOVER else None
        return spent or chosen
    return next(decision for rule in RULES if (decision := rule(state)) is not None)
