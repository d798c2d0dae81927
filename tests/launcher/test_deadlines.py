from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from resilience.config import Settings, resolve
from resilience.launcher.deadlines import announce, hierarchy, problems, rendezvous_limit


def test_defaults_have_no_problem() -> None:
    assert problems(Settings()) == []


def test_hierarchy_names_every_deadline_of_ours() -> None:
    named = dict(hierarchy(Settings(), shutdown_timeout=30.0))
    assert named["ranks are looked at every"] == 0.2
    assert named["stacks collected within"] == 5.0
    assert named["hung rank, signal to SIGKILL"] == 10.0
    assert named["other ranks, signal to SIGKILL"] == 30.0
    assert (named["silent node"], named["silent store"]) == (60.0, 60.0)


@pytest.mark.parametrize(
    "name", ["rank_heartbeat_timeout", "rank_out_of_section_timeout", "initial_rank_heartbeat_timeout"]
)
def test_timeout_shorter_than_the_look_is_a_problem(name: str) -> None:
    (problem,) = problems(resolve({name: "1", "workload_check_interval": "5"}, {}))
    assert name in problem
    assert "--ft-workload-check-interval" in problem


def test_timeout_above_that_of_nccl_is_a_problem_since_the_victims_die_first() -> None:
    found = problems(resolve({"rank_heartbeat_timeout": "700", "rank_section_timeouts": "save:900,step:60"}, {}))
    assert len(found) == 2
    assert "NCCL" in found[0]
    assert "section 'save'" in found[1]


def test_long_initial_timeout_is_no_problem_since_no_collective_runs_yet() -> None:
    assert problems(resolve({"initial_rank_heartbeat_timeout": "3600"}, {})) == []


def test_no_timeout_is_no_problem() -> None:
    assert problems(resolve({"rank_heartbeat_timeout": "null", "rank_section_timeouts": "a:null"}, {})) == []


@pytest.mark.parametrize(
    ("configs", "least"),
    [({}, 600.0), ({"join_timeout": 10}, 10.0), ({"timeout": 900}, 900.0), ({"read_timeout": 5}, 600.0)],
)
def test_rendezvous_has_more_time_than_torch_gives_it(configs: dict[str, int], least: float) -> None:
    limit = rendezvous_limit(SimpleNamespace(rdzv_configs=configs))
    assert least < limit < least + 2 * configs.get("read_timeout", 60) + 61


def test_announcement_prints_the_hierarchy_its_problems_and_notes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resilience.launcher")
    settings = resolve({"rank_heartbeat_timeout": "0.1", "restart_check_interval": "60"}, {})
    announce(SimpleNamespace(shutdown_timeout=30), settings)
    levels = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert levels[0][0] == logging.INFO
    assert "hung rank, signal to SIGKILL: 10 s" in levels[0][1]
    warnings = [text for level, text in levels if level == logging.WARNING]
    assert any("restart_check_interval" in text for text in warnings)
    assert any("rank_heartbeat_timeout is 0.1 s" in text for text in warnings)
