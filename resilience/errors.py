"""Every error that this library raises.

    ResilienceError
    ├── ConfigError            a key, flag, environment variable or value that can't be meant
    ├── PulseError             the in-loop calls were used in a way that can't be meant
    │   ├── SectionError       a section ended that is not open, or too many names
    │   └── RankMonitorClientError   the seeds' client, used before init or after shutdown
    ├── CheckpointError        a snapshot that can't be made, kept or read; its leaves stand beside what raises them
    │   ├── EncodingError      a value that can't be kept          (checkpoint.encoding)
    │   ├── DecodingError      values that can't be read           (checkpoint.encoding)
    │   ├── ShardError         tensors that can't be read          (checkpoint.shards)
    │   ├── ManifestError      a checkpoint that is not whole      (checkpoint.manifest)
    │   ├── GuardError         training is bad again and again     (checkpoint.guard)
    │   ├── NothingToRestore   no checkpoint, and no fresh start allowed
    │   └── SaveError          a save failed in the background, and ``on_save_error`` is "raise"
    ├── KubernetesError        the API server refused or did not answer   (integrations.kubernetes.api)
    ├── RayJobError            a job on Ray can't be submitted, found or waited for   (integrations.ray.status)
    ├── LinkError              a peer process (launcher, monitor, saver) did not answer in time
    └── UnsupportedPlatform    the launcher needs Linux

The in-loop calls never raise because of us: a missing launcher, a dead monitor or a full page make them no-ops. They
raise for mistakes in the code that calls them.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


class ResilienceError(Exception):
    """Base of all errors of this library."""


class ConfigError(ResilienceError):
    """A setting that can't be meant; the message names the nearest valid one."""


class PulseError(ResilienceError):
    """Misuse of heartbeat, section or expect_heartbeats."""


class SectionError(PulseError):
    """Misuse of a section."""


class RankMonitorClientError(PulseError):
    """Misuse of RankMonitorClient."""


class CheckpointError(ResilienceError):
    """A snapshot that can't be made, kept or read."""


class NothingToRestore(CheckpointError):  # noqa: N818 - reads as what it is
    """There is no checkpoint to go on from, and a fresh start was not allowed."""


class SaveError(CheckpointError):
    """A save failed behind the training loop's back."""


class LinkError(ResilienceError):
    """Another process of ours did not answer in time."""


class UnsupportedPlatform(ResilienceError):  # noqa: N818 - reads as what it is
    """The launcher needs Linux (memfd, pidfd, SCM_RIGHTS)."""


def double_colon(word: str) -> str:
    """Return ``" Did you mean 'module::Class'?"`` for a class that was written with one colon, or an empty string.

    Only a capital says that a class was meant: ``fil:faults`` is a misspelt file.
    """
    module, _, name = word.partition(":")
    is_class = name[:1].isupper() and all(part.isidentifier() for part in (*module.split("."), name))
    return f" Did you mean '{module}::{name}'?" if is_class else ""


def nearest_class(name: str, module: ModuleType) -> str:
    """Return ``" Did you mean 'Drain'?"`` for the class of a module that is nearest to ``name``, or an empty string."""
    return nearest(name, [known for known, found in vars(module).items() if isinstance(found, type)])


def imported(name: str) -> ModuleType:
    """Import a module that somebody has named. Raises what the import does, and says where Python took another package for it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        found = getattr(sys.modules.get(top), "__file__", None) or ""
        if not Path(top).is_dir() or not found or Path(top).resolve() in Path(found).resolve().parents:
            raise
        why = f"{error}. Python takes {top!r} for {found}: give the folder {top}/ an __init__.py, or another name"
        raise ModuleNotFoundError(why, name=error.name) from error


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known word nearest to ``word``, or an empty string."""
    spelt = {name.lower(): name for name in reversed([*known])}
    matches = difflib.get_close_matches(word.lower(), spelt, n=1, cutoff=0.5)
    return f" Did you mean {spelt[matches[0]]!r}?" if matches else ""
