"""From a state to what a slot holds: which tensors there are, where each goes, and whether that is still true.

A plan is made once and kept as long as the structure stays: the same names, dtypes and shapes in the same order. Any other
structure makes a new plan, never a stale read. What safetensors has no type for is kept in another *form*, and the values say
which: ``["complex128"]`` (pairs of F64), ``["bits", "float8_e8m0fnu"]`` (bytes), ``["quantized", …]``, ``["numpy"]``,
``["subclass", …]``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from resilience.checkpoint import encoding, shards
from resilience.checkpoint.encoding import EncodingError, Ext, pack
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
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


OWN, SHARED, LEADER = range(3)
"""Whose a tensor is: this rank's alone; the same on all ranks, so that each stages a part; the same for all, but only as the
first rank of the node has it."""


@dataclass
class Collected:
    """Every tensor of a state at one moment, by name, in order, and whose it is."""

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)


class Collector:
    """Takes the tensors out of a state while it is encoded; two names of one tensor are kept once."""

    def __init__(self) -> None:
        self.found = Collected()
        self.owner: Callable[[torch.Tensor], int] = lambda tensor: OWN
        self._places: dict[int, str] = {}
        self._taken: set[str] = set()

    def keep(self, node: Any, path: str) -> Any | None:
        """Take a tensor or an array; return what stands for it in the values."""
        if isinstance(node, torch.Tensor):
            return self._tensor(node, path)
        if isinstance(node, numpy.ndarray) and node.dtype.kind in "biufc" and node.dtype.isnative:
            return self._array(node, path)
        return None

    def _add(self, tensor: torch.Tensor, path: str) -> str:
        name = path
        number = 2
        while name in self._taken:
            name, number = f"{path}#{number}", number + 1
        self._taken.add(name)
        self.found.names.append(name)
        self.found.tensors.append(tensor)
        self.found.owners.append(self.owner(tensor))
        return name

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        known = self._places.get(id(tensor))
        if known is not None:
            return Ext(encoding.TENSOR, known.encode())
        if type(tensor) not in _PLAIN_TENSORS:
            special = self._subclass(tensor, path)
            if special is not None:
                return special
        if tensor.dtype in NAMES and tensor.layout is torch.strided and tensor.device.type != "meta":
            name = self._places[id(tensor)] = self._add(tensor, path)
            return Ext(encoding.TENSOR, name.encode())
        return self._form(tensor, path)

    def _form(self, tensor: torch.Tensor, path: str) -> Any:
        if tensor.is_quantized:
            return self._quantized(tensor, path)
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_nested:
            what = "on the meta device" if tensor.device.type == "meta" else f"of layout {tensor.layout}"
            raise EncodingError(f"{path}: a tensor {what} can't be kept; nothing was saved. Leave it out of the state.")
        if tensor.dtype in _PAIRS:
            name = self._add(torch.view_as_real(tensor.resolve_conj()), path)
            return Ext(encoding.TENSOR_FORM, pack([name, _PAIRS[tensor.dtype]]))
        if tensor.dtype.itemsize == 1:
            name = self._add(tensor.view(torch.uint8), path)
            return Ext(encoding.TENSOR_FORM, pack([name, "bits", str(tensor.dtype).removeprefix("torch.")]))
        raise EncodingError(f"{path}: a tensor of {tensor.dtype} can't be kept; nothing was saved.")

    def _quantized(self, tensor: torch.Tensor, path: str) -> Any:
        if tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            raise EncodingError(
                f"{path}: a tensor quantized by {tensor.qscheme()} can't be kept, only per tensor; nothing was saved."
            )
        name = self._add(tensor.int_repr(), path)
        kind = str(tensor.dtype).removeprefix("torch.")
        form = [name, "quantized", kind, tensor.q_scale(), tensor.q_zero_point()]
        return Ext(encoding.TENSOR_FORM, pack(form))

    def _subclass(self, tensor: torch.Tensor, path: str) -> Any | None:
        kind = type(tensor)
        where = f"{kind.__module__}.{kind.__qualname__}"
        if hasattr(tensor, "device_mesh") or hasattr(tensor, "sharding_spec"):
            raise EncodingError(
                f"{path}: {where} is sharded over ranks, which is not supported yet; nothing was saved. Save a full state, or use "
                "torch.distributed.checkpoint for this part."
            )
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise EncodingError(f"{path}: {where} has no shape yet; nothing was saved. Run the model once before.")
        if not hasattr(tensor, "__tensor_flatten__"):
            return None  # a tensor with another name: its bytes are all there is
        inner, context = tensor.__tensor_flatten__()
        refs = [[attribute, self._tensor(getattr(tensor, attribute), f"{path}.{attribute}")] for attribute in inner]
        shaped = encoding.shaped(context, f"{path}.<context>", self.keep)
        return Ext(encoding.TENSOR_FORM, pack(["", "subclass", where, refs, shaped]))

    def _array(self, array: Any, path: str) -> Any | None:
        tensor = _from_numpy(array)
        if tensor is None or tensor.dtype not in NAMES:
            return None
        name = self._add(tensor, path)
        return Ext(encoding.TENSOR_FORM, pack([name, "numpy"]))


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
            and [tensor.dtype for tensor in state.tensors] == self.dtypes
            and [tensor.shape for tensor in state.tensors] == self.shapes
        )

    def sources(self, state: Collected) -> list[torch.Tensor]:
        """Return what is to be copied, in the order of ``pieces``."""
        tensors = state.tensors
        return [
            tensors[part.index] if part.rows is None else tensors[part.index][part.rows[0] : part.rows[1]]
            for part in self.parts
        ]

    def targets(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Return views into a slot's memory (bytes), in the order of ``pieces``."""
        return [view_of(slot, piece) for piece in self.pieces]


def view_of(memory: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a piece as a tensor over memory whose byte 0 is the first of the data section."""
    raw = memory[piece.start : piece.start + piece.nbytes]
    return raw.view(DTYPES[piece.dtype]).view(piece.shape)


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
        whole = tuple(tensor.shape)
        first, last = part.rows if part.rows is not None else (0, 0)
        shape = (last - first, *whole[1:]) if part.rows is not None else whole
        described.append((state.names[part.index], NAMES[tensor.dtype], shape, whole, first))
    pieces = shards.lay_out(described)
    by_name = {state.names[part.index]: part for part in parts}
    header = shards.build_header(pieces)
    return Plan(
        list(state.names),
        [tensor.dtype for tensor in state.tensors],
        [tensor.shape for tensor in state.tensors],
        list(state.owners),
        [by_name[piece.name] for piece in pieces],
        pieces,
        header,
        sum(piece.nbytes for piece in pieces),
        zlib.crc32(header),
    )


def whole_tensor(tensor: torch.Tensor, form: Sequence[Any]) -> Any:
    """Return what a kept tensor was before it was brought into a form that safetensors has."""
    kind = form[0] if form else ""
    if kind == "":
        return tensor
    if kind == "numpy":
        return tensor.numpy()
    if kind in ("complex128", "complex32"):
        return torch.view_as_complex(tensor)
    if kind == "bits":
        return tensor.view(_dtype(form[1]))
    if kind == "quantized":
        return torch._make_per_tensor_quantized_tensor(tensor, float(form[2]), int(form[3]))
    raise encoding.DecodingError(f"a tensor in the form {kind!r}, which this version does not know")


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(found, torch.dtype) or found.itemsize != 1:
        raise encoding.DecodingError(f"unknown torch.dtype {name!r}")
    return found
