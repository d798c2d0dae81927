from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Sequence

import pytest

from resilience.launcher.ranks import assign, infra_rank
from resilience.launcher.roster import Member

RUNS = 400


def member(
    id_: str, infra: int | None = None, rank: int | None = None, group: str = "", index: int | None = None
) -> Member:
    return Member(id_, id_.partition("_")[0], infra, rank, group, index)


def in_order(ranks: dict[str, int]) -> list[str]:
    """The members as they stand in the job."""
    return sorted(ranks, key=lambda id_: ranks[id_])


def node(number: int) -> str:
    return f"node-{number}_77"


def some_members(rng: random.Random) -> list[Member]:
    """Members of any round: with and without ranks of either kind, given twice and out of range."""
    numbers = rng.sample(range(200), rng.randint(1, 12))
    return [
        member(
            node(number),
            rng.choice([None, rng.randrange(4), number]),
            rng.choice([None, rng.randrange(4), rng.randrange(16)]),
        )
        for number in numbers
    ]


def numbered(ids: Sequence[str]) -> list[int]:
    return [int(id_.removeprefix("node-").removesuffix("_77")) for id_ in ids]


# -- the infrastructure's rank ----------------------------------------------------------------------------------------


def test_slurms_rank_comes_before_a_launchers_and_that_before_kubernetes() -> None:
    environ = {"JOB_COMPLETION_INDEX": "3", "GROUP_RANK": "2", "SLURM_PROCID": "1", "RANK": "9", "SLURM_NODEID": "8"}
    found = []
    while (rank := infra_rank(environ)) is not None:
        found.append(rank)
        del environ[{1: "SLURM_PROCID", 2: "GROUP_RANK", 3: "JOB_COMPLETION_INDEX"}[rank]]
    assert found == [1, 2, 3]
    assert environ == {"RANK": "9", "SLURM_NODEID": "8"}


def test_rank_0_is_a_rank() -> None:
    assert infra_rank({"SLURM_PROCID": "0", "GROUP_RANK": "5"}) == 0


@pytest.mark.parametrize("garbage", ["", " ", "one", "-1", "1.5", "0x1", "1,2", "None", "%t", " 1"])
def test_variable_that_holds_no_number_is_passed_over(garbage: str) -> None:
    assert infra_rank({"SLURM_PROCID": garbage, "GROUP_RANK": garbage, "JOB_COMPLETION_INDEX": "7"}) == 7
    assert infra_rank({"SLURM_PROCID": garbage, "GROUP_RANK": garbage, "JOB_COMPLETION_INDEX": garbage}) is None


def test_character_that_only_looks_like_a_digit_is_passed_over() -> None:
    assert infra_rank({"SLURM_PROCID": "²", "GROUP_RANK": "4"}) == 4


# -- by the infrastructure's ranks ------------------------------------------------------------------------------------


def test_infrastructures_ranks_decide_whatever_a_node_had_before() -> None:
    members = [member("a", 2, rank=0), member("b", 0, rank=1), member("c", 1, rank=2)]
    assert assign(members, by_infra=True) == {"b": 0, "c": 1, "a": 2}


def test_hole_in_the_infrastructures_ranks_leaves_none_in_ours() -> None:
    members = [member("a", 70), member("b", 3), member("c", 12)]
    assert assign(members, by_infra=True) == {"b": 0, "c": 1, "a": 2}


def test_nodes_without_a_rank_from_the_infrastructure_come_last_in_the_order_of_their_names() -> None:
    members = [member("node-10", None, rank=0), member("node-9"), member("z", 1), member("y", 0)]
    assert in_order(assign(members, by_infra=True)) == ["y", "z", "node-9", "node-10"]


def test_nodes_keep_their_ranks_where_the_infrastructure_gives_none() -> None:
    """What is in their memory is that of their ranks: a newcomer takes the lost node's place, whatever its name."""
    members = [member("z", rank=1), member("newcomer")]
    assert assign(members, by_infra=True) == {"newcomer": 0, "z": 1}


def test_nodes_that_claim_the_same_rank_are_put_in_order_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    members = [member("node-10", 1), member("last", 2), member("node-9", 1), member("first", 0)]
    with caplog.at_level(logging.WARNING, logger="resilience.launcher"):
        assert in_order(assign(members, by_infra=True)) == ["first", "node-9", "node-10", "last"]
    assert "same rank" in caplog.text


def test_nodes_with_ranks_of_their_own_raise_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="resilience.launcher"):
        assign([member("a", 0), member("b", 1), member("c"), member("d")], by_infra=True)
    assert not caplog.records


# -- by the ranks they had --------------------------------------------------------------------------------------------


def test_first_round_is_put_in_natural_order_and_not_in_that_of_the_alphabet() -> None:
    members = [
        member(id_) for id_ in ("node-10_5", "node-9_123", "node-9_22", "node-100_1", "10.0.0.9_1", "10.0.0.10_1")
    ]
    expected = ["10.0.0.9_1", "10.0.0.10_1", "node-9_22", "node-9_123", "node-10_5", "node-100_1"]
    assert in_order(assign(members, by_infra=False)) == expected


def test_infrastructures_ranks_are_ignored_when_they_are_not_wanted() -> None:
    assert assign([member("a", 1), member("b", 0)], by_infra=False) == {"a": 0, "b": 1}


def test_newcomer_fills_the_gap_and_nobody_else_moves() -> None:
    members = [member("z", rank=0), member("a"), member("y", rank=2)]
    assert assign(members, by_infra=False) == {"z": 0, "a": 1, "y": 2}


def test_newcomers_fill_several_gaps_in_natural_order() -> None:
    members = [member("node-10"), member("k", rank=1), member("node-9"), member("node-11"), member("m", rank=3)]
    assert assign(members, by_infra=False) == {"node-9": 0, "k": 1, "node-10": 2, "m": 3, "node-11": 4}


def test_node_whose_rank_is_beyond_a_world_that_shrank_gets_a_gap() -> None:
    members = [member("a", rank=3), member("b", rank=1), member("c", rank=2)]
    assert assign(members, by_infra=False) == {"a": 0, "b": 1, "c": 2}


def test_last_node_of_a_world_that_shrank_to_one_has_rank_0() -> None:
    for by_infra in (True, False):
        assert assign([member("a", infra=6, rank=5)], by_infra) == {"a": 0}


def test_two_nodes_that_had_the_same_rank_do_not_both_get_it() -> None:
    members = [member("b", rank=1), member("a", rank=1), member("c", rank=0)]
    assert assign(members, by_infra=False) == {"c": 0, "a": 1, "b": 2}


def test_nodes_whose_names_differ_by_a_leading_zero_get_the_same_ranks_in_any_order() -> None:
    members = [member("node-01_5"), member("node-1_5")]
    for by_infra in (True, False):
        assert assign(members, by_infra) == assign(members[::-1], by_infra)


def test_character_that_only_looks_like_a_digit_may_be_in_a_name() -> None:
    assert in_order(assign([member("x²_2"), member("x²_1")], by_infra=False)) == ["x²_1", "x²_2"]


# -- whatever the members ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_infra", [True, False])
def test_ranks_are_0_to_n_less_1_for_any_members(by_infra: bool) -> None:
    rng = random.Random(1)
    for _ in range(RUNS):
        members = some_members(rng)
        ranks = assign(members, by_infra)
        assert set(ranks) == {it.id for it in members}
        assert sorted(ranks.values()) == list(range(len(members))), members


@pytest.mark.parametrize("by_infra", [True, False])
def test_order_in_which_the_members_are_listed_does_not_matter(by_infra: bool) -> None:
    rng = random.Random(2)
    for _ in range(RUNS):
        members = some_members(rng)
        shuffled = rng.sample(members, len(members))
        assert assign(members, by_infra) == assign(shuffled, by_infra), members


def test_order_by_infrastructure_is_that_of_its_ranks_for_any_members() -> None:
    rng = random.Random(3)
    for _ in range(RUNS):
        members = some_members(rng)
        given = {it.id: it.infra for it in members}
        placed = [given[id_] for id_ in in_order(assign(members, by_infra=True))]
        with_rank = [infra for infra in placed if infra is not None]
        assert placed == [*sorted(with_rank), *[None] * (len(placed) - len(with_rank))], members


def test_rank_that_only_one_node_had_and_that_exists_is_kept_for_any_members() -> None:
    rng = random.Random(4)
    kept = 0
    for _ in range(RUNS):
        members = some_members(rng)
        ranks = assign(members, by_infra=False)
        had = [it.rank for it in members]
        for it in members:
            if it.rank is not None and it.rank < len(members) and had.count(it.rank) == 1:
                assert ranks[it.id] == it.rank, members
                kept += 1
    assert kept > RUNS, "the members were not such that it could have failed"


def test_newcomers_stand_in_natural_order_among_themselves_for_any_members() -> None:
    rng = random.Random(5)
    for _ in range(RUNS):
        members = some_members(rng)
        ranks = assign(members, by_infra=False)
        new = numbered([id_ for id_ in in_order(ranks) if {it.id: it.rank for it in members}[id_] is None])
        assert new == sorted(new), members


def test_second_round_of_the_same_nodes_gives_the_ranks_of_the_first() -> None:
    rng = random.Random(6)
    for _ in range(RUNS):
        members = some_members(rng)
        for by_infra in (True, False):
            first = assign(members, by_infra)
            again = [dataclasses.replace(it, rank=first[it.id]) for it in rng.sample(members, len(members))]
            assert assign(again, by_infra) == first


# -- groups of nodes --------------------------------------------------------------------------------------------------


def groups_of(members: Sequence[Member], ranks: dict[str, int]) -> list[str | int | None]:
    """The group of each rank, in the order of ranks."""
    by_id = {it.id: it.group_index if it.group_index is not None else it.group or None for it in members}
    return [by_id[id_] for id_ in in_order(ranks)]


def test_ranks_are_contiguous_within_a_group_and_the_infrastructures_order_holds_in_it() -> None:
    members = [member("a", 0, index=1), member("b", 1, index=0), member("c", 2, index=1), member("d", 3, index=0)]
    assert assign(members, by_infra=True) == {"b": 0, "d": 1, "a": 2, "c": 3}


def test_groups_come_in_the_order_of_their_indices_and_not_of_the_alphabet() -> None:
    members = [member(f"n{index}", index=index, group=f"rack-{99 - index}") for index in (10, 9, 2)]
    assert in_order(assign(members, by_infra=True)) == ["n2", "n9", "n10"]


def test_node_without_a_group_keeps_its_place_where_that_tears_none_apart_and_else_follows_the_groups() -> None:
    members = [member("loner", 0), member("x", 5, group="rack-b"), member("y", 1, group="rack-a")]
    assert in_order(assign(members, by_infra=True)) == ["loner", "y", "x"]
    between = [*members, member("z", 9, group="rack-a")]
    assert in_order(assign(between, by_infra=True)) == ["y", "z", "x", "loner"]


def test_replacement_that_does_not_know_its_group_moves_nobody() -> None:
    """What is in the others' memory is that of their ranks."""
    members = [member("new", 0), member("a1", 1, rank=1, group="a"), member("b0", 2, rank=2, group="b")]
    assert assign(members, by_infra=True) == {"new": 0, "a1": 1, "b0": 2}


def test_groups_keep_their_order_also_where_the_infrastructures_order_is_another_by_now() -> None:
    members = [
        member("a1", 3, rank=1, group="a"),
        member("b0", 1, rank=2, group="b"),
        member("b1", 2, rank=3, group="b"),
    ]
    assert groups_of(members, assign(members, by_infra=True)) == ["a", "b", "b"]


def test_newcomer_takes_the_place_in_its_group_and_nobody_else_moves() -> None:
    members = [
        member("a0", rank=0, group="a"), member("new", group="a"), member("b0", rank=2, group="b"), member("b1", rank=3, group="b"),
    ]  # fmt: skip
    assert assign(members, by_infra=True) == {"a0": 0, "new": 1, "b0": 2, "b1": 3}


def test_group_that_moved_to_another_rack_keeps_its_place_by_its_index() -> None:
    members = [
        member("b0", rank=2, group="rack-2", index=1), member("b1", rank=3, group="rack-2", index=1),
        member("z0", group="rack-9", index=0), member("z1", group="rack-9", index=0),
    ]  # fmt: skip
    assert assign(members, by_infra=False) == {"z0": 0, "z1": 1, "b0": 2, "b1": 3}


def test_group_with_a_name_only_takes_the_gap_that_another_left() -> None:
    members = [
        member("b0", rank=2, group="b"),
        member("b1", rank=3, group="b"),
        member("z0", group="z"),
        member("z1", group="z"),
    ]
    assert assign(members, by_infra=False) == {"z0": 0, "z1": 1, "b0": 2, "b1": 3}
    larger = [*members, member("z2", group="z")]
    assert groups_of(larger, assign(larger, by_infra=False)) == ["b", "b", "z", "z", "z"]


def test_groups_keep_their_order_when_one_of_them_shrinks() -> None:
    members = [member("z0", rank=1, group="z"), member("a0", rank=2, group="a"), member("a1", rank=3, group="a")]
    assert groups_of(members, assign(members, by_infra=False)) == ["z", "a", "a"]


def test_newcomer_of_a_known_group_does_not_change_the_order_of_groups() -> None:
    members = [
        member("z0", rank=0, group="z"),
        member("a0", rank=1, group="a"),
        member("a1", group="a"),
        member("z1", group="z"),
    ]
    assert groups_of(members, assign(members, by_infra=False)) == ["z", "z", "a", "a"]


@pytest.mark.parametrize("by_infra", [True, False])
def test_whatever_comes_together_every_group_is_one_block_and_every_rank_is_given_once(by_infra: bool) -> None:
    for seed in range(RUNS):
        rng = random.Random(seed)
        members = [
            dataclasses.replace(
                it, group=rng.choice(["", "a", "b", "c10", "c9"]), group_index=rng.choice([None, None, 0, 1])
            )
            for it in some_members(rng)
        ]
        ranks = assign(members, by_infra)
        assert sorted(ranks.values()) == list(range(len(members)))
        assert ranks == assign(rng.sample(members, len(members)), by_infra)
        found = groups_of(members, ranks)
        starts = [it for rank, it in enumerate(found) if it is not None and (rank == 0 or found[rank - 1] != it)]
        assert len(starts) == len(set(starts)), found
        again = [dataclasses.replace(it, rank=ranks[it.id]) for it in members]
        assert assign(again, by_infra) == ranks, "a restart with the same nodes changes nothing"
