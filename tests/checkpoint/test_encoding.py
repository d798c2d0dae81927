"""The encoding of values: what goes in comes out, exactly; what can't be kept is named; what was tampered with runs nothing."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import enum
import io
import math
import random
import struct
import subprocess
import sys
import time
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import msgpack
import numpy
import pytest
import torch

from resilience.checkpoint import encoding, packing, standard
from resilience.checkpoint.decoding import decode, looks_only
from resilience.checkpoint.encoding import (
    DecodingError,
    EncodingError,
    UnknownCodec,
    encode,
    register_codec,
)
from resilience.checkpoint.leaves import Leaves
from resilience.checkpoint.packing import LARGE, Ext, pack


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"
    CRIMSON = "red"  # an alias


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Outer:
    class Inner(enum.Enum):
        ONLY = 1


@dataclass(frozen=True)
class Point:
    x: int
    y: int


Pair = namedtuple("Pair", "left right")


TEHRAN = datetime.timezone(datetime.timedelta(hours=3, minutes=30), "Tehran")


def no_tensor(name: str, form: list[Any]) -> Any:
    return ("tensor", name, form)


def there_and_back(value: Any) -> Any:
    return decode(encode(value), no_tensor)


def told(value: Any) -> Any:
    """Return something that is equal for two values only if they are the same in type, value and sign, all the way down."""
    kind: Any = type(value)
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    if isinstance(value, (complex, Decimal, datetime.timezone)):  # -0, 1.0 and 1.00, NaN; names
        return kind, repr(value)
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return kind, value.dtype, value.shape, value.tobytes()
    more = [getattr(value, "maxlen", None), getattr(value, "default_factory", None)]
    if isinstance(value, (datetime.datetime, datetime.time)):  # two are equal that are told apart by their zone alone
        more += [value.fold, told(value.tzinfo)]
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return kind, more, [(told(key), told(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return kind, more, [told(item) for item in value]
    return kind, more, value


def same(one: Any, other: Any) -> bool:
    return bool(told(one) == told(other))


def namespace() -> argparse.Namespace:
    made = argparse.Namespace(lr=0.1, nested=argparse.Namespace(betas=(0.9, 0.99)))
    vars(made).update({"self": 1, "a b": 2})
    return made


@pytest.fixture
def codecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A table of codecs of the test's own."""
    monkeypatch.setattr(encoding, "_codecs", {})
    yield


VALUES: dict[str, Any] = {
    "none": None,
    "booleans": [True, False],
    "small ints": [0, 1, -1, 127, 128, -32, -33, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1],
    "large ints": [2**64, -(2**63) - 1, 10**30, -(10**30), 10**6000, -(10**6000)],
    "floats": [0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308],
    "text": ["", "a", "ä€𝄞", "\0", "x" * 70_000],
    "lone surrogates": {"\ud800": "a\udfffb"},
    "bytes": [b"", b"\0\xff", b"x" * 70_000],
    "bytearray": [bytearray(), bytearray(b"\0\xff")],
    "complex": [0j, complex(-0.0, -0.0), complex(math.nan, -math.inf), 1 - 2j],
    "list": [[], [[]], [1, [2, [3]]]],
    "tuple": [(), (1,), (1, (2, [3, ()]))],
    "tuples as keys": {(1, "a"): 1, (): 2, ((1, 2), (3, b"")): 3},
    "keys of many types": {
        1: "a",
        "1": "b",
        None: "c",
        1.5: "d",
        b"1": "e",
        False: "f",
        2**80: "g",
        frozenset({1}): "h",
    },
    "enums as keys": {Colour.RED: 1, Level.LOW: 2},
    "order of a dict": {"b": 1, "a": 2, "c": 3},
    "ordered dict": OrderedDict([("b", 1), ((1, 2), OrderedDict()), ("a", [2])]),
    "default dicts": [defaultdict(kind, {"a": kind()}) for kind in (int, float, str, list, dict, set, tuple, bool)],
    "default dict without a factory": defaultdict(None, {1: 2}),
    "counter": Counter({"b": 3, "a": -1, (1, 2): 0}),
    "deque": [deque([1, (2,)]), deque([1, 2], maxlen=5), deque(maxlen=0)],
    "set": [set(), {1, "a", None, (1, 2), 2.5, b""}, {frozenset({1}), frozenset()}],
    "frozenset": frozenset({frozenset({(1, 2)}), "x"}),
    "range": [range(5), range(10, -5, -3), range(2**70)],
    "slices": [slice(5), slice(None), slice(-3, None, 2), slice(2**70, 1)],
    "paths": [Path("a/b"), Path(), Path("/"), Path("a\udcff"), PurePosixPath("//x/y"), PureWindowsPath("C:/a", "b")],
    "paths as keys": {Path("a"): 1, PureWindowsPath("a"): 2},
    "dates": [datetime.date.min, datetime.date.max, datetime.date(2024, 2, 29)],
    "times": [datetime.time.min, datetime.time.max, datetime.time(1, 2, fold=1), datetime.time(3, tzinfo=TEHRAN)],
    "datetimes": [datetime.datetime.min, datetime.datetime.max, datetime.datetime(2024, 10, 27, 2, 30, fold=1)],
    "datetimes of a zone": [
        datetime.datetime(2024, 10, 27, 2, 30, tzinfo=zone, fold=fold)
        for zone in (datetime.timezone.utc, TEHRAN)
        for fold in (0, 1)
    ],
    "zones": [
        datetime.timezone.utc,
        datetime.timezone(datetime.timedelta(0), "UTC"),
        datetime.timezone(-datetime.timedelta(hours=24, microseconds=-1), "ä\ud800"),
    ],
    "spans": [datetime.timedelta.min, datetime.timedelta.max, datetime.timedelta(0), -datetime.timedelta.resolution],
    "uuids": [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1), uuid.UUID("12345678-1234-5678-1234-567812345678")],
    "decimals": [Decimal(text) for text in ("0", "-0", "1.10", "1E+999999", "NaN", "-sNaN123", "-Infinity", "1" * 99)],
    "fractions": [Fraction(0), Fraction(-1, 3), Fraction(2**200, 3**100)],
    "enums": [Colour.RED, Colour.CRIMSON, Level.HIGH, Outer.Inner.ONLY, Mode.WRITE],
    "namespace": namespace(),
    "torch dtypes": [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128],
    "torch devices": [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")],
    "torch sizes": [torch.Size([]), torch.Size([2, 0, 3])],
    "numpy scalars": [kind(1) for kind in (numpy.int8, numpy.uint64, numpy.float16, numpy.float64, numpy.complex128)],
    "numpy truth": [numpy.bool_(True), numpy.bool_(False)],
    "numpy oddities": [numpy.float32("nan"), numpy.float64(-0.0), numpy.longdouble(1) / 3, numpy.void(b"ab")],
    "numpy text": [numpy.str_("äb"), numpy.str_(""), numpy.bytes_(b"ab"), numpy.bytes_(b"")],
    "numpy times": [
        numpy.datetime64("2024-02-29T12:00", "ns"),
        numpy.timedelta64(5, ("s", 25)),
        numpy.datetime64("NaT"),
    ],
    "arrays of text": [numpy.array(["a", "bcd"]), numpy.array([[b"x"], [b"yz"]]), numpy.array([], dtype="U3")],
    "arrays of times": numpy.array(["2024-01-01", "NaT"], dtype="datetime64[D]"),
    "arrays of numbers": [numpy.arange(6).reshape(2, 3).T, numpy.array(1.5), numpy.zeros((3, 0)), numpy.array([True])],
    "arrays of the other byte order": numpy.array([1, 2], dtype=">i4"),
    "random state of python": random.Random(7).getstate(),
    "random state of numpy": numpy.random.RandomState(7).get_state(),
    "state of a numpy generator": numpy.random.default_rng(7).bit_generator.state,
}


# -- what can be kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", list(VALUES.values()), ids=list(VALUES))
def test_value_comes_back_with_its_exact_type(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_comparison_of_these_tests_sees_types_and_signs() -> None:
    """If it did not, none of them could fail."""
    different = [(1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ({}, OrderedDict()), (b"", bytearray()), (1, Level.LOW)]
    different += [(deque([1]), deque([1], 3)), (defaultdict(int), defaultdict(list)), (1.5, numpy.float64(1.5))]
    different += [({"a": 1, "b": 2}, {"b": 2, "a": 1}), (numpy.int32(1), numpy.int64(1)), (0j, complex(-0.0, 0))]
    different += [(Decimal("1.0"), Decimal("1.00")), (datetime.time(1), datetime.time(1, fold=1))]
    utc, named = datetime.timezone.utc, datetime.timezone(datetime.timedelta(0), "UTC")
    different += [(utc, named), (datetime.time(1, tzinfo=utc), datetime.time(1, tzinfo=named))]
    assert not [pair for pair in different if same(*pair)]
    assert same(math.nan, math.nan)


def test_restored_generators_go_on_with_the_same_numbers() -> None:
    python, older = random.Random(1), numpy.random.RandomState(1)
    python.gauss(0, 1)
    older.standard_normal()
    state = there_and_back({"python": python.getstate(), "numpy": older.get_state()})
    again, older_again = random.Random(), numpy.random.RandomState()
    again.setstate(state["python"])
    older_again.set_state(state["numpy"])
    assert [again.random() for _ in range(5)] == [python.random() for _ in range(5)]
    assert older_again.random_sample(5).tolist() == older.random_sample(5).tolist()


def test_restored_arrays_are_writable_and_nobody_elses() -> None:
    data = encode(numpy.array(["a", "b"]))
    one, other = decode(data, no_tensor), decode(data, no_tensor)
    one[0] = "z"
    assert other.tolist() == ["a", "b"]


def test_same_set_is_the_same_bytes_whatever_its_order() -> None:
    one, other = {8, 0}, {0, 8}  # they fall into one place of the table, so the first one in is the first one out
    assert list(one) != list(other)
    assert encode(one) == encode(other)
    letters = sorted("the quick brown fox jumps".replace(" ", ""))
    assert encode(set(letters)) == ext(encoding.SET, sorted(set(letters)))


def test_bytes_are_read_from_a_memoryview_too() -> None:
    assert decode(memoryview(b"xx" + encode({"a": (1, 2)}))[2:], no_tensor) == {"a": (1, 2)}


def test_bytes_are_those_of_the_specification() -> None:
    """A change here is a change of the format: checkpoints that exist could not be read any more."""
    state = [(1, 2**70), {"b"}, 1j, torch.float16, numpy.int16(5), bytearray(b"x"), deque([1], 2)]
    assert encode(state) == (
        b"\x97"
        b"\xc7\x17\x03\x92\x01\xc7\x12\x08400000000000000000"
        b"\xc7\x03\x05\x91\xa1b"
        b"\xc7\x13\x07\x92\xcb\0\0\0\0\0\0\0\0\xcb\x3f\xf0\0\0\0\0\0\0"
        b"\xc7\x07\x0afloat16"
        b"\xc7\x0a\x0d\x93\xa3<i2\xc0\xc4\x02\x05\x00"
        b"\xd4\x09x"
        b"\xd6\x11\x92\x02\x91\x01"
    )


def test_tensors_are_given_to_their_keeper_and_asked_for_on_the_way_back() -> None:
    asked: list[str] = []

    def keep(node: Any, path: str) -> Any | None:
        if not isinstance(node, torch.Tensor):
            return None
        asked.append(path)
        return packing.ext(encoding.TENSOR, path.encode())

    data = encode({"a": [torch.ones(1), {"b": torch.ones(1)}], 5: torch.ones(1)}, "state", keep)
    assert asked == ["state.a.0", "state.a.1.b", "state.5"]
    found = decode(data, no_tensor)
    assert found["a"][1]["b"] == ("tensor", "state.a.1.b", [])


# -- what can't be kept -----------------------------------------------------------------------------------------------


class Sub(str):
    __slots__ = ()


class Moment(datetime.datetime):
    pass


class Zone(datetime.tzinfo):
    def utcoffset(self, moment: datetime.datetime | None) -> datetime.timedelta:
        return datetime.timedelta(0)

    dst = utcoffset

    def tzname(self, moment: datetime.datetime | None) -> str:
        return "Zone"


def zone_from_a_file(key: str | None) -> zoneinfo.ZoneInfo:
    table = b"TZif".ljust(20, b"\0") + struct.pack(">6l", 0, 0, 0, 0, 1, 4) + bytes(6) + b"ABC\0"
    return zoneinfo.ZoneInfo.from_file(io.BytesIO(table), key)


UNKNOWN: dict[str, Any] = {
    "object": object(),
    "function": len,
    "class": int,
    "module": math,
    "dataclass": Point(1, 2),
    "named tuple": Pair(1, 2),
    "subclass of str": Sub("a"),
    "subclass of a datetime": Moment(2024, 1, 1),
    "datetime of a zone of its own": datetime.datetime(2024, 1, 1, tzinfo=Zone()),
    "time of a zone of its own": datetime.time(1, tzinfo=Zone()),
    "zone without a key": zone_from_a_file(None),
    "zone with a key of its own": zone_from_a_file("My/Zone"),
    "datetime of such a zone": datetime.datetime(2024, 1, 1, tzinfo=zone_from_a_file("../UTC")),
    "slice of texts": slice("a", "b"),
    "slice of truths": slice(True),
    "slice of tensors": slice(torch.ones(1)),
    "memoryview": memoryview(b"a"),
    "generator": torch.Generator(),
    "simple namespace": types.SimpleNamespace(),
    "extension type of msgpack": Ext(1, b"a"),
    "tensor without a keeper": torch.ones(1),
}


@pytest.mark.parametrize("value", list(UNKNOWN.values()), ids=list(UNKNOWN))
def test_unknown_type_is_refused_with_its_place_and_the_way_out(value: Any) -> None:
    with pytest.raises(EncodingError) as caught:
        encode({"loader": {"workers": [1, value]}})
    text = str(caught.value)
    assert text.startswith("state.loader.workers.1: ")
    assert "register_codec" in text
    assert type(value).__qualname__ in text
    assert "nothing was saved" in text


def test_unknown_type_in_a_key_or_a_set_is_refused_with_its_place() -> None:
    with pytest.raises(EncodingError, match=r"^state\.a\.<key>: .*Point"):
        encode({"a": {Point(1, 3): 1}})
    with pytest.raises(EncodingError, match=r"^state\.a\.<item>: .*Point"):
        encode({"a": {Point(1, 3)}})


@pytest.mark.parametrize("factory", [lambda: 0, object, Counter, Path, types.SimpleNamespace(__name__="int")])
def test_default_dict_with_another_factory_is_refused_with_its_place(factory: Any) -> None:
    if not callable(factory):
        factory = type("int", (), {"__call__": lambda self: 0})()  # one that only calls itself like an allowed one
        factory.__name__ = "int"
    with pytest.raises(EncodingError, match=r"^state\.counts: a defaultdict that makes .*Use a plain dict"):
        encode({"counts": defaultdict(factory)})


def test_combination_of_flags_is_refused_rather_than_lost() -> None:
    with pytest.raises(EncodingError, match=r"^state\.mode: .*can't be kept"):
        encode({"mode": Mode.READ | Mode.WRITE})


def test_enum_that_no_name_leads_to_is_refused_rather_than_lost() -> None:
    class Local(enum.Enum):
        ONE = 1

    with pytest.raises(EncodingError, match=r"^state\.mode: .*inside a function"):
        encode({"mode": Local.ONE})


@pytest.mark.parametrize(
    "array",
    [
        numpy.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        numpy.zeros(1, dtype=[("a", "i4")])[0],
        numpy.array([object()]),
        numpy.ma.array([1, 2], mask=[False, True]),
        numpy.zeros(2, dtype=[("a", "i4")]).view(numpy.recarray),
    ],
    ids=["structured array", "structured scalar", "array of objects", "masked array", "record array"],
)
def test_array_that_is_more_than_its_numbers_is_refused_in_words(array: Any) -> None:
    with pytest.raises(EncodingError, match=r"^state\.table: .*(dtype|of type).*can't be kept.*register_codec"):
        encode({"table": array})


def test_keys_that_would_fall_together_are_refused() -> None:
    with pytest.raises(EncodingError, match=r"^state\.a: two of its keys"):
        encode({"a": {numpy.float32("nan"): 1, numpy.float32("nan"): 2}})


def circles() -> Iterator[Any]:
    in_list: list[Any] = []
    in_list.append(in_list)
    in_dict: dict[str, Any] = {}
    in_dict["me"] = (in_dict,)
    in_deque: deque[Any] = deque()
    in_deque.append([in_deque])
    in_namespace = argparse.Namespace()
    in_namespace.me = OrderedDict(me=in_namespace)
    in_default: defaultdict[str, Any] = defaultdict(list)
    in_default["me"].append(in_default)
    yield from (in_list, in_dict, in_deque, in_namespace, in_default)


@pytest.mark.parametrize("state", list(circles()), ids=lambda state: type(state).__name__)
def test_state_that_contains_itself_is_refused(state: Any) -> None:
    with pytest.raises(EncodingError, match="contains itself"):
        encode({"a": state})


@pytest.mark.parametrize("wrap", [lambda node: [node], lambda node: (node,), lambda node: {"a": node}])
def test_nesting_is_kept_or_refused_at_every_depth_but_never_lost(wrap: Callable[[Any], Any]) -> None:
    kept = []
    for depth in [*range(1, 130), 500, 5000]:
        state: Any = 1
        for _ in range(depth):
            state = wrap(state)
        try:
            data = encode(state)
        except EncodingError:
            continue
        kept.append(depth)
        found = decode(data, no_tensor)
        for _ in range(depth):
            found = found["a"] if isinstance(found, dict) else found[0]
        assert found == 1
    assert kept == list(range(1, 49))


# -- codecs -----------------------------------------------------------------------------------------------------------


def as_list(point: Point) -> list[int]:
    return [point.x, point.y]


def as_point(value: list[int]) -> Point:
    return Point(*value)


@pytest.mark.usefixtures("codecs")
def test_registered_type_comes_back_wherever_it_stands() -> None:
    register_codec(Point, as_list, as_point)
    state = {"a": [Point(1, 2)], Point(3, 4): {Point(5, 6)}, "c": (Point(7, 8),)}
    assert there_and_back(state) == state


@pytest.mark.usefixtures("codecs")
def test_codec_may_give_what_needs_another_codec() -> None:
    register_codec(Point, lambda point: (Fraction(point.x), point.y), lambda value: Point(int(value[0]), value[1]))
    register_codec(
        Fraction, lambda value: (value.numerator, value.denominator), lambda value: Fraction(*value), "fraction"
    )
    assert there_and_back([Point(1, 2)]) == [Point(1, 2)]


@pytest.mark.usefixtures("codecs")
def test_codec_goes_before_the_keeper_of_tensors() -> None:
    class Special(torch.Tensor):  # type: ignore[misc]
        pass

    register_codec(Special, lambda tensor: "special", lambda value: value, "special")
    data = encode(
        torch.ones(1).as_subclass(Special), "state", lambda node, path: packing.ext(encoding.TENSOR, b"taken")
    )
    assert decode(data, no_tensor) == "special"


@pytest.mark.usefixtures("codecs")
def test_value_of_a_codec_that_holds_tensors_waits_for_them() -> None:
    register_codec(Point, lambda point: [torch.ones(1)], as_point, "point")
    data = encode(Point(1, 2), "state", lambda node, path: packing.ext(encoding.TENSOR, path.encode()))
    assert decode(data, no_tensor) == ("tensor", "", ["codec", "point", [("tensor", "state.0", [])]])


@pytest.mark.usefixtures("codecs")
def test_value_whose_codec_is_missing_is_refused_by_name() -> None:
    register_codec(Point, as_list, as_point, "point")
    plain, with_tensor = encode(Point(1, 2)), pack(Ext(encoding.TENSOR_FORM, pack(["", "codec", "point", []])))
    encoding._codecs.clear()
    for data in (plain, with_tensor):
        with pytest.raises(UnknownCodec, match="no codec 'point' is registered here"):
            decode(data, no_tensor)


@pytest.mark.usefixtures("codecs")
def test_who_only_looks_needs_neither_codecs_nor_classes() -> None:
    register_codec(Point, as_list, as_point, "point")
    state = {"a": Point(1, 2), "b": [{Point(3, 4): 5}], "c": {Point(5, 6)}}
    data, gone = encode(state), ext(encoding.ENUM, ["gone", "Level", "LOW"])
    encoding._codecs.clear()
    with looks_only():
        found = decode(data, no_tensor)
        assert repr(decode(gone, no_tensor)) == "<gone.Level.LOW>"
        assert decode(pack(Ext(encoding.TENSOR_FORM, pack(["", "codec", "point", []]))), no_tensor)[0] == "tensor"
    assert repr(found["a"]) == "<made by the codec 'point'>"
    assert [len(found["b"][0]), len(found["c"])] == [1, 1]
    for lost in (data, gone):
        with pytest.raises(UnknownCodec):
            decode(lost, no_tensor)


@pytest.mark.usefixtures("codecs")
def test_codec_that_fails_is_named() -> None:
    register_codec(Point, lambda point: [1 // 0], lambda value: value[0], "point")
    with pytest.raises(EncodingError, match=r"^state\.a: the codec 'point' failed: ZeroDivisionError"):
        encode({"a": Point(1, 2)})
    with pytest.raises(DecodingError, match="the codec 'point' failed: IndexError"):
        decode(pack(Ext(encoding.CODEC, pack(["point", []]))), no_tensor)


@pytest.mark.usefixtures("codecs")
def test_codec_that_could_not_be_meant_is_refused() -> None:
    register_codec(Point, as_list, as_point, "point")
    register_codec(Point, as_list, as_point, "point")
    with pytest.raises(ValueError, match="another type has the codec name 'point'"):
        register_codec(Fraction, str, Fraction, "point")
    for kind in (dict, str, tuple):
        with pytest.raises(ValueError, match="has a form of its own"):
            register_codec(kind, list, list)


@pytest.mark.usefixtures("codecs")
def test_codec_that_gives_itself_is_refused() -> None:
    register_codec(Point, lambda point: [point], as_point)
    with pytest.raises(EncodingError):
        encode(Point(1, 2))


# -- what was tampered with -------------------------------------------------------------------------------------------


def ext(code: int, value: Any) -> bytes:
    return pack(Ext(code, pack(value)))


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "never used": b"\xc1",
    "two values": pack(1) + pack(2),
    "cut short": encode(list(range(100)))[:-1],
    "enum that is a function": ext(encoding.ENUM, ["os", "system", "id"]),
    "enum that is a module": ext(encoding.ENUM, ["os", "path", "join"]),
    "enum below a function": ext(encoding.ENUM, ["os", "system.x", "id"]),
    "enum of a module that is not loaded": ext(encoding.ENUM, ["antigravity", "A", "B"]),
    "enum without a member": ext(encoding.ENUM, [__name__, "Colour", "GREEN"]),
    "enum with a member that is none": ext(encoding.ENUM, [__name__, "Colour", "__class__"]),
    "enum with a member that can't be one": ext(encoding.ENUM, [__name__, "Colour", []]),
    "enum that is a class": ext(encoding.ENUM, [__name__, "Outer", "Inner"]),
    "enum of nothing": ext(encoding.ENUM, []),
    "enum of a number": ext(encoding.ENUM, [1, 2, 3]),
    "codec that nobody knows": ext(encoding.CODEC, ["os.system", "id"]),
    "codec without a value": ext(encoding.CODEC, ["os.system"]),
    "codec with tensors that nobody knows": ext(encoding.TENSOR_FORM, ["", "codec", "os.system", "id"]),
    "codec with tensors and without a name": ext(encoding.TENSOR_FORM, ["", "codec"]),
    "dtype that is a function": pack(Ext(encoding.DTYPE, b"load")),
    "dtype that torch would import": pack(Ext(encoding.DTYPE, b"_inductor")),
    "dtype with a dot": pack(Ext(encoding.DTYPE, b"nn.Module")),
    "dtype that is no text": pack(Ext(encoding.DTYPE, b"\xff")),
    "device that is none": pack(Ext(encoding.DEVICE, b"toaster")),
    "size that is none": ext(encoding.SIZE, ["a"]),
    "type that is not known": ext(99, [1]),
    "type that is not known, without a value": pack(Ext(99, b"\xc1")),
    "type zero": ext(0, [1]),
    "large int that is none": pack(Ext(LARGE, b"zz")),
    "large int that is empty": pack(Ext(LARGE, b"")),
    "tensor without a name": pack(Ext(encoding.TENSOR, b"\xff")),
    "tensor form of nothing": ext(encoding.TENSOR_FORM, []),
    "tensor form of a number": ext(encoding.TENSOR_FORM, 5),
    "tensor form without a form": ext(encoding.TENSOR_FORM, ["name"]),
    "tensor form with a number as name": ext(encoding.TENSOR_FORM, [5, "bits", "uint8"]),
    "tuple of a number": ext(encoding.TUPLE, 5),
    "pairs that are none": ext(encoding.ORDERED, [[1]]),
    "counter of a number": ext(encoding.COUNTER, 5),
    "set of lists": ext(encoding.SET, [[1]]),
    "complex of text": ext(encoding.COMPLEX, ["a", "b", "c"]),
    "range of text": ext(encoding.RANGE, ["a"]),
    "range without steps": ext(encoding.RANGE, [1, 2, 0]),
    "deque of nothing": ext(encoding.DEQUE, []),
    "deque with a negative limit": ext(encoding.DEQUE, [-1, []]),
    "default dict that opens files": ext(encoding.DEFAULTDICT, ["open", []]),
    "default dict that evaluates": ext(encoding.DEFAULTDICT, ["eval", []]),
    "default dict of a list": ext(encoding.DEFAULTDICT, [[], []]),
    "namespace of numbers": ext(encoding.NAMESPACE, {1: 2}),
    "namespace of a list": ext(encoding.NAMESPACE, [1]),
    "array of objects": ext(encoding.NUMPY, ["|O", [1], b"12345678"]),
    "array of objects in disguise": ext(encoding.NUMPY, ["i4,O", [1], b"123456789012"]),
    "array type that is an expression": ext(encoding.NUMPY, ["i4,(", [1], b"1234"]),
    "array type that is a number": ext(encoding.NUMPY, [5, [1], b"1234"]),
    "array with too few bytes": ext(encoding.NUMPY, ["<i4", [2], b"1234"]),
    "array with too many bytes": ext(encoding.NUMPY, ["<i4", [1], b"12345678"]),
    "array of a size that nobody has": ext(encoding.NUMPY, ["<i4", [2**40, 2**40], b"1234"]),
    "array of a negative size": ext(encoding.NUMPY, ["<i4", [-1], b"1234"]),
    "array with huge items": ext(encoding.NUMPY, ["<U999999999", [1], b"1234"]),
    "array without bytes": ext(encoding.NUMPY, ["<i4", None, b""]),
    "path of no system": ext(standard.PATH, ["MacPath", "a"]),
    "path that is a number": ext(standard.PATH, ["PosixPath", 5]),
    "path that is a list": ext(standard.PATH, [["PosixPath"], "a"]),
    "date of a month that is none": ext(standard.DATE, [2024, 13, 1]),
    "date that is pickled": ext(standard.DATE, [b"\x07\xe8\x01\x01"]),
    "time that is pickled": ext(standard.TIME, [b"\0\0\0\0\0\0"]),
    "time of an hour that is none": ext(standard.TIME, [24, 0, 0, 0, 0, None]),
    "time of a zone that is none": ext(standard.TIME, [1, 0, 0, 0, 0, "UTC"]),
    "datetime that is pickled": ext(standard.DATETIME, [b"\x07\xe8\x01\x01\0\0\0\0\0\0"]),
    "datetime of a fold that is none": ext(standard.DATETIME, [2024, 1, 1, 0, 0, 0, 0, 2, None]),
    "span that nobody lives": ext(standard.TIMEDELTA, [10**30, 0, 0]),
    "span of text": ext(standard.TIMEDELTA, ["a", 0, 0]),
    "zone of more than a day": ext(standard.TIMEZONE, [10**12, None]),
    "zone with a number as name": ext(standard.TIMEZONE, [0, 5]),
    "zone elsewhere": pack(Ext(standard.ZONE, b"../../../etc/passwd")),
    "zone that is a path": pack(Ext(standard.ZONE, b"/etc/localtime")),
    "zone that is a module": pack(Ext(standard.ZONE, b"os.path")),
    "zone with a line after it": pack(Ext(standard.ZONE, b"UTC\n")),
    "zone that is no text": pack(Ext(standard.ZONE, b"\xff")),
    "zone without a name": pack(Ext(standard.ZONE, b"")),
    "uuid of 15 bytes": pack(Ext(standard.UUID, bytes(15))),
    "decimal that is none": pack(Ext(standard.DECIMAL, b"1.2.3")),
    "fraction of nothing": ext(standard.FRACTION, [1, 0]),
    "fraction of text": ext(standard.FRACTION, ["1/2", None]),
    "fraction of floats": ext(standard.FRACTION, [0.5, 1]),
    "slice of text": ext(standard.SLICE, ["a", None, None]),
    "slice of four": ext(standard.SLICE, [1, 2, 3, 4]),
    "list as a key": b"\x81\x90\x01",
    "list of 4 billion": b"\xdd\xff\xff\xff\xff",
    "map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "text of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "bytes of 4 GiB": b"\xc6\xff\xff\xff\xff",
    "extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x03",
    "nested lists": b"\x91" * 100_000 + b"\x01",
    "nested maps": b"\x81\x01" * 100_000 + b"\x01",
}


@pytest.mark.parametrize("data", list(HOSTILE.values()), ids=list(HOSTILE))
def test_hostile_bytes_are_refused_and_import_nothing(data: bytes) -> None:
    decode(encode([torch.float32, numpy.int8(1)]), no_tensor)  # what decoding itself imports is there
    before = set(sys.modules)
    with pytest.raises(DecodingError):
        decode(data, no_tensor)
    assert set(sys.modules) == before


@pytest.mark.parametrize("code", [encoding.TUPLE, encoding.TENSOR_FORM, encoding.CODEC])
@pytest.mark.parametrize("levels", [101, 1_000, 10_000])
def test_extension_types_in_extension_types_do_not_overflow_the_stack(levels: int, code: int) -> None:
    data = pack(1)
    for _ in range(levels):
        data = pack(Ext(code, b"\x91" + data))
    with pytest.raises(DecodingError, match="nested"):
        decode(data, no_tensor)


def test_looking_for_an_enum_does_not_wake_a_lazy_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for: the module would have been imported")

    monkeypatch.setitem(sys.modules, "lazy_one", Lazy("lazy_one"))
    with pytest.raises(DecodingError, match=r"lazy_one\.A\.B is not known here"):
        decode(ext(encoding.ENUM, ["lazy_one", "A", "B"]), no_tensor)


def test_names_in_a_namespace_change_no_class() -> None:
    found = decode(ext(encoding.NAMESPACE, {"__class__": 1, "__dict__": 2, "a": 3}), no_tensor)
    assert type(found) is argparse.Namespace
    assert found.a == 3


@pytest.mark.spawns
def test_hostile_bytes_run_nothing_in_a_process_of_their_own(tmp_path: Path) -> None:
    """Every file that is opened, process started and module imported is seen by an audit hook."""
    blobs = tmp_path / "blobs"
    blobs.write_bytes(msgpack.packb(list(HOSTILE.values())))
    code = (
        "import sys, msgpack, torch, numpy\n"
        "from resilience.checkpoint.decoding import decode\n"
        "from resilience.checkpoint.encoding import encode, DecodingError\n"
        "decode(encode([torch.float32, torch.device('cpu'), torch.Size([1]), numpy.array(['a'])]), lambda *_: None)\n"
        f"blobs = msgpack.unpackb(open({str(blobs)!r}, 'rb').read())\n"
        "seen = []\n"
        "watched = ('import', 'open', 'exec', 'compile', 'os.', 'subprocess', 'socket', 'ctypes', 'marshal', 'pickle')\n"
        "sys.addaudithook(lambda event, args: seen.append((event, args)) if event.startswith(watched) else None)\n"
        "for blob in blobs:\n"
        "    try:\n"
        "        decode(blob, lambda *_: None)\n"
        "    except DecodingError:\n"
        "        pass\n"
        "looked, seen = seen, []\n"
        "print(len(blobs), looked)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.strip() == f"{len(HOSTILE)} []", done.stderr


def realistic() -> bytes:
    state = {
        "model": {"weight": torch.ones(2), "bias": torch.ones(2)},
        "optimizer": {
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["weight", "bias"], "foreach": None}]
        },
        "rng": {"python": random.Random(3).getstate(), "numpy": numpy.random.RandomState(3).get_state()},
        "others": [
            value
            for name, value in VALUES.items()
            if name not in ("text", "bytes", "large ints") and "random" not in name
        ],
    }

    def keep(node: Any, path: str) -> Any | None:
        return packing.ext(encoding.TENSOR, path.encode()) if isinstance(node, torch.Tensor) else None

    return encode(state, "state", keep)


def mutated(data: bytes, source: random.Random) -> bytes:
    """Flip some bits, cut something out, or put a part of it somewhere else."""
    changed, kind = bytearray(data), source.randrange(4)
    if kind == 0:
        for _ in range(source.randint(1, 8)):
            changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
    elif kind == 1:
        start = source.randrange(len(changed))
        del changed[start : start + source.randint(1, 50)]
    elif kind == 2:
        start, to = source.randrange(len(changed)), source.randrange(len(changed))
        changed[to:to] = changed[start : start + source.randint(1, 50)]
    else:
        at = source.randrange(len(changed))
        changed[at] = source.choice(b"\xc1\xc7\xc8\xc9\xd4\xd5\xd6\xd7\xd8\xdd\xdf\xc6\xdb\x80\x90\xc0")
    return bytes(changed)


@pytest.mark.parametrize("seed", range(4))
def test_any_damage_gives_a_value_or_a_decoding_error(seed: int) -> None:
    source, data = random.Random(seed), realistic()
    refused = 0
    for _ in range(1_000):
        damaged = mutated(data, source)
        for _ in range(source.randrange(3)):
            damaged = mutated(damaged, source)
        try:
            decode(damaged, no_tensor)
        except DecodingError:
            refused += 1
    assert 200 < refused < 1_000


@pytest.mark.parametrize("name", [name for name in VALUES if name not in ("text", "bytes", "large ints")])
def test_damage_to_every_single_byte_gives_a_value_or_a_decoding_error(name: str) -> None:
    data = encode(VALUES[name])[:600]
    seen = 0
    for at in range(len(data)):
        for value in {0x00, 0x7F, 0x81, 0x91, 0xC0, 0xC1, 0xC7, 0xD4, 0xFF, data[at] ^ 1} - {data[at]}:
            with contextlib.suppress(DecodingError):
                decode(data[:at] + bytes([value]) + data[at + 1 :], no_tensor)
            seen += 1
    assert seen >= 8 * len(data)


# -- how long it takes ------------------------------------------------------------------------------------------------


def large_state(number: int) -> dict[str, Any]:
    return {
        "floats": [float(index) for index in range(number)],
        "strings": tuple(f"sample {index}" for index in range(number)),
        "by number": OrderedDict((index, (index, -1.5)) for index in range(number // 10)),
        "by name": {f"sample {index}": [index, {"left": 2**70}] for index in range(number // 10)},
        "seen": set(range(number // 10)),
    }


@pytest.mark.parametrize("number", [1, 31, 32, 33, 1000])
def test_large_state_comes_back_like_a_small_one(number: int) -> None:
    """Large lists and dicts take a shorter way."""
    state = large_state(number)
    assert same(there_and_back(state), state)


@pytest.mark.parametrize("odd", [(1,), Level.LOW, {1}, numpy.float32(1), [[{"a": (1,)}]], {(1,): 2}])
def test_one_odd_value_in_a_large_state_is_not_overlooked(odd: Any) -> None:
    numbers = list(range(100))
    states: list[Any] = [[*numbers, odd], dict([*enumerate(numbers), (-1, odd)]), [numbers, [*numbers, [odd]]]]
    for state in states:
        assert same(there_and_back(state), state)
    with pytest.raises(EncodingError, match=r"^state\.a\.100: .*Point"):
        encode({"a": [*range(100), Point(1, 3)]})


# What the packer takes without a word, although it would not come back as it was.
TAKEN_FOR_SOMETHING_ELSE: list[Any] = [
    bytearray(b"a"),
    memoryview(b"a"),
    Ext(encoding.TENSOR, b"a"),
    msgpack.Timestamp(5),
]
LONG: dict[str, list[Any]] = {
    "ints": list(range(3000)),
    "floats": [number / 7 for number in range(3000)],
    "texts": [str(number) for number in range(3000)],
    "lists": [[number] for number in range(3000)],
    "dicts": [{"a": {"b": number}} for number in range(3000)],
}


@pytest.mark.parametrize("odd", TAKEN_FOR_SOMETHING_ELSE, ids=lambda odd: type(odd).__name__)
@pytest.mark.parametrize("kind", list(LONG))
def test_what_the_packer_would_take_for_something_else_is_found_anywhere_in_a_long_list(kind: str, odd: Any) -> None:
    kept = isinstance(odd, bytearray)
    for at in (0, 1023, 1024, 2999):
        for inside in (odd, [odd], {"a": [odd]}, {"a": {"b": odd}}):
            state = [*LONG[kind][:at], inside, *LONG[kind][at:]]
            if kept:
                assert same(there_and_back(state), state)
            else:
                with pytest.raises(
                    EncodingError, match=rf"^state\.{at}[.a-b0]*: .*{type(odd).__name__}.*register_codec"
                ):
                    encode(state)


@pytest.mark.parametrize("odd", TAKEN_FOR_SOMETHING_ELSE[1:], ids=lambda odd: type(odd).__name__)
def test_what_the_packer_would_take_for_something_else_is_found_among_many_keys(odd: Any) -> None:
    for keys in (range(100), map(str, range(100))):
        with pytest.raises(EncodingError, match=rf"<key>: .*{type(odd).__name__}"):
            encode({**dict.fromkeys(keys, 1), odd: 1})
    with pytest.raises(EncodingError, match=rf"^state\.50\.<key>: .*{type(odd).__name__}"):
        encode([{"a": number} if number != 50 else {odd: 1} for number in range(100)])


def test_long_list_of_numbers_keeps_the_type_of_each() -> None:
    numbers = [1, 1.0, True, 0, 0.0, -0.0, False, 2**70, math.inf, math.nan, 10**400, -(10**400)] * 100
    for state in (numbers, [*numbers, None], [*numbers, "a"], [*numbers, [1, True, 1.0]], dict(enumerate(numbers))):
        assert same(there_and_back(state), state)
    with_odd = [*numbers, numpy.float64(1.5), Level.LOW]
    assert same(there_and_back(with_odd), with_odd)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 31, 32, 65_535, 65_536])
def test_list_or_dict_of_any_length_is_what_any_reader_reads(count: int) -> None:
    lists: list[Any] = [[number] for number in range(count)]
    assert encode(lists) == msgpack.packb(lists)
    with_odd = [(), *lists[1:]]
    assert msgpack.unpackb(encode(with_odd)) == [Ext(encoding.TUPLE, b"\x90"), *lists[1:]]
    by_number = dict(enumerate(with_odd))
    assert msgpack.unpackb(encode(by_number), strict_map_key=False) == dict(
        enumerate(msgpack.unpackb(encode(with_odd)))
    )
    assert there_and_back(OrderedDict(by_number)) == by_number


def test_long_list_that_contains_itself_twice_is_refused_at_once() -> None:
    """A look at it level by level would never end: each level is twice as long as the one before."""
    fills: list[Any] = [0, "a", {}, ()]
    for fill in fills:
        state: list[Any] = [fill] * 100
        state += [state, [state]]
        with pytest.raises(EncodingError, match="contains itself"):
            encode(state)


@pytest.mark.parametrize("fill", [0, "a", [], ()], ids=repr)
def test_depth_is_the_same_in_a_long_list(fill: Any) -> None:
    def nested(depth: int) -> Any:
        state: Any = 1
        for _ in range(depth):
            state = [state, *[fill] * 40]
        return state

    for depth in (1, 2, 47):
        assert same(there_and_back(nested(depth)), nested(depth))
    for depth in (49, 60, 600):
        with pytest.raises(EncodingError, match=r"more than 48 levels"):
            encode(nested(depth))


def test_keys_that_are_no_numbers_are_all_kept() -> None:
    state = {float("nan"): 1, float("nan"): 2, (): 3}
    assert list(there_and_back(state).values()) == [1, 2, 3]


def test_time_grows_with_the_state_and_not_with_its_square() -> None:
    def best(number: int) -> float:
        state, times = large_state(number), []
        for _ in range(3):
            began = time.process_time()
            assert there_and_back(state).keys() == state.keys()
            times.append(time.process_time() - began)
        return min(times)

    small, large = best(10_000), best(100_000)
    assert large < 40 * small  # 10 where it is linear, 100 where it is not


def test_time_grows_with_the_size_of_python_objects_and_not_with_its_square() -> None:
    def seconds(number: int) -> float:
        state = {f"name-{index}": [index, float(index), str(index), {"x": None}] for index in range(number)}
        found = []
        for _ in range(5):
            began = time.process_time()
            encode(state, "state", lambda node, path: None)
            found.append(time.process_time() - began)
        return min(found)

    assert seconds(32_000) < 60 * seconds(2_000), "16 times the objects: 16 if linear, 256 if quadratic"


def test_tuple_that_can_not_change_is_encoded_once() -> None:
    """Told by the bytes: they are the same object, where a second encoding would make others."""
    leaves, long = Leaves(), tuple((number, f"{number}") for number in range(1000))
    first = encode(long, leaves=leaves)
    leaves.turn()
    assert encode(long, leaves=leaves) is first
    assert decode(first, no_tensor) == long


def test_tuple_that_holds_what_may_change_is_encoded_again() -> None:
    leaves, inside = Leaves(), [0]
    long = tuple([inside] * 100)
    encode(long, leaves=leaves)
    leaves.turn()
    inside[0] = 1
    assert decode(encode(long, leaves=leaves), no_tensor) == long


def test_another_tuple_in_the_place_of_one_that_is_gone_is_not_taken_for_it() -> None:
    leaves = Leaves()
    for turn in range(50):  # the same memory is used again and again
        long = tuple(float(turn + number) for number in range(100))
        assert decode(encode(long, leaves=leaves), no_tensor) == long
        leaves.turn()


def test_tuple_that_no_save_has_any_more_is_let_go() -> None:
    leaves, held = Leaves(), tuple(range(100))
    references = sys.getrefcount(held)
    encode(held, leaves=leaves)
    leaves.turn()
    assert sys.getrefcount(held) > references
    leaves.turn()
    assert sys.getrefcount(held) == references


def test_tuple_that_is_known_is_refused_where_it_is_too_deep() -> None:
    leaves, long = Leaves(), tuple((number,) for number in range(100))
    encode(long, leaves=leaves)
    leaves.turn()
    state: Any = long
    for _ in range(47):
        state = [state]
    with pytest.raises(EncodingError, match="levels"):
        encode(state, leaves=leaves)


ODD = [1, True, bytearray(7), bytearray(16), memoryview(b"\xcb" * 7), None]


@pytest.mark.parametrize("count", [32, 65_535, 65_536])
@pytest.mark.parametrize("odd", ODD, ids=[f"{type(odd).__name__}{number}" for number, odd in enumerate(ODD)])
def test_odd_one_among_floats_is_not_overlooked(odd: Any, count: int) -> None:
    for place in (0, count // 2, count - 1):
        values: list[Any] = [0.5] * count
        values[place] = odd
        if isinstance(odd, memoryview):
            with pytest.raises(EncodingError, match="memoryview"):
                encode(values)
        else:
            assert type(decode(encode(values), no_tensor)[place]) is type(odd)
