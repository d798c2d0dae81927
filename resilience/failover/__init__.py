"""What to do about a failure: what happened (failure), who did it (culprit), what follows (policy, strategy, extension)."""

from __future__ import annotations

from resilience.failover.strategy import (
    AgentFailureInfo,
    DynamicAgentFailoverExtension,
    DynamicFailoverExtension,
    FailoverStrategy,
)

__all__ = ["AgentFailureInfo", "DynamicAgentFailoverExtension", "DynamicFailoverExtension", "FailoverStrategy"]
