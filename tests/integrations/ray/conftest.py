"""What the tests of Ray's actors share: the actors, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from resilience.integrations.ray.node import NodeAgent


@pytest.fixture
def new_agent() -> Iterator[Callable[[], NodeAgent]]:
    """Make actors of nodes, in this process. They are closed again: what watches them would outlive the test."""
    made: list[NodeAgent] = []

    def make() -> NodeAgent:
        made.append(NodeAgent())
        return made[-1]

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def agent(new_agent: Callable[[], NodeAgent]) -> NodeAgent:
    """One of them."""
    return new_agent()
