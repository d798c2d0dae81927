"""Tensors that some mesh of ranks has saved are what any other mesh restores: any shape, any type, any cut.

The ranks are played one after the other, on torch's process group for that: what is tested is who has which part of what.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from resilience.checkpoint import encoding, plan, sharding, shards, source
from resilience.checkpoint.boxes import Box
from resilience.checkpoint.plan import Collector, make_plan
from resilience.checkpoint.stager import copy
from resilience.errors import CheckpointError

Layout = tuple[tuple[int, ...], tuple[Placement, ...]]  # a mesh, and what each of its dimensions does
LAYOUTS: dict[str, Layout] = {
    "one rank": ((1,), (Shard(0),)),
    "two": ((2,), (Shard(0),)),
    "three": ((3,), (Shard(0),)),
    "seven": ((7,), (Shard(0),)),
    "two columns": ((2,), (Shard(1),)),
    "last dimension of three": ((3,), (Shard(2),)),
    "copies": ((2,), (Replicate(),)),
    "hybrid": ((2, 3), (Replicate(), Shard(0))),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "columns and rows": ((3, 2), (Shard(1), Shard(0))),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.float64]


@contextmanager
def rank_of(number: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=number, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sharding._boxes.clear()


def laid_out(whole: torch.Tensor, layout: Layout, empty: bool = False) -> DTensor:
    """Return this rank's part of a tensor, or room for it."""
    mesh, placements = layout
    dims = [
        placement if not isinstance(placement, Shard) or placement.dim < whole.dim() else Replicate()
        for placement in placements
    ]
    room = DTensor.from_local(
        torch.empty(0), init_device_mesh("cpu", mesh), dims, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    (chunk,) = room.__create_chunk_list__()
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    piece = whole[box.within(Box.whole(whole.shape))]
    local = torch.zeros_like(piece) if empty else piece.clone()
    return DTensor.from_local(local, room.device_mesh, dims, run_check=False, shape=whole.shape, stride=whole.stride())


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def some_tensors(noise: random.Random) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(noise.randrange(1000))
    found = {}
    for number in range(5):
        shape = [noise.choice([1, 2, 3, 4, 5, 7, 12]) for _ in range(noise.randrange(1, 4))]
        dtype = noise.choice(DTYPES)
        raw = torch.randint(0, 2 if dtype == torch.bool else 250, (*shape, dtype.itemsize), generator=generator)
        found[f"w{number}"] = raw.to(torch.uint8).view(dtype).reshape(shape)
    return found


def saved_by(layout: Layout, tensors: dict[str, torch.Tensor]) -> list[source.Shard]:
    """Return the shards that all ranks of a layout write."""
    world, found = torch.Size(layout[0]).numel(), []
    for rank in range(world):
        with rank_of(rank, world):
            collector = Collector()
            state = {name: laid_out(tensor, layout) for name, tensor in tensors.items()}
            encoding.encode(state, "state", collector.keep)
            made = make_plan(collector.found, 0, 1)
            slot = torch.full((shards.aligned(made.data_bytes),), 0xEE, dtype=torch.uint8)
            copy(made.targets(slot), made.sources(collector.found))
            found.append(source.Shard(slot, shards.parse_header(made.header, made.data_bytes)))
    return found


@pytest.mark.parametrize("before", list(LAYOUTS))
@pytest.mark.parametrize("after", list(LAYOUTS))
def test_what_one_layout_saved_any_other_restores(before: str, after: str) -> None:
    noise = random.Random(f"{before} {after}")
    tensors = some_tensors(noise)
    there, (mesh, placements) = saved_by(LAYOUTS[before], tensors), LAYOUTS[after]
    world = torch.Size(mesh).numel()
    for rank in range(world):
        with rank_of(rank, world):
            found = source.Source()
            for number, shard in enumerate(there):
                found.add(shard, own=number == rank)
            rooms = {name: laid_out(tensor, (mesh, placements), empty=True) for name, tensor in tensors.items()}
            found.copy_all((f"state.{name}", room) for name, room in rooms.items())
            for name, tensor in tensors.items():
                wanted = laid_out(tensor, (mesh, placements))
                assert bits(rooms[name]._local_tensor) == bits(wanted._local_tensor), (name, rank)
    whole = source.Source()
    for shard in there:
        whole.add(shard, own=False)
    assert {name: bits(tensor) for name, tensor in whole.tensors().items()} == {
        f"state.{name}": bits(tensor) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("lost", range(3))
def test_shard_that_is_missing_is_named_and_nothing_is_changed(lost: int) -> None:
    tensors = {"w": torch.arange(12.0).reshape(6, 2)}
    there = saved_by(LAYOUTS["three"], tensors)
    found = source.Source()
    for number, shard in enumerate(there):
        if number != lost:
            found.add(shard, own=False)
    target = torch.full((6, 2), -1.0)
    with pytest.raises(CheckpointError, match=rf"'state.w' of shape \[6, 2\] lacks what begins at \[{2 * lost}, 0\]"):
        found.copy_into("state.w", target)
    assert target.eq(-1).all()


def test_plan_of_another_cut_is_another_plan() -> None:
    """The same names, types and shapes here: two rows of four, but other ones."""
    made: list[plan.Plan] = []
    states: list[plan.Collected] = []
    for rank in (0, 1):
        with rank_of(rank, 2):
            collector = Collector()
            encoding.encode({"w": laid_out(torch.ones(4, 2), LAYOUTS["two"])}, "state", collector.keep)
            states.append(collector.found)
            made.append(make_plan(collector.found, 0, 1))
    assert made[0].fits(states[0])
    assert not made[0].fits(states[1])
