"""However a job's ``stop_grace`` was said, its supervisor knows it: it must not end ranks that were promised more time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resilience.integrations.ray import JobBuilder, grace
from resilience.integrations.ray.node import NodeAgent

from tests.jobs import wait_for


@pytest.mark.parametrize(
    ("say", "seconds"),
    [
        (lambda job: job, 25.0),
        (lambda job: job.settings(stop_grace=120), 120.0),
        (lambda job: job.launcher_args("--ft-stop-grace=120"), 120.0),
        (lambda job: job.launcher_args("--ft-param-stop_grace=120", "--redirects=3"), 120.0),
        (lambda job: job.settings(stop_grace=60).launcher_args("--ft-stop-grace=120"), 120.0),
        (lambda job: job.environment({"RESILIENCE_STOP_GRACE": "120"}), 120.0),
        (lambda job: job.settings(stop_grace=60).environment({"RESILIENCE_STOP_GRACE": "120"}), 60.0),
        (lambda job: job.launcher_args("--ft-cfg-path=/nowhere/x.yaml", "--ft-stop-grace=120"), 120.0),
    ],
)
def test_grace_of_a_job_is_what_its_launchers_make_of_all_that_was_said(say: Any, seconds: float) -> None:
    assert grace.of_spec(say(JobBuilder().train("train.py", "--ft-stop-grace=5")).build().spec) == seconds


def test_launcher_that_will_refuse_its_words_promises_nothing(tmp_path: Path) -> None:
    assert grace.of_launcher(["--ft-stop-grace=soon"], {}) is None
    assert grace.of_launcher(["--ft-cfg-path=nowhere.yaml"], {}, str(tmp_path)) is None
    assert grace.of_launcher(["--ft-cfg-path=a\0b"], {}, str(tmp_path)) is None
    assert grace.of_launcher(["train.py", "--ft-stop-grace=5"], {}) == 25.0, "that is the script's"


def ended(agent: NodeAgent) -> None:
    def over() -> bool:
        agent._keeper.end()
        return agent.report()["code"] is not None

    wait_for(over, "the launcher's end")


@pytest.mark.spawns
def test_node_tells_the_grace_of_its_file_and_of_the_environment_that_ray_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_agent: Callable[[], NodeAgent]
) -> None:
    (tmp_path / "ft.yaml").write_text("fault_tolerance:\n  stop_grace: 90\n")
    told = []
    for flags, theirs in ((["--ft-cfg-path=ft.yaml"], ""), ([], "80"), (["--ft-stop-grace=70"], "80")):
        monkeypatch.setenv("RESILIENCE_STOP_GRACE", theirs)
        agent = new_agent()
        agent.order(1, [*flags, "nowhere.py"], {}, str(tmp_path), False)
        told.append(agent.report()["grace_s"])
        ended(agent)
    assert told == [90.0, 80.0, 70.0]
