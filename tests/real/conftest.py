"""What the tests with real parts share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.real import kubernetes
from tests.real.ray_cluster import ENVIRONMENT, RayCluster

if TYPE_CHECKING:
    from tests.real.ray_training import Site, Undisturbed


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


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """A real Ray cluster for the tests of a file. They say how many nodes they want."""
    os.environ.update(ENVIRONMENT)  # Ray reads it when it is imported
    import ray

    started = RayCluster()
    try:
        yield started
    finally:
        ray.shutdown()
        started.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The losses that are right."""
    from tests.real.ray_training import Undisturbed

    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def site(ray_cluster: RayCluster, tmp_path: Path, undisturbed: Undisturbed) -> Iterator[Site]:
    """Where a training on Ray is tried."""
    from tests.real.ray_training import Site

    with Site(ray_cluster, tmp_path, undisturbed) as site:
        yield site
