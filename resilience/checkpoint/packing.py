"""Values as MessagePack: one by one, long lists and dicts of plain values at once, and what is packed already put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import msgpack

PLAIN = frozenset({type(None), bool, int, float, str, bytes})
BOXES = frozenset({list, dict})
LARGE = 8  # the extension type of an int of more than 64 bits
TOO_LARGE = (ValueError, OverflowError)  # for the packer: 4 GiB and more, or too many levels
_PART = 1024  # so many are looked at together: they stay in the processor's cache

Ext = msgpack.ExtType
_flat = chain.from_iterable


def _large(node: Any) -> Any:
    """Called by the packer for what it does not know: an int of more than 64 bits is all that is left."""
    if type(node) is int:
        return Ext(LARGE, b"%x" % node)
    raise TypeError(f"a value of type {type(node)} can't be kept")


def packer() -> Any:
    """Return a packer of plain data, and of nothing that only looks like it, as far as it can tell."""
    return msgpack.Packer(default=_large, strict_types=True, unicode_errors="surrogatepass")


def pack(plain: Any) -> bytes:
    """Return plain data as bytes."""
    packed: bytes = packer().pack(plain)
    return packed


def ext(code: int, payload: bytes) -> bytes:
    """Return a value of an extension type."""
    return pack(Ext(code, payload))


def as_list(items: Sequence[bytes]) -> bytes:
    """Return values that are bytes already as a list of them."""
    return b"".join([header(0x90, 0xDC, len(items)), *items])


def as_map(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return keys and values that are bytes already as a map of them."""
    return b"".join([header(0x80, 0xDE, len(entries)), *_flat(entries)])


def header(few: int, many: int, count: int) -> bytes:
    """Return the head of a list (0x90, 0xDC) or a map (0x80, 0xDE)."""
    if count < 1 << 4:
        return bytes([few | count])
    return bytes([many]) + count.to_bytes(2, "big") if count < 1 << 16 else bytes([many + 1]) + count.to_bytes(4, "big")


def pack_at_once(node: Any, levels: int) -> bytes | None:
    """Return a list or dict as bytes if there are only plain values, lists and dicts in it, within so many levels.

    The packer comes first: it refuses what contains itself, and nearly everything that is not plain, at the first one. What it
    takes without a word (bytearrays, memoryviews, types of its own) is looked for afterwards. None of these can be added to a
    number or joined to a text, and to try that takes a fraction of the time that a look at every type does.
    """
    try:
        packed = pack(node)
    except (TypeError, *TOO_LARGE):
        return None
    if type(node) is dict:
        return packed if _is_plain(node, levels) else None
    if _are_floats(packed, len(node)) or _works(sum, node):
        return packed
    parts = (node[at : at + _PART] for at in range(0, len(node), _PART))
    return packed if all(_is_plain(part, levels) for part in parts) else None


def _are_floats(packed: bytes, count: int) -> bool:
    """Whether a packed list has nothing but floats: nine bytes for each, of which the first says so."""
    head = len(header(0x90, 0xDC, count))
    return len(packed) == head + 9 * count and packed[head::9] == b"\xcb" * count


def _is_plain(node: Any, levels: int) -> bool:
    """Whether there are only plain values, lists and dicts in what was packed, within so many levels.

    Looks at a whole level at a time, which is several times faster than value by value.
    """
    lists, dicts = ([node], []) if type(node) is list else ([], [node])
    while lists or dicts:
        values = list(chain(_flat(lists), _flat(map(dict.values, dicts))))
        kinds = set(map(type, values))
        keys_are_plain = _works("".join, _flat(dicts)) or PLAIN.issuperset(map(type, _flat(dicts)))
        if not levels or not keys_are_plain or kinds - PLAIN - BOXES:
            return False
        lists = [value for value in values if type(value) is list] if list in kinds else []
        dicts = [value for value in values if type(value) is dict] if dict in kinds else []
        levels -= 1
    return True


def _works(act: Callable[[Any], Any], values: Any) -> bool:
    try:
        act(values)
    except (TypeError, OverflowError):  # that: a float and an int that is larger than any
        return False
    return True
