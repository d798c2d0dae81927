"""What another number of ranks left in memory: when it is whole, what it is worth, and whose values a rank is given."""

from __future__ import annotations

from typing import Any

import pytest

from resilience.checkpoint.saver.heritage import Estate, Share, lacking
from resilience.checkpoint.saver.reach import inherited
from resilience.checkpoint.saver.restoring import DISK, MEMORY, Agreement, Candidate, candidates
from resilience.checkpoint.shards import Piece


def piece(name: str, start: int, rows: int, of: int) -> Piece:
    return Piece(name, "F32", (rows, 3), 0, rows * 12, (of, 3), (start, 0))


def estate(world: int, *ranks: int) -> Estate:
    shares = {rank: Share(rank, rank, {"rank": rank}, [rank], [], lambda rank=rank: [str(rank)]) for rank in ranks}  # type: ignore[misc]
    return Estate((1, 5), world, shares)


def test_tensor_is_whole_if_its_pieces_cover_it() -> None:
    assert lacking([piece("a", 0, 2, 5), piece("a", 2, 3, 5), piece("b", 0, 4, 4)]) == []


def test_tensor_that_misses_a_row_is_named() -> None:
    assert lacking([piece("a", 0, 2, 5), piece("a", 3, 2, 5), piece("b", 0, 4, 4)]) == ["a"]


def test_pieces_of_tensors_of_one_name_and_other_shapes_are_not_put_together() -> None:
    """Each rank's own: one has more rows than the other."""
    assert lacking([piece("own", 0, 2, 2), piece("own", 0, 3, 3)]) == []
    assert lacking([piece("own", 0, 1, 2), piece("own", 1, 2, 3)]) == ["own"]


@pytest.mark.parametrize(
    ("world", "here", "rank", "giver"),
    [(2, (0, 1), 1, 1), (2, (0, 1), 2, 0), (3, (2,), 0, 2), (3, (1, 2), 5, 1)],
    ids=["its own", "new: those of rank 0", "lost: another's", "new, and rank 0's lost"],
)
def test_rank_is_given_its_own_values_where_they_are(world: int, here: tuple[int, ...], rank: int, giver: int) -> None:
    assert estate(world, *here).giver(rank) == giver


def test_it_is_exact_only_if_every_rank_is_given_what_the_disk_would_give() -> None:
    assert estate(2, 0, 1).is_exact([0, 1, 2])
    assert estate(2, 0).is_exact([0])
    assert not estate(2, 0).is_exact([0, 1])
    assert not estate(2, 1).is_exact([2])


def test_every_share_is_checked_by_one_rank() -> None:
    told = [estate(3, 0, 1, 2).describe(rank, [0, 1]) for rank in (0, 1)]
    checked = [peer["rank"] for message, _ in told for peer in message["peers"] if "digests" in peer]
    assert sorted(checked) == [0, 1, 2]
    assert told[0][1] == (0, 1, 2)


def test_rank_that_is_given_values_of_another_is_told_so() -> None:
    message, _ = estate(2, 1).describe(0, [0])
    assert (message["giver"], message["stranger"], message["world"]) == (1, True, 2)


def test_only_what_all_nodes_have_whole_is_inherited() -> None:
    asks = {0: {"inherited": [(1, 5, True), (1, 6, True)]}, 1: {"inherited": [(1, 5, False)]}}
    assert inherited(asks) == {(1, 5): False}
    assert inherited({0: {"inherited": [(1, 5, True)]}, 1: {}}) == {}


def test_of_one_step_memory_goes_before_an_exact_heritage_then_disk_then_one_that_lacks_values() -> None:
    disk = [Candidate((1, step), DISK, str(step)) for step in (4, 5, 6)]
    found = candidates([(1, 6)], disk, {(1, 6): True, (1, 5): True, (1, 4): False})
    assert [(item.key[1], item.where, item.inherited) for item in found] == [
        *(
            (6, MEMORY, False),
            (6, DISK, False),
            (5, MEMORY, True),
            (5, DISK, False),
            (4, DISK, False),
            (4, MEMORY, True),
        )
    ]


def test_what_was_inherited_is_fetched_from_nobody() -> None:
    ask: dict[str, Any] = {
        "step": None,
        "fresh": True,
        "timeout": 1,
        "memory": [],
        "disk": [],
        "tries": [],
        "left_out": [],
    }
    agreement = Agreement()
    agreement.ask(0, {**ask, "inherited": [(1, 5, False)]}, 0.0)
    agreement.choose((0, -1))
    assert agreement.choice == Candidate((1, 5), MEMORY, inherited=True)
    assert agreement.fetch() == []
