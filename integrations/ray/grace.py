"""How long ranks have to leave after a request to stop (``stop_grace``), wherever that was said: nobody may end them before.

It is what the launcher itself will make of its flags, its environment and its ``--ft-cfg-path``. The spec says part of that, and
each node's actor the rest: what was in the environment of ``ray start``, and what stands in a file that only the nodes have.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilience.integrations.ray.spec import JobSpec, shown

from resilience import config
from resilience.errors import ConfigError

_FLAGS = ("--ft-stop-grace", "--ft-param-stop-grace")
_FILES = ("--ft-cfg-path", "--fault-tol-cfg-path")
_VARIABLE = f"{config.ENV_PREFIX}STOP_GRACE"


def of_launcher(words: Sequence[str], variables: Mapping[str, str], cwd: str | None = None) -> float | None:
    """Return what a launcher with these words grants; ``None`` where it will refuse them, or its file can't be read."""
    said = [word.partition("=") for word in itertools.takewhile(lambda word: word.startswith("--"), words)]
    given = [(flag.replace("_", "-"), value) for flag, _, value in said]
    flags = dict([("stop_grace", value) for flag, value in given if flag in _FLAGS][-1:])
    files = [str(Path(cwd or ".") / value) for flag, value in given if flag in _FILES]
    try:
        told = {_VARIABLE: variables.get(_VARIABLE, "")}
        return config.resolve(flags, told, files[-1] if files else None).failover.stop_grace
    except (ConfigError, ValueError):  # ValueError: a path that can't be one
        return None


def of_spec(spec: JobSpec) -> float:
    """Return what a job's spec grants, as far as that can be known without its nodes; the default where it says nothing."""
    given = [f"--ft-{name.replace('_', '-')}={shown(value)}" for name, value in spec.settings.items()]
    without = [word for word in spec.launcher_args if not word.replace("_", "-").startswith(_FILES)]
    found = of_launcher([*given, *without], spec.environment)
    return config.FailoverConfig().stop_grace if found is None else found
