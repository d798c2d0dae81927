"""Run a function as a rank (``python -m resilience.integrations.ray.call``, by the launcher); and a job's configuration."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from resilience import config
from resilience.errors import ConfigError


def job_config() -> dict[str, Any]:
    """Return what ``JobBuilder.config(…)`` was given; empty where it was given nothing, and outside of a job on Ray."""
    return dict(_told().get("config", {}))


def _told() -> dict[str, Any]:
    text = config.job_config()
    return dict(json.loads(text)) if text else {}


def find(name: str) -> Callable[..., Any]:
    """Import ``module.function``. Raises ``ConfigError`` where there is none."""
    module, _, function = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # it is there, and lacks something itself
        raise ConfigError(f"train({name!r}): there is no module {error.name!r} on this node.") from error
    except AttributeError as error:
        raise ConfigError(f"train({name!r}): module {module!r} has no {function!r}.") from error
    if not callable(found):
        raise ConfigError(f"train({name!r}): that is no function.")
    return found


def arguments(function: Callable[..., Any], args: list[Any], given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return with what a function is called: its arguments, and the configuration where it has a parameter for it."""
    try:
        free = list(inspect.signature(function).parameters)[len(args) :]
    except (TypeError, ValueError):
        free = []
    return args, {"config": given} if "config" in free else {}


def main() -> int:
    """Call it. What it raises goes on to the recorder, as with a script."""
    told = _told()
    function = find(str(told["function"]))
    args, more = arguments(function, list(told["args"]), job_config())
    function(*args, **more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
