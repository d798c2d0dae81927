"""The names that failover extensions are written with: strategies, what an extension is told, and the class it derives from."""

from __future__ import annotations

import dataclasses
import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class FailoverStrategy(enum.Enum):
    """What follows a failure. The short names and the long ones mean the same."""

    # The launcher's own rules decide; with nothing special about it: restart in place.
    NORMAL_FAILOVER = "NORMAL_FAILOVER"
    NODE_FAILOVER = "NODE_FAILOVER"  # the node leaves the job and is to be replaced
    GLOBAL_FAILOVER = "GLOBAL_FAILOVER"  # the workers of every node restart
    ABORTION_FAILOVER = "ABORTION_FAILOVER"  # the job ends, on every node

    NORMAL = "NORMAL_FAILOVER"
    NODE = "NODE_FAILOVER"
    GLOBAL = "GLOBAL_FAILOVER"
    ABORTION = "ABORTION_FAILOVER"


@dataclass(frozen=True)
class AgentFailureInfo:
    """What an extension is told about a failure.

    ``node_rank`` is the node of the culprit, ``timestamp`` when it failed (seconds since 1970), ``log_content`` the end of its
    log. ``failures`` are all failed ranks, the culprit first; ``report`` is the report of the cycle, as it will be written;
    ``history`` are earlier failures of the job, oldest first. ``rehearsal``: nothing has failed, this is the call at start-up
    that finds out whether the extension works.
    """

    node_rank: int = -1
    timestamp: float = 0.0
    log_content: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    host: str = ""
    rank: int | None = None
    kind: str = ""
    message: str = ""
    exit_code: int | None = None
    error_code: int | None = None
    cycle: int = 0
    step: int | None = None
    restart_count: int = 0
    max_restarts: int = 0
    failures: Sequence[Mapping[str, Any]] = ()
    history: Sequence[Mapping[str, Any]] = ()
    report: Mapping[str, Any] = field(default_factory=dict)
    rehearsal: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return dataclasses.asdict(self)


class DynamicFailoverExtension(ABC):
    """The base of every failover extension."""

    @abstractmethod
    def get_user_failover_strategy(self, failure_info: Any) -> FailoverStrategy:
        """Return what is to follow a failure; ``NORMAL_FAILOVER`` leaves it to the launcher's own rules."""
        return FailoverStrategy.NORMAL_FAILOVER


class DynamicAgentFailoverExtension(DynamicFailoverExtension):
    """An extension for the launcher: given as ``--dynamic_failover_extension=module::Class``.

    It lives in a process of its own, from the start of the launcher to its end, and is asked once per failed cycle, by the
    launcher that writes the report.
    """

    @abstractmethod
    def get_user_failover_strategy(self, failure_info: AgentFailureInfo) -> FailoverStrategy:
        """See base class."""
        return FailoverStrategy.NORMAL_FAILOVER
