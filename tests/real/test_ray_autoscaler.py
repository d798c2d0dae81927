"""Jobs on a real Ray cluster whose nodes are not there yet: its autoscaler starts them because the job waits for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import wait_for
from tests.real.ray_cluster import ENVIRONMENT, RayCluster
from tests.real.ray_training import Site, Training, Undisturbed

pytestmark = [pytest.mark.timeout(900), pytest.mark.rare]


@pytest.fixture(scope="module")
def growing() -> Iterator[RayCluster]:
    """A cluster without nodes, that can have two of each of two racks."""
    os.environ.update(ENVIRONMENT)
    import ray

    started = RayCluster(a=2, b=2)
    try:
        yield started
    finally:
        ray.shutdown()
        started.close()


@pytest.fixture
def empty_site(growing: RayCluster, tmp_path: Path, undisturbed: Undisturbed) -> Iterator[Site]:
    """It has no node of its own."""
    with Site(growing, tmp_path, undisturbed) as site:
        yield site


def submitted(site: Site, nodes: int, threshold: float | None = None) -> Training:
    it = site.planned(nodes, threshold=threshold)
    it.job.submit()
    wait_for(lambda: it.job.status().phase == "RUNNING", lambda: f"all of its nodes\n{it.job.status()}", 240)
    return it


def test_job_whose_nodes_do_not_exist_yet_gets_them(empty_site: Site) -> None:
    it = submitted(empty_site, 2)
    it.await_steps()
    it.finish()


def test_job_with_groups_whose_nodes_do_not_exist_yet_gets_them_and_knows_their_racks(empty_site: Site) -> None:
    it = submitted(empty_site, 4, threshold=60)
    it.await_steps()
    assert [one.rack for one in it.job.status().nodes] == ["a", "a", "b", "b"]
    it.finish()
