"""The kinds of values that settings have: how each is read from a flag, the environment or YAML, and how it is shown."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from typing import Any

from resilience.errors import ConfigError

_LONGEST_S = 1e9
_INDEX_DIGITS = 9
_NO_TIMEOUT = ("none", "null", "~", "")
_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def parse(name: str, raw: Any, kind: str, source: str) -> Any:
    """Turn one raw value (text from a flag, or what YAML gave) into the setting's type."""
    try:
        return _PARSERS[kind](raw)
    except (ValueError, TypeError, KeyError) as error:
        wanted = _WANTED[kind]
        raise ConfigError(f"{name}={raw!r} ({source}): {error}. Wanted: {wanted}. Nothing was started.") from error


def _timeout(raw: Any) -> float | None:
    if isinstance(raw, str) and raw.strip().lower() == "learned":
        return None
    return _timeout_or_none(raw)


def _timeout_or_none(raw: Any) -> float:
    if raw is None or (isinstance(raw, str) and raw.strip().lower() in _NO_TIMEOUT):
        return math.inf
    if isinstance(raw, float) and math.isinf(raw) and raw > 0:
        return math.inf
    return _positive(raw)


def _factor(raw: Any) -> float:
    value = _positive(raw)
    if value <= 1:
        raise ValueError("must be greater than 1")
    return value


def _positive(raw: Any) -> float:
    if isinstance(raw, bool):
        raise ValueError("a yes/no value is not a number of seconds")
    value = float(raw)
    if not 0 < value < _LONGEST_S:
        raise ValueError("must be greater than 0 and less than 30 years")
    return value


def _count(raw: Any) -> int:
    if isinstance(raw, bool):
        raise ValueError("a yes/no value is not a number")
    if not float(raw).is_integer() or not 1 <= int(raw) <= 900:
        raise ValueError("must be a whole number from 1 to 900")
    return int(raw)


def _number(raw: Any) -> int | None:
    if raw is None or (isinstance(raw, str) and raw.strip().lower() in _NO_TIMEOUT):
        return None
    if isinstance(raw, bool) or not float(raw).is_integer() or int(raw) < 0:
        raise ValueError("must be a whole number from 0 up")
    return int(raw)


def _index(raw: Any) -> int | None:
    """As the controller reads it from a pod's label: both must see the same groups."""
    if raw is None or (isinstance(raw, str) and raw.strip().lower() in _NO_TIMEOUT):
        return None
    text = str(raw).strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > _INDEX_DIGITS:
        raise ValueError("not a whole number from 0 up")
    return int(text)


def _policy(raw: Any) -> str:
    text = str(raw).strip().lower().replace("_", "-")
    if text not in ("any-failed", "min-healthy"):
        raise ValueError("no such policy")
    return text


def _timeouts(raw: Any) -> dict[str, float]:
    if raw is None:
        return {}
    if isinstance(raw, str):
        parts = [part.rpartition(":") for part in raw.split(",") if part.strip()]
        for name, colon, _ in parts:
            if not colon or not name.strip():
                raise ValueError("every entry needs a name and a colon")
        raw = {name.strip(): value.strip() for name, _, value in parts}
    if not isinstance(raw, Mapping):
        raise ValueError("not a mapping")
    return {str(name): _timeout_or_none(value) for name, value in raw.items()}


def _signal(raw: Any) -> signal.Signals:
    if isinstance(raw, int) or (isinstance(raw, str) and raw.isdigit()):
        found = signal.Signals(int(raw))
    else:
        name = str(raw).strip().upper().removeprefix("SIGNALS.")
        found = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    if found.name in ("SIGSTOP", "SIGTSTP", "SIGCONT", "SIGCHLD", "SIGWINCH", "SIGURG"):
        raise ValueError("it ends nothing")
    return found


def _switch(raw: Any) -> bool:
    text = str(raw).strip().lower()
    if text not in _ON + _OFF:
        raise ValueError("neither yes nor no")
    return text in _ON


def _level(raw: Any) -> str:
    if isinstance(raw, int) or (isinstance(raw, str) and raw.isdigit()):
        raw = {10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "CRITICAL"}[int(raw)]
    text = str(raw).strip().upper()
    text = {"DBG": "DEBUG", "WARN": "WARNING"}.get(text, text)
    if text not in _LEVELS:
        raise ValueError("not a log level")
    return text


def _word(raw: Any) -> str | None:
    if raw is not None and not str(raw).isprintable():
        raise ValueError("it has a line break or another character that can't be shown")
    return None if raw is None else str(raw)


_PARSERS: dict[str, Any] = {
    "timeout": _timeout,
    "timeout_or_none": _timeout_or_none,
    "timeouts": _timeouts,
    "positive": _positive,
    "factor": _factor,
    "count": _count,
    "number": _number,
    "index": _index,
    "policy": _policy,
    "signal": _signal,
    "switch": _switch,
    "level": _level,
    "word": _word,
    "text": lambda raw: None if raw is None else str(raw),
}
_WANTED = {
    "timeout": "seconds, 'learned', or null for no timeout",
    "timeout_or_none": "seconds, or null for no timeout",
    "timeouts": "name:seconds,name:seconds (null for no timeout)",
    "positive": "a number greater than 0",
    "factor": "a number greater than 1",
    "count": "a whole number from 1 to 900",
    "number": "a whole number from 0 up, or null for no limit",
    "index": "a whole number from 0 up, or null for none",
    "policy": "any-failed or min-healthy",
    "signal": "the name or number of a signal that ends a process",
    "switch": "true or false",
    "level": ", ".join(_LEVELS),
    "word": "text that is one line",
    "text": "text",
}


def show(value: Any, kind: str) -> str:
    """Return a value as ``resilience config`` prints it; it can be given back as a flag."""
    if value is None:
        return "learned" if kind == "timeout" else "-"
    if isinstance(value, float):
        return "null" if math.isinf(value) else f"{value:g}"
    if isinstance(value, signal.Signals):
        return value.name
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{show(item, 'timeout')}" for name, item in value.items()) or "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
