"""The safe encoding of everything in a state that is no tensor: MessagePack, with extension types for what Python adds.

Rule: what is kept comes back with its exact type. A type that is not listed here needs a codec (:func:`register_codec`), and the
error names the place where it was found. :mod:`~resilience.checkpoint.decoding` is the way back.

Hazard: two places that hold one list hold two equal ones afterwards; only tensors and arrays stay one.

The extension types (``docs/checkpoint-format.md`` is their specification); a payload is MessagePack again unless noted:

    1 tensor: its name, UTF-8     2 tensor in another form: [name, form, …]    3 tuple: list      4 OrderedDict: list of pairs
    5 set: list   6 frozenset: list   7 complex: [re, im]   8 large int: hexadecimal, ASCII   9 bytearray: raw
    10 torch.dtype: name   11 torch.device: text   12 torch.Size: list   13 numpy value: [dtype, shape or nil, raw bytes]
    14 enum: [module, class, member]   15 argparse.Namespace: map   16 defaultdict: [factory or nil, list of pairs]
    17 deque: [maxlen or nil, list]   18 codec: [name, value]   19 range: [start, stop, step]   20 Counter: list of pairs
    21 and up: values of the standard library, see :mod:`~resilience.checkpoint.standard`
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from resilience.checkpoint import standard
from resilience.checkpoint.leaves import Leaves
from resilience.checkpoint.packing import (
    BOXES,
    PLAIN,
    TOO_LARGE,
    Ext,
    as_list,
    as_map,
    ext,
    header,
    pack,
    pack_at_once,
    packer,
)
from resilience.errors import CheckpointError

TENSOR, TENSOR_FORM, TUPLE, ORDERED, SET, FROZENSET, COMPLEX = range(1, 8)
BYTEARRAY = 9
DTYPE, DEVICE, SIZE, NUMPY, ENUM, NAMESPACE, DEFAULTDICT, DEQUE, CODEC, RANGE, COUNTER = range(10, 21)
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple, bool)}
_MANY = 32  # so many are packed at once, if they can be
NUMPY_TYPE = re.compile(r"[<>|][biufcmMSUV]\d{1,9}(\[\d{0,9}[A-Za-z]{1,2}\])?\Z")
_MAX_DEPTH = 48  # levels of a state


class EncodingError(CheckpointError):
    """A value that can't be kept; the message names its place."""


class DecodingError(CheckpointError):
    """Bytes that are not what they should be."""


class UnknownCodec(DecodingError):  # noqa: N818 - reads as what it is
    """The bytes are good; what would make a value of them is not here."""


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
    if type_ in PLAIN or type_ in _WRITTEN:
        raise ValueError(f"{type_.__qualname__} has a form of its own: a codec for it would never be asked")
    chosen = name or f"{type_.__module__}.{type_.__qualname__}"
    if any(codec.name == chosen and codec.type is not type_ for codec in _codecs.values()):
        raise ValueError(f"another type has the codec name {chosen!r}")
    _codecs[type_] = Codec(chosen, type_, encode, decode)


def have_codecs(types: Collection[type]) -> bool:
    """Whether a codec is registered for any of these types."""
    return not _codecs.keys().isdisjoint(types)


def codec_named(name: Any) -> Codec:
    """Return the codec of that name. Raises :class:`UnknownCodec`."""
    for codec in _codecs.values():
        if codec.name == name:
            return codec
    raise UnknownCodec(f"no codec {name!r} is registered here: register it before you restore")


class Writer:
    """Turns a state into bytes. ``keep`` is given every tensor and array, with its path, and returns the bytes that stand in its
    place, or ``None`` if it is none of its business. It is given long lists and dicts too, before they are looked into.
    ``leaves``: what was written before and can't have changed."""

    def __init__(self, keep: Callable[[Any, str], bytes | None], leaves: Leaves | None = None) -> None:
        self._keep = keep
        self._leaves = leaves or Leaves()
        self._kept = self._depth = 0  # so many tensors and arrays up to now; so many levels down
        self._pack: Callable[[Any], bytes] = packer().pack  # to make one takes longer than to pack a small value

    def write(self, node: Any, path: str) -> bytes:
        """Return a node as bytes."""
        kind = type(node)
        if kind in PLAIN:
            return self._pack(node)
        act = _WRITTEN.get(kind) or (Writer._coded if kind in _codecs else None)
        if act is not None:
            return self._deeper(act, node, path)
        kept = self._kept_whole(node, path)
        return _rare(node, path) if kept is None else kept

    def _kept_whole(self, node: Any, path: str) -> bytes | None:
        kept = self._keep(node, path)
        self._kept += kept is not None
        return kept

    def _deeper(self, act: Callable[[Writer, Any, str], bytes], node: Any, path: str) -> bytes:
        if self._depth == _MAX_DEPTH:
            raise EncodingError(f"{path}: more than {_MAX_DEPTH} levels, or it contains itself; nothing was saved.")
        if type(node) in BOXES and len(node) >= _MANY:
            whole = pack_at_once(node, _MAX_DEPTH - self._depth) or self._kept_whole(node, path)
            if whole is not None:
                return whole
        self._depth += 1
        found = act(self, node, path)
        self._depth -= 1
        return found

    def _ext(self, code: int, payload: bytes) -> bytes:
        return self._pack(Ext(code, payload))

    def _list(self, node: Any, path: str) -> bytes:
        plain, pack, write = PLAIN, self._pack, self.write
        if plain.issuperset(map(type, node)):
            return pack(list(node))
        return as_list(
            [
                pack(value) if type(value) in plain else write(value, f"{path}.{index}")
                for index, value in enumerate(node)
            ]
        )

    def _tuple(self, node: Any, path: str) -> bytes:
        known = self._leaves.find(node, _MAX_DEPTH + 1 - self._depth)
        if known is None:
            known = self._ext(TUPLE, self._list(node, path))
            self._leaves.learn(node, known)
        return known

    def _entries(self, node: Any, path: str) -> list[tuple[bytes, bytes]]:
        plain, pack, write = PLAIN, self._pack, self.write
        return [
            (
                pack(key) if type(key) in plain else write(key, f"{path}.<key>"),
                pack(value) if type(value) in plain else write(value, f"{path}.{key}"),
            )
            for key, value in node.items()
        ]

    def _dict(self, node: Any, path: str) -> bytes:
        if PLAIN.issuperset(map(type, node.values())) and PLAIN.issuperset(map(type, node)):
            return self._pack(node)
        found = self._entries(node, path)
        odd = [written for key, (written, _) in zip(node, found, strict=True) if type(key) not in PLAIN]
        if len(set(odd)) != len(odd):
            raise EncodingError(f"{path}: two of its keys can't be told apart once they are kept; nothing was saved.")
        return as_map(found)

    def _pairs(self, node: Any, path: str) -> bytes:
        pair = header(0x90, 0xDC, 2)
        return as_list([pair + key + value for key, value in self._entries(node, path)])

    def _set(self, node: Any, path: str) -> bytes:
        return as_list(sorted(self.write(value, f"{path}.<item>") for value in node))

    def _defaultdict(self, node: Any, path: str) -> bytes:
        factory = node.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            raise EncodingError(
                f"{path}: a defaultdict that makes {factory!r} can't be kept; nothing was saved. Use a plain dict, or one of "
                f"{', '.join(sorted(FACTORIES))}."
            )
        return self._ext(DEFAULTDICT, as_list([pack(name), self._pairs(node, path)]))

    def _coded(self, node: Any, path: str) -> bytes:
        codec, before = _codecs[type(node)], self._kept
        try:
            value = codec.encode(node)
        except Exception as error:  # somebody else's code: its error is told with the place
            raise EncodingError(f"{path}: the codec {codec.name!r} failed: {error!r}; nothing was saved.") from error
        named = [pack(codec.name), self.write(value, path)]
        if self._kept == before:
            return self._ext(CODEC, as_list(named))
        return self._ext(TENSOR_FORM, as_list([pack(""), pack("codec"), *named]))  # made once its tensors are there


_WRITTEN: dict[type, Callable[[Writer, Any, str], bytes]] = {
    dict: Writer._dict,
    list: Writer._list,
    tuple: Writer._tuple,
    OrderedDict: lambda writer, node, path: writer._ext(ORDERED, writer._pairs(node, path)),
    Counter: lambda writer, node, path: writer._ext(COUNTER, writer._pairs(node, path)),
    set: lambda writer, node, path: writer._ext(SET, writer._set(node, path)),
    frozenset: lambda writer, node, path: writer._ext(FROZENSET, writer._set(node, path)),
    complex: lambda writer, node, path: writer._ext(COMPLEX, writer._pack([node.real, node.imag])),
    bytearray: lambda writer, node, path: writer._ext(BYTEARRAY, bytes(node)),
    argparse.Namespace: lambda writer, node, path: writer._ext(NAMESPACE, writer._dict(vars(node), path)),
    defaultdict: Writer._defaultdict,
    deque: lambda writer, node, path: writer._ext(DEQUE, as_list([pack(node.maxlen), writer._list(node, path)])),
    range: lambda writer, node, path: writer._ext(RANGE, writer._pack([node.start, node.stop, node.step])),
}


def _rare(node: Any, path: str) -> bytes:
    for known in (_of_standard, _of_enum, _of_torch, _of_numpy):
        found = known(node, path)
        if found is not None:
            return found
    kind = type(node)
    raise EncodingError(
        f"{path}: a value of type {kind.__module__}.{kind.__qualname__} can't be kept; nothing was saved. Leave it out of the "
        f"state, or say how with resilience.checkpoint.encoding.register_codec({kind.__qualname__}, encode, decode)."
    )


def _of_standard(node: Any, path: str) -> bytes | None:
    try:
        found = standard.payload(node)
    except standard.UnfitError as error:
        raise EncodingError(
            f"{path}: {error} can't be kept; nothing was saved. Keep something plainer, or say how with "
            f"resilience.checkpoint.encoding.register_codec({type(node).__qualname__}, encode, decode)."
        ) from None
    if found is None:
        return None
    code, kept = found
    return ext(code, kept if isinstance(kept, bytes) else pack(kept))


def _of_enum(node: Any, path: str) -> bytes | None:
    if not isinstance(node, Enum):
        return None
    kind, name = type(node), node._name_
    if enum_class(kind.__module__, kind.__qualname__) is not kind or kind.__members__.get(name) is not node:
        raise EncodingError(
            f"{path}: {node!r} can't be kept: no name leads back to it (its class stands inside a function, or it is a combination "
            "of flags). Nothing was saved. Keep its value instead, or use register_codec."
        )
    return ext(ENUM, pack([kind.__module__, kind.__qualname__, name]))


def enum_class(module: Any, qualname: Any) -> Any:
    """Return what stands under a name in a module that is loaded already. Looks, and runs nothing: a lazy module stays so."""
    found: Any = sys.modules.get(module)
    for part in str(qualname).split("."):
        owner = ModuleType if issubclass(type(found), ModuleType) else type
        if not issubclass(type(found), owner):
            return None
        found = owner.__getattribute__(found, "__dict__").get(part)
    return found


def _of_torch(node: Any, path: str) -> bytes | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(node, (torch.dtype, torch.device)):
        return ext(DTYPE if isinstance(node, torch.dtype) else DEVICE, str(node).removeprefix("torch.").encode())
    return ext(SIZE, pack(list(node))) if isinstance(node, torch.Size) else None


def _of_numpy(node: Any, path: str) -> bytes | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(node, (numpy.generic, numpy.ndarray)):
        return None
    kind, dtype = type(node), node.dtype
    shape = list(node.shape) if isinstance(node, numpy.ndarray) else None
    if shape is not None and kind not in (numpy.ndarray, numpy.memmap):
        what = f"an array of type {kind.__module__}.{kind.__qualname__}"
    elif not NUMPY_TYPE.match(dtype.str) or numpy.dtype(dtype.str) != dtype:
        what = f"a numpy value of dtype {dtype}"
    else:
        raw = node.tobytes() if dtype.itemsize else b""  # numpy would give a NUL
        return ext(NUMPY, pack([dtype.str, shape, raw]))
    raise EncodingError(
        f"{path}: {what} can't be kept; nothing was saved. Keep a plain array, or say how with "
        f"resilience.checkpoint.encoding.register_codec({kind.__qualname__}, encode, decode)."
    )


def encode(
    node: Any,
    path: str = "state",
    keep: Callable[[Any, str], bytes | None] = lambda node, path: None,
    leaves: Leaves | None = None,
) -> bytes:
    """Return a state as bytes; what ``keep`` takes care of is not in them, what ``leaves`` knows is not encoded again."""
    try:
        return Writer(keep, leaves).write(node, path)
    except RecursionError:
        raise EncodingError(f"{path}: the state is nested too deeply, or contains itself; nothing was saved.") from None
    except TOO_LARGE as error:
        raise EncodingError(f"{path}: a part of the state can't be kept: {error}. Nothing was saved.") from error
