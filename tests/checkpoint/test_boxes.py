"""Pieces of tensors: whatever is wanted is made up of what there is, every item once, or it is said where something is missing."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from resilience.checkpoint.boxes import Box, Cut, Gap, cover

Shape = tuple[int, ...]


def grid(noise: random.Random, shape: Shape) -> list[Box]:
    """Cut a tensor along every dimension, at places of no particular order: what meshes of any shape do."""
    edges = [sorted({0, size, *noise.sample(range(size + 1), min(size, noise.randrange(3)))}) for size in shape]
    spans = [list(itertools.pairwise(edge)) or [(0, 0)] for edge in edges]
    return [
        Box(tuple(begin for begin, _ in corner), tuple(end - begin for begin, end in corner))
        for corner in itertools.product(*spans)
    ]


def some_shape(noise: random.Random) -> Shape:
    return tuple(noise.choice([1, 2, 3, 5, 8]) for _ in range(noise.randrange(4)))


def assembled(wanted: Box, boxes: list[Box], cuts: list[Cut], whole: torch.Tensor) -> torch.Tensor:
    """Copy as the cuts say, counting how often each item is written."""
    found, times = torch.full(wanted.shape, -1), torch.zeros(wanted.shape, dtype=torch.int64)
    for number, box in cuts:
        there = whole[boxes[number].within(Box.whole(whole.shape))]
        found[box.within(wanted)] = there[box.within(boxes[number])]
        times[box.within(wanted)] += 1
    assert bool((times == 1).all())
    return found


@pytest.mark.parametrize("seed", range(300))
def test_any_box_is_made_up_of_any_cut_each_item_once(seed: int) -> None:
    noise = random.Random(seed)
    shape = some_shape(noise)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    boxes = [box for _ in range(noise.randrange(1, 4)) for box in grid(noise, shape)]
    noise.shuffle(boxes)
    for wanted in (*grid(noise, shape), Box.whole(shape)):
        cuts = cover(wanted, boxes)
        assert torch.equal(assembled(wanted, boxes, cuts, whole), whole[wanted.within(Box.whole(shape))])


@pytest.mark.parametrize("seed", range(200))
def test_what_is_missing_is_found_and_nothing_else_is_called_missing(seed: int) -> None:
    noise = random.Random(seed)
    shape = some_shape(noise) or (4,)
    boxes = [box for _ in range(noise.randrange(1, 3)) for box in grid(noise, shape)]
    for box in noise.sample(boxes, noise.randrange(len(boxes) + 1)):
        boxes.remove(box)
    there = torch.zeros(shape, dtype=torch.bool)
    for box in boxes:
        there[box.within(Box.whole(shape))] = True
    try:
        cover(Box.whole(shape), boxes)
    except Gap as gap:
        assert not there[gap.at]
    else:
        assert bool(there.all())


@pytest.mark.parametrize("seed", range(100))
def test_parts_are_those_that_torchs_own_planner_reads(seed: int) -> None:
    """Where nothing is there twice: it would read both, and does not notice what is missing."""
    noise = random.Random(seed)
    shape = some_shape(noise) or (3,)
    boxes, wanted = grid(noise, shape), noise.choice(grid(noise, shape))
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)) for box in boxes]
    saved = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)
    target = ChunkStorageMetadata(torch.Size(wanted.offsets), torch.Size(wanted.shape))
    theirs = {
        (item.storage_index.offset, tuple(item.dest_offsets), tuple(item.storage_offsets), tuple(item.lengths))
        for item in create_read_items_for_chunk_list("w", saved, [target])
        if 0 not in item.lengths
    }
    ours = {
        (
            torch.Size(boxes[number].offsets),
            tuple(span.start for span in box.within(wanted)),
            tuple(span.start for span in box.within(boxes[number])),
            box.shape,
        )
        for number, box in cover(wanted, boxes)
    }
    assert ours == theirs


def test_of_several_that_have_a_part_the_first_is_taken() -> None:
    assert cover(Box((0,), (4,)), [Box((0,), (4,)), Box((0,), (2,)), Box((0,), (4,))]) == [Cut(0, Box((0,), (4,)))]
    assert {number for number, _ in cover(Box((1,), (2,)), [Box((0,), (3,)), Box((1,), (3,))])} == {0}


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0, 2)])
def test_nothing_is_needed_for_nothing(shape: Shape) -> None:
    assert cover(Box.whole(shape), []) == []


def test_scalar_is_one_box() -> None:
    assert cover(Box((), ()), [Box((), ())]) == [Cut(0, Box((), ()))]
    with pytest.raises(Gap):
        cover(Box((), ()), [])


def test_a_thousand_ranks_are_resharded_in_no_time_that_grows_with_their_square() -> None:
    import time

    def took(ranks: int) -> float:
        rows, wanted = 1000 * ranks, Box((500, 0), (999 * ranks - 500, 8))
        boxes = [Box((1000 * rank, 0), (1000, 8)) for rank in range(ranks)]
        start = time.perf_counter()
        assert len(cover(Box.whole((rows, 8)), boxes)) == ranks
        cover(wanted, boxes)
        return time.perf_counter() - start

    assert min(took(4000) for _ in range(3)) < 40 * min(took(400) for _ in range(3))
