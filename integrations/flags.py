"""The launcher's flags and variables, as jobs are given them on any engine: typos are found when a job is described.

Pure. It knows them without torch, which need not be where jobs are rendered; a test compares them with torch's own parser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from resilience import config
from resilience.errors import ConfigError, nearest
from resilience.nodecheck import accelerators

# What an engine's adapter may say to the launchers itself.
PLACES = (
    *("nnodes", "nproc-per-node", "node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr"),
    *("master-addr", "master-port", "standalone", "role", "max-restarts", "module", "no-python", "run-path"),
)
TORCHS = (
    *("monitor-interval", "start-method", "event-log-handler", "log-dir", "redirects", "tee", "local-ranks-filter"),
    *("duplicate-stdout-filters", "duplicate-stderr-filters", "logs-specs", "numa-binding", "signals-to-handle"),
    "shutdown-timeout",
)
SWITCHES = ("virtual-local-rank", "network-check", "exclude-straggler", "ignore-missing-fault-tol-cfg")
MORE = ("term-timeout", "workers-stop-timeout", "fault-tol-cfg-path", "ft-cfg-path")
BARE = ("restart-policy", "dynamic-failover-extension", "accelerator")
_PREFIXES = ("ft-param-", "ft-")
_PET = "PET_"


def settings_flags(without: Sequence[str] = ()) -> list[str]:
    """Return the flags of our settings, but for some of these."""
    names = [name for name in (*config.parameters(), *config.ACCEPTED_WITHOUT_EFFECT) if name not in without]
    return [f"{prefix}{name.replace('_', '-')}" for name in names for prefix in _PREFIXES]


def says_where(variable: str) -> bool:
    """Return whether a variable says what each launcher is told by its adapter: torch reads ``PET_<FLAG>`` for a flag."""
    return variable.startswith(_PET) and variable.removeprefix(_PET).lower().replace("_", "-") in PLACES


def check(words: Sequence[str], variables: Mapping[str, str], where: str = "launcher_args") -> None:
    """Raise :class:`ConfigError` for a flag or variable that no launcher knows, or whose value it would refuse.

    Values may be words of their own. torch's flags may be abbreviated, as torchrun takes them; ours may not.
    """
    known = [*PLACES, *TORCHS, *SWITCHES, *MORE, *BARE, *settings_flags()]
    told: dict[str, str] = {}
    for number, word in enumerate(words):
        if not word.startswith("--"):
            continue
        flag, equals, text = word[2:].partition("=")
        flag = flag.replace("_", "-")
        if flag not in known and not any(name.startswith(flag) for name in (*PLACES, *TORCHS)):
            close = nearest(f"--{flag}", [f"--{name}" for name in known])
            raise ConfigError(f"{where} has {word!r}, which is not a flag of `resilience run`.{close}")
        prefix = next((it for it in _PREFIXES if flag.startswith(it)), None)
        if prefix is not None and flag not in MORE:
            told[flag.removeprefix(prefix).replace("-", "_")] = (
                text if equals else "".join(words[number + 1 : number + 2])
            )
    for name in filter(says_where, variables):
        raise ConfigError(f"environment: {name!r} is what the job tells each launcher itself.")
    config.resolve(told, {name: text for name, text in variables.items() if name.startswith(config.ENV_PREFIX)})


def undone(word: str, ours: Mapping[str, str]) -> str:
    """Return which of the flags in ``ours`` a word gives, be it abbreviated, as torch allows; empty for none."""
    if not word.startswith("--"):
        return ""
    flag = word[2:].partition("=")[0].replace("_", "-").replace("ft-param-", "ft-")
    close = (known for known in ours if known == flag or (known.startswith(flag) and known[:3] != "ft-"))
    return next(close, "") if flag else ""


def unknown_accelerator(name: str) -> Iterator[str]:
    """Yield a word about an accelerator that is not known here; it may be where the job runs."""
    try:
        accelerators.check_name(name or accelerators.AUTO)
    except ConfigError:
        yield (
            f"accelerator {name!r} is not known here.{nearest(name, accelerators.names())} The nodes must have an entry point of "
            f"that name (group {accelerators.GROUP}), else every launcher ends with 2."
        )
