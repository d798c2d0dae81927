"""The way back from the safe encoding: bytes to values.

Rule: it builds values and nothing else. No class is imported for it, no function of the data's choosing is called; whatever the
bytes are, the outcome is a value or a :class:`DecodingError`. (A time zone reads its table from the system, by its key.)
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import msgpack

from resilience.checkpoint import standard
from resilience.checkpoint.encoding import (
    BYTEARRAY,
    CODEC,
    COMPLEX,
    COUNTER,
    DEFAULTDICT,
    DEQUE,
    DEVICE,
    DTYPE,
    ENUM,
    FACTORIES,
    FROZENSET,
    NAMESPACE,
    NUMPY,
    NUMPY_TYPE,
    ORDERED,
    RANGE,
    SET,
    SIZE,
    TENSOR,
    TENSOR_FORM,
    TUPLE,
    DecodingError,
    UnknownCodec,
    codec_named,
    enum_class,
)
from resilience.checkpoint.packing import LARGE

_MAX_NESTED = 100  # extension types in each other: msgpack takes 45 KB of the stack for each
_IN_DATA = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)
_looks_only: ContextVar[bool] = ContextVar("looks_only", default=False)


@dataclass(frozen=True, eq=False)
class Unmade:
    """What stands where a value would be that only a codec or a class of the training script can make."""

    what: str

    def __repr__(self) -> str:
        return f"<{self.what}>"


@contextlib.contextmanager
def looks_only() -> Iterator[None]:
    """Decode to an :class:`Unmade` whatever needs code that may not be here: for those who only look, or only want the tensors."""
    before = _looks_only.set(True)
    try:
        yield
    finally:
        _looks_only.reset(before)


def decode(data: bytes | memoryview, tensor: Callable[[str, list[Any]], Any]) -> Any:
    """Return what was encoded, or raise :class:`DecodingError`. ``tensor(name, form)`` gives the tensors."""
    try:
        return _unpack(data, tensor, 0)
    except _IN_DATA as error:
        raise DecodingError(f"the values of a checkpoint can't be read: {type(error).__name__}: {error}") from error


def _unpack(data: bytes | memoryview, tensor: Callable[[str, list[Any]], Any], depth: int) -> Any:
    if depth > _MAX_NESTED:
        raise DecodingError(f"the values of a checkpoint are nested more than {_MAX_NESTED} times")
    revive = partial(_revive, tensor, depth + 1)
    return msgpack.unpackb(data, ext_hook=revive, strict_map_key=False, unicode_errors="surrogatepass", use_list=True)


def _revive(tensor: Callable[[str, list[Any]], Any], depth: int, code: int, data: bytes) -> Any:
    if code == TENSOR:
        return tensor(data.decode(), [])
    if code in _RAW:
        return _RAW[code](data)
    if code == TENSOR_FORM:
        return _in_form(tensor, _unpack(data, tensor, depth))
    maker = _FROM_VALUE.get(code)
    if maker is None:
        raise DecodingError(f"extension type {code} is unknown: the checkpoint was written by a newer version")
    return maker(_unpack(data, tensor, depth))


def _in_form(tensor: Callable[[str, list[Any]], Any], value: Any) -> Any:
    name, *form = value
    if type(name) is not str or not form or type(form[0]) is not str:
        raise DecodingError("a tensor without a name or a form")
    if form[0] == "codec" and not _looks_only.get():
        codec_named(form[1])
    return tensor(name, form)


def dtype_named(name: Any) -> Any:
    """Return the ``torch.dtype`` of that name. Raises :class:`DecodingError`."""
    import torch  # noqa: PLC0415 - only where a state holds one

    found = vars(torch).get(name) if type(name) is str else None  # getattr would import what torch loads lazily
    if not isinstance(found, torch.dtype):
        raise DecodingError(f"unknown torch.dtype {name!r}")
    return found


def _made_by_torch(kind: str, value: Any) -> Any:
    import torch  # noqa: PLC0415

    return getattr(torch, kind)(value)


def _numpy_value(value: Any) -> Any:
    import numpy  # noqa: PLC0415

    dtype, shape, raw = value
    if not NUMPY_TYPE.match(dtype) or min(shape or [0]) < 0:
        raise DecodingError(f"a numpy value of dtype {dtype!r} and shape {shape!r}")
    made: Any = numpy.ndarray(() if shape is None else shape, numpy.dtype(dtype), raw)
    if made.nbytes != len(raw):
        raise DecodingError(f"a numpy value of {made.nbytes} bytes in {len(raw)}")
    return made.copy() if shape is not None else made.copy()[()]


def _enum(value: Any) -> Any:
    module, qualname, member = value
    found = enum_class(module, qualname)
    if not issubclass(type(found), type(Enum)) or member not in found.__members__:
        if _looks_only.get():
            return Unmade(f"{module}.{qualname}.{member}")
        raise UnknownCodec(f"enum member {module}.{qualname}.{member} is not known here: import it before you restore")
    return found.__members__[member]


def from_codec(name: Any, value: Any) -> Any:
    """Have a codec make a value. Raises :class:`DecodingError`."""
    if _looks_only.get():
        return Unmade(f"made by the codec {name!r}")
    codec = codec_named(name)
    try:
        return codec.decode(value)
    except Exception as error:  # somebody else's code, given what stands in a file
        raise DecodingError(f"the codec {name!r} failed: {type(error).__name__}: {error}") from error


def _namespace(value: Any) -> argparse.Namespace:
    if not all(type(name) is str for name in value):
        raise DecodingError("a namespace with a name that is none")
    made = argparse.Namespace()
    vars(made).update(value)  # neither as arguments nor by setattr: a name may be "self" or "__class__"
    return made


_RAW: dict[int, Callable[[bytes], Any]] = {
    LARGE: lambda data: int(data, 16),
    BYTEARRAY: bytearray,
    DTYPE: lambda data: dtype_named(data.decode()),
    DEVICE: lambda data: _made_by_torch("device", data.decode()),
    **standard.MADE_FROM_BYTES,
}
_FROM_VALUE: dict[int, Callable[[Any], Any]] = {
    TUPLE: tuple,
    ORDERED: OrderedDict,
    SET: set,
    FROZENSET: frozenset,
    COMPLEX: lambda value: complex(*value),
    SIZE: lambda value: _made_by_torch("Size", value),
    NUMPY: _numpy_value,
    ENUM: _enum,
    NAMESPACE: _namespace,
    DEFAULTDICT: lambda value: defaultdict(None if value[0] is None else FACTORIES[value[0]], value[1]),
    DEQUE: lambda value: deque(value[1], value[0]),
    CODEC: lambda value: from_codec(*value),
    RANGE: lambda value: range(*value),
    COUNTER: lambda value: Counter(dict(value)),
    **standard.MADE_FROM_VALUE,
}
