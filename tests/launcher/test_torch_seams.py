"""What we override or use of torch's private agent, pinned: a torch that changes it must fail here and not in a cluster."""

from __future__ import annotations

import inspect

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.run import config_from_args, get_args_parser

from resilience.launcher.agent import Agent
from resilience.launcher.rendezvous import FreshStores

OVERRIDDEN = {
    "_rendezvous": ["self", "worker_group"],
    "_start_workers": ["self", "worker_group"],
    "_invoke_run": ["self", "role"],
    "_stop_workers": ["self", "worker_group"],
    "_shutdown": ["self", "death_sig", "timeout"],
}


@pytest.mark.parametrize(("name", "parameters"), OVERRIDDEN.items())
def test_torch_has_the_methods_that_we_override_with_these_parameters(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(LocalElasticAgent, name)).parameters) == parameters
    assert list(inspect.signature(getattr(Agent, name)).parameters) == parameters


def test_we_override_nothing_else_that_is_private() -> None:
    ours = {name for name in vars(Agent) if not name.startswith("__")}
    theirs = {name for base in LocalElasticAgent.__mro__ for name in vars(base)}
    assert {name for name in ours & theirs if name.startswith("_") and not name.startswith("_abc")} == set(OVERRIDDEN)


def test_the_attributes_that_we_read_are_set_by_torchs_constructor() -> None:
    source = "".join(inspect.getsource(base.__init__) for base in LocalElasticAgent.__mro__[:2])
    for name in ("_remaining_restarts", "_pcontext"):
        assert f"self.{name}" in source


def test_every_method_of_a_rendezvous_is_passed_on() -> None:
    abstract = set(RendezvousHandler.__abstractmethods__) | {"use_agent_store"}
    assert abstract <= set(vars(FreshStores))


def test_the_public_parts_of_torch_that_we_build_on_have_the_parameters_we_pass() -> None:
    assert list(inspect.signature(RendezvousStoreInfo.build).parameters) == [
        "rank",
        "store",
        "local_addr",
        "server_port",
    ]
    assert list(inspect.signature(RendezvousInfo.__init__).parameters)[1:] == [
        "store",
        "rank",
        "world_size",
        "bootstrap_store_info",
    ]
    assert "reify" in LogsSpecs.__abstractmethods__
    assert {"stdouts", "stderrs", "error_files"} <= set(LogsDest.__dataclass_fields__)
    assert callable(config_from_args)
    assert get_args_parser().prog
