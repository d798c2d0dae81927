"""Every setting, and the one place that reads the environment.

One small frozen dataclass per component; flags (``--ft-<name>``), environment names (``RESILIENCE_<NAME>``), the YAML
schema and ``resilience config`` are generated from them. Precedence: argument in code > flag > environment > YAML > default.

A timeout is a number of seconds. ``null`` means no timeout, as in the files and flags that people bring along; leaving it
out, or ``learned``, means learned. In code (``section(timeout=…)``) ``None`` means learned and ``math.inf`` means none.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from resilience.errors import ConfigError, nearest
from resilience.values import parse, show

ENV_PREFIX = "RESILIENCE_"


def _setting(default: Any, doc: str, kind: str) -> Any:
    metadata = {"doc": doc, "kind": kind}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TimeoutConfig:
    """When silence is a hang. ``None`` is learned, ``math.inf`` is none."""

    initial_rank_heartbeat_timeout: float | None = _setting(
        None, "from process start to the first heartbeat or section; imports and init_process_group included", "timeout"
    )
    rank_heartbeat_timeout: float | None = _setting(None, "between two heartbeats", "timeout")
    rank_section_timeouts: Mapping[str, float] = _setting({}, "per section: name:seconds,name:seconds", "timeouts")
    rank_out_of_section_timeout: float | None = _setting(None, "between two sections", "timeout")
    rank_exit_timeout: float | None = _setting(None, "from the end of the loop to the end of the process", "timeout")
    safety_factor: float = _setting(5.0, "a learned timeout is this many times the largest time seen", "positive")
    learned_timeout_floor: float = _setting(30.0, "no learned timeout is shorter", "positive")
    unlearned_timeout: float = _setting(1800.0, "used until enough was seen", "timeout_or_none")
    learn_after: int = _setting(16, "samples after which a learned timeout is trusted", "count")


@dataclass(frozen=True)
class MonitorConfig:
    """How the rank monitors look and act."""

    workload_check_interval: float = _setting(0.2, "a monitor looks at its rank at least this often", "positive")
    rank_termination_signal: signal.Signals = _setting(signal.SIGTERM, "first signal to a hung rank", "signal")
    rank_term_timeout: float = _setting(10.0, "from the first signal to SIGKILL", "positive")
    testimony_timeout: float = _setting(
        5.0, "longest wait for the stacks of all ranks before anything is ended", "positive"
    )


@dataclass(frozen=True)
class LauncherConfig:
    """What the launcher itself needs."""

    run_dir: str | None = _setting(
        None, "directory of this run: reports and logs; default below the state folder", "text"
    )
    capture_logs: bool = _setting(
        True, "keep the workers' output per cycle and rank, and prefix it on the console", "switch"
    )
    shared_console: bool = _setting(False, "all launchers write to one log: one prints failures whole", "switch")
    store_silence_timeout: float = _setting(
        60.0, "a launcher that can't reach the rendezvous store this long ends itself", "positive"
    )
    node_silence_timeout: float = _setting(60.0, "a node whose launcher is silent this long is a lost node", "positive")
    log_level: str = _setting("INFO", "of the launcher's own lines", "level")


@dataclass(frozen=True)
class FailoverConfig:
    """What follows a failure, and who is who."""

    restart_policy: str = _setting(
        "any-failed",
        "all workers restart when any fails, or only when fewer than the minimum of nodes are whole",
        "policy",
    )
    max_node_restarts: int | None = _setting(
        None, "restarts in place that one node may cause before it is replaced; default: no limit of its own", "number"
    )
    dynamic_failover_extension: str | None = _setting(
        None, "module::Class that is asked what follows a failure", "text"
    )
    failover_timeout: float = _setting(30.0, "longest wait for the extension's answer", "positive")
    use_infra_group_rank: bool = _setting(
        True,
        "nodes are ranked by SLURM_PROCID, GROUP_RANK or JOB_COMPLETION_INDEX; false: by name, spares take over",
        "switch",
    )
    node_name: str | None = _setting(
        None, "name of this node in exclusions and budgets; default: its host name", "word"
    )
    node_group: str | None = _setting(
        None,
        "name of the group of nodes that this one belongs to, a rack for instance: ranks are contiguous in it",
        "word",
    )
    node_group_index: int | None = _setting(
        None, "place of that group among the groups, from 0; it stays when the group moves elsewhere", "index"
    )
    stop_grace: float = _setting(
        25.0, "from a request to stop (SIGTERM, SIGUSR1) until the workers are ended", "positive"
    )


@dataclass(frozen=True)
class NodeConfig:
    """Whether a node is fit to train, and who is told when it is not."""

    network_check: bool = _setting(False, "check every node before its workers start, each time they start", "switch")
    accelerator: str = _setting(
        "auto",
        "what is checked: auto (what torch finds), cpu, nvidia, ascend, one of your own, or module::Class",
        "text",
    )
    exclude_straggler: bool = _setting(False, "a node that is much slower than the others must not train", "switch")
    straggler_factor: float = _setting(2.0, "a straggler takes more than this many times the median", "factor")
    node_check_timeout: float = _setting(60.0, "longest time of one task of the check; longer is a fault", "positive")
    error_monitor: str = _setting(
        "none", "who is told of faulty nodes: none, file:PATH, module::Class, or the name of an entry point", "text"
    )
    error_monitor_timeout: float = _setting(10.0, "longest time of one attempt to mark a node", "positive")
    termination_log: str | None = _setting(
        None,
        "file for the termination message of a faulty node; default: /dev/termination-log where there is one, by hand none",
        "text",
    )


COMPONENTS = (TimeoutConfig, MonitorConfig, LauncherConfig, FailoverConfig, NodeConfig)

ACCEPTED_WITHOUT_EFFECT = {
    "node_health_check_interval": "nothing checks nodes on a clock",
    "restart_check_interval": "the launchers tell each other at once, nothing is polled for restarts",
    "enable_nic_monitor": "there is no NIC monitor; a cut link is found by the launcher's own watchdog",
    "pci_topo_file": "there is no NIC monitor",
    "link_down_path_template": "there is no NIC monitor",
}


@dataclass(frozen=True)
class Settings:
    """All settings of a run, with where each value came from."""

    timeouts: TimeoutConfig = TimeoutConfig()
    monitor: MonitorConfig = MonitorConfig()
    launcher: LauncherConfig = LauncherConfig()
    failover: FailoverConfig = FailoverConfig()
    nodes: NodeConfig = NodeConfig()
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield (name, value, where from, what it is) for every setting."""
        for component in (self.timeouts, self.monitor, self.launcher, self.failover, self.nodes):
            for item in dataclasses.fields(component):
                shown = show(getattr(component, item.name), item.metadata["kind"])
                yield item.name, shown, self.sources.get(item.name, "default"), item.metadata["doc"]


def parameters() -> dict[str, dataclasses.Field[Any]]:
    """Return every setting's field by name."""
    return {item.name: item for component in COMPONENTS for item in dataclasses.fields(component)}


def resolve(flags: Mapping[str, str], environ: Mapping[str, str], yaml_path: str | None = None) -> Settings:
    """Merge flags, environment and YAML file into :class:`Settings`; raise :class:`ConfigError` for anything unknown."""
    known = parameters()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notes: list[str] = []
    environment, odd = _without_odd_group(_environment_settings(environ, known))
    notes += odd
    layers = [
        (_yaml_section(yaml_path), f"file {yaml_path}"),
        (environment, "environment"),
        (dict(flags), "flag"),
    ]
    for layer, source in layers:
        for name, raw in layer.items():
            if name in ACCEPTED_WITHOUT_EFFECT:
                notes.append(f"{name} ({source}) has no effect here: {ACCEPTED_WITHOUT_EFFECT[name]}.")
                continue
            if name not in known:
                raise ConfigError(
                    f"unknown setting {name!r} ({source}).{nearest(name, known)} `resilience config` lists all."
                )
            values[name] = parse(name, raw, known[name].metadata["kind"], source)
            sources[name] = source

    def part(component: type) -> dict[str, Any]:
        return {item.name: values[item.name] for item in dataclasses.fields(component) if item.name in values}

    return Settings(
        TimeoutConfig(**part(TimeoutConfig)),
        MonitorConfig(**part(MonitorConfig)),
        LauncherConfig(**part(LauncherConfig)),
        FailoverConfig(**part(FailoverConfig)),
        NodeConfig(**part(NodeConfig)),
        sources,
        tuple(notes),
    )


def _environment_settings(environ: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, str]:
    """Pick our settings out of the environment. A misspelt one raises; what the launcher itself sets is not a setting."""
    found = {}
    for variable, value in environ.items():
        name = variable[len(ENV_PREFIX) :].lower()
        if not variable.startswith(ENV_PREFIX) or variable in _WORKER_VARIABLES or not value:
            continue  # an empty one is how manifests spell "not set"; it must not switch a timeout off
        if name not in known and name not in ACCEPTED_WITHOUT_EFFECT:
            close = nearest(variable, [ENV_PREFIX + item.upper() for item in known])
            raise ConfigError(
                f"unknown environment variable {variable}.{close} `resilience config` lists all settings."
            )
        found[name] = value
    return found


def _without_odd_group(found: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Leave out a group of nodes whose index can't be meant, and say so.

    In the environment it comes from a pod's label, which a scheduler wrote: no group is worth failing the whole job for.
    """
    raw = found.get("node_group_index")
    if raw is None:
        return found, []
    try:
        parse("node_group_index", raw, "index", "environment")
    except ConfigError:
        note = (
            f"{ENV_PREFIX}NODE_GROUP_INDEX={raw!r} is not the index of a group of nodes, a whole number from 0 up: this node is "
            "in no group. On Kubernetes look at the pod's labels scheduling/rack-*."
        )
        return {name: value for name, value in found.items() if not name.startswith("node_group")}, [note]
    return found, []


def _yaml_section(path: str | None) -> dict[str, Any]:
    """Return the ``fault_tolerance:`` section of a YAML file, at whatever depth it stands."""
    if path is None:
        return {}
    import yaml  # noqa: PLC0415 - only a run with a file pays for it

    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--ft-cfg-path {path}: {error.strerror or error}. Nothing was started.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--ft-cfg-path {path} is not valid YAML: {error}. Nothing was started.") from error
    sections = list(_find_sections(document))
    if len(sections) != 1:
        found = "no" if not sections else f"{len(sections)}"
        raise ConfigError(f"--ft-cfg-path {path} has {found} 'fault_tolerance:' sections; exactly one is needed.")
    if not isinstance(sections[0], dict):
        raise ConfigError(f"--ft-cfg-path {path}: 'fault_tolerance:' must hold 'name: value' lines.")
    return {str(key): value for key, value in sections[0].items()}


def _find_sections(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "fault_tolerance":
                yield value
            else:
                yield from _find_sections(value)
    elif isinstance(node, list):
        for value in node:
            yield from _find_sections(value)


# What the launcher tells its workers. Not settings: nobody sets these by hand.
ENV_SOCKET = "RESILIENCE_SOCKET"
ENV_CYCLE = "RESILIENCE_CYCLE"
ENV_LAUNCHER_PID = "RESILIENCE_LAUNCHER_PID"
ENV_LATE_ATTACH = "RESILIENCE_LATE_ATTACH"
ENV_RUN = "RESILIENCE_RUN"
ENV_NODE_GROUP = "RESILIENCE_NODE_GROUP"  # also the setting node_group: the launcher tells its workers what it was told
# What people tell a rank, past the launcher.
ENV_SIMULATED_FAULT = "RESILIENCE_SIMULATED_FAULT"
ENV_FINISHED_FLAG_FILE = "FAULT_TOL_FINISHED_FLAG_FILE"
ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torch's: where whoever starts a process looks for its error
ENV_JOB_CONFIG = "RESILIENCE_JOB_CONFIG"  # what a job on Ray trains, as JSON
_WORKER_VARIABLES = {ENV_SOCKET, ENV_CYCLE, ENV_LAUNCHER_PID, ENV_LATE_ATTACH, ENV_RUN, ENV_SIMULATED_FAULT}
_WORKER_VARIABLES |= {ENV_JOB_CONFIG}


@dataclass(frozen=True)
class RankEnvironment:
    """What a worker finds in its environment."""

    socket: str | None
    rank: int | None
    cycle: int
    launcher_pid: int
    late_attach: bool
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    master: tuple[str, int] = ("", 0)  # where the ranks' store is
    restarts: int = 0  # as torchrun counts them; without a launcher of ours they number the cycles
    run: str = ""
    group: str = ""  # of nodes that fail together; empty where none are known


_told: dict[str, Any] = {}  # who this process is, by a framework that starts its ranks itself


def rank_environment() -> RankEnvironment:
    """Read what the launcher told this worker, or else what the framework did that started it."""
    rank = os.environ.get("RANK", "")
    found = _read_rank_environment(rank)
    return found if rank or not _told else dataclasses.replace(found, **_told)


def this_rank_is(rank: int, world: int, local_rank: int, local_world: int) -> None:
    """Say who this process is. A launcher's word counts more: without ``RANK`` in the environment there was none."""
    _told.update(rank=rank, world=world, local_rank=local_rank, local_world=local_world)


def _read_rank_environment(rank: str) -> RankEnvironment:
    return RankEnvironment(
        socket=os.environ.get(ENV_SOCKET),
        rank=int(rank) if rank.isdigit() else None,
        cycle=_number(ENV_CYCLE, 0),
        launcher_pid=int(os.environ.get(ENV_LAUNCHER_PID, "0")),
        late_attach=ENV_LATE_ATTACH in os.environ,
        world=_number("WORLD_SIZE", 1),
        local_rank=_number("LOCAL_RANK", 0),
        local_world=_number("LOCAL_WORLD_SIZE", 1),
        restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
        master=(os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 0)),
        run=os.environ.get(ENV_RUN) or os.environ.get("TORCHELASTIC_RUN_ID", ""),
        group=os.environ.get(ENV_NODE_GROUP, ""),
    )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


def error_file() -> str | None:
    """Return where torch wants the error of this worker written, if anywhere."""
    return os.environ.get(ENV_ERROR_FILE) or None


def simulated_fault() -> str | None:
    """Return the faults that an integration is to simulate on a rank, if any; see ``resilience.integrations.faults``."""
    return os.environ.get(ENV_SIMULATED_FAULT) or None


def job_config() -> str | None:
    """Return what a job on Ray told its ranks, if there is one; see ``resilience.integrations.ray.call``."""
    return os.environ.get(ENV_JOB_CONFIG) or None


def finished_flag_file() -> str | None:
    """Return the file that says, once it is there, that a chain of jobs has nothing left to train."""
    return os.environ.get(ENV_FINISHED_FLAG_FILE) or None


def tell_workers(variables: Mapping[str, str | None]) -> None:
    """Set (or with ``None`` remove) what the workers that start next find in their environment."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def told_to_ourselves(name: str, value: str) -> Iterator[None]:
    """Have a variable set for what is imported in the block, unless the user has set it; workers do not see it."""
    given = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not given:
            del os.environ[name]


def environment() -> Mapping[str, str]:
    """Return the environment, for :func:`resolve`."""
    return os.environ
