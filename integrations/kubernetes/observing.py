"""What the pods of a job say about its seats, now. Pure: the record and the pods in, the record as it is now out.

Rule: a seat is known once a pod with a group has held it on a node. From then on it is either held or missed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from resilience.integrations.kubernetes.members import ANONYMOUS, Member
from resilience.integrations.kubernetes.memory import Record, Seat

from resilience.groups import escalation


def observe(record: Record, members: Sequence[Member], now: float) -> Record:
    """Return the record after a look at all pods of the job."""
    found = copy.deepcopy(record)
    found.state = escalation.not_ahead(found.state, now)  # another replica's clock may have been ahead
    found.marked = {node: min(since, now) for node, since in found.marked.items()}
    found.origins = _origins(members) or found.origins
    doomed = set(record.doomed.values())
    held = {it.seat: it for it in members if it.filled and it.uid not in doomed}
    for it in members:
        if it.finished and it.seat not in held:
            _leave(found, it.seat)
    _taken_away(found, members)
    for name, seat in found.seats.items():  # first who is missed, then who comes: it may be the one who takes over
        if name not in held:
            found.state = escalation.lost(found.state, seat.group, name, now, _why(name, seat, members))
    for it in sorted(held.values(), key=lambda it: (it.created, it.name)):
        _seat(found, it)
        if it.seat in found.seats:
            found.state = escalation.placed(found.state, found.seats[it.seat].group, it.seat)
    return found


def _seat(record: Record, held: Member) -> None:
    """Note who sits where. One that comes anew and can't be told from others takes the seat of one that is gone."""
    known = record.seats.get(held.seat)
    group = held.place.key or (known.group if known else "")
    if known is None and held.seat.startswith(ANONYMOUS):
        gone = _vacant(record, group, elsewhere=held.place.index is None)
        if gone is not None:
            group = group or record.seats[gone].group
            _leave(record, gone)
    if not group:
        return
    if known is not None and known.group != group:
        record.state = escalation.placed(record.state, known.group, held.seat)
    record.seats[held.seat] = Seat(group, held.place.name or (known.rack if known else ""), held.node, held.name)


def _vacant(record: Record, group: str, *, elsewhere: bool) -> str | None:
    """Return the seat that has been empty for longest, in the group if there is one; ``elsewhere``: else in any.

    A group that is only the name of a rack is where a pod landed, and not where it belongs: its successor may land in another.
    """
    empty = [
        (incident.absent[name].since, name, key)
        for key, incident in record.state.incidents.items()
        for name in incident.absent
        if name.startswith(ANONYMOUS) and name in record.seats
    ]
    own = [it for it in empty if it[2] == group]
    return min(own or (empty if elsewhere else []), default=(0.0, None, ""))[1]


def _leave(record: Record, name: str) -> None:
    seat = record.seats.pop(name, None)
    record.plain.pop(name, None)
    if seat is not None:
        record.state = escalation.placed(record.state, seat.group, name)


def _taken_away(record: Record, members: Sequence[Member]) -> None:
    """Forget groups of plain pods of which none is left: nobody but people takes them all."""
    present = {it.seat for it in members}
    for group in {seat.group for seat in record.seats.values()}:
        names = [name for name, seat in record.seats.items() if seat.group == group]
        incident = record.state.incidents.get(group)
        moves = incident is not None and incident.moved_at is not None
        if not moves and all(name in record.plain for name in names) and not present & set(names):
            for name in names:
                _leave(record, name)
            record.state = escalation.over(record.state, group)


def is_anothers(record: Record, members: Sequence[Member]) -> bool:
    """Whether the record is of an earlier job of the same name: all pods that live now have owners that it does not know."""
    origins = set(_origins(members))
    return bool(record.origins and origins) and not {*record.origins, ""} & origins


def _origins(members: Sequence[Member]) -> list[str]:
    return sorted({it.origin for it in members if it.lives})


def idle(record: Record, members: Sequence[Member]) -> set[str]:
    """Return the groups in which nobody has a node. Nothing holds them where they were: whoever makes their pods again may have
    them placed anywhere, and a job that has ended waits for nobody. Plain pods of a job that lives are made again here only."""
    held = {record.seats[it.seat].group for it in members if it.filled and it.seat in record.seats}
    if any(it.lives for it in members):
        held |= {record.seats[name].group for name in record.plain if name in record.seats}
    return record.state.incidents.keys() - held


def stranded(record: Record, members: Sequence[Member]) -> set[str]:
    """Return the groups with a plain pod that was lost after all that a move is to make again was made: nobody else makes it."""
    if record.doomed or record.making:
        return set()
    there = {it.seat for it in members if it.lives}
    return {seat.group for name, seat in record.seats.items() if name in record.plain and name not in there}


def waiting(record: Record, members: Sequence[Member]) -> dict[str, str]:
    """Return the pods that wait for a node in the place of those that are missed, by the seat."""
    doomed = set(record.doomed.values())
    free = sorted((it for it in members if it.waits and it.uid not in doomed), key=lambda it: (it.created, it.name))
    found = {it.seat: it.name for it in free if it.seat in record.seats}
    anybody = [it.name for it in free if it.seat.startswith(ANONYMOUS) and it.seat not in record.seats]
    empty = [name for name in record.seats if name.startswith(ANONYMOUS) and name not in found]
    missed = [name for name in empty if any(name in it.absent for it in record.state.incidents.values())]
    return {**found, **dict(zip(missed, anybody, strict=False))}


def _why(name: str, seat: Seat, members: Sequence[Member]) -> str:
    mine = [it for it in members if it.seat == name]
    newest = max(mine, key=lambda it: (it.created, it.uid), default=None)
    return newest.why if newest is not None else f"pod {seat.pod or name} is gone"


def is_over(record: Record, members: Sequence[Member], now: float, patience_s: float) -> bool:
    """Whether there is nothing to look after any more: no pods, or only finished ones, and none that are on their way."""
    if any(not it.finished for it in members) or record.doomed or record.making:
        return False
    moves = [it.moved_at for it in record.state.incidents.values() if it.moved_at is not None]
    return bool(members) or not moves or now - max(moves) > patience_s
