"""What is a rank's alone, and what all nodes have: cut out of a slot, each is a shard of its own; together they are everything."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
import torch

from resilience.checkpoint import digest, ownership, shards
from resilience.checkpoint.arena import Slot
from resilience.checkpoint.boxes import Box
from resilience.checkpoint.ledger import Ledger
from resilience.checkpoint.link import Place
from resilience.checkpoint.plan import LEADER, OWN, SHARED, Collected, make_plan, views
from resilience.checkpoint.saver.excerpts import Excerpt, Outlines, excerpt
from resilience.checkpoint.stager import Stager
from resilience.errors import CheckpointError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool]


def some_state(rng: random.Random) -> Collected:
    state = Collected()
    for number in range(rng.randint(0, 12)):
        shape = [rng.randint(0, 5) for _ in range(rng.randint(0, 3))]
        state.names.append(f"t{number}")
        state.tensors.append(torch.randint(0, 2, shape).to(rng.choice(DTYPES)))
        state.owners.append(rng.choice([OWN, SHARED, LEADER]))
    return state


def staged(state: Collected, local_rank: int, local_world: int) -> tuple[Stager, Slot, Ledger]:
    slot, ledger = Slot.create(1 << 16), Ledger.create(2, local_rank, local_world)
    place = Place(local_rank, local_world, local_rank, local_world, 0, "x")
    stager = Stager(place, ledger, [slot], 1, make_plan(state, local_rank, local_world))
    stager.stage(0, 3, state, b"values", disk=False)
    return stager, slot, ledger


def tensors_of(found: Excerpt) -> dict[str, tuple[shards.Piece, torch.Tensor]]:
    data = bytearray(b"".join(found.pieces(7)))
    memory = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    pieces = shards.parse_header(found.header, found.nbytes)
    return {piece.name: (piece, view) for piece, view in zip(pieces, views(memory, pieces), strict=True)}


@pytest.mark.parametrize("seed", range(40))
def test_both_excerpts_are_whole_shards_and_hold_every_tensor_of_the_slot_once(seed: int) -> None:
    rng = random.Random(seed)
    state, local_world = some_state(rng), rng.randint(1, 3)
    for local_rank in range(local_world):
        stager, slot, ledger = staged(state, local_rank, local_world)
        seal = ledger.seal_of(0)
        assert seal is not None
        outlines = Outlines()
        own, rest = (excerpt(slot, seal, outlines, own=own) for own in (True, False))
        assert (bytes(own.values), bytes(rest.values)) == (b"values", b"")
        assert own.nbytes + rest.nbytes == seal.data
        owners = dict(zip(state.names, state.owners, strict=True))
        values = dict(zip(state.names, state.tensors, strict=True))
        for shared, found in ((False, tensors_of(own)), (True, tensors_of(rest))):
            for name, (piece, tensor) in found.items():
                if piece.nbytes:
                    assert (owners[name] == SHARED) == shared
                    whole = values[name]
                    part = whole[piece.box.within(Box.whole(whole.shape))]
                    assert torch.equal(tensor, part)
        del own, rest
        stager.close()


@pytest.fixture
def one() -> Iterator[tuple[Slot, Ledger]]:
    state = Collected(["a", "b"], [torch.ones(4), torch.zeros(4)], [OWN, SHARED])
    stager, slot, ledger = staged(state, 0, 1)
    yield slot, ledger
    stager.close()


def test_damage_to_what_says_whose_the_tensors_are_is_found(one: tuple[Slot, Ledger]) -> None:
    slot, ledger = one
    seal = ledger.seal_of(0)
    assert seal is not None
    for at in range(seal.header_at + seal.header, seal.values_at):
        slot.map[at] ^= 1
        with pytest.raises(CheckpointError, match="whose its tensors are"):
            excerpt(slot, seal, Outlines(), own=True)
        slot.map[at] ^= 1
    excerpt(slot, seal, Outlines(), own=True)


def test_slot_that_does_not_say_whose_its_tensors_are_is_all_the_ranks_own() -> None:
    assert ownership.unpack(b"", 17) == [(0, 17)]
    assert ownership.unpack(b"", 0) == []


@pytest.mark.parametrize("spans", [[(0, 9)], [(-1, 2)], [(3, 2)]])
def test_spans_outside_of_the_slot_are_refused(spans: list[tuple[int, int]]) -> None:
    text = json.dumps(spans).encode()
    with pytest.raises(CheckpointError, match="makes no sense"):
        ownership.unpack(digest.short(text).to_bytes(8, "little") + text, 8)


def test_spans_come_back_merged_and_in_order() -> None:
    packed = ownership.pack([(8, 12), (0, 4), (4, 8), (20, 20), (16, 18)])
    assert ownership.unpack(packed, 18) == [(0, 12), (16, 18)]
