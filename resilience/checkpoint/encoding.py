"""The safe encoding of everything in a state that is no tensor: MessagePack, with extension types for what Python adds.

Rule: decoding builds values and nothing else. No class is imported for it, no function of the data's choosing is called. A
type that is not listed here needs a codec (:func:`register_codec`), and the error names the place where it was found.

Hazard: two places that hold one list hold two equal ones afterwards; only tensors and arrays stay one.

The extension types (``docs/checkpoint-format.md`` is their specification); a payload is MessagePack again unless noted:

    1 tensor: its name, UTF-8     2 tensor in another form: [name, form, …]    3 tuple: list      4 OrderedDict: list of pairs
    5 set: list   6 frozenset: list   7 complex: [re, im]   8 large int: hexadecimal, ASCII   9 bytearray: raw
    10 torch.dtype: name   11 torch.device: text   12 torch.Size: list   13 numpy value: [dtype, shape or nil, raw bytes]
    14 enum: [module, class, member]   15 argparse.Namespace: map   16 defaultdict: [factory or nil, list of pairs]
    17 deque: [maxlen or nil, list]   18 codec: [name, value]   19 range: [start, stop, step]   20 Counter: list of pairs
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any

import msgpack

from resilience.errors import CheckpointError

TENSOR, TENSOR_FORM, TUPLE, ORDERED, SET, FROZENSET, COMPLEX, LARGE, BYTEARRAY = range(1, 10)
DTYPE, DEVICE, SIZE, NUMPY, ENUM, NAMESPACE, DEFAULTDICT, DEQUE, CODEC, RANGE, COUNTER = range(10, 21)
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple, bool)}
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_BOXES, _MANY = frozenset({list, dict}), 32
_NUMPY_TYPE = re.compile(r"[<>|][biufcmMSUV]\d{1,9}(\[\d{0,9}[A-Za-z]{1,2}\])?\Z")
_MAX_DEPTH, _MAX_NESTED = 48, 100  # levels of a state; levels that are read: msgpack takes 45 KB of the stack for each
_IN_DATA = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)

Ext = msgpack.ExtType


class EncodingError(CheckpointError):
    """A value that can't be kept; the message names its place."""


class DecodingError(CheckpointError):
    """Bytes that are not what they should be."""


@dataclass(frozen=True)
class Codec:
    """How one more type is kept. ``encode`` gives something that can be kept already; ``decode`` makes the value from it."""

    name: str
    type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_codecs: dict[type, Codec] = {}


def register_codec(type_: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any], name: str = "") -> None:
    """Have values of a type kept in checkpoints. The same must be registered where they are read.

    ``decode`` is only ever given what ``encode`` returned, or what stands in its place in a checkpoint that somebody changed: it
    must be safe for that. Tensors and arrays in it are the restored ones.
    """
    if type_ in _PLAIN or type_ in _SHAPED:
        raise ValueError(f"{type_.__qualname__} has a form of its own: a codec for it would never be asked")
    chosen = name or f"{type_.__module__}.{type_.__qualname__}"
    if any(codec.name == chosen and codec.type is not type_ for codec in _codecs.values()):
        raise ValueError(f"another type has the codec name {chosen!r}")
    _codecs[type_] = Codec(chosen, type_, encode, decode)


class Shaper:
    """Turns a state into plain data for the packer. ``keep`` is given every tensor and array, with its path, and returns what
    stands in its place, or ``None`` if it is none of its business."""

    def __init__(self, keep: Callable[[Any, str], Any | None]) -> None:
        self._keep = keep
        self._kept = self._depth = 0  # so many tensors and arrays up to now; so many levels down

    def shape(self, node: Any, path: str) -> Any:
        """Return plain data that stands for ``node``."""
        kind = type(node)
        if kind in _PLAIN or (kind in _BOXES and len(node) >= _MANY and _is_plain(node, _MAX_DEPTH - self._depth)):
            return node
        act, codec = _SHAPED.get(kind), _codecs.get(kind)
        if act is not None or codec is not None:
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise EncodingError(f"{path}: more than {_MAX_DEPTH} levels, or it contains itself; nothing was saved.")
            found = act(self, node, path) if act is not None else self._coded(codec, node, path)
            self._depth -= 1
            return found
        kept = self._keep(node, path)
        if kept is not None:
            self._kept += 1
            return kept
        return _rare(node, path)

    def _dict(self, node: Any, path: str) -> Any:
        found = dict(self._pairs(node, path))
        if len(found) != len(node):
            raise EncodingError(f"{path}: two of its keys can't be told apart once they are kept; nothing was saved.")
        return found

    def _list(self, node: Any, path: str) -> list[Any]:
        plain, shape = _PLAIN, self.shape
        return [value if type(value) in plain else shape(value, f"{path}.{index}") for index, value in enumerate(node)]

    def _pairs(self, node: Any, path: str) -> Any:
        plain, shape = _PLAIN, self.shape
        return [
            [
                key if type(key) in plain else shape(key, f"{path}.<key>"),
                value if type(value) in plain else shape(value, f"{path}.{key}"),
            ]
            for key, value in node.items()
        ]

    def _set(self, node: Any, path: str) -> Any:
        return sorted((self.shape(value, f"{path}.<item>") for value in node), key=pack)

    def _defaultdict(self, node: Any, path: str) -> Any:
        factory = node.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
            raise EncodingError(
                f"{path}: a defaultdict that makes {factory!r} can't be kept; nothing was saved. Use a plain dict, or one of "
                f"{', '.join(sorted(_FACTORIES))}."
            )
        return Ext(DEFAULTDICT, pack([name, self._pairs(node, path)]))

    def _coded(self, codec: Any, node: Any, path: str) -> Any:
        try:
            value = codec.encode(node)
        except Exception as error:  # somebody else's code: its error is told with the place
            raise EncodingError(f"{path}: the codec {codec.name!r} failed: {error!r}; nothing was saved.") from error
        before = self._kept
        shaped = self.shape(value, path)
        if self._kept == before:
            return Ext(CODEC, pack([codec.name, shaped]))
        return Ext(TENSOR_FORM, pack(["", "codec", codec.name, shaped]))  # can only be made once its tensors are there


_SHAPED: dict[type, Callable[[Shaper, Any, str], Any]] = {
    dict: Shaper._dict,
    list: Shaper._list,
    tuple: lambda shaper, node, path: Ext(TUPLE, pack(shaper._list(node, path))),
    OrderedDict: lambda shaper, node, path: Ext(ORDERED, pack(shaper._pairs(node, path))),
    Counter: lambda shaper, node, path: Ext(COUNTER, pack(shaper._pairs(node, path))),
    set: lambda shaper, node, path: Ext(SET, pack(shaper._set(node, path))),
    frozenset: lambda shaper, node, path: Ext(FROZENSET, pack(shaper._set(node, path))),
    complex: lambda shaper, node, path: Ext(COMPLEX, pack([node.real, node.imag])),
    bytearray: lambda shaper, node, path: Ext(BYTEARRAY, bytes(node)),
    argparse.Namespace: lambda shaper, node, path: Ext(NAMESPACE, pack(shaper._dict(vars(node), path))),
    defaultdict: Shaper._defaultdict,
    deque: lambda shaper, node, path: Ext(DEQUE, pack([node.maxlen, shaper._list(node, path)])),
    range: lambda shaper, node, path: Ext(RANGE, pack([node.start, node.stop, node.step])),
}


def _rare(node: Any, path: str) -> Any:
    for known in (_of_enum, _of_torch, _of_numpy):
        found = known(node, path)
        if found is not None:
            return found
    kind = type(node)
    raise EncodingError(
        f"{path}: a value of type {kind.__module__}.{kind.__qualname__} can't be kept; nothing was saved. Leave it out of the "
        f"state, or say how with resilience.checkpoint.encoding.register_codec({kind.__qualname__}, encode, decode)."
    )


def _of_enum(node: Any, path: str) -> Any | None:
    if not isinstance(node, Enum):
        return None
    kind, name = type(node), node._name_
    if _enum_class(kind.__module__, kind.__qualname__) is not kind or kind.__members__.get(name) is not node:
        raise EncodingError(
            f"{path}: {node!r} can't be kept: no name leads back to it (its class stands inside a function, or it is a combination "
            "of flags). Nothing was saved. Keep its value instead, or use register_codec."
        )
    return Ext(ENUM, pack([kind.__module__, kind.__qualname__, name]))


def _is_plain(node: Any, levels: int) -> bool:
    """Whether there are only plain values, lists and dicts in it, within so many levels: then the packer can have it as it is.

    Looks at a whole level at a time, which is several times faster than value by value. What is in two places is looked at once.
    """
    level: list[Any] = [node]
    while level and levels:
        dicts = [item for item in level if type(item) is dict]
        values = chain((item for item in level if type(item) is list), map(dict.values, dicts))
        inside = {id(value): value for value in chain.from_iterable(values) if type(value) not in _PLAIN}
        level, levels = list(inside.values()), levels - 1
        if not (_PLAIN.issuperset(map(type, chain.from_iterable(dicts))) and _BOXES.issuperset(map(type, level))):
            return False
    return not level


def _of_torch(node: Any, path: str) -> Any | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(node, (torch.dtype, torch.device)):
        return Ext(DTYPE if isinstance(node, torch.dtype) else DEVICE, str(node).removeprefix("torch.").encode())
    return Ext(SIZE, pack(list(node))) if isinstance(node, torch.Size) else None


def _of_numpy(node: Any, path: str) -> Any | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(node, (numpy.generic, numpy.ndarray)):
        return None
    kind, dtype = type(node), node.dtype
    shape = list(node.shape) if isinstance(node, numpy.ndarray) else None
    if shape is not None and kind not in (numpy.ndarray, numpy.memmap):
        what = f"an array of type {kind.__module__}.{kind.__qualname__}"
    elif not _NUMPY_TYPE.match(dtype.str) or numpy.dtype(dtype.str) != dtype:
        what = f"a numpy value of dtype {dtype}"
    else:
        raw = node.tobytes() if dtype.itemsize else b""  # numpy would give a NUL
        return Ext(NUMPY, pack([dtype.str, shape, raw]))
    raise EncodingError(
        f"{path}: {what} can't be kept; nothing was saved. Keep a plain array, or say how with "
        f"resilience.checkpoint.encoding.register_codec({kind.__qualname__}, encode, decode)."
    )


def _large(node: Any) -> Any:
    """Called by the packer for what it does not know: an int of more than 64 bits is all that is left."""
    if type(node) is int:
        return Ext(LARGE, b"%x" % node)
    raise EncodingError(f"a value of type {type(node)} can't be kept")


def pack(plain: Any) -> bytes:
    """Return plain data as bytes."""
    try:
        packed: bytes = msgpack.packb(plain, default=_large, strict_types=True, unicode_errors="surrogatepass")
    except (ValueError, OverflowError) as error:  # of 4 GiB and more, or nested too deeply
        raise EncodingError(f"a part of the state can't be kept: {error}. Nothing was saved.") from error
    return packed


def encode(node: Any, path: str = "state", keep: Callable[[Any, str], Any | None] = lambda node, path: None) -> bytes:
    """Return a state as bytes; what ``keep`` takes care of is not in them."""
    return pack(shaped(node, path, keep))


def shaped(node: Any, path: str, keep: Callable[[Any, str], Any | None]) -> Any:
    """Return a state as plain data for :func:`pack`."""
    try:
        return Shaper(keep).shape(node, path)
    except RecursionError:
        raise EncodingError(f"{path}: the state is nested too deeply, or contains itself; nothing was saved.") from None


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode(data: bytes | memoryview, tensor: Callable[[str, list[Any]], Any]) -> Any:
    """Return what :func:`encode` was given, or raise :class:`DecodingError`. ``tensor(name, form)`` gives the tensors."""
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
    if form[0] == "codec":
        _codec_named(form[1])
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
    if not _NUMPY_TYPE.match(dtype) or min(shape or [0]) < 0:
        raise DecodingError(f"a numpy value of dtype {dtype!r} and shape {shape!r}")
    made: Any = numpy.ndarray(() if shape is None else shape, numpy.dtype(dtype), raw)
    if made.nbytes != len(raw):
        raise DecodingError(f"a numpy value of {made.nbytes} bytes in {len(raw)}")
    return made.copy() if shape is not None else made.copy()[()]


def _enum_class(module: Any, qualname: Any) -> Any:
    """Return what stands under a name in a module that is loaded already. Looks, and runs nothing: a lazy module stays so."""
    found: Any = sys.modules.get(module)
    for part in str(qualname).split("."):
        owner = ModuleType if issubclass(type(found), ModuleType) else type
        if not issubclass(type(found), owner):
            return None
        found = owner.__getattribute__(found, "__dict__").get(part)
    return found


def _enum(value: Any) -> Any:
    module, qualname, member = value
    found = _enum_class(module, qualname)
    if not issubclass(type(found), type(Enum)) or member not in found.__members__:
        raise DecodingError(f"enum member {module}.{qualname}.{member} is not known here: import it before you restore")
    return found.__members__[member]


def _codec_named(name: Any) -> Codec:
    for codec in _codecs.values():
        if codec.name == name:
            return codec
    raise DecodingError(f"no codec {name!r} is registered here: register it before you restore")


def from_codec(name: Any, value: Any) -> Any:
    """Have a codec make a value. Raises :class:`DecodingError`."""
    codec = _codec_named(name)
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
    DEFAULTDICT: lambda value: defaultdict(None if value[0] is None else _FACTORIES[value[0]], value[1]),
    DEQUE: lambda value: deque(value[1], value[0]),
    CODEC: lambda value: from_codec(*value),
    RANGE: lambda value: range(*value),
    COUNTER: lambda value: Counter(dict(value)),
}
