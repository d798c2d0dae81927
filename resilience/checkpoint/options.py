"""What can be asked of a :class:`FlashCheckpoint`, and what can't be meant."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import torch

from resilience.checkpoint.receipt import Level
from resilience.checkpoint.schedule import Every
from resilience.errors import ConfigError, nearest

DEVICE_FAILS_EVERY = timedelta(hours=50_000)  # 419 interruptions in 54 days of 16,384 devices, as published for Llama 3
_OPTIONS = (
    "memory_every",
    "disk_every",
    "keep",
    "keep_every",
    "slots",
    "replicated",
    "mode",
    "verify",
    "rng",
    "on_save_error",
    "max_failures",
    "mean_time_between_failures",
    "restore_timeout",
)


def check(
    things: Mapping[str, Any],
    replicated: Iterable[str],
    on_save_error: str,
    *,
    slots: int,
    flags: Mapping[str, bool],
    mode: str,
    **numbers: tuple[Any, int],
) -> None:
    """Raise :class:`ConfigError` for what can't be meant; the message names the nearest that can. ``numbers``: by name, with the
    least that each may be."""
    refuse_what_has_no_state(things)
    for name, (value, least) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value!r}: give a whole number from {least} up.")
    if mode not in ("blocking", "overlap"):
        raise ConfigError(f'mode={mode!r}: give "blocking" or "overlap".{nearest(str(mode), ("blocking", "overlap"))}')
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(
                f"{name}=a {type(flag).__qualname__}: give True or False; a thing of that name needs another one."
            )
    if isinstance(replicated, str):
        raise ConfigError(f"replicated={replicated!r}: give a list of names, [{replicated!r}].")
    if on_save_error not in ("raise", "warn"):
        raise ConfigError(f'on_save_error={on_save_error!r}: give "raise" or "warn".')
    if not isinstance(slots, int) or not 2 <= slots <= 8:
        raise ConfigError(
            f"slots={slots!r}: give 2 to 8; 3 is what a step in memory, one pending and one to write take."
        )
    unknown = set(replicated) - set(things)
    if unknown:
        raise ConfigError(f"replicated={sorted(unknown)}: no such things.{nearest(min(unknown), things)}")


def for_saver(
    keep: int, keep_every: int, memory: Every, disk: Every, *, failures: timedelta, run: str
) -> dict[str, Any]:
    """Return what the saver is told when a rank comes."""
    return {
        "keep": keep,
        "keep_every": keep_every,
        "memory": astuple(memory),
        "disk": astuple(disk),
        "failures_s": seconds("mean_time_between_failures", failures),
        "run": run,
        "facts": {"torch": torch.__version__, "python": sys.version.split()[0]},
    }


def seconds(name: str, value: float | timedelta) -> float:
    """Return a time in seconds. Raises :class:`ConfigError` for what is none."""
    found = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not found >= 0:
        raise ConfigError(f"{name}={value!r}: give seconds, or a timedelta, from 0 up.")
    return float(found)


def level(value: Level | str) -> Level:
    """Return a level that a save can come to, given as itself or by its name. Raises :class:`ConfigError`."""
    reachable = [item for item in Level if item not in (Level.SKIPPED, Level.FAILED)]
    if value not in reachable:
        names = [item.value for item in reachable]
        raise ConfigError(f"level={value!r}: give one of {', '.join(names)}.{nearest(str(value), names)}")
    return Level(value)


def refuse_what_has_no_state(things: Mapping[str, Any]) -> None:
    """Raise for what is neither an option nor something with a state: a misspelt option, mostly."""
    for name, thing in things.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            shown = (
                repr(thing)
                if isinstance(thing, str | int | float | timedelta | None)
                else f"a {type(thing).__qualname__}"
            )
            advice = " Give the thing itself, not its state." if isinstance(thing, Mapping) else nearest(name, _OPTIONS)
            raise ConfigError(
                f"{name}={shown} is no option of FlashCheckpoint and has no state_dict() and load_state_dict().{advice}"
            )
