"""The tensors of a snapshot, by name, whichever shards their pieces are in.

Rule: nothing that is handed out shares memory with a slot or a file, and nothing is handed out of which an item is missing.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from resilience.checkpoint import boxes, decoding, plan, sharding
from resilience.checkpoint.boxes import Box
from resilience.checkpoint.shards import Piece
from resilience.errors import CheckpointError

_BAD = (CheckpointError, OSError, ValueError)
_LEAVES = frozenset({str, int, float, bool, type(None), bytes})


class DamagedError(CheckpointError):
    """A snapshot that does not have what it should have."""


@dataclass(frozen=True, eq=False)
class Ref:
    """A tensor that is in the snapshot, or a value that is made of some. Every one is itself: it may be a key, or in a set."""

    name: str
    form: tuple[Any, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it can be copied into a tensor that exists, by its name."""
        return not self.form or self.form[0] == "subclass"

    def differs(self, where: str, tensor: torch.Tensor, source: Source) -> list[str]:
        """Say how a live tensor differs from it, if it does."""
        if not self.plain or (not self.form and source.has(self.name, tensor)):
            return []
        is_one = sharding.is_sharded(tensor) or type(tensor) in plan.PLAIN_TENSORS
        parts = [("", tensor)] if is_one else plan.parts_of(tensor)
        kind, names, context = self.form[1:4] if self.form else (plan.class_name(tensor), [""], None)
        if [name for name, _ in parts] != names or kind != plan.class_name(tensor):
            there = kind if self.form else "a plain tensor"
            return [f"{where} is a {plan.class_name(tensor)}, in the checkpoint {there}"]
        if self.form and tensor.__tensor_flatten__()[1] != context:
            return [f"{where} is a {kind} with another context than in the checkpoint"]
        said = []
        for name, part in parts:
            shape, dtype = source.shape_of(self.name + name), source.dtype_of(self.name + name)
            if tuple(part.shape) != shape or part.dtype != dtype:
                said.append(
                    f"{where}{name} is {list(part.shape)} {part.dtype}, in the checkpoint {list(shape)} {dtype}"
                )
        return said


def compared(name: str, live: Mapping[str, Any], tree: Any, source: Source) -> tuple[list[str], set[str]]:
    """Say how a module's state differs from what was saved of it; return also the keys of what can't be loaded."""
    if not isinstance(tree, dict):
        return [f"{name}: what was saved is no module's state"], set()
    said = few_names(f"{name}: in the model, not in the checkpoint", live.keys() - tree.keys())
    said += few_names(f"{name}: in the checkpoint, not in the model", tree.keys() - live.keys())
    unfit = set(tree.keys() ^ live.keys())
    for key in live.keys() & tree.keys():
        ref, tensor = tree[key], live[key]
        if isinstance(ref, Ref) and (isinstance(tensor, torch.Tensor) or sharding.is_sharded(tensor)):
            differs = ref.differs(f"{name}.{key}", tensor, source)
            if differs:
                unfit.add(key)
                said += differs
    return said, unfit


def few_names(what: str, names: Iterable[str]) -> list[str]:
    """Return a sentence about some names, if there are any; the first five stand for many."""
    found = sorted(map(str, names))
    shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    return [f"{what}: {shown}"] if found else []


class Shard:
    """The data section of a shard, as bytes or as what gets them when they are first wanted, and what is in it."""

    def __init__(self, memory: torch.Tensor | Callable[[], torch.Tensor], pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self._memory = memory
        self._views: dict[str, torch.Tensor] | None = None

    def view(self, name: str) -> torch.Tensor:
        """Return a piece as a tensor over this memory."""
        if self._views is None:
            try:
                memory = self._memory if isinstance(self._memory, torch.Tensor) else self._memory()
            except _BAD as error:
                raise DamagedError(str(error)) from error
            self._views = {
                piece.name: view for piece, view in zip(self.pieces, plan.views(memory, self.pieces), strict=True)
            }
        return self._views[name]


class Source:
    """The pieces of all tensors of a snapshot. This rank's own go before those of the same name elsewhere."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[Shard, Piece]]] = {}
        self._later: list[Callable[[], Shard]] = []

    def add(self, shard: Shard, own: bool) -> None:
        """Add a shard."""
        for piece in shard.pieces:
            known = self._found.setdefault(piece.name, [])
            known.insert(0 if own else len(known), (shard, piece))

    def add_later(self, opened: Callable[[], Shard]) -> None:
        """Add a shard of another rank that is opened only if this rank's own do not have everything."""
        self._later.append(opened)

    def _open_all(self) -> bool:
        """Open what is left; return whether there was any."""
        later, self._later = self._later, []
        for opened in later:
            try:
                self.add(opened(), own=False)
            except _BAD as error:
                raise DamagedError(str(error)) from error
        return bool(later)

    def _of(self, name: str) -> list[tuple[Shard, Piece]]:
        """Return the pieces of a tensor: those that belong together with the first, which is this rank's own where it has one."""
        while name not in self._found:
            if not self._open_all():
                raise DamagedError(f"tensor {name!r} is missing")
        return self._found[name]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._of(name)[0][1].whole

    def shape_if_there(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a whole tensor, if the snapshot has one of that name."""
        return self._of(name)[0][1].whole if name in self._found or (self._open_all() and name in self._found) else None

    def has(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor of that name has the shape and the type of this one, which is no subclass. There may be very many."""
        piece = self._of(name)[0][1]
        kind = type(tensor)
        return (
            (kind in plan.PLAIN_TENSORS or sharding.is_sharded(tensor))
            and tensor.shape == piece.whole
            and plan.NAMES.get(tensor.dtype) == piece.dtype
        )

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type of a tensor's items."""
        return plan.DTYPES[self._of(name)[0][1].dtype]

    def _cuts(self, name: str, wanted: Box) -> list[tuple[torch.Tensor, Box]]:
        """Return views that make up a piece of a tensor, and which part of the tensor each is."""
        shard, first = self._of(name)[0]
        if first.box == wanted:  # nearly always, and there may be very many
            return [(shard.view(name), wanted)]
        self._open_all()
        found = [item for item in self._of(name) if (item[1].whole, item[1].dtype) == (first.whole, first.dtype)]
        try:
            cuts = boxes.cover(wanted, [piece.box for _, piece in found])
        except boxes.Gap as gap:
            raise DamagedError(
                f"tensor {name!r} of shape {list(first.whole)} lacks what begins at {list(gap.at)}: a shard is missing"
            ) from None
        return [(found[cut.number][0].view(name)[cut.box.within(found[cut.number][1].box)], cut.box) for cut in cuts]

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Copy a tensor into one that exists, part by part where that is made of several."""
        self.copy_all([(name, target)])

    def copy_all(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into ones that exist, all at once: where one is missing or does not fit, nothing is changed."""
        targets, sources = [], []
        with torch.no_grad():
            for name, target in wanted:
                for part_name, part in self._parts(name, target):
                    here, whole, box = sharding.local(part)
                    if whole != self.shape_of(part_name):
                        there = list(self.shape_of(part_name))
                        raise CheckpointError(
                            f"tensor {part_name!r} has shape {there}, where it should go {list(whole)}"
                        )
                    for view, region in self._cuts(part_name, box):
                        targets.append(here if region == box else here[region.within(box)])
                        sources.append(view)
            if targets:
                torch._foreach_copy_(targets, sources)

    def _parts(self, name: str, target: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if type(target) in plan.PLAIN_TENSORS or sharding.is_sharded(target) or name in self._found:
            return [(name, target)]
        return [(name + part, inner) for part, inner in plan.parts_of(target)]

    def differs(self, name: str) -> bool:
        """Whether ranks that have all of a tensor have other values in it. Three of them are looked at, this one among them."""
        self._open_all()
        whole = [(shard, piece) for shard, piece in self._found.get(name, ()) if piece.box == Box.whole(piece.whole)]
        some = [whole[number] for number in sorted({0, 1, len(whole) - 1}) if 0 <= number < len(whole)]
        alike = {(piece.whole, piece.dtype) for _, piece in some}
        views = [shard.view(name).flatten().view(torch.uint8) for shard, _ in some]
        return len(alike) > 1 or not all(torch.equal(views[0], view) for view in views[1:])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the snapshot, whole, in memory of its own."""
        self._open_all()
        return {name: self.fresh(Ref(name)) for name in sorted(self._found)}

    def fresh(self, tree: Any, rooms: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Return a tree with tensors of its own in place of every :class:`Ref`: one for each name, however often it is there.

        ``rooms``: tensors that exist, by the name of what is written into them: they are used instead of new ones. Each has the
        right shape and type, and its memory to itself.
        """
        made: dict[str, Any] = dict(rooms or {})
        self.copy_all(made.items())
        return self._fresh(tree, made)

    def _fresh(self, tree: Any, made: dict[str, Any]) -> Any:
        kind = type(tree)
        if kind in _LEAVES:
            return tree
        if kind is Ref:
            return self._made(tree, made)
        if kind in (list, tuple, set, frozenset):
            if _LEAVES.issuperset(map(type, tree)):
                return tree
            return kind(self._fresh(item, made) for item in tree)
        if kind is deque:
            return deque((self._fresh(item, made) for item in tree), tree.maxlen)
        if isinstance(tree, dict):
            items = [(self._fresh(key, made), self._fresh(value, made)) for key, value in tree.items()]
            tree.clear()
            for key, value in items:
                tree[key] = value
        elif kind is argparse.Namespace:
            self._fresh(vars(tree), made)
        return tree

    def _made(self, ref: Ref, made: dict[str, Any]) -> Any:
        kind = ref.form[0] if ref.form else ""
        if kind == "codec":
            return decoding.from_codec(ref.form[1], self._fresh(ref.form[2], made))
        if kind == "subclass":
            raise CheckpointError(
                f"{ref.name}: a {ref.form[1]} can only be restored into a module that has one. Where it stands elsewhere, say how "
                "it is made with resilience.checkpoint.encoding.register_codec before it is saved."
            )
        if ref.name not in made:
            # Before memory is taken for a shape that nobody has.
            self._cuts(ref.name, Box.whole(self.shape_of(ref.name)))
            # Arrays and generators' states are made of some: on the CPU, whatever torch.set_default_device says.
            tensor = torch.empty(self.shape_of(ref.name), dtype=self.dtype_of(ref.name), device="cpu")
            self.copy_into(ref.name, tensor)
            made[ref.name] = plan.whole_tensor(tensor, ref.form)
        return made[ref.name]
