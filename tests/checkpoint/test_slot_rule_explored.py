"""The slot rule holds in every state that can be reached, whoever is slow and whoever dies: all of them are visited.

Small numbers of ranks, slots and saves, every interleaving (:mod:`tests.checkpoint.slot_machine` has the steps). The same
exploration finds each of several wrong rules: otherwise it would show nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest

from resilience.checkpoint import slots
from resilience.checkpoint.slots import Slot
from tests.checkpoint.slot_machine import BrokenRule, Limits, Rules, World, in_memory, moves, start

# A state in which every rank has so many saves left, and from which nothing new can be completed, is a deadlock.
ENOUGH_SAVES = 2


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """States are tuples without cycles; looking through millions of them for cycles would take most of the time."""
    gc.disable()
    yield
    gc.enable()


def check(world: World) -> None:
    """Raise :class:`BrokenRule` if what was acknowledged can't be restored."""
    found = in_memory(world)
    if world.acknowledged is not None and (not found or found[0] < world.acknowledged):
        raise BrokenRule(f"{world.acknowledged} was acknowledged, and there is only {found}: {world}")
    if world.replicated is not None and world.replicated not in found:
        raise BrokenRule(f"{world.replicated} was replicated, and there is only {found}: {world}")


def completes(before: World, after: World) -> bool:
    """Whether a step acknowledges a snapshot that is newer than all before."""
    told = bool(before.ops) and before.ops[0][0] == "tell complete"
    return told and after.acknowledged != before.acknowledged


def explore(limits: Limits, rules: Rules | None = None) -> int:
    """Visit every state; return how many there are. Raises :class:`BrokenRule`."""
    rules = rules or Rules()
    worlds = [start(limits)]
    numbers = {worlds[0]: 0}
    reached_from: list[list[int]] = [[]]
    good: list[int] = []  # states from which the next step completes a snapshot
    for number, world in enumerate(worlds):  # grows while it is gone through
        check(world)
        for after in moves(world, limits, rules):
            known = numbers.get(after)
            if known is None:
                known = numbers[after] = len(worlds)
                worlds.append(after)
                reached_from.append([])
            reached_from[known].append(number)
            if completes(world, after):
                good.append(number)
    find_deadlocks(worlds, reached_from, good, limits)
    return len(worlds)


def find_deadlocks(worlds: Sequence[World], reached_from: list[list[int]], good: list[int], limits: Limits) -> None:
    """Raise :class:`BrokenRule` for a state from which no snapshot can be completed any more, though saves are left."""
    live = bytearray(len(worlds))
    waiting = good
    while waiting:
        number = waiting.pop()
        if not live[number]:
            live[number] = 1
            waiting += reached_from[number]
    for number, world in enumerate(worlds):
        left = limits.saves - max(rank.tries for rank in world.ranks)
        if not live[number] and left >= ENOUGH_SAVES:
            raise BrokenRule(f"nothing can be completed from here: {world}")


@pytest.mark.parametrize(
    "limits",
    [
        Limits(ranks=2, slots=2, saves=5, crashes=0, saver_deaths=1, writes=2),
        pytest.param(Limits(ranks=2, slots=2, saves=5, crashes=0, saver_deaths=0, failures=1), marks=pytest.mark.long),
        pytest.param(Limits(ranks=2, slots=2, saves=4, crashes=1, saver_deaths=1), marks=pytest.mark.long),
        pytest.param(Limits(ranks=2, slots=2, saves=3, crashes=2, saver_deaths=0, writes=0), marks=pytest.mark.long),
        Limits(ranks=2, slots=3, saves=5, crashes=0, saver_deaths=1),
        pytest.param(Limits(ranks=2, slots=3, saves=4, crashes=1, saver_deaths=0), marks=pytest.mark.rare),
        Limits(ranks=2, slots=3, saves=3, crashes=1, saver_deaths=1),
        pytest.param(Limits(ranks=3, slots=2, saves=3, crashes=0, saver_deaths=1), marks=pytest.mark.rare),
        Limits(ranks=3, slots=2, saves=2, crashes=1, saver_deaths=1, together=True),
        Limits(ranks=3, slots=2, saves=3, crashes=1, saver_deaths=0, writes=0, together=True),
    ],
    ids=str,
)
def test_what_was_acknowledged_can_be_restored_in_every_state_and_there_is_always_a_way_on(limits: Limits) -> None:
    assert explore(limits) > 10_000


@pytest.mark.parametrize(
    "limits",
    [
        Limits(ranks=2, slots=3, saves=4, crashes=0, saver_deaths=0, writes=0, sends=2),
        Limits(ranks=2, slots=3, saves=3, crashes=0, saver_deaths=1, writes=0, sends=2),
        Limits(ranks=2, slots=3, saves=3, crashes=0, saver_deaths=0, writes=1, sends=1),
        Limits(ranks=2, slots=3, saves=3, crashes=1, saver_deaths=0, writes=0, sends=1, together=True),
        pytest.param(
            Limits(ranks=2, slots=4, saves=4, crashes=0, saver_deaths=0, writes=0, sends=2), marks=pytest.mark.rare
        ),
        pytest.param(
            Limits(ranks=2, slots=2, saves=4, crashes=0, saver_deaths=0, writes=0, sends=2), marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_what_other_nodes_have_copies_of_is_kept_by_all_ranks_until_there_is_a_newer_one(limits: Limits) -> None:
    assert explore(limits) > 10_000


@pytest.mark.parametrize("number", [2, 3])
def test_ranks_that_run_far_apart_lose_nothing(number: int) -> None:
    assert explore(Limits(ranks=2, slots=number, saves=4, lead=3, crashes=0, saver_deaths=1, writes=2)) > 10_000


# -- the exploration can fail ---------------------------------------------------------------------------------------------


def overwrites_pending(found: Sequence[Slot], newest_complete: int) -> int | None:
    """A wrong rule: what is not decided yet may go."""
    return slots.choose(
        [slot if slot.serial <= newest_complete else Slot(0, 0, slot.leased) for slot in found], newest_complete
    )


def overwrites_the_newest(found: Sequence[Slot], newest_complete: int) -> int | None:
    """A wrong rule: W itself may go."""
    return slots.choose(found, newest_complete + 1)


def forgets_leases(found: Sequence[Slot], newest_complete: int) -> int | None:
    """A wrong rule: what is older than W may go even while it is written to disk."""
    return slots.choose([Slot(slot.serial, slot.decision) for slot in found], newest_complete)


SMALL = Limits(ranks=2, slots=2, saves=4, crashes=0, saver_deaths=0, writes=2)
SENDING = Limits(ranks=2, slots=3, saves=4, crashes=0, saver_deaths=0, writes=0, sends=2)


@pytest.mark.parametrize(
    ("rules", "limits", "what"),
    [
        (Rules(choose=overwrites_pending), SMALL, "has overwritten it|was acknowledged"),
        (Rules(choose=overwrites_the_newest), SMALL, "was acknowledged"),
        (Rules(choose=forgets_leases), SMALL, "leased"),
        (Rules(choose=lambda found, newest: None), SMALL, "nothing can be completed"),
        (Rules(leases_before_w=False), SMALL, "has overwritten|leased"),
        (Rules(void_is_not_leased=False), Limits(2, 2, 3, crashes=1, saver_deaths=0), "has overwritten|leased"),
        (Rules(w_before_leases=False), SMALL, "leased|was acknowledged"),
        (Rules(new_generation=False), Limits(2, 2, 3, crashes=1, writes=0), "different cycles"),
        (Rules(leases_taken_over=False), Limits(2, 2, 4, crashes=0, saver_deaths=1), "nothing can be completed"),
        (Rules(chosen_is_complete=False), Limits(2, 2, 3, crashes=2, saver_deaths=0, writes=0), "was acknowledged"),
        (Rules(replicated_is_kept=False), SENDING, "was replicated"),
        (Rules(replicated_before_release=False), SENDING, "was replicated|has overwritten"),
        (Rules(replicated_read_last=False), SENDING, "was replicated|leased"),
        (Rules(replicated_told_again=False), Limits(2, 3, 4, crashes=0, writes=0, sends=2), "was replicated"),
    ],
    ids=[
        "pending ones may go",
        "W may go",
        "leased ones may go",
        "nothing may go",
        "what W has moved past is leased",
        "what is void is leased",
        "the rank reads W last",
        "a new cycle in the old generation",
        "leases of a dead saver stay",
        "what is gone back to stays void",
        "what is replicated may go",
        "the lease ends before it is said to be replicated",
        "the rank reads what is replicated before the leases",
        "a new saver does not say again what is replicated",
    ],
)
def test_wrong_rule_is_found(rules: Rules, limits: Limits, what: str) -> None:
    with pytest.raises(BrokenRule, match=what):
        explore(limits, rules)
