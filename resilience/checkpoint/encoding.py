"""The safe encoding of everything in a state that is no tensor: MessagePack, with extension types for what Python adds.

Rule: decoding builds values and nothing else. No class is imported for it, no function of the data's choosing is called. A
type that is not listed here needs a codec (:func:`register_codec`), and the error names the place where it was found.

The extension types (``docs/checkpoint-format.md`` is their specification); a payload is MessagePack again unless noted:

    1 tensor: its name, UTF-8     2 tensor in another form: [name, form, …]    3 tuple: list      4 OrderedDict: list of pairs
    5 set: list   6 frozenset: list   7 complex: [re, im]   8 large int: decimal, ASCII   9 bytearray: raw
    10 torch.dtype: name   11 torch.device: text   12 torch.Size: list   13 numpy value: [dtype, shape or nil, raw bytes]
    14 enum: [module, class, member]   15 argparse.Namespace: map   16 defaultdict: [factory or nil, list of pairs]
    17 deque: [maxlen or nil, list]   18 codec: [name, value]   19 range: [start, stop, step]   20 Counter: list of pairs
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import msgpack

from resilience.errors import CheckpointError

TENSOR, TENSOR_FORM, TUPLE, ORDERED, SET, FROZENSET, COMPLEX, LARGE, BYTEARRAY = range(1, 10)
DTYPE, DEVICE, SIZE, NUMPY, ENUM, NAMESPACE, DEFAULTDICT, DEQUE, CODEC, RANGE, COUNTER = range(10, 21)
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple, bool)}
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})

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
    must be safe for that.
    """
    chosen = name or f"{type_.__module__}.{type_.__qualname__}"
    if any(codec.name == chosen and codec.type is not type_ for codec in _codecs.values()):
        raise ValueError(f"another type has the codec name {chosen!r}")
    _codecs[type_] = Codec(chosen, type_, encode, decode)


class Shaper:
    """Turns a state into plain data for the packer. ``keep`` is given every tensor and array, with its path, and returns what
    stands in its place, or ``None`` if it is none of its business."""

    def __init__(self, keep: Callable[[Any, str], Any | None]) -> None:
        self._keep = keep
        self._by_type: dict[type, Callable[[Any, str], Any]] = {
            dict: self._dict,
            list: self._list,
            tuple: lambda node, path: Ext(TUPLE, pack(self._list(node, path))),
            OrderedDict: lambda node, path: Ext(ORDERED, pack(self._pairs(node, path))),
            Counter: lambda node, path: Ext(COUNTER, pack(self._pairs(node, path))),
            set: lambda node, path: Ext(SET, pack(self._sorted(node, path))),
            frozenset: lambda node, path: Ext(FROZENSET, pack(self._sorted(node, path))),
            complex: lambda node, _: Ext(COMPLEX, pack([node.real, node.imag])),
            bytearray: lambda node, _: Ext(BYTEARRAY, bytes(node)),
            argparse.Namespace: lambda node, path: Ext(NAMESPACE, pack(self._dict(vars(node), path))),
            defaultdict: self._defaultdict,
            deque: lambda node, path: Ext(DEQUE, pack([node.maxlen, self._list(node, path)])),
            range: lambda node, _: Ext(RANGE, pack([node.start, node.stop, node.step])),
        }

    def shape(self, node: Any, path: str) -> Any:
        """Return plain data that stands for ``node``."""
        kind = type(node)
        if kind in _PLAIN:
            return node
        act = self._by_type.get(kind)
        if act is not None:
            return act(node, path)
        kept = self._keep(node, path)
        if kept is not None:
            return kept
        return self._rare(node, path)

    def _dict(self, node: Any, path: str) -> Any:
        shape = self.shape
        return {
            key if type(key) is str else shape(key, f"{path}.<key>"): shape(value, f"{path}.{key}")
            for key, value in node.items()
        }

    def _list(self, node: Any, path: str) -> list[Any]:
        return [self.shape(value, f"{path}.{index}") for index, value in enumerate(node)]

    def _pairs(self, node: Any, path: str) -> list[Any]:
        shape = self.shape
        return [
            [key if type(key) is str else shape(key, f"{path}.<key>"), shape(value, f"{path}.{key}")]
            for key, value in node.items()
        ]

    def _sorted(self, node: Any, path: str) -> list[Any]:
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

    def _rare(self, node: Any, path: str) -> Any:
        kind = type(node)
        codec = _codecs.get(kind)
        if codec is not None:
            return Ext(CODEC, pack([codec.name, self.shape(codec.encode(node), path)]))
        if isinstance(node, Enum):
            return Ext(ENUM, pack([kind.__module__, kind.__qualname__, node.name]))
        from_torch = _of_torch(node)
        if from_torch is not None:
            return from_torch
        from_numpy = _of_numpy(node)
        if from_numpy is not None:
            return from_numpy
        raise EncodingError(
            f"{path}: a value of type {kind.__module__}.{kind.__qualname__} can't be kept; nothing was saved. Leave it out of the "
            f"state, or say how with resilience.checkpoint.encoding.register_codec({kind.__qualname__}, encode, decode)."
        )


def _of_torch(node: Any) -> Any | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(node, torch.dtype):
        return Ext(DTYPE, str(node).removeprefix("torch.").encode())
    if isinstance(node, torch.device):
        return Ext(DEVICE, str(node).encode())
    if isinstance(node, torch.Size):
        return Ext(SIZE, pack(list(node)))
    return None


def _of_numpy(node: Any) -> Any | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(node, (numpy.generic, numpy.ndarray)) or node.dtype.hasobject:
        return None
    shape = list(node.shape) if isinstance(node, numpy.ndarray) else None
    names = node.dtype.descr if node.dtype.names else node.dtype.str
    return Ext(NUMPY, pack([names, shape, node.tobytes()])) if isinstance(names, str) else None


def _large(node: Any) -> Any:
    """Called by the packer for what it does not know: an int of more than 64 bits is all that is left."""
    if type(node) is int:
        return Ext(LARGE, str(node).encode())
    raise EncodingError(f"a value of type {type(node)} can't be kept")


def pack(plain: Any) -> bytes:
    """Return plain data as bytes."""
    packed: bytes = msgpack.packb(plain, default=_large, strict_types=True, unicode_errors="surrogatepass")
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
    """Return the state that :func:`encode` was given. ``tensor(name, form)`` gives the tensors: ``form`` is empty for a plain one.

    Raises :class:`DecodingError` for anything that is not of this form.
    """
    try:
        return _unpack(data, tensor)
    except DecodingError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError) as error:
        raise DecodingError(f"the values of a checkpoint can't be read: {type(error).__name__}: {error}") from error


def _unpack(data: bytes | memoryview, tensor: Callable[[str, list[Any]], Any]) -> Any:
    return msgpack.unpackb(
        data,
        ext_hook=partial(_revive, tensor),
        strict_map_key=False,
        unicode_errors="surrogatepass",
        use_list=True,
    )


def _revive(tensor: Callable[[str, list[Any]], Any], code: int, data: bytes) -> Any:
    if code == TENSOR:
        return tensor(data.decode(), [])
    if code in _RAW:
        return _RAW[code](data)
    maker = _FROM_VALUE.get(code)
    value = _unpack(data, tensor)
    if code == TENSOR_FORM:
        return tensor(value[0], value[1:])
    if maker is None:
        raise DecodingError(f"extension type {code} is unknown: the checkpoint was written by a newer version")
    return maker(value)


def _dtype(data: bytes) -> Any:
    import torch  # noqa: PLC0415 - only where a state holds one

    found = getattr(torch, data.decode(), None) if data.isascii() and data.decode().isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise DecodingError(f"unknown torch.dtype {data!r}")
    return found


def _device(data: bytes) -> Any:
    import torch  # noqa: PLC0415

    return torch.device(data.decode())


def _size(value: Any) -> Any:
    import torch  # noqa: PLC0415

    return torch.Size(value)


def _numpy_value(value: Any) -> Any:
    import numpy  # noqa: PLC0415

    dtype, shape, raw = value
    kind = numpy.dtype(str(dtype))
    if kind.hasobject:
        raise DecodingError("an array of objects")
    flat = numpy.frombuffer(raw, dtype=kind)
    return flat.reshape(shape).copy() if shape is not None else flat[0]


def _enum(value: Any) -> Any:
    module, qualname, member = value
    found: Any = sys.modules.get(module)
    for part in str(qualname).split("."):
        found = vars(found).get(part) if found is not None else None
    if not (isinstance(found, type) and issubclass(found, Enum)) or member not in found.__members__:
        raise DecodingError(
            f"enum member {module}.{qualname}.{member} is not known here: import its module before you restore"
        )
    return found.__members__[member]


def _from_codec(value: Any) -> Any:
    name, payload = value
    for codec in _codecs.values():
        if codec.name == name:
            return codec.decode(payload)
    raise DecodingError(f"no codec {name!r} is registered here: register it before you restore")


def _default_dict(value: Any) -> Any:
    factory, pairs = value
    if factory is not None and factory not in _FACTORIES:
        raise DecodingError(f"a defaultdict of {factory!r}")
    return defaultdict(None if factory is None else _FACTORIES[factory], pairs)


_RAW: dict[int, Callable[[bytes], Any]] = {
    LARGE: lambda data: int(data.decode("ascii")),
    BYTEARRAY: bytearray,
    DTYPE: _dtype,
    DEVICE: _device,
}
_FROM_VALUE: dict[int, Callable[[Any], Any]] = {
    TUPLE: tuple,
    ORDERED: OrderedDict,
    SET: set,
    FROZENSET: frozenset,
    COMPLEX: lambda value: complex(*value),
    SIZE: _size,
    NUMPY: _numpy_value,
    ENUM: _enum,
    NAMESPACE: lambda value: argparse.Namespace(**value),
    DEFAULTDICT: _default_dict,
    DEQUE: lambda value: deque(value[1], value[0]),
    CODEC: _from_codec,
    RANGE: lambda value: range(*value),
    COUNTER: lambda value: Counter(dict(value)),
}
