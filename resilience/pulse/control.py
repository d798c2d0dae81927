"""Workload control: a rank tells the launchers what to do with the job, and they do it at once."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

from resilience.errors import LinkError, PulseError
from resilience.pulse import attach

_MAX_TEXT = 1000  # of a description; the rest is cut off


class WorkloadAction(enum.Enum):
    """What can be asked for."""

    Continue = 0  # nothing: the request is only logged
    ExcludeThisNode = 1  # this node leaves the job and does not come back; the others go on, or wait for another one
    ShutdownWorkload = 2  # the job ends on every node, with the same exit code


@dataclass(frozen=True)
class WorkloadControlRequest:
    """An action, and why."""

    action: WorkloadAction
    description: str = "<not set>"


def send(request: WorkloadControlRequest) -> None:
    """Send a request to the launcher. Returns when it was taken; raises :class:`LinkError` when it was not."""
    if not isinstance(request, WorkloadControlRequest) or not isinstance(request.action, WorkloadAction):
        raise PulseError(
            f"send_workload_control_request({request!r}): give a WorkloadControlRequest(action=WorkloadAction.…)."
        )
    if attach.page_of_this_process() is None:
        logging.getLogger("resilience").warning(
            "no launcher: the request %s has no effect. Start the script with `resilience run`.", request.action.name
        )
        return
    message = {"op": "control", "action": request.action.name, "description": str(request.description)[:_MAX_TEXT]}
    answer = attach.ask(message)
    if answer is None or "error" in answer:
        why = "no answer within 5 s" if answer is None else answer["error"]
        raise LinkError(f"the launcher did not take the request {request.action.name}: {why}. Nothing was done.")
