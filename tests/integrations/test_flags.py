"""What launchers are told, on every engine: a typo is refused where the job is described, and the nearest word named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from resilience.integrations.flags import check
from resilience.integrations.kubernetes.job.values import JobValues
from resilience.integrations.ray import JobBuilder
from resilience.integrations.slurm.values import SlurmValues

from resilience.errors import ConfigError


def on_kubernetes(flags: list[str], env: dict[str, str]) -> Any:
    return JobValues(name="llm", image="x", script=("train.py",), launcher_args=tuple(flags), env=env)


def on_slurm(flags: list[str], env: dict[str, str]) -> Any:
    return SlurmValues(name="llm", script=("train.py",), launcher_args=tuple(flags), env=env)


def on_ray(flags: list[str], env: dict[str, str]) -> Any:
    return JobBuilder().train("train.py").launcher_args(*flags).environment(env).build()


@pytest.mark.parametrize("engine", [on_kubernetes, on_slurm, on_ray])
@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (["--ft-testimony-timeut=3"], {}, "Did you mean '--ft-testimony-timeout'?"),
        (["--network-chek"], {}, "Did you mean '--network-check'?"),
        (["--ft-testimony-timeout=soon"], {}, "testimony_timeout='soon'"),
        ([], {"RESILIENCE_TESTIMONY_TIMEUT": "3"}, "Did you mean 'RESILIENCE_TESTIMONY_TIMEOUT'?"),
        ([], {"RESILIENCE_TESTIMONY_TIMEOUT": "soon"}, "testimony_timeout='soon'"),
        ([], {"PET_NNODES": "3"}, "'PET_NNODES' is what the job tells each launcher itself"),
    ],
)
def test_typo_in_what_launchers_are_told_is_refused_on_every_engine(
    engine: Callable[[list[str], dict[str, str]], Any], flags: list[str], env: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        engine(flags, env)
    assert said in str(refused.value)


@pytest.mark.parametrize("engine", [on_kubernetes, on_slurm, on_ray])
def test_what_launchers_know_is_taken_on_every_engine(
    engine: Callable[[list[str], dict[str, str]], Any],
) -> None:
    engine(
        ["--redirects=3", "--ft-param-testimony-timeout=3", "--exclude-straggler"],
        {"PET_REDIRECTS": "3", "RESILIENCE_TESTIMONY_TIMEOUT": "3", "NCCL_DEBUG": "INFO"},
    )


def test_values_may_be_words_of_their_own_and_torchs_flags_abbreviated() -> None:
    check(["--ft-testimony-timeout", "3", "--redir", "3", "-t", "3"], {})
    with pytest.raises(ConfigError, match="testimony_timeout='soon'"):
        check(["--ft-testimony-timeout", "soon"], {})
    with pytest.raises(ConfigError, match="not a flag"):
        check(["--ft-testimony", "3"], {})
