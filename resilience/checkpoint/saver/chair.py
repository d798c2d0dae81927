"""What all nodes decide together about one directory's snapshots. Pure: it hears messages and says what is to be told to whom.

One saver per job is the chair: that of the node with rank 0. A node tells it

    join      its ranks, the newest generation it knows of, what it holds
    sealed    all ranks of this node have sealed a snapshot        void      one of them never will       tried  all have tried
    ask       all ranks want to go on from somewhere               loaded    they have tried: "" or what was wrong
    written   its files of a snapshot are on disk                  failed    they are not, and why
    want      a step is waited for      secure   a rank failed     bye       its ranks are done     leave  its saver is about to end
    at        how far its ranks are, and what a snapshot costs     quit      the restoring is off
    sent      other nodes have copies of its part of a snapshot, or why not

and is told

    begin     all nodes are here; the generation of what is sealed from now on
    when      how far are you?  arm  take a snapshot at this step: it is time for one
    decided   COMPLETE or VOID, and the folder to write it to, if it is to be written      write   write this one too
    choice    go on from this one       nothing   there is none     go   everybody has it   refused   it can't be done
    durable   it is on disk, everywhere     failed  it is not, and why     dropped  nobody waits for it     done  nor for you
    peers     where each node takes copies  send    have copies made of this one too (``decided`` may say so at once)
    replicated  there are copies of it, of all nodes' parts                unsent  there are not, and why

The chair's own node is told more: ``commit`` (all files of a folder are there) and ``discard``, ``bad`` (what was chosen is) and
``aside`` (the job went back behind these); it says ``committed``.
A job of one node has a chair too; it only never hears of others.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from resilience.checkpoint.decisions import Key
from resilience.checkpoint.saver.relay import DIFFERENT, NEVER, Relay
from resilience.checkpoint.saver.restoring import Agreement, key_of
from resilience.checkpoint.saver.seats import Seat
from resilience.checkpoint.saver.writes import Writes
from resilience.checkpoint.schedule import Clock
from resilience.checkpoint.slots import COMPLETE, VOID

Message = dict[str, Any]
GONE_S = 15.0  # a node that was lost and did not come back within this writes nothing any more
AHEAD = 2  # steps from the farthest rank to the one that a snapshot is taken at
_KEPT = 64
_ME = 0


class Chair:
    """Decides. Nodes are named by their first rank, the chair's own is 0. ``out`` is what is to be told, in order."""

    def __init__(self, memory: Clock, disk: Clock, mark: str = "", replicate: bool = False) -> None:
        self.out: deque[tuple[int, Message]] = deque()
        self.generation = 0
        self._memory, self._disk = memory, disk
        self._asked_when = 0.0
        self._world = self._cycle = 0
        self._began = False
        self._seats: dict[int, Seat] = {}
        self._decided: dict[Key, int] = {}
        self._floor: Key = (0, -1)  # the newest that is known to be COMPLETE: nobody needs what is older
        self._wanted: set[int] = set()  # steps that somebody waits for
        self._writes = Writes(mark)
        self._lost: dict[int, float] = {}
        self._agreement = Agreement()
        self._relay = Relay(replicate)

    def new_round(self, world: int, cycle: int) -> None:
        """A cycle begins: all nodes are to join anew. What is being written goes on."""
        self._world, self._cycle, self._began = world, cycle, False
        self._seats, self._wanted = {}, set()
        self._agreement = Agreement()
        self._relay.new_round()

    def hear(self, node: int, message: Message, now: float) -> None:
        """Take in what a node says."""
        op = str(message.get("op"))
        if op == "join":
            self._join(node, message, now)
        elif op in _HEARD and node in self._seats:
            getattr(self, f"_hear_{op}")(node, message, now)

    def lost(self, node: int, now: float) -> None:
        """The line to a node is cut. It may come back."""
        self._lost.setdefault(node, now)
        given_up = self._relay.lost()
        if given_up is not None:
            self._tell_all(op="unsent", key=given_up, why=f"the node with rank {node} was lost")
        if node in self._seats and self._agreement.asks:
            self._refuse(f"the saver of the node with rank {node} was lost while the ranks were restoring")

    def tick(self, now: float) -> None:
        """Give up what is waited for in vain."""
        for node, since in list(self._lost.items()):
            if now - since > GONE_S:
                for folder in self._writes.awaited(node):
                    self._give_up(folder, node)
        if self._began and self._memory.take(now):
            self._asked_when = now
            self._tell_all(op="when")
        if self._agreement.asks and now > self._agreement.deadline:
            late = ", ".join(map(str, self._agreement.late(self._seats)))
            self._refuse(f"the ranks of the node with rank {late} did not come to restore() or rollback() in time")

    def missing(self) -> int:
        """Return how many ranks are yet to join."""
        return self._world - sum(seat.ranks for seat in self._seats.values())

    def _tell(self, node: int, **message: Any) -> None:
        self.out.append((node, message))

    def _tell_all(self, **message: Any) -> None:
        for node in self._seats:
            self._tell(node, **message)

    # -- who is here ------------------------------------------------------------------------------------------------

    def _join(self, node: int, message: Message, now: float) -> None:
        if self._began and not message["again"]:
            return  # of a cycle that we have not heard of yet: rank 0 will come too, and then all join anew
        self._lost.pop(node, None)
        held = {key_of(item[:2]): int(item[2]) for item in message["held"]}
        leased = {key_of(item) for item in message["leased"]}
        self._seats[node] = Seat(int(message["ranks"]), bool(message["again"]), held, leased)
        self.generation = max(self.generation, int(message["generation"]))
        self._floor = max(self._floor, key_of(message["newest"]))
        self._seats[node].peer = tuple(message.get("peer") or ())
        self._relay.heard(key_of(message.get("replicated") or NEVER))
        for folder in self._writes.awaited(node):
            self._tell(node, op="write", key=self._writes[folder].key, folder=folder)
        if self._began:
            self._tell(node, op="begin", generation=self.generation)
        elif self.missing() <= 0:
            self._began = True
            self.generation += not all(seat.again for seat in self._seats.values())
            self._tell_all(op="begin", generation=self.generation)
        if self._began:
            # What an earlier saver was about to write is ordered with its decision: a later one would let go of it.
            unfinished = set().union(*(seat.leased for seat in self._seats.values()))
            self._wanted |= {key[1] for key in unfinished - self._decided.keys()}
            self._decide_all(now)
            for key in sorted(unfinished):
                self._write_now(key, now)
            if self._relay.differs([bool(seat.peer) for seat in self._seats.values()]):
                self._tell(_ME, op="aloud", text=DIFFERENT)
            if self._relay.on:
                self._tell_all(
                    op="peers", peers=[(name, *seat.peer) for name, seat in self._seats.items() if seat.peer]
                )
                self._tell_all(op="replicated", key=self._relay.last)
                self._send_newest()

    # -- what is decided --------------------------------------------------------------------------------------------

    def _hear_sealed(self, node: int, message: Message, now: float) -> None:
        key, edition, seat = key_of(message["key"]), int(message["edition"]), self._seats[node]
        again = message["anew"] or edition > seat.held.get(key, edition)
        seat.held[key] = edition
        if again and self._decided.get(key) == COMPLETE:
            self._decided.pop(key)  # the same step was saved once more
            self._writes.durable.discard(key)
        if message["want"] and key not in self._decided:
            self._wanted.add(key[1])
        if key in self._decided:
            self._tell(node, op="decided", key=key, verdict=self._decided[key], folder="")
        elif self._began:
            self._decide(key, now)
        self._pass(node, key[1])

    def _hear_tried(self, node: int, message: Message, now: float) -> None:
        self._pass(node, int(message["step"]))

    def _pass(self, node: int, step: int) -> None:
        """A node has nothing to come below a step: what others hold of it will never be whole."""
        self._seats[node].tried = step
        open_keys = set().union(*(seat.held for seat in self._seats.values())) - self._decided.keys()
        for key in sorted(open_keys - self._seats[node].held.keys()):
            if key[0] == self.generation and key[1] < step:
                self._void(key)

    def _hear_void(self, node: int, message: Message, now: float) -> None:
        self._void(key_of(message["key"]))

    def _void(self, key: Key) -> None:
        if key <= self._floor:
            return  # it may have been whole once: whoever has it may use its slot, and nobody is told that it never was
        self._note(key, VOID)
        self._tell_all(op="decided", key=key, verdict=VOID, folder="")

    def _decide_all(self, now: float) -> None:
        for key in sorted(set().union(*(seat.held for seat in self._seats.values()))):
            if key not in self._decided:
                self._decide(key, now)

    def _decide(self, key: Key, now: float) -> None:
        if all(key in seat.held for seat in self._seats.values()):
            self._note(key, COMPLETE)
            self._floor = max(self._floor, key)
            folder = self._order(key, now) if not self._writes.has(key) and self._is_due(key, now) else ""
            send = {"send": True} if self.newest() == key and self._relay.takes(key, self._seats) else {}
            self._tell_all(op="decided", key=key, verdict=COMPLETE, folder=folder, **send)
        elif key[0] < self.generation or any(
            seat.tried > key[1] for seat in self._seats.values() if key not in seat.held
        ):
            self._void(key)  # that cycle is over, or somebody is past it: whoever sealed it is all there will ever be

    def _note(self, key: Key, verdict: int) -> None:
        self._decided[key] = verdict
        for known in (self._decided, *(seat.held for seat in self._seats.values())):
            for old in sorted(known)[:-_KEPT]:
                del known[old]

    def newest(self) -> Key | None:
        """Return the newest snapshot that all nodes hold."""
        held = [set(seat.held) for seat in self._seats.values()]
        common = set.intersection(*held) if held and self._began else set()
        return max((key for key in common if self._decided.get(key) != VOID), default=None)

    def _hear_at(self, node: int, message: Message, now: float) -> None:
        """A node says how far it is. The step must be one that nobody has passed when it hears of it; if somebody has, the
        snapshot is void, and the next one is not."""
        self._seats[node].at = int(message["step"])
        self._memory.learn(float(message["cost_s"]), self._asked_when)
        far = [seat.at for seat in self._seats.values() if seat.at is not None]
        if len(far) == len(self._seats):
            self._tell_all(op="arm", step=max(far) + AHEAD)
            for seat in self._seats.values():
                seat.at = None

    # -- what is written --------------------------------------------------------------------------------------------

    def _is_due(self, key: Key, now: float) -> bool:
        if key[1] in self._wanted:
            self._wanted.discard(key[1])
            return True
        return not self._writes and self._disk.take(now)

    def _order(self, key: Key, now: float) -> str:
        return self._writes.order(key, self._world, self._cycle, now, self._seats)

    def _write_now(self, key: Key, now: float) -> None:
        held = all(key in seat.held for seat in self._seats.values())
        if held and key not in self._writes.durable and not self._writes.has(key):
            self._tell_all(op="write", key=key, folder=self._order(key, now))

    def _hear_want(self, node: int, message: Message, now: float) -> None:
        step, newest = int(message["step"]), self.newest()
        if newest is not None and newest[1] == step:
            self._write_now(newest, now)
        elif newest is None or newest[1] < step:
            self._wanted.add(step)

    def _hear_secure(self, node: int, message: Message, now: float) -> None:
        newest = self.newest()
        if newest is not None:
            self._write_now(newest, now)

    def _hear_written(self, node: int, message: Message, now: float) -> None:
        write = self._writes.get(message["folder"])
        if write is None:
            self._tell(node, op="dropped", folder=message["folder"])  # ordered by a chair that is no more, or given up
        if write is None or node not in write.waiting:
            return
        write.waiting.discard(node)
        write.shards += message["shards"]
        write.values += message["values"]
        if not write.waiting:
            self._tell(_ME, op="commit", folder=message["folder"], write=write)

    def _hear_failed(self, node: int, message: Message, now: float) -> None:
        if message["folder"] in self._writes:
            self._fail(message["folder"], str(message["why"]))
        else:
            self._tell(node, op="dropped", folder=message["folder"])

    def _hear_committed(self, node: int, message: Message, now: float) -> None:
        folder = message["folder"]
        if message["why"]:
            self._fail(folder, str(message["why"]))
        elif folder in self._writes:
            write = self._writes.committed(folder)
            self._disk.learn(now - write.began, write.began)
            self._tell_all(op="durable", key=write.key, folder=folder)
            if write.left_behind:
                self._tell(_ME, op="aside", keys=[write.key])

    def _give_up(self, folder: str, node: int) -> None:
        """A node is gone for good. What only an earlier cycle wanted on disk is no failure of this one."""
        write = self._writes[folder]
        why = f"step {write.key[1]} is not on disk: the node with rank {node} is gone, and its part with it"
        if write.cycle == self._cycle:
            self._fail(folder, why)
        else:
            self._tell(_ME, op="aloud", text=f"{why}. The job has gone on without it.")
            self._fail(folder, "")

    def _fail(self, folder: str, why: str) -> None:
        """Have nobody wait for a write any more; without a ``why`` that is no failure."""
        write = self._writes.pop(folder, None)
        if write is not None:
            self._tell(_ME, op="discard", folder=folder)
            self._tell_all(op="failed" if why else "dropped", key=write.key, folder=folder, why=why)

    # -- what other nodes have copies of ----------------------------------------------------------------------------

    def _hear_sent(self, node: int, message: Message, now: float) -> None:
        key = key_of(message["key"])
        if key != self._relay.key:  # of an earlier round, or given up: the node waits for a word all the same
            self._tell(node, op="replicated" if key == self._relay.last else "unsent", key=key, why="")
            return
        ended = self._relay.sent(node, key, str(message["why"]))
        if ended is not None:
            self._tell_all(op=ended[0], key=key, why=ended[1])
            self._send_newest()

    def _send_newest(self) -> None:
        """The last one has ended: the newest is next. Nobody has overwritten it, for nobody was told of a newer one."""
        newest = self.newest()
        if newest is not None and self._decided.get(newest) == COMPLETE and self._relay.takes(newest, self._seats):
            self._tell_all(op="send", key=newest)

    def _hear_bye(self, node: int, message: Message, now: float) -> None:
        self._seats[node].bye = True
        if self._began and all(seat.bye or name in self._lost for name, seat in self._seats.items()):
            self._hear_secure(node, message, now)
            self._tell_all(op="done")

    def _hear_leave(self, node: int, message: Message, now: float) -> None:
        """The saver of a node is about to end. If it is ours, nobody else is needed either."""
        self._hear_secure(node, message, now)
        for name in self._seats if node == _ME else [node]:
            self._tell(name, op="done")

    # -- what the job goes on from ----------------------------------------------------------------------------------

    def _refuse(self, why: str) -> None:
        self._agreement = Agreement()
        self._tell_all(op="refused", why=why)

    def _hear_quit(self, node: int, message: Message, now: float) -> None:
        if self._agreement.asks:
            self._refuse(str(message["why"]))

    def _hear_ask(self, node: int, message: Message, now: float) -> None:
        self._agreement.ask(node, message, now)
        if not self._agreement.late(self._seats):
            self._choose()

    def _choose(self) -> None:
        agreement = self._agreement
        if agreement.differ():
            self._refuse(f"nodes ask for different steps: {'; '.join(agreement.differ())}")
            return
        aside = agreement.choose(self._floor)
        if agreement.choice is not None:
            agreed = {"aside": aside, "back": agreement.back is not None, "fetch": agreement.fetch()}
            self._tell_all(op="choice", **vars(agreement.choice), **agreed)
            return
        self._agreement = Agreement()
        if agreement.allows_fresh_start():
            self._begin_after((-1, -1))
        problems, fresh = agreement.problems(), agreement.allows_fresh_start()
        there = [(item.key[1], item.where) for item in agreement.there[:_KEPT]]
        self._tell_all(op="nothing", problems=problems, fresh=fresh, there=there, generation=self.generation)

    def _hear_loaded(self, node: int, message: Message, now: float) -> None:
        agreement, choice = self._agreement, self._agreement.choice
        if choice is None:
            return
        agreement.loaded[node] = str(message["wrong"])
        if message.get("misfit"):
            agreement.misfits.add(node)
        if agreement.late(self._seats):
            return
        if agreement.misfit():
            self._tell(_ME, op="bad", key=choice.key, why="")  # that is no failure of a restart
            self._refuse(agreement.misfit())
            return
        wrong = next((text for text in agreement.loaded.values() if text), "")
        if wrong:
            self._tell(_ME, op="bad", key=choice.key, why=agreement.spoil(wrong))
            self._choose()
            return
        self._agreement = Agreement()
        self._begin_after(choice.key)
        if agreement.back is not None:
            since = self._writes.leave_behind(choice.key)  # written since the nodes were asked what is there
            self._tell(_ME, op="aside", keys=sorted({*agreement.left_behind(), *since}))
        self._tell_all(op="go", key=choice.key, where=choice.where, generation=self.generation)

    def _begin_after(self, key: Key) -> None:
        """Begin a generation: everything newer than ``key`` is void."""
        self.generation += 1
        self._floor, self._wanted = key, set()
        self._relay.go_back_to(key)
        for seat in self._seats.values():
            seat.held, seat.tried = {held: edition for held, edition in seat.held.items() if held <= key}, 0
        self._decided = {known: verdict for known, verdict in self._decided.items() if known <= key}


_HEARD = frozenset(name.removeprefix("_hear_") for name in vars(Chair) if name.startswith("_hear_"))
