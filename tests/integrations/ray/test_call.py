"""A function as a rank's main program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from resilience.integrations.ray.call import arguments, find, job_config

from resilience.config import ENV_JOB_CONFIG
from resilience.errors import ConfigError


def test_configuration_is_what_the_builder_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_config() == {}
    monkeypatch.setenv(ENV_JOB_CONFIG, json.dumps({"config": {"lr": 0.1}, "function": "", "args": []}))
    assert job_config() == {"lr": 0.1}


def test_function_gets_the_configuration_only_if_it_has_a_place_for_it() -> None:
    def with_it(a: int, config: Any) -> None: ...
    def without(a: int) -> None: ...

    assert arguments(with_it, [1], {"lr": 1}) == ([1], {"config": {"lr": 1}})
    assert arguments(without, [1], {"lr": 1}) == ([1], {})
    assert arguments(with_it, [1, 2], {"lr": 1}) == ([1, 2], {})  # it was given by place


@pytest.mark.parametrize(
    ("name", "said"),
    [("nowhere.main", "no module 'nowhere'"), ("json.lodas", "has no 'lodas'"), ("json.decoder.FLAGS", "no function")],
)
def test_function_that_is_not_there_is_said_in_words(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find(name)


@pytest.mark.spawns
def test_function_is_called_under_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, resilience\n"
        "def main(word, number, config):\n"
        "    resilience.heartbeat(1)\n"
        "    open(f'told_{os.environ[\"RANK\"]}', 'w').write(f'{word} {number + 1} {config[\"lr\"]}')\n"
    )
    told = {"config": {"lr": 0.5}, "function": "mine.main", "args": ["word", 1]}
    command = [sys.executable, "-m", "resilience.run", "--nproc-per-node=2", f"--ft-run-dir={tmp_path / 'run'}"]
    env = {**os.environ, ENV_JOB_CONFIG: json.dumps(told)}
    done = subprocess.run(
        [*command, "--module", "resilience.integrations.ray.call"],
        check=False,
        cwd=tmp_path,
        env=env,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert [(tmp_path / f"told_{rank}").read_text() for rank in range(2)] == ["word 2 0.5"] * 2
