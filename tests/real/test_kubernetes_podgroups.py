"""Groups of Pods and the real garbage collector of Kubernetes 1.20: a group goes with the job that it belongs to."""

from __future__ import annotations

import pytest
from resilience.integrations.kubernetes.api import Api
from resilience.integrations.kubernetes.podgroups.jobs import KINDS
from resilience.integrations.kubernetes.podgroups.schedulers import T9k

from tests.integrations.kubernetes.test_podgroups_cluster import admin, controller, found, group_of, space, submit
from tests.jobs import wait_for
from tests.real.kubernetes import ApiServer

__all__ = ["admin", "controller", "space"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.apiserver]


def test_group_goes_with_its_job(api_server: ApiServer, admin: Api, space: str, controller: None) -> None:
    submit(admin, space, "BeamJob")
    group_of(admin, space)
    admin.delete(KINDS["BeamJob"].kind, "job-sample", space)
    api_server.start_controllers("garbagecollector")
    try:
        wait_for(lambda: found(admin, T9k.kind, "job-sample", space) is None, "the group to be collected", 120)
    finally:
        api_server.end("kube-controller-manager")
