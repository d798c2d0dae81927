"""What the tests with real parts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real import kubernetes


@pytest.fixture(scope="session")
def api_server() -> Iterator[kubernetes.ApiServer]:
    """A real API server for the whole session, or a skip that says what is not here. Tests take names of their own."""
    lacking = kubernetes.missing()
    if lacking:
        pytest.skip(f"not here: {lacking}. Left out is everything against a real Kubernetes API server")
    server = kubernetes.ApiServer()
    try:
        yield server.start()
    finally:
        server.close()
