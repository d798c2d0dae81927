"""What follows an exception, by the user's own rules: a control request, or a failover strategy. Pure, but for what it sends.

exc_handling_policy={MemoryError: WorkloadAction.ShutdownWorkload, OSError: FailoverStrategy.NODE}
exc_handling_policy=lambda error: WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "bad disk")
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from resilience import recording
from resilience.errors import ConfigError, ResilienceError
from resilience.failover.strategy import FailoverStrategy
from resilience.pulse import control
from resilience.pulse.control import WorkloadAction, WorkloadControlRequest

_LOG = logging.getLogger("resilience.lightning")
Answer = WorkloadControlRequest | WorkloadAction | FailoverStrategy | None
Policy = Mapping[type[BaseException], Answer] | Callable[[Any], Answer] | None
_ACTIONS = {
    FailoverStrategy.NODE_FAILOVER: WorkloadAction.ExcludeThisNode,
    FailoverStrategy.ABORTION_FAILOVER: WorkloadAction.ShutdownWorkload,
}


def check(policy: Policy) -> None:
    """Raise :class:`ConfigError` for what is no policy."""
    if policy is None or callable(policy):
        return
    wrong = not isinstance(policy, Mapping) or [
        one for one in policy if not (isinstance(one, type) and issubclass(one, BaseException))
    ]
    if wrong:
        raise ConfigError(
            f"exc_handling_policy={policy!r}: give a function of the exception, or a mapping from classes of exceptions to "
            "WorkloadAction, WorkloadControlRequest or FailoverStrategy."
        )


def answer(policy: Policy, error: BaseException) -> Answer:
    """Return what a policy says to an exception; of a mapping the class that is nearest to it counts."""
    if policy is None:
        return None
    if callable(policy):
        return policy(error)
    return next((policy[kind] for kind in type(error).__mro__ if kind in policy), None)


def request(said: Answer, error: BaseException) -> WorkloadControlRequest | None:
    """Return the request that follows from it; ``None``: the launcher's own rules decide, which restart all workers."""
    if isinstance(said, FailoverStrategy):
        said = _ACTIONS.get(said)
    if isinstance(said, WorkloadAction):
        text = str(error).splitlines()[0] if str(error) else ""
        said = WorkloadControlRequest(said, f"{type(error).__name__}: {text}" if text else type(error).__name__)
    if said is None or isinstance(said, WorkloadControlRequest):
        return said
    raise ConfigError(
        f"exc_handling_policy returned {said!r}; give a WorkloadControlRequest, an action, a strategy or None."
    )


def follow(policy: Policy, error: BaseException) -> WorkloadAction | None:
    """Record an exception and tell the launchers what is to follow it. Never raises: the exception goes on as it is."""
    try:
        said = answer(policy, error)
        if isinstance(said, FailoverStrategy):
            recording.annotate(failover=said.name)
        recording.capture(error)
        wanted = request(said, error)
        if wanted is not None:
            control.send(wanted)
            return wanted.action
    except (ResilienceError, Exception) as problem:  # noqa: BLE001 - the user's code, in a process that is failing
        _LOG.warning("exc_handling_policy could not be followed: %s: %s.", type(problem).__name__, problem)
        recording.capture(error)
    return None
