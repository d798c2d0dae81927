"""A real API server where one is here; else these tests say what they leave out."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from resilience.integrations.kubernetes.api import Api

from tests.integrations.kubernetes.cluster import Cluster, Forwarder
from tests.real import kubernetes
from tests.real.conftest import api_server
from tests.real.kubernetes import ApiServer

__all__ = ["api_server"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the server, so that it can be asked for by itself."""
    for item in items:
        if "api_server" in getattr(item, "fixturenames", ()):
            item.add_marker("apiserver")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Say what is left out, in one line for all; the fixture would say it for each."""
    if "api_server" not in getattr(item, "fixturenames", ()):
        return
    left_out = "everything against a real Kubernetes API server"
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:  # each would start a server of its own
        pytest.skip(f"left to the end of `make test`, with one server for all of them: {left_out}")
    if lacking := kubernetes.missing():
        pytest.skip(f"not here: {lacking}. Left out is {left_out}")


@pytest.fixture
def cluster(api_server: ApiServer) -> Iterator[Cluster]:
    """A namespace and nodes of the test's own."""
    made = Cluster(api_server, f"t{uuid.uuid4().hex[:8]}")
    yield made
    made.close()


@pytest.fixture
def forwarder(api_server: ApiServer) -> Iterator[Forwarder]:
    """A way to the API server that can be cut."""
    made = Forwarder(int(api_server.url.rpartition(":")[2]))
    yield made
    made.close()


@pytest.fixture
def api(api_server: ApiServer) -> Api:
    """The API server, as the admin sees it."""
    return Api(api_server.client())
