"""Values of the standard library that a state may hold: paths, dates and times, UUIDs, exact numbers, slices.

Rule: only the very types that are listed, no subclass of one (a ``pandas.Timestamp`` is a datetime and more than that). A codec
that somebody registered for one of them goes first. What ``payload`` gives is plain data, and ``MADE_FROM_BYTES`` and
``MADE_FROM_VALUE`` make the value again; codes and payloads are specified in ``docs/checkpoint-format.md``.

Hazard: a time zone is kept by its key. To make it again its table is read from the system, or from the package ``tzdata``: what the
key stands for there may have changed since, and on a system without either the value can't be read.
"""

from __future__ import annotations

import pathlib
import re
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import msgpack

PATH, DATE, TIME, DATETIME, TIMEDELTA, TIMEZONE, ZONE, UUID, DECIMAL, FRACTION, SLICE = range(21, 32)
_ZONE_KEY = re.compile(r"[A-Za-z0-9_+-]{1,50}(/[A-Za-z0-9_+-]{1,50}){0,3}\Z")  # stays inside the folder of all zones
_PURE = {"Posix": pathlib.PurePosixPath, "Windows": pathlib.PureWindowsPath}
_MICROSECOND = timedelta(microseconds=1)


class UnfitError(ValueError):
    """A value of a known type that holds something which can't be kept; the message says what."""


def payload(node: Any) -> tuple[int, Any] | None:
    """Return the code of a value and what is kept of it, ``bytes`` or plain data; ``None`` for other types.

    Raises :class:`UnfitError`.
    """
    act = _KEPT.get(type(node))
    return None if act is None else act(node)


def _path(node: pathlib.PurePath) -> tuple[int, Any]:
    return PATH, [type(node).__name__, str(node)]


def _zone(node: ZoneInfo) -> tuple[int, Any]:
    try:
        return ZONE, _zone_from(node.key.encode()).key.encode()
    except (ValueError, AttributeError):  # that: it has no key
        raise UnfitError(f"a time zone that no key leads back to ({node!r})") from None


def _fixed(node: timezone) -> tuple[int, Any]:
    offset, *name = node.__getinitargs__()  # type: ignore[attr-defined] # whether it was given a name: for pickle, says Python
    return TIMEZONE, [offset // _MICROSECOND, name[0] if name else None]


def _tz(node: tzinfo | None) -> Any:
    """Return a time zone as a part of a payload."""
    if node is None:
        return None
    if type(node) not in (timezone, ZoneInfo):
        kind = type(node)
        raise UnfitError(f"a time with a time zone of type {kind.__module__}.{kind.__qualname__}")
    code, kept = _KEPT[type(node)](node)
    return msgpack.ExtType(
        code, kept if isinstance(kept, bytes) else msgpack.packb(kept, unicode_errors="surrogatepass")
    )


def _clock(node: datetime | time) -> list[Any]:
    return [node.hour, node.minute, node.second, node.microsecond, node.fold, _tz(node.tzinfo)]


def _slice(node: slice) -> tuple[int, Any]:
    kept = [node.start, node.stop, node.step]
    if not all(type(item) in (int, type(None)) for item in kept):
        raise UnfitError("a slice whose ends are no plain ints")
    return SLICE, kept


_KEPT: dict[type, Callable[[Any], tuple[int, Any]]] = {
    pathlib.PosixPath: _path,
    pathlib.WindowsPath: _path,
    pathlib.PurePosixPath: _path,
    pathlib.PureWindowsPath: _path,
    date: lambda node: (DATE, [node.year, node.month, node.day]),
    time: lambda node: (TIME, _clock(node)),
    datetime: lambda node: (DATETIME, [node.year, node.month, node.day, *_clock(node)]),
    timedelta: lambda node: (TIMEDELTA, [node.days, node.seconds, node.microseconds]),
    timezone: _fixed,
    ZoneInfo: _zone,
    uuid.UUID: lambda node: (UUID, node.bytes),
    Decimal: lambda node: (DECIMAL, str(node).encode()),
    Fraction: lambda node: (FRACTION, [node.numerator, node.denominator]),
    slice: _slice,
}


# -- the way back: each is given what stands in a file, and raises ValueError, TypeError, ArithmeticError or LookupError ----------


def _path_from(value: Any) -> pathlib.PurePath:
    kind, text = value
    flavour = _PURE[kind.removeprefix("Pure").removesuffix("Path")]
    here = isinstance(pathlib.Path(), flavour)  # a path of the other system can only be a pure one
    return pathlib.Path(text) if here and not kind.startswith("Pure") else flavour(text)


def _zone_from(data: bytes) -> ZoneInfo:
    key = data.decode()
    if not _ZONE_KEY.match(key):
        raise ValueError(f"a time zone {key[:100]!r}")
    try:
        return ZoneInfo(key)
    except (LookupError, OSError) as error:  # that: the name of a folder of zones
        raise ValueError(f"this system knows no time zone {key!r}: install the package tzdata") from error


def _fixed_from(value: Any) -> timezone:
    offset, name = value
    return timezone(offset * _MICROSECOND) if name is None else timezone(offset * _MICROSECOND, name)


def _time_from(value: Any) -> time:
    hour, minute, second, microsecond, fold, zone = value
    return time(hour, minute, second, microsecond, zone, fold=fold)


def _datetime_from(value: Any) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold, zone = value
    return datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)


def _date_from(value: Any) -> date:
    year, month, day = value  # exactly three: a single one may be pickled
    return date(year, month, day)


def _timedelta_from(value: Any) -> timedelta:
    days, seconds, microseconds = value
    return timedelta(days, seconds, microseconds)


def _fraction_from(value: Any) -> Fraction:
    numerator, denominator = value
    if type(numerator) is not int or type(denominator) is not int:
        raise ValueError("a fraction of what are no ints")
    return Fraction(numerator, denominator)


def _slice_from(value: Any) -> slice:
    start, stop, step = value
    return slice(*_slice(slice(start, stop, step))[1])


MADE_FROM_BYTES: dict[int, Callable[[bytes], Any]] = {
    ZONE: _zone_from,
    UUID: lambda data: uuid.UUID(bytes=data),
    DECIMAL: lambda data: Decimal(data.decode()),
}
MADE_FROM_VALUE: dict[int, Callable[[Any], Any]] = {
    PATH: _path_from,
    DATE: _date_from,
    TIME: _time_from,
    DATETIME: _datetime_from,
    TIMEDELTA: _timedelta_from,
    TIMEZONE: _fixed_from,
    FRACTION: _fraction_from,
    SLICE: _slice_from,
}
