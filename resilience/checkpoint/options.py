"""What can be asked of a :class:`FlashCheckpoint`, and what can't be meant."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from typing import Any

import torch

from resilience import config
from resilience.checkpoint.link import Place
from resilience.checkpoint.receipt import Level
from resilience.checkpoint.schedule import Intervals
from resilience.errors import ConfigError, UnsupportedPlatform, nearest

_LOG = logging.getLogger("resilience.checkpoint")
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
    "replicas",
    "replica_interface",
    "replica_bandwidth",
)
_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_UNITS |= {"Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_LEAST_BANDWIDTH = 1e6  # bytes per second: below that the other end would think that nobody is there
SLOTS, SLOTS_WITH_REPLICAS = 3, 4


def check(
    things: Mapping[str, Any],
    replicated: Iterable[str],
    on_save_error: str,
    *,
    slots: int | None,
    flags: Mapping[str, bool],
    mode: str,
    **numbers: tuple[Any, int],
) -> None:
    """Raise :class:`ConfigError` for what can't be meant; the message names the nearest that can. ``numbers``: by name, with the
    least that each may be. Raises :class:`UnsupportedPlatform` where nothing can be asked."""
    if sys.platform != "linux":
        raise UnsupportedPlatform("FlashCheckpoint needs Linux (memfd); use torch.save elsewhere.")
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
    if slots is not None and (not isinstance(slots, int) or not 2 <= slots <= 8):
        raise ConfigError(
            f"slots={slots!r}: give 2 to 8; 3 is what a step in memory, one pending and one to write take."
        )
    unknown = set(replicated) - set(things)
    if unknown:
        raise ConfigError(f"replicated={sorted(unknown)}: no such things.{nearest(min(unknown), things)}")


@dataclass(frozen=True)
class Replication:
    """Copies of snapshots in the memory of other nodes: so many, through what, and how fast at most (bytes per second)."""

    replicas: int = 0
    interface: str = ""
    bandwidth: float = 0.0
    group: str = ""

    @classmethod
    def of(cls, replicas: int, interface: str | None, bandwidth: float | str | None, slots: int | None) -> Replication:
        """Read what the user gave. Raises :class:`ConfigError`."""
        if not replicas and (interface is not None or bandwidth is not None):
            raise ConfigError(
                "replica_interface and replica_bandwidth say how copies are sent, and replicas=0 sends none."
            )
        if replicas and slots is not None and slots < SLOTS:
            raise ConfigError(
                f"slots={slots} with replicas={replicas}: give 3 or more; the newest step that other nodes have too takes one."
            )
        if not isinstance(interface, str | None) or interface == "":
            raise ConfigError(
                f"replica_interface={interface!r}: give the name of a network interface, or an address of it."
            )
        return cls(replicas, interface or "", _bytes_per_second(bandwidth), config.rank_environment().group)

    def without(self, alone: bool) -> Replication:
        """Return what there is of it where all ranks are on one node: nothing, and that is said."""
        if self.replicas and alone:
            _LOG.warning(
                "replicas=%s: all ranks are on one node, and there is no other to keep copies. Nothing is replicated; what is "
                "COMPLETE survives processes, what is DURABLE the node.",
                self.replicas,
            )
            return Replication()
        return self

    def slots(self, given: int | None) -> int:
        """Return how many slots each rank has: also while it is alone, for other nodes may come, and what it has is to be found."""
        return given if given is not None else (SLOTS_WITH_REPLICAS if self.replicas else SLOTS)


def _bytes_per_second(given: float | str | None) -> float:
    """Read a bandwidth: bytes per second, or a text such as "2GB/s"."""
    if given is None:
        return 0.0
    found: Any = given
    if isinstance(given, str):
        match = re.fullmatch(rf"\s*([0-9.]+)\s*({'|'.join(_UNITS)})/s\s*", given)
        try:
            found = float(match[1]) * _UNITS[match[2]] if match is not None else None
        except ValueError:
            found = None
    if isinstance(found, bool) or not isinstance(found, int | float) or not _LEAST_BANDWIDTH <= found < math.inf:
        raise ConfigError(
            f'replica_bandwidth={given!r}: give bytes per second, or a text such as "2GB/s" or "10Gbit/s"; 1 MB/s at least.'
        )
    return float(found)


def for_saver(
    keep: tuple[int, int], every: Intervals, failures: timedelta | None, place: Place, replication: Replication
) -> dict[str, Any]:
    """Return what the saver is told when a rank comes. ``keep``: how many, and every how many steps one for good.
    ``failures``: the time between two of them, where the user knows it."""
    return {
        "keep": keep[0],
        "keep_every": keep[1],
        "memory": astuple(every.memory),
        "disk": astuple(every.disk),
        "failures_s": seconds("mean_time_between_failures", failures or DEVICE_FAILS_EVERY / place.world),
        "run": place.run,
        "facts": {"torch": torch.__version__, "python": sys.version.split()[0]},
        **asdict(replication),
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
