"""From a state to what a slot holds: which tensors there are, where each goes, and whether that is still true.

A plan is made once and kept as long as the structure stays: the same names, dtypes and shapes in the same order. Any other
structure makes a new plan, never a stale read. What safetensors has no type for is kept in another *form*, and the values say
which: ``["complex128"]`` (pairs of F64), ``["complex32"]`` (pairs of F16), ``["bits", dtype]`` (bytes), ``["quantized", dtype,
scale, zero point]``, ``["numpy"]``, ``["subclass", class, names of what it is made of, context]`` (NAME is not there, but
NAME.PART for each), ``["codec", codec, value]``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy
import torch

from resilience.checkpoint import encoding, garbage, sharding, shards
from resilience.checkpoint.boxes import Box
from resilience.checkpoint.decoding import dtype_named
from resilience.checkpoint.encoding import EncodingError
from resilience.checkpoint.packing import as_list, as_map, ext, pack
from resilience.checkpoint.shards import Piece

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
_PAIRS = {torch.complex128: "complex128", torch.complex32: "complex32"}
PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_FACTS = attrgetter("dtype", "layout", "is_meta", "is_nested")
_PLAIN_FACTS = frozenset((dtype, torch.strided, False, False) for dtype in NAMES)
_PLAIN_ARRAYS = (numpy.ndarray, numpy.memmap)  # others, masked ones for instance, are more than their numbers


OWN, SHARED, LEADER = range(3)
"""Whose a tensor is: this rank's alone; the same on all ranks, so that each stages a part; the same for all, but only as the
first rank of the node has it."""


@dataclass
class Collected:
    """Every tensor of a state at one moment, by name, in order, and whose it is; of those that are spread over ranks what is here
    of them, and by index what that is a piece of."""

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    pieces: dict[int, tuple[tuple[int, ...], Box]] = field(default_factory=dict)


class Collector:
    """Takes the tensors out of a state while it is encoded; two names of one tensor are kept once."""

    def __init__(self) -> None:
        self.found = Collected()
        self.owner: Callable[[torch.Tensor], int] = lambda tensor: OWN
        self._places: dict[int, bytes] = {}  # by id: what stands for it
        self._held: list[Any] = []  # whose id that is: as long as they are here nothing else has it
        self._taken = {"__metadata__": 1}  # names; how often each was asked for

    def keep(self, node: Any, path: str) -> bytes | None:
        """Take a tensor, an array or a dict of tensors; return what stands for it in the values."""
        kept = self._places.get(id(node))
        if kept is not None:
            return kept
        if type(node) is dict:
            return self._dict(node, path)
        if type(node) in PLAIN_TENSORS and _is_plain(node):
            kept = self._plain(node, path, self.owner(node))
        elif isinstance(node, torch.Tensor):
            kept = self._tensor(node, path, self.owner(node))
        elif type(node) in _PLAIN_ARRAYS and node.dtype.kind in "biufc" and node.dtype.isnative:
            kept = self._array(node, path)
        else:
            return None
        if kept is not None:
            self._places[id(node)] = kept
            self._held.append(node)
        return kept

    def _name(self, path: str, parts: Sequence[str] = ("",)) -> str:
        """Return a name that is still free, with all ``parts`` after it, and that every reader can read."""
        wanted = name = path if path.isascii() else path.encode("utf-8", "backslashreplace").decode()
        if len(parts) == 1 and not parts[0] and name not in self._taken:  # nearly always, and there may be very many
            self._taken[name] = 1
            return name
        while any(name + part in self._taken for part in (*parts, "")):
            self._taken[wanted] = number = self._taken.get(wanted, 1) + 1
            name = f"{wanted}#{number}"
        self._taken.update(dict.fromkeys((name + part for part in (*parts, "")), 1))
        return name

    def _add(self, tensor: torch.Tensor, name: str, owner: int) -> None:
        self.found.names.append(name)
        self.found.tensors.append(tensor)
        self.found.owners.append(owner)

    def _dict(self, node: dict[Any, Any], path: str) -> bytes | None:
        """Take all tensors of a dict at once, in a third of the time that it takes one by one, if none wants a closer look."""
        tensors, ids = list(node.values()), list(map(id, node.values()))
        if (
            not PLAIN_TENSORS.issuperset(map(type, tensors))
            or encoding.have_codecs(PLAIN_TENSORS)
            or not _PLAIN_FACTS.issuperset(map(_FACTS, tensors))
            or set(map(type, node)) != {str}
            or len(set(ids)) < len(ids)
            or not self._places.keys().isdisjoint(ids)
        ):
            return None
        names = [f"{path}.{key}" for key in node]
        if not self._taken.keys().isdisjoint(names) or not "".join(names).isascii():
            return None
        self.found.names += names
        self.found.tensors += tensors
        self.found.owners += map(self.owner, tensors)
        self._taken.update(dict.fromkeys(names, 1))
        self._places.update(zip(ids, map(_reference, names), strict=True))
        return _references(path, tuple(node))

    def _plain(self, tensor: torch.Tensor, path: str, owner: int) -> bytes:
        name = self._name(path)
        self._add(tensor, name, owner)
        return _reference(name)

    def _tensor(self, tensor: torch.Tensor, path: str, owner: int) -> bytes:
        if sharding.is_sharded(tensor):
            return self._sharded(tensor, path)
        if type(tensor) not in PLAIN_TENSORS:
            _refuse_what_is_elsewhere(tensor, path)
            if hasattr(tensor, "__tensor_flatten__"):
                return self._subclass(tensor, path, owner)
            tensor = tensor.as_subclass(torch.Tensor)  # a tensor with another name: its bytes are all there is
        if _is_plain(tensor):
            return self._plain(tensor, path, owner)
        stored, form = _in_form(tensor.detach(), path)
        name = self._name(path)
        self._add(stored, name, owner)
        return ext(encoding.TENSOR_FORM, pack([name, *form]))

    def _sharded(self, tensor: torch.Tensor, path: str) -> bytes:
        """Take what is here of a tensor that is spread over ranks. What stands for it is the same as for one that is not, so that
        either can be restored as the other."""
        here, whole, box = sharding.local(tensor, path)
        if type(here) not in PLAIN_TENSORS or not _is_plain(here):
            raise EncodingError(
                f"{path}: a {class_name(tensor)} of {class_name(here)} and {here.dtype} can't be kept; nothing was saved. Use "
                "torch.distributed.checkpoint for this part."
            )
        self.found.pieces[len(self.found.names)] = whole, box
        return self._plain(here, path, OWN)

    def _subclass(self, tensor: torch.Tensor, path: str, owner: int) -> bytes:
        if tensor.is_nested:
            raise EncodingError(
                f"{path}: a tensor of nested tensors can't be kept; nothing was saved. Leave it out of the state."
            )
        parts = parts_of(tensor)
        for part, inner in parts:
            _refuse_what_is_elsewhere(inner, f"{path}{part}")
            if not _is_plain(inner):
                raise EncodingError(
                    f"{path}{part}: a tensor of {inner.dtype} and {inner.layout} inside a {class_name(tensor)} can't be kept; "
                    "nothing was saved. Say how with resilience.checkpoint.encoding.register_codec."
                )
        context = encoding.encode(tensor.__tensor_flatten__()[1], f"{path}.<context>")
        name = self._name(path, [part for part, _ in parts])
        for part, inner in parts:
            self._add(inner, f"{name}{part}", owner)
        form = [name, "subclass", class_name(tensor), [part for part, _ in parts]]
        return ext(encoding.TENSOR_FORM, as_list([*map(pack, form), context]))

    def _array(self, array: Any, path: str) -> bytes | None:
        tensor = _from_numpy(array)
        if tensor is None or tensor.dtype not in NAMES:
            return None
        name = self._name(path)
        self._add(tensor, name, self.owner(tensor))
        return ext(encoding.TENSOR_FORM, pack([name, "numpy"]))


@lru_cache(1 << 16)  # the same names in every save
def _reference(name: str) -> bytes:
    return ext(encoding.TENSOR, name.encode())


@lru_cache(16)
def _references(path: str, keys: tuple[str, ...]) -> bytes:
    return as_map([(pack(key), _reference(f"{path}.{key}")) for key in keys])


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether safetensors has a type for it, and it has bytes."""
    return _FACTS(tensor) in _PLAIN_FACTS


def class_name(tensor: torch.Tensor) -> str:
    """Return the full name of a tensor's class."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def parts_of(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors with bytes that a tensor is made of, and what follows its name in theirs."""
    if type(tensor) in PLAIN_TENSORS or not hasattr(tensor, "__tensor_flatten__"):
        return [("", tensor)]
    inner = tensor.__tensor_flatten__()[0]
    return [(f".{name}{rest}", part) for name in inner for rest, part in parts_of(getattr(tensor, name))]


def _refuse_what_is_elsewhere(tensor: torch.Tensor, path: str) -> None:
    """Raise for tensors whose bytes are not here: not there yet, or never there."""
    where = class_name(tensor)
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise EncodingError(f"{path}: {where} has no shape yet; nothing was saved. Run the model once before.")
    if tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__") and not _has_bytes(tensor):
        raise EncodingError(
            f"{path}: {where} has no memory of its own; nothing was saved. Say how it is kept with "
            "resilience.checkpoint.encoding.register_codec."
        )


def _has_bytes(tensor: torch.Tensor) -> bool:
    try:
        storage = tensor.untyped_storage()
        return bool(storage.device.type != "meta" and (tensor.numel() == 0 or storage.data_ptr() != 0))
    except (RuntimeError, NotImplementedError):  # wrappers say so when their memory is asked for
        return False


def _in_form(tensor: torch.Tensor, path: str) -> tuple[torch.Tensor, list[Any]]:
    """Return a tensor as one that safetensors has a type for, and how to make it what it was. Raises for what has no such form."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_nested:
        what = f"of layout {tensor.layout}"
        if tensor.is_nested:
            what = "of nested tensors"
        elif tensor.device.type == "meta":
            what = "on the meta device"
        raise EncodingError(f"{path}: a tensor {what} can't be kept; nothing was saved. Leave it out of the state.")
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized:
        if tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            raise EncodingError(
                f"{path}: a tensor quantized by {tensor.qscheme()} can't be kept, only per tensor; nothing was saved."
            )
        return tensor.int_repr(), ["quantized", kind, tensor.q_scale(), tensor.q_zero_point()]
    if tensor.dtype in _PAIRS:
        return torch.view_as_real(tensor.resolve_conj()), [_PAIRS[tensor.dtype]]
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8), ["bits", kind]
    raise EncodingError(f"{path}: a tensor of {tensor.dtype} can't be kept; nothing was saved.")


def _from_numpy(array: Any) -> torch.Tensor | None:
    """Return a tensor over an array's memory; over a copy where torch can't read it as it is; ``None`` for other types."""
    usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    try:
        return torch.from_numpy(array if usable else array.copy())
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class Plan:
    """Where everything of one structure goes in the slots of one rank."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    owners: list[int]
    whole: dict[int, tuple[tuple[int, ...], Box]]  # as in ``Collected``
    parts: list[shards.Part]  # what this rank stages, in the order of ``pieces``
    pieces: list[Piece]
    header: bytes
    data_bytes: int
    id: int

    def fits(self, state: Collected) -> bool:
        """Whether a state has the structure that this plan was made for."""
        return (
            state.names == self.names
            and state.owners == self.owners
            and state.pieces == self.whole
            and [tensor.dtype for tensor in state.tensors] == self.dtypes
            and [tensor.shape for tensor in state.tensors] == self.shapes
        )

    def sources(self, state: Collected) -> list[torch.Tensor]:
        """Return what is to be copied, in the order of ``pieces``."""
        tensors = state.tensors
        with torch.no_grad():
            return [
                tensors[part.index] if part.rows is None else tensors[part.index][part.rows[0] : part.rows[1]]
                for part in self.parts
            ]

    def targets(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Return views into a slot's memory (bytes), in the order of ``pieces``."""
        return views(slot, self.pieces)


def views(memory: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Return pieces as tensors over memory whose byte 0 is the first of the data section; all of a type are cut at once."""
    found: list[torch.Tensor] = []
    for dtype, run in groupby(pieces, key=attrgetter("dtype")):  # those of one type follow each other
        together = list(run)
        room = memory[together[0].start : together[-1].start + together[-1].nbytes].view(DTYPES[dtype])
        cut = room.split([piece.nbytes // shards.ITEM_SIZES[dtype] for piece in together])
        found += [part.view(piece.shape) for part, piece in zip(cut, together, strict=True)]
    return found


@garbage.left_alone()
def make_plan(state: Collected, local_rank: int, local_world: int) -> Plan:
    """Make the plan for a state: shared tensors are divided over the ranks of the node."""
    shared = [index for index, owner in enumerate(state.owners) if owner == SHARED]
    own = [index for index, owner in enumerate(state.owners) if owner == OWN or (owner == LEADER and local_rank == 0)]
    sizes = [(tuple(state.tensors[index].shape), state.tensors[index].dtype.itemsize) for index in shared]
    divided = shards.split(sizes, local_world, local_rank)
    parts = [shards.Part(shared[part.index], part.rows) for part in divided] + [shards.Part(index) for index in own]
    described = []
    for part in parts:
        tensor = state.tensors[part.index]
        whole, box = state.pieces.get(part.index) or (tuple(tensor.shape), Box.whole(tensor.shape))
        if part.rows is not None:
            first, last = part.rows
            box = Box((first, *box.offsets[1:]), (last - first, *box.shape[1:]))
        described.append(shards.Wanted(state.names[part.index], NAMES[tensor.dtype], box.shape, whole, box.offsets))
    pieces = shards.lay_out(described)
    by_name = {state.names[part.index]: part for part in parts}
    header = shards.build_header(pieces)
    return Plan(
        list(state.names),
        [tensor.dtype for tensor in state.tensors],
        [tensor.shape for tensor in state.tensors],
        list(state.owners),
        dict(state.pieces),
        [by_name[piece.name] for piece in pieces],
        pieces,
        header,
        sum(piece.nbytes for piece in pieces),
        zlib.crc32(header),
    )


def whole_tensor(tensor: torch.Tensor, form: Sequence[Any]) -> Any:
    """Return what a kept tensor was before it was brought into a form that safetensors has. Raises ``DecodingError``."""
    kind = form[0] if form else ""
    try:
        if kind == "":
            return tensor
        if kind == "numpy":
            return tensor.numpy()
        if (
            kind in ("complex128", "complex32")
            and NAMES[tensor.dtype] == {"complex128": "F64", "complex32": "F16"}[kind]
        ):
            return torch.view_as_complex(tensor)
        if kind == "bits" and tensor.dtype == torch.uint8 and dtype_named(form[1]).itemsize == 1:
            return tensor.view(dtype_named(form[1]))
        if kind == "quantized":
            return torch._make_per_tensor_quantized_tensor(tensor, float(form[2]), int(form[3]))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise encoding.DecodingError(f"a tensor can't be read in the form {kind!r}: {error}") from error
    raise encoding.DecodingError(f"a tensor of {tensor.dtype} in the form {kind!r}, which this version does not know")
