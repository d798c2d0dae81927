"""A node's part in replication: what it gives to others, what it keeps for them, what it fetches when it took a lost one's place.

Called by the saver's loop, in one thread; what takes time is the courier's (:mod:`courier`), in threads that come back through
``later``. A snapshot on its way out is leased until the chair has said what became of it *and* nobody reads it any more. Its ranks
are told REPLICATED before the lease ends.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resilience.checkpoint import limits
from resilience.checkpoint.manifest import in_words
from resilience.checkpoint.saver import courier, wire
from resilience.checkpoint.saver.courier import Counter, Fetched, Parcel, Trip, key_of
from resilience.checkpoint.saver.excerpts import Outlines, excerpt
from resilience.checkpoint.saver.line import Message, listen
from resilience.checkpoint.saver.member import Snapshot
from resilience.checkpoint.saver.pace import Pace
from resilience.checkpoint.saver.replicas import Key, Replicas
from resilience.checkpoint.saver.ring import keepers
from resilience.checkpoint.saver.roll import Roll
from resilience.checkpoint.saver.throttle import Bucket
from resilience.checkpoint.saver.wishes import Options
from resilience.errors import CheckpointError

_LOG = logging.getLogger("resilience.saver")
_LOOP_S = 30.0
_SAY_EVERY_S = 60.0
Later = Callable[[Callable[[], None]], None]


@dataclass
class Flight:
    """A snapshot on its way out. ``landed``: no thread reads it any more; ``verdict``: the chair has said what became of it."""

    snapshot: Snapshot
    stop: threading.Event
    result: Message | None = None
    landed: bool = False
    verdict: bool = False


@dataclass
class Links:
    """What replication needs of its book."""

    roll: Roll
    say: Callable[..., None]
    complain: Callable[[str], None]
    later: Later
    writing: Callable[[], Sequence[Snapshot]]  # what is being written to disk


class Copies:
    """Replication of one book. Without ``replicas`` it does nothing."""

    def __init__(self, options: Options, links: Links) -> None:
        self._options, self._links = options, links
        self.replicas = Replicas(limits.available)
        self.fetched: Fetched | None = None
        self._outlines = Outlines()
        self._bucket, self._pace = Bucket(options.bandwidth, time.monotonic()), Pace()
        self._counter: Counter | None = None
        self._secret = ""
        self._here = ""
        self._node = 0
        self._peers: dict[int, tuple[str, int, str]] = {}  # by node: host, port, group
        self._flight: Flight | None = None
        self._reading: list[Snapshot] = []
        self._newest: Key = (0, -1)
        self._said: dict[str, float] = {}  # by what: when it was last said aloud

    # -- coming and going -------------------------------------------------------------------------------------------

    def open(self, node: int, here: str, secret: str) -> None:
        """Listen for the others, at ``here`` or at the address of the interface that was asked for. Raises ``CheckpointError``."""
        self._node, self._secret = node, secret
        if not self._options.replicas or self._counter is not None:
            return
        asked = self._options.interface
        self._here = wire.address_of(asked) if asked else here
        try:
            server = listen(self._here, 0)
        except OSError as error:
            raise CheckpointError(
                f"no copies can be taken at {self._here} on {socket.gethostname()}: {error.strerror}. Nothing was set up. Give the "
                "name of an interface that every node has (replica_interface=)."
            ) from error
        self._counter = Counter(server, lambda: self._secret, self.replicas, self)

    def joining(self) -> Message:
        """Return what the chair is to know when this node joins."""
        if self._counter is None:
            return {}
        address = (self._here, self._counter.address[1], self._options.group)
        return {"peer": address, "replicated": self._links.roll.newest_replicated()}

    def say_again(self) -> None:
        """The line to the chair is a new one: it may not have heard."""
        if self._flight is not None and self._flight.result is not None:
            self._links.say(**self._flight.result)

    def close(self) -> None:
        """Let go of everything."""
        if self._counter is not None:
            self._counter.close()
            self._counter = None
        if self._flight is not None:
            self._flight.stop.set()
        self.forget_fetched()
        self.replicas.close()

    def forget_fetched(self) -> None:
        """Let go of what was fetched for a restore."""
        if self.fetched is not None:
            self.fetched.close()
            self.fetched = None

    def go_back_to(self, key: Key | None) -> None:
        """Everything newer is void."""
        self.replicas.go_back_to(key)
        self.forget_fetched()
        if key is None or self._newest > key:
            self._newest = (0, -1)

    # -- what the chair says ----------------------------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """Do what the chair says about copies."""
        op = message["op"]
        if op == "peers":
            known = self._peers
            self._peers = {
                int(name): (str(host), int(port), str(group)) for name, host, port, group in message["peers"]
            }
            if self._peers != known:
                self._tell_where()
        elif op == "send":
            self.send(key_of(message["key"]))
        else:
            self._verdict(key_of(message["key"]), op == "replicated", str(message.get("why", "")))

    def _tell_where(self) -> None:
        """Say through what, to whom and how fast copies go."""
        targets = ", ".join(f"rank {node} ({self._peers[node][0]})" for node in self._targets())
        if not targets:
            return
        limit = f"{self._options.bandwidth / 1e9:g} GB/s at most" if self._options.bandwidth else "no limit"
        through = wire.interface_of(self._here) or "an interface"
        _LOG.info(
            "copies of the snapshots here (node with rank %s) go to the node with %s, through %s (%s), %s.",
            *(self._node, targets, through, self._here, limit),
        )

    def _targets(self) -> list[int]:
        groups = {name: group for name, (_, _, group) in self._peers.items()}
        return keepers(groups, self._node, self._options.replicas) if self._node in groups else []

    def _trip(self) -> Trip:
        addresses = {name: (host, port) for name, (host, port, _) in self._peers.items()}
        here = self._here if self._options.interface else ""
        return Trip(addresses, self._secret, here, self._bucket)

    def _verdict(self, key: Key, good: bool, why: str) -> None:
        roll, flight = self._links.roll, self._flight
        ours = flight is not None and flight.snapshot.key == key
        if good:
            snapshot = flight.snapshot if flight is not None and ours else roll.snapshot(key)
            for rank, seal in snapshot.seals.items() if snapshot is not None else ():
                member = roll.members.get(rank)
                if member is not None and member.ledger.seal_of(seal.slot) is not None:
                    member.ledger.mark_replicated(seal)
            self._newest = max(self._newest, key)
            self.replicas.settle(key)
        else:
            self.replicas.drop(key)
            if why:
                _LOG.log(
                    self._loudness("failed", logging.WARNING),
                    "step %s is not replicated: %s. It is still in memory here; a later one will be tried.",
                    *(key[1], why),
                )
        if flight is not None and ours:
            flight.verdict = True
            flight.stop.set()
            self._end_flight()

    # -- giving copies ----------------------------------------------------------------------------------------------

    def send(self, key: Key) -> None:
        """Lease a snapshot and have other nodes keep copies of it."""
        roll = self._links.roll
        snapshot = roll.snapshot(key)
        why = ""
        if self._flight is not None:
            why = f"step {self._flight.snapshot.key[1]} is still on its way from the node with rank {self._node}"
        elif snapshot is None or not roll.holds(snapshot):
            why = f"it is no longer in the memory of the node with rank {self._node}"
        elif not self._targets():
            why = "there is no other node"
        if snapshot is None or why:
            self._links.say(op="sent", key=key, why=why)
            return
        self._lease(snapshot)
        self._flight = flight = Flight(snapshot, threading.Event())
        everybody = self._trip()
        trip = Trip(
            {node: everybody.addresses[node] for node in self._targets()},
            *(self._secret, everybody.here, self._bucket, self._pace),
        )
        slots = {rank: roll.members[rank].slots[seal.slot] for rank, seal in snapshot.seals.items()}
        replicated = self._newest

        def carry() -> None:
            began = time.monotonic()
            sent, wrong = 0, ""
            try:
                parcels = [
                    Parcel(key, rank, seal.serial, excerpt(slots[rank], seal, self._outlines, own=True))
                    for rank, seal in sorted(snapshot.seals.items())
                ]
                sent = courier.deliver(trip, parcels, replicated, flight.stop)
            except Exception as error:  # noqa: BLE001 - a thread's boundary: the chair waits for a word
                wrong = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            took = time.monotonic() - began
            self._links.later(lambda: self._landed(flight, sent, took, wrong))

        threading.Thread(target=carry, name="resilience-courier", daemon=True).start()

    def _landed(self, flight: Flight, sent: int, took: float, wrong: str) -> None:
        flight.landed = True
        if sent and not wrong:
            _LOG.log(
                self._loudness("sent", logging.INFO),
                "step %s: %s copied to other nodes in %.2f s (%s/s).",
                *(flight.snapshot.key[1], in_words(sent), took, in_words(sent / max(took, 1e-9))),
            )
        if not flight.verdict:
            flight.result = {"op": "sent", "key": flight.snapshot.key, "why": wrong}
            self._links.say(**flight.result)
        self._end_flight()

    def _loudness(self, what: str, aloud: int) -> int:
        """Return how loud to say something that happens often: once a minute aloud."""
        now = time.monotonic()
        if now - self._said.get(what, -_SAY_EVERY_S) < _SAY_EVERY_S:
            return logging.DEBUG
        self._said[what] = now
        return aloud

    def _end_flight(self) -> None:
        flight = self._flight
        if flight is not None and flight.landed and flight.verdict:
            self._flight = None
            self._release(flight.snapshot)

    # -- leases -----------------------------------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """Whether some thread reads the memory of ranks."""
        return self._flight is not None or bool(self._reading)

    def busy(self) -> set[tuple[int, int]]:
        """Return the seals that must stay leased for what goes on here: rank and serial."""
        held = [*([self._flight.snapshot] if self._flight is not None else []), *self._reading]
        return {(rank, seal.serial) for snapshot in held for rank, seal in snapshot.seals.items()}

    def _lease(self, snapshot: Snapshot) -> None:
        for rank, seal in snapshot.seals.items():
            self._links.roll.members[rank].ledger.lease(seal)

    def _release(self, snapshot: Snapshot) -> None:
        written = {(rank, seal.serial) for item in self._links.writing() for rank, seal in item.seals.items()}
        busy = written | self.busy()
        for rank, seal in snapshot.seals.items():
            member = self._links.roll.members.get(rank)
            if member is not None and (rank, seal.serial) not in busy:
                member.ledger.release(seal)

    # -- giving back ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def shared(self, key: Key) -> Iterator[Sequence[Parcel]]:
        """Give what all nodes have in common of a snapshot. In a courier's thread: the loop leases it, and lets go of it."""
        roll = self._links.roll

        def lease() -> Snapshot:
            found = roll.snapshot(key)
            if found is None:
                raise CheckpointError(f"step {key[1]} is not in the memory of the node with rank {self._node} any more")
            self._reading.append(found)
            self._lease(found)
            return found

        def release() -> None:
            if snapshot in self._reading:
                self._reading.remove(snapshot)
                self._release(snapshot)

        snapshot = self._in_loop(lease)
        try:
            slots = {rank: roll.members[rank].slots[seal.slot] for rank, seal in snapshot.seals.items()}
            parcels = [
                Parcel(key, rank, seal.serial, excerpt(slots[rank], seal, self._outlines, own=False))
                for rank, seal in sorted(snapshot.seals.items())
            ]
            yield [parcel for parcel in parcels if parcel.shard.nbytes]
        finally:
            self._links.later(release)

    def _in_loop(self, act: Callable[[], Snapshot]) -> Snapshot:
        """Have the loop do something, and wait for it."""
        found: list[Snapshot] = []
        wrong: list[Exception] = []
        done = threading.Event()

        def do() -> None:
            try:
                found.append(act())
            except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
                wrong.append(error)
            done.set()

        self._links.later(do)
        if not done.wait(_LOOP_S):
            raise CheckpointError(f"the saver of the node with rank {self._node} did not answer within {_LOOP_S:g} s")
        if wrong:
            raise wrong[0]
        return found[0]

    # -- fetching ---------------------------------------------------------------------------------------------------

    def fetch(self, key: Key, need: Mapping[str, Any], done: Callable[[str], None]) -> None:
        """Fetch what this node needs of a snapshot; ``done`` is called in the loop, with what went wrong or an empty text."""
        self.forget_fetched()
        trip = self._trip()

        def bring() -> None:
            fetched, wrong = None, ""
            try:
                fetched = courier.bring_back(trip, key, need)
            except Exception as error:  # noqa: BLE001 - a thread's boundary: the ranks wait for a word
                wrong = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            self._links.later(lambda: self._arrived(fetched, wrong, done))

        threading.Thread(target=bring, name="resilience-courier", daemon=True).start()

    def _arrived(self, fetched: Fetched | None, wrong: str, done: Callable[[str], None]) -> None:
        self.forget_fetched()
        self.fetched = fetched
        if fetched is not None:
            ranks = ", ".join(map(str, sorted(fetched.own)))
            size, took = fetched.nbytes, fetched.seconds
            _LOG.info(
                "step %s of rank %s was fetched from other nodes' memory: %s in %.2f s (%s/s), digests checked.",
                *(fetched.key[1], ranks, in_words(size), took, in_words(size / max(took, 1e-9))),
            )
        done(wrong)


def describe(fetched: Fetched, rank: int, world: int) -> tuple[Message, tuple[int, ...]]:
    """Say where a snapshot is that was fetched, and what its bytes should be: as :func:`reception.describe` does of one that is in
    the ranks' own memory. What all share is checked by one rank each."""
    own = fetched.own[rank]
    known = {"digests": own.digests}
    peers = [{**item.described(), **(known if item is own else {})} for _, item in sorted(fetched.own.items())]
    turn = sorted(fetched.own).index(rank)
    for number, item in enumerate(fetched.shared):
        mine = {"digests": item.digests} if number % len(fetched.own) == turn else {}
        peers.append({**item.described(), "rank": -1, **mine})
    fds = [item.slot.fd for _, item in sorted(fetched.own.items())] + [item.slot.fd for item in fetched.shared]
    base = {"generation": fetched.key[0], "step": fetched.key[1], "world": world, "values": own.values()}
    return {"found": "memory", "where": "other nodes' memory", **base, "peers": peers}, tuple(fds)
