"""The builder of jobs on Ray: one call for each thing to say, in any order; ``build()`` checks the whole.

``DLJobBuilder`` is the same class, under the name that users of DLRover know.
"""

from __future__ import annotations

import os
import uuid
from argparse import Namespace
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from resilience.integrations.ray.job import Job
from resilience.integrations.ray.spec import Groups, JobSpec

from resilience.errors import ConfigError, nearest
from resilience.groups.escalation import THRESHOLD_S

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_OF_A_JOB = ("submit", "wait", "status", "stop")


class JobBuilder:
    """Describe a job, then ``build()`` it.

    1) ``nodes``, ``nproc_per_node``, ``train``: how many launchers, how many ranks each, and what they run
    2) everything else, as wanted
    3) ``build()``: raises :class:`ConfigError` for what can't be meant; touches no cluster
    """

    def __init__(self) -> None:
        self._said: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in _OF_A_JOB:
            raise AttributeError(f"a {type(self).__name__} has no {name!r}: .build() returns the job, which has.")
        known = [word for word in dir(type(self)) if not word.startswith("_")]
        raise AttributeError(f"a {type(self).__name__} has no {name!r}.{nearest(name, known)}")

    def name(self, name: str) -> JobBuilder:
        """Name the job: by this it is found again (:func:`attach`). Default: the workload's name and a random end."""
        return self._say(name=name)

    def config(self, given: Any = None, **more: Any) -> JobBuilder:
        """Give the training its configuration: a mapping, an argparse namespace, or an OmegaConf ``DictConfig``."""
        return self._say(config={**_as_mapping(given), **more})

    def nodes(self, number: int, minimum: int | None = None) -> JobBuilder:
        """Have so many Ray nodes, with a launcher on each. With a ``minimum`` training goes on while a lost one is replaced."""
        return self._say(nodes=number, min_nodes=number if minimum is None else minimum)

    def nproc_per_node(self, number: int) -> JobBuilder:
        """Have so many ranks on each node."""
        return self._say(nproc_per_node=number)

    def train(self, target: str, *args: Any) -> JobBuilder:
        """Run a script with arguments (``"train.py", "--lr", 0.1``), or call a function with them (``"module.function", 0.1``).

        A function that has a parameter ``config`` gets what :meth:`config` was given.
        """
        if not isinstance(target, str):
            raise ConfigError(
                f"train({target!r}): name it, as 'train.py' or 'module.function'; it is imported where it runs."
            )
        script = target.endswith(".py") or "/" in target
        odd = [word for word in args if word is None or isinstance(word, (list, tuple, set, Mapping))]
        if script and odd:
            raise ConfigError(
                f"train({target!r}, …): {odd[0]!r} is no argument of a command line; give words and numbers."
            )
        given = tuple(map(str, args)) if script else args
        return self._say(script=target if script else "", function="" if script else target, args=given)

    def workload(self, name: str) -> JobBuilder:
        """Name what the ranks do."""
        return self._say(workload=name)

    def resources_per_node(self, amounts: Mapping[str, float] = _NOTHING, /, **more: float) -> JobBuilder:
        """Reserve this on each node: ``CPU=8, GPU=8``, or what your cluster calls its devices. Default: a CPU for each rank."""
        return self._add(resources=_told("resources_per_node", amounts, more))

    def node_labels(self, labels: Mapping[str, str] = _NOTHING, /, **more: str) -> JobBuilder:
        """Use only nodes that have these labels."""
        return self._add(labels=_told("node_labels", labels, more))

    def enable_node_group_failover(
        self, label: str, timeout_threshold: float = THRESHOLD_S, size: int | None = None
    ) -> JobBuilder:
        """Treat nodes with the same value of a label as a group.

        Ranks are contiguous in it. If a lost node of a group has no replacement after so many seconds, the whole group moves.
        """
        return self._say(groups=Groups(label, timeout_threshold, size))

    def max_restarts(self, number: int) -> JobBuilder:
        """Let the workers restart in place so often without progress, as ``--max-restarts``."""
        return self._say(max_restarts=number)

    def max_failures(self, number: int) -> JobBuilder:
        """Let launchers be started again so often in a row, with less than ten minutes of training in between."""
        return self._say(max_failures=number)

    def settings(self, settings: Mapping[str, Any] = _NOTHING, /, **more: Any) -> JobBuilder:
        """Set what ``resilience config`` lists: ``network_check=True, stop_grace=60``."""
        return self._add(settings=_told("settings", settings, more))

    def rendezvous(self, conf: Mapping[str, Any] = _NOTHING, /, **more: Any) -> JobBuilder:
        """Set what ``--rdzv-conf`` takes: ``last_call_timeout=10``."""
        return self._add(rendezvous=_told("rendezvous", conf, more))

    def launcher_args(self, *flags: str) -> JobBuilder:
        """Add flags of ``resilience run``."""
        return self._say(launcher_args=(*self._said.get("launcher_args", ()), *flags))

    def environment(self, variables: Mapping[str, str] = _NOTHING, /, **more: str) -> JobBuilder:
        """Set environment variables of launchers and ranks."""
        return self._add(environment=_told("environment", variables, more))

    def run_dir(self, folder: str | os.PathLike[str]) -> JobBuilder:
        """Keep reports and logs in this folder, in one of its own for each node."""
        return self._say(run_dir=_folder("run_dir", folder))

    def working_dir(self, folder: str | os.PathLike[str]) -> JobBuilder:
        """Start the launchers in this folder. Default: Ray's workers' own, so a ``runtime_env``'s ``working_dir``."""
        return self._say(working_dir=_folder("working_dir", folder))

    def detached(self, yes: bool = True) -> JobBuilder:
        """Have the job live on when the program that submitted it ends."""
        return self._say(detached=yes)

    def build(self) -> Job:
        """Check everything and return the job, which is not submitted yet."""
        said = dict(self._said)
        said.setdefault("name", f"{str(said.get('workload', 'train'))[:54]}-{uuid.uuid4().hex[:8]}")
        return Job(JobSpec(**said))

    def _say(self, **what: Any) -> JobBuilder:
        self._said.update(what)
        return self

    def _add(self, **what: Mapping[str, Any]) -> JobBuilder:
        """What was said of the same before stays, but for the same words."""
        return self._say(**{name: {**self._said.get(name, {}), **more} for name, more in what.items()})


DLJobBuilder = JobBuilder


def _told(call: str, given: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a call was told, as a mapping or by names."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{call}({given!r}): give a mapping, or {call}(name=value).")
    return {**given, **more}


def _folder(call: str, given: Any) -> str:
    if not isinstance(given, (str, os.PathLike)) or not isinstance(path := os.fspath(given), str) or not path:
        raise ConfigError(f"{call}({given!r}): give the path of a folder.")
    if "://" in path:
        raise ConfigError(f"{call}({given!r}): that is a URL; give the path of a folder that the nodes can write to.")
    return path


def _as_mapping(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Namespace):
        return dict(vars(given))
    if type(given).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import DictConfig, OmegaConf  # noqa: PLC0415 - whoever has one of its objects has it

        if isinstance(given, DictConfig):
            return {str(key): value for key, value in dict(OmegaConf.to_container(given, resolve=True)).items()}
    if isinstance(given, Mapping):
        return dict(given)
    raise ConfigError(
        f"config({type(given).__name__}): give a mapping, an argparse namespace or an OmegaConf DictConfig."
    )
