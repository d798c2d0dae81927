"""Which pieces of a tensor make up another piece of it. Pure.

A box is a piece of a tensor with any number of dimensions: where it begins, and its shape. What is wanted and what there is may be
cut in different ways, by other numbers of ranks, along other dimensions, and what there is may be there several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resilience.errors import CheckpointError


class Gap(CheckpointError):  # noqa: N818 - reads as what it is
    """Nothing has a part of what is wanted; ``at``: where it begins."""

    def __init__(self, at: tuple[int, ...]) -> None:
        super().__init__(f"nothing begins at {list(at)}")
        self.at = at


class Box(NamedTuple):
    """A piece of a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it is a piece of a tensor of that shape."""
        return len(self.offsets) == len(self.shape) == len(shape) and all(
            begin + size <= most for begin, size, most in zip(*self, shape, strict=True)
        )

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return how to index ``outer`` to get this one, which is inside of it."""
        return tuple(
            slice(begin - first, begin - first + size)
            for begin, size, first in zip(self.offsets, self.shape, outer.offsets, strict=True)
        )


class Cut(NamedTuple):
    """A part of what is wanted, and the number of the box that has it."""

    number: int
    box: Box


def cover(wanted: Box, boxes: Sequence[Box]) -> list[Cut]:
    """Return parts of ``boxes`` that make up ``wanted``, each of its items once; of several that have a part, the first.

    All boxes are of the same tensor. Raises :class:`Gap`.
    """
    if wanted in boxes:  # nearly always: nothing has changed
        return [Cut(boxes.index(wanted), wanted)]
    if 0 in wanted.shape:
        return []
    if not boxes:
        raise Gap(wanted.offsets)
    return _cover(wanted, boxes, range(len(boxes)), ())


def _cover(wanted: Box, boxes: Sequence[Box], numbers: Sequence[int], region: tuple[tuple[int, int], ...]) -> list[Cut]:
    """Cover the dimensions after those of ``region``, in which all of these boxes reach from its beginnings to its ends."""
    dimension = len(region)
    if dimension == len(wanted.shape):
        offsets, ends = tuple(begin for begin, _ in region), tuple(end for _, end in region)
        shape = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
        return [Cut(min(numbers), Box(offsets, shape))]
    begin = wanted.offsets[dimension]
    end = begin + wanted.shape[dimension]
    spans = sorted((boxes[number].offsets[dimension], number) for number in numbers if 0 not in boxes[number].shape)
    found: list[Cut] = []
    at, following, active = begin, 0, list[tuple[int, int]]()  # active: (where it ends, which)
    while at < end:
        while following < len(spans) and spans[following][0] <= at:
            start, number = spans[following]
            active.append((start + boxes[number].shape[dimension], number))
            following += 1
        active = [item for item in active if item[0] > at]
        if not active:
            zeros = wanted.offsets[dimension + 1 :]
            raise Gap((*(first for first, _ in region), at, *zeros))
        upcoming = [spans[following][0]] if following < len(spans) else []
        stop = min([end, *upcoming, *(reach for reach, _ in active)])
        members = [number for _, number in active]
        found += _cover(wanted, boxes, members, (*region, (at, stop)))
        at = stop
    return found
