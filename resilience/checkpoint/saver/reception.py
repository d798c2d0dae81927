"""Where the ranks of this node come to restore: their word is collected for the chair, and its word is passed on to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from resilience.checkpoint.decisions import Key
from resilience.checkpoint.saver import clerk, copies
from resilience.checkpoint.saver.book import Book
from resilience.checkpoint.saver.chair import Message
from resilience.checkpoint.saver.heritage import estate_of, estates
from resilience.checkpoint.saver.restoring import DISK, MEMORY, Round, in_words
from resilience.checkpoint.stores import Kept
from resilience.errors import CheckpointError

_LOG = logging.getLogger("resilience.saver")
_CHAIR_S = 5.0  # the chair gives up before we do: it knows who is missing elsewhere
Tell = Callable[..., None]  # a message, and descriptors


@dataclass
class Meeting:
    """The ranks of one book that agree on what to go on from."""

    round: Round
    deadline: float
    tell: dict[int, Tell] = field(default_factory=dict)
    fresh: bool = True  # all ranks would begin afresh if there is nothing
    timeout: float = 0.0


class Reception:
    """The meetings of all books."""

    def __init__(self) -> None:
        self._meetings: dict[int, tuple[Book, Meeting]] = {}  # by id of the book

    # -- what ranks say ---------------------------------------------------------------------------------------------

    def ask(self, book: Book, rank: int, message: Message, tell: Tell) -> None:
        """A rank wants to go on from somewhere. It is told when all ranks have asked."""
        timeout = float(message["timeout"])
        known = self._meetings.get(id(book))
        if known is not None and rank in known[1].tell:  # it gave its first question up (Ctrl-C), and asks again
            known[1].tell.pop(rank)
            self._call_off(book, f"rank {rank} was interrupted while the ranks were restoring")
            known = None
        meeting = known[1] if known is not None else Meeting(Round(book.cycle.ranks), time.monotonic() + timeout)
        self._meetings[id(book)] = (book, meeting)
        back = message.get("back")
        meeting.round.asked[rank] = message.get("step") if back is None else tuple(back)
        meeting.fresh = meeting.fresh and bool(message.get("fresh"))
        meeting.tell[rank] = tell
        if meeting.round.all_asked():
            self._ask_chair(book, meeting, timeout)

    def _ask_chair(self, book: Book, meeting: Meeting, timeout: float) -> None:
        wanted = set(meeting.round.asked.values())
        if len(wanted) > 1:
            asked = [f"rank {rank}: {in_words(wish)}" for rank, wish in sorted(meeting.round.asked.items())]
            self._call_off(book, f"ranks ask for different steps: {'; '.join(asked)}. All ranks go on from one")
            return
        (wish,) = wanted
        back = wish if isinstance(wish, tuple) else None
        meeting.deadline += _CHAIR_S
        question: Message = {
            "op": "ask",
            "step": wish if back is None else None,
            "back": back,
            "fresh": meeting.fresh,
            "timeout": timeout,
            "memory": book.roll.restorable(),
            "ranks": (book.cycle.first, book.cycle.local),
            "replicas": book.copies.replicas.listed(),
            "inherited": [
                (*estate.key, estate.is_exact(book.cycle.ranks)) for estate in estates(book.roll, book.copies.replicas)
            ],
        }
        if book.cycle.first == 0:
            left_out: list[str] = []
            stored: Sequence[Kept] = ()
            try:
                stored = book.directory.stored(left_out.append)
            except (CheckpointError, OSError) as error:
                left_out.append(str(error))  # an object store that can't be reached: there is what is in memory
            for text in left_out:
                book.complain(text)
            found = [(*item.manifest.key, item.path.name) for item in stored]
            question |= {"disk": found, "left_out": left_out}
            question |= {"tries": [(*key, number) for key, number in book.tries.counts.items()]}
        book.ask(question)

    def loaded(self, book: Book, rank: int, message: Message) -> None:
        """A rank has tried to load what was chosen."""
        known = self._meetings.get(id(book))
        if known is None:
            return  # called off, and told so: that is its answer
        meeting = known[1]
        if meeting.round.choosing:
            raise ValueError("nothing is being restored")
        meeting.round.loaded[rank] = str(message.get("wrong", ""))
        if message.get("misfit"):
            meeting.round.misfits.add(rank)
        if meeting.round.all_loaded():
            meeting.round.choosing = True
            misfit = any(rank in meeting.round.misfits for rank in meeting.round.loaded)
            book.ask({"op": "loaded", "wrong": meeting.round.wrong(), "misfit": misfit})

    def forget(self, book: Book, rank: int) -> None:
        """A rank is gone: whoever waits for it to restore need not."""
        known = self._meetings.get(id(book))
        if known is not None and rank in known[1].tell:  # it asked, and died
            known[1].tell.pop(rank)
            self._call_off(book, f"rank {rank} ended while the ranks were restoring")

    def look_after(self) -> None:
        """End agreements that take too long, naming who is missing."""
        for book, meeting in list(self._meetings.values()):
            if time.monotonic() > meeting.deadline:
                missing = ", ".join(map(str, meeting.round.missing()))
                self._call_off(book, f"rank {missing or 'unknown'} did not come to restore() or rollback() in time")

    def _call_off(self, book: Book, why: str) -> None:
        self._end(book, {"error": why})
        book.ask({"op": "quit", "why": why})

    def _end(self, book: Book, message: dict[str, Any]) -> None:
        _, meeting = self._meetings.pop(id(book), (None, None))
        for tell in meeting.tell.values() if meeting is not None else ():
            tell(message)

    # -- what the chair says ----------------------------------------------------------------------------------------

    def hear(self, book: Book, message: Message) -> None:
        """Pass on what the chair says to the ranks that wait for it."""
        op = message["op"]
        if op == "refused":
            self._end(book, {"error": message["why"]})
        elif op == "nothing":
            if message["fresh"]:
                mourn(book)
                book.go_back_to(None, int(message["generation"]))
            told = {"problems": message["problems"], "there": message["there"]}
            self._end(book, {"found": None, "generation": book.generation, **told})
        elif op == "choice":
            self._offer(book, message)
        elif op == "bad":
            book.tries.take_back(tuple(message["key"]))
            if message["why"]:
                book.complain(str(message["why"]))
        elif op == "aside":
            leave_behind(book, [tuple(item) for item in message["keys"]])
        elif op == "go":
            self._go(book, tuple(message["key"]), message["where"], int(message["generation"]))

    def _offer(self, book: Book, message: Message) -> None:
        known = self._meetings.get(id(book))
        if known is None:
            return  # called off here; the chair hears of it
        meeting, key = known[1], tuple(message["key"])
        if book.cycle.first == 0:
            if not message["back"]:  # that is no restart, and nothing has failed from it
                book.tries.add(key)  # before it is loaded: that may be what kills the ranks
            set_aside(book, [tuple(item) for item in message["aside"]])
        need = dict(message["fetch"]).get(book.cycle.first)
        if need is not None:
            book.copies.fetch(key, need, lambda wrong: self._fetched(book, meeting, wrong))
            return
        try:
            estate = estate_of(book.roll, book.copies.replicas, key) if message["inherited"] else None
        except CheckpointError as error:
            book.ask({"op": "loaded", "wrong": f"rank {book.cycle.first}: {error}", "misfit": False})
            return
        meeting.round.choosing, meeting.round.loaded, meeting.round.misfits = False, {}, set()
        for rank, tell in meeting.tell.items():
            if estate is not None:
                tell(*estate.describe(rank, book.cycle.ranks))
            elif message["where"] == MEMORY:
                tell(*describe(book, key, rank))
            else:
                path = str(book.directory.path / message["name"])
                tell({"found": DISK, "generation": key[0], "step": key[1], "path": path})

    def _fetched(self, book: Book, meeting: Meeting, wrong: str) -> None:
        """What the ranks here have lost is here again, or nobody has it any more."""
        if self._meetings.get(id(book), (None, None))[1] is not meeting:
            book.copies.forget_fetched()  # called off meanwhile
            return
        fetched = book.copies.fetched
        if wrong or fetched is None:
            book.ask({"op": "loaded", "wrong": f"rank {book.cycle.first}: {wrong}", "misfit": False})
            return
        meeting.round.choosing, meeting.round.loaded, meeting.round.misfits = False, {}, set()
        for rank, tell in meeting.tell.items():
            tell(*copies.describe(fetched, rank, book.cycle.world))

    def _go(self, book: Book, key: Key, where: str, generation: int) -> None:
        book.go_back_to(key if where == MEMORY else None, generation)
        if book.cycle.first == 0:
            _LOG.info("the job goes on from step %s (%s).", key[1], where)
        self._end(book, {"go": True, "generation": generation})


def mourn(book: Book) -> None:
    """Say that a job that had got somewhere begins afresh: it may, and somebody will want to know why."""
    if book.farthest[1] >= 0:
        book.complain(
            f"step {book.farthest[1]} was complete, and is lost with the memory of nodes that are gone or whose ranks have moved; "
            "nothing is on disk. The job begins afresh: allow_fresh_start=True. replicas=1 or a smaller disk_every keeps more."
        )


def set_aside(book: Book, keys: list[Key]) -> None:
    """Have checkpoints that restarts failed from no longer count, and say so."""
    _mark_aside(book, keys, "two restarts failed from it")
    for key in keys:
        book.complain(f"step {key[1]} is set aside: the job went on from it and failed, twice, without progress.")


def leave_behind(book: Book, keys: list[Key]) -> None:
    """Have checkpoints that the job rolled back behind no longer count: a restart must not come upon them."""
    _mark_aside(book, keys, "the job rolled back behind it")
    for key in keys:
        _LOG.info("step %s on disk is set aside: the job rolled back behind it.", key[1])


def _mark_aside(book: Book, keys: list[Key], why: str) -> None:
    for item in book.directory.stored() if keys else []:
        if item.manifest.key in keys:
            try:
                book.directory.set_aside(item, why)
            except OSError as error:  # a full disk: it is passed over all the same, as long as we are here
                book.complain(f"{item.path}: could not be marked as set aside: {error}")


def describe(book: Book, key: Key, rank: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Say where a snapshot is in the memory of this node, and what its bytes should be."""
    base: dict[str, Any] = {"found": MEMORY, "generation": key[0], "step": key[1], "world": book.cycle.world}
    peers, fds = [], []
    for other, member in sorted(book.roll.locals().items()):
        seal = member.seals()[key]
        slot = member.slots[seal.slot]
        peers.append({"rank": other, "data": seal.data, "header": [seal.header_at, seal.header, seal.header_sum]})
        if other == rank:
            peers[-1]["digests"] = book.roll.digests.of(rank, seal.serial) or clerk.digests_of(slot, seal)
            base["values"] = [seal.values_at, seal.values, seal.values_sum]
        fds.append(slot.fd)
    return {**base, "peers": peers}, tuple(fds)
