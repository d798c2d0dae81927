"""The page on dynamic fault tolerance, as it is written there: its strategies, its interface, its example, its command line."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import pytest

from resilience.failover import (
    AgentFailureInfo,
    DynamicAgentFailoverExtension,
    DynamicFailoverExtension,
    FailoverStrategy,
    exits,
)
from resilience.failover.extension import Extension
from tests.jobs import WORKLOADS, job

STRATEGIES = ["NORMAL_FAILOVER", "NODE_FAILOVER", "GLOBAL_FAILOVER", "ABORTION_FAILOVER"]
# The document's example, but for the names of the modules that it imports from.
EXAMPLE = """\
from resilience.failover import (
    DynamicAgentFailoverExtension, AgentFailureInfo,
)
from resilience.failover import FailoverStrategy


class TestDynamicFailoverExtension(DynamicAgentFailoverExtension):

    def get_user_failover_strategy(self,
                                   failure_info: AgentFailureInfo) -> FailoverStrategy:
        # stop job whatever the failure is
        return FailoverStrategy.ABORTION_FAILOVER
"""
FLAG = "--dynamic_failover_extension=test.user_def_failover::TestDynamicFailoverExtension"


def package(folder: Path) -> Path:
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "__init__.py").touch()  # without one Python takes its own package of this name
    (folder / "test" / "user_def_failover.py").write_text(EXAMPLE)
    return folder


def test_strategies_have_their_names() -> None:
    assert set(STRATEGIES) <= set(FailoverStrategy.__members__)


def test_interface_is_abstract_and_its_own_answer_is_normal() -> None:
    class Asks(DynamicAgentFailoverExtension):
        def get_user_failover_strategy(self, failure_info: AgentFailureInfo) -> FailoverStrategy:
            return super().get_user_failover_strategy(failure_info)

    assert inspect.isabstract(DynamicAgentFailoverExtension)
    assert issubclass(DynamicAgentFailoverExtension, DynamicFailoverExtension)
    assert Asks().get_user_failover_strategy(AgentFailureInfo()) is FailoverStrategy.NORMAL_FAILOVER


@pytest.mark.spawns
def test_example_stops_the_job_whatever_the_failure_is(tmp_path: Path) -> None:
    script = str(WORKLOADS / "always_fails.py")
    with job(package(tmp_path), ["--nproc-per-node=1", "--max-restarts=3", FLAG], [script]) as it:
        assert it.wait() == exits.ABORTED, it.log()
        report = it.report(0)
        assert (report["strategy"], report["action"]) == ("ABORTION_FAILOVER", "abort")
        assert "RuntimeError: no good" in report["culprit"]["message"]
        assert not (it.run_dir / "cycles" / "1.json").exists()
        it.assert_nothing_left()


@pytest.mark.spawns
def test_folder_that_python_takes_no_notice_of_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package(tmp_path)
    (folder / "test" / "__init__.py").unlink()
    shutil.rmtree(folder / "test" / "__pycache__", ignore_errors=True)
    monkeypatch.chdir(folder)
    with pytest.raises(Exception, match=r"give the folder test/ an __init__\.py, or another name"):
        Extension(FLAG.partition("=")[2], 10.0)


@pytest.mark.parametrize(
    "path", ["test.user_def_failover", "test.user_def_failover:TestDynamicFailoverExtension", "::X"]
)
def test_format_must_be_module_and_class(path: str) -> None:
    with pytest.raises(Exception, match="the form is module::Class"):
        Extension(path, 1.0)
