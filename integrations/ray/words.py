"""Which flags of the launcher, which of its variables, and which of its rendezvous' settings, a job may be given: pure.

Rule: a flag is written out and as one word. The launcher takes abbreviations, and a flag without its value takes the next word;
either could say again, unseen, what the job itself tells each launcher.
"""

from __future__ import annotations

import math

from resilience.integrations.flags import BARE, MORE, PLACES, SWITCHES, TORCHS, settings_flags

from resilience.errors import ConfigError, nearest

# What the job says to the launchers itself, besides where they meet.
OWN_SETTINGS = ("run_dir", "node_name", "node_group", "node_group_index", "use_infra_group_rank")
_CALLS = {  # what has a call of the builder's
    "max-restarts": "max_restarts(…)",
    "nnodes": "nodes(…)",
    "nproc-per-node": "nproc_per_node(…)",
    "rdzv-conf": "rendezvous(…)",
    "role": "workload(…)",
    "module": 'train("module.function")',
    "ft-run-dir": "run_dir(…)",
}
_SECONDS = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "timeout", "keep_alive_interval")
_WHOLE = ("read_timeout", "keep_alive_max_attempt")
RENDEZVOUS = (*_SECONDS, *_WHOLE)


def check_flag(word: object) -> None:
    """Raise :class:`ConfigError` for what is not a flag of ``resilience run`` that the job leaves free."""
    if not isinstance(word, str) or not word.startswith("--") or "\0" in word:
        raise ConfigError(f"launcher_args: write a flag and its value as one word, --flag=value; {word!r} is not one.")
    flag, equals, value = word[2:].partition("=")
    flag = flag.replace("_", "-")
    own = (*PLACES, *(f"ft-{name.replace('_', '-')}" for name in OWN_SETTINGS))
    taken = next((name for name in own if flag and name.startswith(flag.replace("ft-param-", "ft-"))), None)
    if taken is not None:
        raise ConfigError(f"launcher_args: {word!r} is what the job tells each launcher itself.{instead(taken)}")
    if flag in SWITCHES and not equals:
        return
    valued = flags_with_values()
    if flag not in valued:
        known = [f"--{name}" for name in (*valued, *SWITCHES)]
        raise ConfigError(f"launcher_args: {word!r} is not a flag of `resilience run`.{nearest(f'--{flag}', known)}")
    if not value:
        raise ConfigError(f"launcher_args: write a flag and its value as one word, --{flag}=value; {word!r} has none.")


def flags_with_values() -> list[str]:
    """Return the flags that a job may be given with a value."""
    return [*TORCHS, *settings_flags(without=OWN_SETTINGS), *MORE, *BARE]


def instead(flag: str) -> str:
    """Return which call of the builder says what a flag would; empty where none does."""
    return f" Say it by .{_CALLS[flag]}." if flag in _CALLS else ""


def check_rendezvous(name: str, value: object) -> None:
    """Raise :class:`ConfigError` for what is not a setting of the rendezvous that the job leaves free."""
    if name == "is_host":
        raise ConfigError("rendezvous(is_host=…): the store of a job on Ray has an actor of its own.")
    if name not in RENDEZVOUS:
        raise ConfigError(f"rendezvous({name}=…): there is no such setting.{nearest(name, RENDEZVOUS)}")
    number = isinstance(value, int if name in _WHOLE else (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]  # it is a number
        raise ConfigError(f"rendezvous({name}={value!r}): it must be a number above 0.")
