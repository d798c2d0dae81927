"""What a rank has of a tensor that is spread over ranks: its bytes here, and which piece of the whole they are.

``DTensor`` is what FSDP2, tensor parallel and FSDP1 with a device mesh have; ``ShardedTensor`` FSDP1 without. Nothing in here
talks to other ranks.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import torch

from resilience.checkpoint.boxes import Box
from resilience.errors import CheckpointError

_boxes: dict[Any, Box] = {}  # by DTensorSpec: to find it out takes longer than to copy a small tensor


class Local(NamedTuple):
    """What is here of a tensor."""

    tensor: torch.Tensor
    whole: tuple[int, ...]
    box: Box


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor may have pieces on other ranks."""
    return hasattr(tensor, "device_mesh") or hasattr(tensor, "local_shards")


def local(tensor: Any, path: str = "") -> Local:
    """Return what is here of a tensor; of a plain one that is all. Raises for what has no such form."""
    if hasattr(tensor, "device_mesh"):
        return _of_dtensor(tensor, path)
    if hasattr(tensor, "local_shards"):
        return _of_sharded_tensor(tensor, path)
    shape = tuple(tensor.shape)
    return Local(tensor, shape, Box.whole(shape))


def _of_dtensor(tensor: Any, path: str) -> Local:
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"{path}: a DTensor with placements {tensor.placements} can't be kept: each rank has a part of a sum. Nothing was "
            "saved. Redistribute it first."
        )
    inner, box = tensor._local_tensor, _boxes.get(tensor._spec)
    if hasattr(inner, "wait"):  # of a collective that may still be under way
        inner = inner.wait()
    if box is None:
        chunks = tensor.__create_chunk_list__()
        offsets = chunks[0].offsets if len(chunks) == 1 else ()
        box = Box(tuple(offsets), tuple(chunks[0].sizes))
        _boxes[tensor._spec] = box
    if box.shape != tuple(inner.shape) or len(box.offsets) != len(box.shape):
        raise CheckpointError(
            f"{path}: a DTensor with placements {tensor.placements} can't be kept: its piece on this rank does not lie in one "
            "place. Nothing was saved. Use torch.distributed.checkpoint for this part."
        )
    return Local(inner, tuple(tensor.shape), box)


def _of_sharded_tensor(tensor: Any, path: str) -> Local:
    shards, whole = tensor.local_shards(), tuple(tensor.size())
    if len(shards) > 1:
        raise CheckpointError(
            f"{path}: a ShardedTensor with {len(shards)} shards on one rank can't be kept. Nothing was saved."
        )
    if not shards:
        dtype = tensor.metadata().tensor_properties.dtype
        return Local(torch.empty((0, *whole[1:]), dtype=dtype), whole, Box((0,) * len(whole), (0, *whole[1:])))
    found = shards[0]
    box = Box(tuple(found.metadata.shard_offsets), tuple(found.tensor.shape))
    return Local(found.tensor, whole, box)


def like(pattern: Any, piece: torch.Tensor) -> Any:
    """Return a tensor that is spread over ranks as ``pattern`` is, with ``piece`` as what is here of it."""
    if hasattr(pattern, "local_shards"):
        return _sharded_tensor_like(pattern, piece)
    module: Any = sys.modules["torch.distributed.tensor"]
    return module.DTensor.from_local(
        piece,
        pattern.device_mesh,
        pattern.placements,
        run_check=False,
        shape=pattern.shape,
        stride=pattern.stride(),
    )


def empty_like(pattern: Any, dtype: torch.dtype) -> Any:
    """Return a tensor that is spread over ranks as ``pattern`` is, with any contents; a plain one for a plain one."""
    piece = torch.empty_like(local(pattern).tensor, dtype=dtype, requires_grad=False)
    return like(pattern, piece) if is_sharded(pattern) else piece


def _sharded_tensor_like(pattern: Any, piece: torch.Tensor) -> Any:
    module: Any = sys.modules["torch.distributed._shard.sharded_tensor"]
    metadata = copy.deepcopy(pattern.metadata())
    metadata.tensor_properties.dtype = piece.dtype
    shards = [module.Shard(piece, shard.metadata) for shard in pattern.local_shards()]
    return module.ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=pattern._process_group
    )
