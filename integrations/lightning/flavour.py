"""Which Lightning there is: ``lightning`` and ``pytorch_lightning`` are the same code under two names.

A trainer knows callbacks and plugins by the classes of its own name, so that each gets thin classes of ours; everything else is
written once, and takes what belongs to a trainer from the trainer.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from resilience import config
from resilience.errors import ConfigError

NAMES = ("lightning.pytorch", "pytorch_lightning")


def chosen() -> Any:
    """Return the package that the script has imported, or else the first that is installed."""
    for name in sorted(NAMES, key=lambda name: name not in sys.modules):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    raise ImportError(
        "neither lightning nor pytorch_lightning is installed. pip install 'resilience-sdk[lightning]' brings the first."
    )


def package_of(trainer: Any) -> str:
    """Return the name of the package that a trainer comes from, its subclasses included."""
    for kind in type(trainer).__mro__:
        for name in NAMES:
            if kind.__module__.startswith(f"{name}.trainer."):
                return name
    raise ConfigError(
        f"{type(trainer).__qualname__} is no trainer of lightning or pytorch_lightning. Nothing was set up."
    )


def of(trainer: Any, module: str) -> Any:
    """Return a module of the package that a trainer comes from."""
    return importlib.import_module(f"{package_of(trainer)}.{module}")


def version(trainer: Any) -> str:
    """Return the version of the package that a trainer comes from."""
    return str(importlib.import_module(package_of(trainer)).__version__)


def tell_who(trainer: Any) -> None:
    """Say which rank this is, where no launcher has: Lightning may start the ranks itself, with some of torchrun's variables or
    none, and leaves those behind for the next trainer of the script."""
    config.this_rank_is(trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.num_devices)


def check_world(trainer: Any) -> None:
    """Raise :class:`ConfigError` if the job has other ranks than the trainer: each would train a model of its own."""
    env = config.rank_environment()
    if env.world != trainer.world_size:
        raise ConfigError(
            f"the job has {env.world} ranks and this trainer {trainer.world_size} (rank {env.rank}): each would train a model of "
            f"its own into the same snapshots. Nothing was trained. Give the trainer devices={env.local_world}, num_nodes and a "
            'strategy ("ddp"), or start one process.'
        )


def check(trainer: Any, callback: Any) -> None:
    """Raise :class:`ConfigError` if a callback of ours is given to a trainer of the other name."""
    name = package_of(trainer)
    if not isinstance(callback, importlib.import_module(name).Callback):
        home = "resilience.integrations." + ("lightning" if name == NAMES[0] else "pytorch_lightning")
        raise ConfigError(
            f"this {type(callback).__name__} is not one for a trainer of {name.partition('.')[0]}. Nothing was set up. "
            f"Import it from {home}."
        )
