"""Values of the standard library: whatever they are, they come back as they were."""

from __future__ import annotations

import random
import string
import uuid
import zoneinfo
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import pytest

from resilience.checkpoint import encoding, standard
from resilience.checkpoint.decoding import decode
from resilience.checkpoint.encoding import DecodingError, EncodingError, encode, register_codec
from resilience.checkpoint.packing import Ext, pack

ZONES = sorted(zoneinfo.available_timezones())
needs_zones = pytest.mark.skipif("Europe/Berlin" not in ZONES, reason="no time zones here: those by key are left out")


def there_and_back(value: Any) -> Any:
    return decode(encode(value), lambda name, form: name)


def text(source: random.Random) -> str:
    return "".join(source.choices(string.printable + "äß€𝄞\ud800 :\\/.", k=source.randrange(12))).replace("\0", "")


def zone(source: random.Random) -> tzinfo | None:
    offset = timedelta(microseconds=source.randrange(-86_399_999_999, 86_400_000_000))
    fixed = [
        None,
        timezone(offset),
        timezone(offset, text(source)),
        timezone(timedelta(minutes=source.randrange(1440))),
    ]
    return source.choice([*fixed, *([zoneinfo.ZoneInfo(source.choice(ZONES))] if ZONES else [])])


def clock(source: random.Random) -> dict[str, Any]:
    limits = {"hour": 24, "minute": 60, "second": 60, "microsecond": 10**6, "fold": 2}
    return {**{name: source.randrange(limit) for name, limit in limits.items()}, "tzinfo": zone(source)}


def day(source: random.Random) -> date:
    return date.fromordinal(source.randint(1, date.max.toordinal()))


def moment(source: random.Random) -> datetime:
    found = day(source)
    return datetime(found.year, found.month, found.day, **clock(source))


def large(source: random.Random) -> int:
    return source.randrange(-(2 ** (bits := source.choice([3, 60, 70, 300]))), 2**bits)


def path(source: random.Random) -> PurePath:
    kinds: list[type[PurePath]] = [Path, PurePosixPath, PureWindowsPath]
    return source.choice(kinds)(*(text(source) for _ in range(source.randrange(4))))


MADE: dict[str, Callable[[random.Random], Any]] = {
    "path": path,
    "date": day,
    "time": lambda source: time(**clock(source)),
    "datetime": moment,
    "timedelta": lambda source: timedelta(source.randint(-999_999_999, 999_999_998), source.random() * 86_399),
    "zone": zone,
    "uuid": lambda source: uuid.UUID(int=source.getrandbits(128)),
    "decimal": lambda source: Decimal((source.randrange(2), [source.randrange(10)] * 3, source.randint(-999, 999))),
    "fraction": lambda source: Fraction(large(source), abs(large(source)) + 1),
    "slice": lambda source: slice(*(source.choice([None, large(source)]) for _ in range(3))),
    "range": lambda source: range(large(source), large(source), abs(large(source)) + 1),
    "complex": lambda source: complex(source.gauss(0, 1e9), source.gauss(0, 1e-9)),
}


def told(value: Any) -> Any:
    """Return all that there is to a value: two times are equal that differ in their zone or fold."""
    more = (value.fold, told(value.tzinfo)) if isinstance(value, (time, datetime)) else ()
    return type(value), repr(value), more


@pytest.mark.parametrize("kind", list(MADE))
@pytest.mark.parametrize("seed", range(3))
def test_any_value_of_the_standard_library_comes_back_as_it_was(kind: str, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(300):
        value = MADE[kind](source)
        assert told(there_and_back(value)) == told(value)
        assert told(there_and_back([{"a": (value,)}])[0]["a"][0]) == told(value)


@needs_zones
def test_moment_of_a_zone_is_the_same_moment_afterwards() -> None:
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    for fold, hours in ((0, 2), (1, 1)):  # the hour that there is twice
        found = there_and_back(datetime(2024, 10, 27, 2, 30, tzinfo=berlin, fold=fold))
        assert found.utcoffset() == timedelta(hours=hours)
        assert found.tzinfo is berlin


def test_bytes_are_those_of_the_specification() -> None:
    """A change here is a change of the format: checkpoints that exist could not be read any more."""
    utc = timezone(timedelta(hours=1), "X")
    wanted = {
        PurePosixPath("a"): (21, ["PurePosixPath", "a"]),
        date(2024, 2, 29): (22, [2024, 2, 29]),
        time(1, 2, 3, 4, fold=1): (23, [1, 2, 3, 4, 1, None]),
        datetime(2024, 1, 2, 3, 4, 5, 6, utc): (24, [2024, 1, 2, 3, 4, 5, 6, 0, Ext(26, pack([3_600_000_000, "X"]))]),
        timedelta(-1, 2, 3): (25, [-1, 2, 3]),
        timezone.utc: (26, [0, None]),
        Fraction(-1, 3): (30, [-1, 3]),
    }
    for value, (code, kept) in wanted.items():
        assert encode(value) == pack(Ext(code, pack(kept)))
    assert encode(slice(1)) == pack(Ext(31, pack([None, 1, None])))
    assert encode(uuid.UUID(bytes=b"0123456789abcdef")) == pack(Ext(28, b"0123456789abcdef"))
    assert encode(Decimal("-1.50")) == pack(Ext(29, b"-1.50"))


@needs_zones
def test_zone_is_kept_by_its_key() -> None:
    assert encode(zoneinfo.ZoneInfo("Europe/Berlin")) == pack(Ext(27, b"Europe/Berlin"))


def test_path_of_another_system_comes_back_as_a_pure_one() -> None:
    def read(kind: str, text: str) -> Any:
        return decode(pack(Ext(standard.PATH, pack([kind, text]))), lambda name, form: name)

    other, pure = ("WindowsPath", PureWindowsPath) if isinstance(Path(), PosixPath) else ("PosixPath", PurePosixPath)
    found = read(other, "C:\\a\\b")
    assert type(found) is pure
    assert found == pure("C:\\a\\b")
    assert type(read(type(Path()).__name__, "a")) is type(Path())


@pytest.mark.parametrize("key", ["Europe", "No/Such", "posixrules/x"])
def test_zone_that_this_system_does_not_have_is_said(key: str) -> None:
    with pytest.raises(DecodingError, match=f"no time zone '{key}'.*tzdata"):
        decode(pack(Ext(standard.ZONE, key.encode())), lambda name, form: name)


def test_codec_that_is_registered_goes_before_the_built_in_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that said how it keeps its paths is not told otherwise, and its old checkpoints are read as before."""
    monkeypatch.setattr(encoding, "_codecs", {})
    kept = encode(Path("a"))
    register_codec(type(Path()), lambda path: ["mine", str(path)], lambda value: Path("of the codec") / value[1])
    assert there_and_back(Path("a")) == Path("of the codec/a")
    assert decode(kept, lambda name, form: name) == Path("a")


def test_time_with_a_zone_of_another_library_is_refused_with_its_place_and_type() -> None:
    zone: Any = type("Zone", (tzinfo,), {})()
    with pytest.raises(EncodingError, match=r"^state\.when\.0: .*time zone of type .*Zone.*register_codec\(datetime"):
        encode({"when": [datetime(2024, 1, 1, tzinfo=zone)]})
