"""What a job on Ray is: everything that its builder was told, checked, as plain data.

Rule: a spec that exists can be meant. Whatever can't raises :class:`ConfigError` when it is made, in a sentence.
A spec crosses processes as JSON, so it holds nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilience.integrations import flags
from resilience.integrations.ray import words

from resilience import config
from resilience.errors import ConfigError
from resilience.groups.escalation import THRESHOLD_S

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LARGEST_CONFIG = 100_000  # bytes; it travels in one environment variable
_LARGEST_VARIABLE = 128 * 1024 - 1  # bytes, with its name: the kernel's bound
_LONGEST_RESOURCE = 253  # letters: Ray matches a name by a pattern, and one of 70,000 ends the process
_LEAST_AMOUNT = 0.0001  # of a resource: Ray's precision
_RAYS_OWN = ("bundle", "object_store_memory")  # Ray lets a placement group have them, and no actor
_MOST_NODES, _MOST_RANKS = 100_000, 1_000  # beyond that it is a slip


@dataclass(frozen=True)
class Groups:
    """Nodes with the same value of a label belong together. ``size``: nodes of the job in each; ``None``: spread evenly over as few
    groups as have room."""

    label: str
    threshold_s: float = THRESHOLD_S
    size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.label, str) or not _LABEL.fullmatch(self.label):
            raise ConfigError(f"enable_node_group_failover: {self.label!r} is not the key of a Ray node label.")
        if isinstance(self.threshold_s, bool) or not isinstance(self.threshold_s, (int, float)):
            raise ConfigError(
                f"enable_node_group_failover: the threshold is a number of seconds, not {self.threshold_s!r}."
            )
        if not 0 < self.threshold_s < math.inf:
            raise ConfigError(f"enable_node_group_failover: a threshold of {self.threshold_s:g} s can't be meant.")
        if self.size is not None:
            whole("enable_node_group_failover: size", self.size, 1)


@dataclass(frozen=True)
class JobSpec:
    """A training job on Ray."""

    name: str
    workload: str = "train"  # what the ranks do, in a word: their role
    nodes: int = 1
    min_nodes: int = 1  # with fewer the launchers wait
    nproc_per_node: int = 1
    script: str = ""  # either this
    function: str = ""  # or this
    args: tuple[Any, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)  # for the training; see `job_config`
    resources: Mapping[str, float] = field(default_factory=dict)  # of one node; default: a CPU for each rank
    labels: Mapping[str, str] = field(default_factory=dict)  # that nodes must have
    groups: Groups | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the launchers, as in `resilience config`
    rendezvous: Mapping[str, Any] = field(default_factory=dict)  # --rdzv-conf
    launcher_args: tuple[str, ...] = ()
    max_restarts: int = 3
    max_failures: int = 8
    environment: Mapping[str, str] = field(default_factory=dict)
    run_dir: str = ""  # reports and logs, a folder per node; empty: below the user's state folder on each node
    working_dir: str = ""  # of the launchers; empty: that of Ray's workers
    detached: bool = False

    def __post_init__(self) -> None:
        if not is_name(self.workload):
            raise ConfigError(f"workload {self.workload!r}: letters, digits, '-', '_' and '.', at most 63.")
        if not is_name(self.name):
            raise ConfigError(
                f"name {self.name!r}: letters, digits, '-', '_' and '.', at most 63, beginning with a letter or digit."
            )
        for what, least in (
            ("nodes", 1),
            ("min_nodes", 1),
            ("nproc_per_node", 1),
            ("max_restarts", 0),
            ("max_failures", 0),
        ):
            whole("nodes(…, minimum=…)" if what == "min_nodes" else what, getattr(self, what), least)
        if self.nodes > _MOST_NODES or self.nproc_per_node > _MOST_RANKS:
            raise ConfigError(f"{self.nodes} nodes with {self.nproc_per_node} ranks each can't be meant.")
        if not isinstance(self.detached, bool):
            raise ConfigError(f"detached: {self.detached!r} is neither True nor False.")
        if self.min_nodes > self.nodes:
            raise ConfigError(f"a job of {self.nodes} nodes can't need at least {self.min_nodes}.")
        self._check_target()
        self._check_groups()
        self._check_resources()
        self._check_launcher()

    def _check_target(self) -> None:
        if bool(self.script) == bool(self.function):
            raise ConfigError('nothing to train: .train("script.py", …) or .train("module.function", …) says what.')
        if self.function and not _FUNCTION.fullmatch(self.function):
            raise ConfigError(
                f"train({self.function!r}): give a script, 'train.py', or a function as 'module.function'."
            )
        if self.script.startswith("-") or self.script.endswith("/"):
            raise ConfigError(f"train({self.script!r}): that is no script; give its path, as 'train.py'.")
        texts = {"train": [self.script, *self.args], "run_dir": [self.run_dir], "working_dir": [self.working_dir]}
        texts["settings"] = [shown(value) for value in self.settings.values()]
        for what, values in texts.items():
            if any(isinstance(value, str) and ("\0" in value or not _is_text(value)) for value in values):
                raise ConfigError(
                    f"{what}: a text with a NUL byte or half a character in it can't be given to a program."
                )
        plain("train(…)", list(self.args))
        plain("config(…)", self.config)
        if len(json.dumps([self.config, self.args])) > _LARGEST_CONFIG:
            raise ConfigError(
                f"config(…) is longer than {_LARGEST_CONFIG} bytes of JSON. Put it into a file that the script reads."
            )

    def _check_groups(self) -> None:
        if self.groups is None or self.groups.size is None:
            return
        if self.nodes % self.groups.size:
            raise ConfigError(f"{self.nodes} nodes can't be divided into groups of {self.groups.size}.")

    def _check_resources(self) -> None:
        for name, amount in self.resources.items():
            number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
            if not isinstance(name, str) or not name or not number or not 0 < amount < math.inf:
                raise ConfigError(f"resources: {name}={amount!r} is not the name of a resource and an amount above 0.")
            if len(name) > _LONGEST_RESOURCE or not name.isascii() or not name.isprintable():
                raise ConfigError(
                    f"resources: {name[:40]!r} is no name of a resource to Ray: "
                    f"ASCII that can be printed, at most {_LONGEST_RESOURCE} letters."
                )
            if name in _RAYS_OWN:
                raise ConfigError(f"resources: {name} is Ray's own, and can't be asked for.")
            if amount < _LEAST_AMOUNT:
                raise ConfigError(
                    f"resources: {name}={amount!r} is less than {_LEAST_AMOUNT}, the least that Ray counts."
                )
            if name == "GPU" and amount > 1 and amount != int(amount):
                raise ConfigError(f"resources: GPU={amount!r}: Ray gives a part of one, or whole ones.")
        for key, value in self.labels.items():
            good = isinstance(key, str) and _LABEL.fullmatch(key) and isinstance(value, str)
            if not good or not _LABEL_VALUE.fullmatch(value):  # '!x' and 'in(x)' would be conditions to Ray
                raise ConfigError(
                    f"labels: {key!r}: {value!r} is not a Ray node label with its value: letters, digits, '-', '_' and '.', at "
                    "most 63, with a letter or digit at both ends."
                )
        if self.groups is not None and self.groups.label in self.labels:
            raise ConfigError(
                f"label {self.groups.label!r} tells the groups apart: it can't also be the same on all nodes."
            )

    def _check_launcher(self) -> None:
        for what, given in (("settings", self.settings), ("rendezvous", self.rendezvous)):
            odd = [name for name in given if not isinstance(name, str)]
            if odd:
                raise ConfigError(f"{what}: {odd[0]!r} is no name.")
        own = [name for name in self.settings if name in words.OWN_SETTINGS]
        if own:
            there = words.instead(f"ft-{own[0].replace('_', '-')}")
            raise ConfigError(f"setting {own[0]!r} is what the job tells each launcher itself.{there}")
        calls = [name for name in self.settings if words.instead(name.replace("_", "-"))]
        if calls:
            raise ConfigError(f"{calls[0]!r} is no setting.{words.instead(calls[0].replace('_', '-'))}")
        # As it was given, where a sentence may name it.
        raw: dict[str, Any] = {
            name: value if isinstance(value, float) else shown(value) for name, value in self.settings.items()
        }
        config.resolve(raw, {})
        plain("settings(…)", dict(self.settings))
        for name, value in self.rendezvous.items():
            words.check_rendezvous(name, value)
        for word in self.launcher_args:
            words.check_flag(word)
        for name, value in self.environment.items():
            if not isinstance(name, str) or not name or not isinstance(value, str):
                raise ConfigError(f"environment: {name!r}: {value!r} is not a variable with its text.")
            if "=" in name or "\0" in name + value or not _is_text(name + value):
                raise ConfigError(f"environment: {name!r}: {value!r} is not a variable with its text.")
            if len(f"{name}={value}".encode()) > _LARGEST_VARIABLE:
                raise ConfigError(
                    f"environment: {name} is longer than the {_LARGEST_VARIABLE} bytes that a variable may have."
                )
        flags.check(self.launcher_args, self.environment)

    @property
    def bundle(self) -> Mapping[str, float]:
        """Return what one node's launcher reserves."""
        return self.resources or {"CPU": float(self.nproc_per_node)}

    def as_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> JobSpec:
        """Read what :meth:`as_text` wrote."""
        data = json.loads(text)
        groups = data.pop("groups")
        lists: dict[str, Any] = {name: tuple(data.pop(name)) for name in ("args", "launcher_args")}
        return cls(**data, **lists, groups=Groups(**groups) if groups else None)


def is_name(name: object) -> bool:
    """Return whether a job may be called so."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _is_text(text: str) -> bool:
    """Return whether it has no half characters in it, which no program can be given."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole(what: str, number: object, least: int) -> None:
    """Raise for what is not a whole number, or too small."""
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ConfigError(f"{what}: {number!r} is not a whole number from {least} up.")


def plain(what: str, value: object) -> None:
    """Raise for what JSON can't carry as it is."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what}: only numbers, texts, lists and mappings with texts as keys can be sent to nodes: {error}."
        ) from error
    _check_keys(what, value)


def _check_keys(what: str, value: object) -> None:
    """Raise for a key that is not a text, however deep: JSON would make it one."""
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise ConfigError(f"{what}: the keys must be texts, and {odd[0]!r} is not.")
    if isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            _check_keys(what, one)


def shown(value: object) -> str:
    """Return a setting's value as a flag has it."""
    if value is None:
        return "learned"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and math.isinf(value):
        return "null"
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{shown(one)}" for name, one in value.items())
    return str(value)
