"""The slot rule as a state machine: ranks, their ledgers and a saver, in steps as small as those that other processes see.

A rank saves in four: it reads W, looks at its slots and chooses, takes the seal back (from here it writes), seals. A saver looks
at one rank after the other, decides, leases on one rank after the other, tells one rank after the other. Anybody may die between
any two. What is decided is decided by the real functions; what stands here are the words of the ledgers, as plain tuples.

With replication a snapshot is leased as one that is written is, until the chair knows that other nodes have copies of all of it;
then one rank after the other is told, and the lease ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from resilience.checkpoint import slots
from resilience.checkpoint.decisions import Key, RankView, decide, restorable
from resilience.checkpoint.slots import COMPLETE, PENDING, VOID, Slot

READ, CHOOSE, BEGIN, SEAL, DEAD, WAITING = range(6)
View = tuple[int, int, tuple[Key, ...], bool]  # as RankView
Op = tuple[str, int, Key | None]  # what, rank, which snapshot


class BrokenRule(AssertionError):  # noqa: N818 - reads as what it is
    """An invariant does not hold in a state that can be reached."""


class Cell(NamedTuple):
    """One slot. ``cycle`` stands for its bytes: which life of the job wrote them. ``serial`` 0: unsealed."""

    serial: int = 0
    key: Key = (0, 0)
    cycle: int = 0
    decision: int = PENDING
    leased: bool = False


class Rank(NamedTuple):
    """A rank and its ledger."""

    cells: tuple[Cell, ...]
    phase: int = WAITING
    step: int = 0  # to be saved next
    tries: int = 0  # steps that it was through with, in all its lives
    serial: int = 0
    w: int = 0
    r: int = 0  # serial of the newest REPLICATED
    generation: int = 1
    attempt: int = 0
    seen: tuple[Slot, ...] = ()  # what it has read of its slots (only with the wrong order)
    seen_w: int = 0
    seen_r: int = 0  # (only with the wrong order)
    target: int = -1


class World(NamedTuple):
    """Everything. A saver has no memory of its own but ``views``, ``ops`` and ``writing``, which die with it."""

    ranks: tuple[Rank, ...]
    views: tuple[View, ...] = ()
    ops: tuple[Op, ...] = ()
    writing: Key | None = None
    sending: Key | None = None
    replicated: Key | None = None  # the newest that the chair knows other nodes to have copies of
    sends: int = 0
    cycle: int = 1
    generation: int = 1
    acknowledged: Key | None = None
    crashes: int = 0
    saver_deaths: int = 0
    writes: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Rules:
    """The right rules, and how each can be broken, to see that it is noticed."""

    choose: Callable[[Sequence[Slot], int], int | None] = slots.choose
    leases_before_w: bool = True  # the saver leases nothing that W has moved past
    void_is_not_leased: bool = True
    w_before_leases: bool = True  # the rank reads W before the leases
    new_generation: bool = True  # a new cycle gets a generation of its own
    leases_taken_over: bool = True  # a new saver lets go of what the dead one had leased
    chosen_is_complete: bool = True  # what is gone back to is COMPLETE, even if it was void
    replicated_is_kept: bool = True
    replicated_before_release: bool = True  # the saver says so before the lease ends
    replicated_read_last: bool = True  # the rank reads that after the leases
    replicated_told_again: bool = True  # a new saver tells all ranks what one was told


@dataclass(frozen=True)
class Limits:
    """How far to look."""

    ranks: int
    slots: int
    saves: int  # steps that each rank tries to save
    lead: int = 1  # how many steps a rank may be ahead of the others
    crashes: int = 1
    saver_deaths: int = 1
    writes: int = 1  # snapshots that are written to disk
    failures: int = 0  # copies that fail
    sends: int = 0  # snapshots that are sent to other nodes
    together: bool = False  # whether ranks die all at once only


def start(limits: Limits) -> World:
    """Return the state in which everything is empty and all ranks save."""
    return World(tuple(Rank(tuple(Cell() for _ in range(limits.slots)), READ) for _ in range(limits.ranks)))


def in_memory(world: World) -> list[Key]:
    """Return what a restore would find: the real intersection of the seals."""
    return _restorable(tuple(sealed(rank.cells) for rank in world.ranks))


@cache
def sealed(cells: tuple[Cell, ...]) -> tuple[Key, ...]:
    """Return the snapshots in a rank's slots, oldest first."""
    return tuple(cell.key for cell in sorted(cells) if cell.serial)


@cache
def _restorable(seals: tuple[tuple[Key, ...], ...]) -> list[Key]:
    return restorable(dict(enumerate(seals)), len(seals))


@cache
def _decide(key: Key, views: tuple[View, ...]) -> int:
    return decide(key, {number: RankView(*view) for number, view in enumerate(views)}, len(views))


def with_rank(world: World, number: int, rank: Rank) -> World:
    return world._replace(ranks=(*world.ranks[:number], rank, *world.ranks[number + 1 :]))


def with_cell(rank: Rank, index: int, cell: Cell) -> Rank:
    return rank._replace(cells=(*rank.cells[:index], cell, *rank.cells[index + 1 :]))


def index_of(rank: Rank, key: Key | None) -> int | None:
    """Return the slot of a snapshot; of two seals of it the newer one."""
    found = [(cell.serial, index) for index, cell in enumerate(rank.cells) if cell.serial and cell.key == key]
    return max(found)[1] if found else None


def moves(world: World, limits: Limits, rules: Rules) -> Iterator[World]:
    """Yield every state that one step of anybody leads to."""
    for number, rank in enumerate(world.ranks):
        if rank.phase < DEAD:
            yield from rank_moves(world, number, rank, limits, rules)
            if world.crashes < limits.crashes and not limits.together:
                yield with_rank(world, number, dead(rank))
    if limits.together and world.crashes < limits.crashes and any(rank.phase < DEAD for rank in world.ranks):
        yield world._replace(ranks=tuple(dead(rank) for rank in world.ranks))
    if all(rank.phase == DEAD for rank in world.ranks):
        yield come_again(world, rules)
    yield from saver_moves(world, limits, rules)


# -- ranks --------------------------------------------------------------------------------------------------------------


def rank_moves(world: World, number: int, rank: Rank, limits: Limits, rules: Rules) -> Iterator[World]:
    """Yield the next step of a rank's save."""
    if rank.phase == READ:
        behind = min(other.step for other in world.ranks)
        if rank.tries < limits.saves and rank.step - behind <= limits.lead:
            seen = () if rules.w_before_leases else view_of(rank, rules)
            early = 0 if rules.replicated_read_last else rank.r
            yield with_rank(world, number, rank._replace(phase=CHOOSE, seen_w=rank.w, seen=seen, seen_r=early))
    elif rank.phase == CHOOSE:
        view = view_of(rank, rules)
        found = rules.choose(view, rank.seen_w) if rules.w_before_leases else rules.choose(rank.seen, rank.w)
        if found is None:
            yield with_rank(world, number, through(rank))
        else:
            yield with_rank(world, number, rank._replace(phase=BEGIN, target=found, seen=(), seen_w=0, seen_r=0))
    elif rank.phase == BEGIN:
        if rank.cells[rank.target].leased:
            raise BrokenRule(f"rank {number} writes into a slot that is leased: {world}")
        yield with_rank(world, number, with_cell(rank, rank.target, Cell())._replace(phase=SEAL))
    elif rank.phase == SEAL:
        fresh = Cell(rank.serial + 1, (rank.generation, rank.step), world.cycle)
        yield with_rank(world, number, through(with_cell(rank, rank.target, fresh))._replace(serial=rank.serial + 1))
        if world.failures < limits.failures:  # the copy failed: never sealed
            yield with_rank(world, number, through(rank))._replace(failures=world.failures + 1)


def view_of(rank: Rank, rules: Rules) -> tuple[Slot, ...]:
    kept = (rank.r if rules.replicated_read_last else rank.seen_r) if rules.replicated_is_kept else 0
    return tuple(Slot(cell.serial, cell.decision, cell.leased, 0 < cell.serial == kept) for cell in rank.cells)


def through(rank: Rank) -> Rank:
    """A rank that is through with a step, whatever came of it."""
    step, tries = rank.step + 1, rank.tries + 1
    return rank._replace(phase=READ, step=step, attempt=step, tries=tries, target=-1, seen=(), seen_w=0, seen_r=0)


def dead(rank: Rank) -> Rank:
    """A rank that was killed. What it was writing is unsealed, and stays so."""
    return rank._replace(phase=DEAD, target=-1, seen=(), seen_w=0, seen_r=0)


def come_again(world: World, rules: Rules) -> World:
    """All ranks are started again: what they seal from now on has a generation of its own."""
    generation = world.generation + rules.new_generation
    fresh = [rank._replace(phase=WAITING, generation=generation, attempt=0) for rank in world.ranks]
    return world._replace(
        ranks=tuple(fresh), generation=generation, cycle=world.cycle + 1, crashes=world.crashes + 1, views=()
    )


# -- the saver ----------------------------------------------------------------------------------------------------------


def saver_moves(world: World, limits: Limits, rules: Rules) -> Iterator[World]:
    """Yield what the saver may do next. It does one thing at a time, and is through with it before the next."""
    if world.saver_deaths < limits.saver_deaths and (world.ops or world.views or world.writing or world.sending):
        yield new_saver(world, rules)
    if world.ops:
        yield from obey(world, limits, rules)
        return
    yield look(world)
    if world.views:
        return
    if world.sending is not None:
        yield arrived(world)
    elif world.sends < limits.sends:  # the last one has arrived: the newest is next
        newest = next(iter(in_memory(world)), None)
        if newest is not None and newest != world.replicated and is_complete(world, newest):
            yield send(world, newest)._replace(ops=lease_ops(world, newest))
    if world.writing is not None:
        yield on_disk(world)
    elif world.writes < limits.writes:  # somebody died, or asks for it: the newest is to be durable
        keys = [key for key in in_memory(world) if not (rules.void_is_not_leased and is_void(world, key))]
        for newest in keys[:1] if rules.leases_before_w else keys:
            yield order(world, newest)._replace(ops=lease_ops(world, newest))
    waiting = all(rank.phase == WAITING for rank in world.ranks)
    if waiting and not decided(world, tuple(map(seen, world.ranks))):  # all is decided before anybody goes back
        for key in (*in_memory(world), None):
            back: list[Op] = [("back", number, key) for number in range(len(world.ranks))]
            yield world._replace(ops=(*back, ("go", 0, key)))


def look(world: World) -> World:
    """Read the next rank's ledger; after the last one, decide."""
    views = (*world.views, seen(world.ranks[len(world.views)]))
    if len(views) < len(world.ranks):
        return world._replace(views=views)
    return world._replace(views=(), ops=decided(world, views))


def seen(rank: Rank) -> View:
    return rank.generation, rank.attempt, sealed(rank.cells), rank.phase == DEAD


def decided(world: World, views: tuple[View, ...]) -> tuple[Op, ...]:
    """Decide about everything that is pending, oldest first."""
    pending = {cell.key for rank in world.ranks for cell in rank.cells if cell.serial and cell.decision == PENDING}
    found = [(key, _decide(key, views)) for key in sorted(pending)]
    return tuple(("complete" if what == COMPLETE else "void", 0, key) for key, what in found if what != PENDING)


def obey(world: World, limits: Limits, rules: Rules) -> Iterator[World]:
    """Do the next thing that was decided upon."""
    (what, number, key), rest = world.ops[0], world.ops[1:]
    world = world._replace(ops=rest)
    if what == "complete":
        yield from complete(world, key, limits)
    elif what == "replicated":
        yield world._replace(replicated=key, sending=None)
    elif what == "void":
        having = [number for number, rank in enumerate(world.ranks) if index_of(rank, key) is not None]
        yield world._replace(ops=(*(("tell void", number, key) for number in having), *rest))
    elif what == "go":
        acknowledged = key
        ready = [rank._replace(phase=READ, step=key[1] + 1 if key else 0) for rank in world.ranks]
        known = world.replicated if key and world.replicated and world.replicated <= key else None
        yield world._replace(ranks=tuple(ready), acknowledged=acknowledged, replicated=known)
    else:
        yield on_rank(world, what, number, key, rules)


def complete(world: World, key: Key | None, limits: Limits) -> Iterator[World]:
    """All ranks have it, as far as the saver saw: look again, lease it if it is to be written, and tell them."""
    assert key is not None
    held = [rank.cells[index] for rank in world.ranks if (index := index_of(rank, key)) is not None]
    if len(held) < len(world.ranks):
        yield world
        return
    if len({cell.cycle for cell in held}) > 1:
        raise BrokenRule(f"seals of different cycles are combined to {key}: {world}")
    tell: tuple[Op, ...] = tuple(("tell complete", number, key) for number in range(len(world.ranks)))
    yield world._replace(ops=(*tell, *world.ops))
    if world.writes < limits.writes and world.writing is None:
        lease = lease_ops(world, key)
        yield order(world, key)._replace(ops=(*lease, *tell, *world.ops))
    if world.sends < limits.sends and world.sending is None:
        yield send(world, key)._replace(ops=(*lease_ops(world, key), *tell, *world.ops))


def order(world: World, key: Key) -> World:
    return world._replace(writing=key, writes=world.writes + 1)


def send(world: World, key: Key) -> World:
    return world._replace(sending=key, sends=world.sends + 1)


def arrived(world: World) -> World:
    """Other nodes have copies of all of it: the chair knows, and tells one rank after the other."""
    tell: tuple[Op, ...] = tuple(("tell replicated", number, world.sending) for number in range(len(world.ranks)))
    return world._replace(ops=(("replicated", 0, world.sending), *tell))


def is_complete(world: World, key: Key) -> bool:
    """Whether every rank was told that all have a snapshot."""
    found = [rank.cells[index] for rank in world.ranks if (index := index_of(rank, key)) is not None]
    return all(cell.decision == COMPLETE for cell in found)


def lease_ops(world: World, key: Key) -> tuple[Op, ...]:
    return tuple(("lease", number, key) for number in range(len(world.ranks)))


def is_void(world: World, key: Key) -> bool:
    """Whether some rank may overwrite a snapshot because it is void."""
    return any(cell.key == key and cell.decision == VOID for rank in world.ranks for cell in rank.cells if cell.serial)


def on_rank(world: World, what: str, number: int, key: Key | None, rules: Rules) -> World:
    """Write into one rank's ledger."""
    rank = world.ranks[number]
    if what == "back":
        return with_rank(world, number, go_back(rank, key, rules))
    index = index_of(rank, key)
    if index is None:
        if what == "tell void":
            return world  # overwritten meanwhile, by a rank that knew
        raise BrokenRule(f"{what} {key}: rank {number} has overwritten it: {world}")
    cell = rank.cells[index]
    if what in ("tell replicated", "tell replicated late"):
        return tell_replicated(world, number, index, what, rules)
    if what == "lease":
        return with_rank(world, number, with_cell(rank, index, cell._replace(leased=True)))
    verdict = COMPLETE if what == "tell complete" else VOID
    rank = with_cell(rank, index, cell._replace(decision=verdict))
    if verdict == COMPLETE:
        rank = rank._replace(w=max(rank.w, cell.serial))
        world = world._replace(acknowledged=max(world.acknowledged or (0, 0), cell.key))
    return with_rank(world, number, rank)


def tell_replicated(world: World, number: int, index: int, what: str, rules: Rules) -> World:
    """Say that other nodes have copies, and let the slot go, unless it is being written to disk."""
    rank = world.ranks[number]
    cell = rank.cells[index]
    free = with_cell(rank, index, cell._replace(leased=cell.leased and world.writing == cell.key))
    if rules.replicated_before_release or what == "tell replicated late":
        return with_rank(world, number, free._replace(r=max(rank.r, cell.serial)))
    late: Op = ("tell replicated late", number, cell.key)
    return with_rank(world, number, free)._replace(ops=(late, *world.ops))


def go_back(rank: Rank, key: Key | None, rules: Rules) -> Rank:
    """As :meth:`Ledger.go_back_to`."""
    chosen = index_of(rank, key)
    rank = rank._replace(w=rank.cells[chosen].serial if chosen is not None else 0)
    kept = [cell.key for cell in rank.cells if cell.serial and cell.serial == rank.r]
    if not kept or key is None or kept[0] > key:
        rank = rank._replace(r=0)
    for index, cell in enumerate(rank.cells):
        if cell.serial and (key is None or cell.key > key):
            rank = with_cell(rank, index, cell._replace(decision=VOID))
        elif index == chosen and rules.chosen_is_complete:
            rank = with_cell(rank, index, cell._replace(decision=COMPLETE))
    return rank


def on_disk(world: World) -> World:
    """The snapshot is durable: its slots are let go."""
    for number, rank in enumerate(world.ranks):
        index = index_of(rank, world.writing)
        if index is None:
            raise BrokenRule(f"rank {number} has overwritten what was being written to disk: {world}")
        sent = world.sending == world.writing
        world = with_rank(world, number, with_cell(rank, index, rank.cells[index]._replace(leased=sent)))
    return world._replace(writing=None)


def new_saver(world: World, rules: Rules) -> World:
    """The saver dies, another one takes over what is in the ledgers. What one rank knows to be REPLICATED all are told, before the
    lease of it ends; what was on its way is not any more."""
    known = [cell.key for rank in world.ranks for cell in rank.cells if cell.serial and cell.serial == rank.r]
    last = max(known, default=None)
    tell: tuple[Op, ...] = ()
    if last is not None and rules.replicated_told_again:
        having = [number for number, rank in enumerate(world.ranks) if index_of(rank, last) is not None]
        tell = tuple(("tell replicated", number, last) for number in having)
    ranks = world.ranks
    if rules.leases_taken_over:
        ranks = tuple(
            rank._replace(
                cells=tuple(
                    cell._replace(leased=bool(tell) and cell.leased and cell.key == last) for cell in rank.cells
                )
            )
            for rank in ranks
        )
    # Nobody was told of what the dead one alone knew to be REPLICATED.
    replicated = last if world.replicated is not None else None
    world = world._replace(ranks=ranks, views=(), ops=tell, writing=None, sending=None, replicated=replicated)
    return world._replace(saver_deaths=world.saver_deaths + 1)
