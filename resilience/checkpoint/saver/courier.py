"""Carries snapshots between the savers of a job, in threads of low priority: gives copies to others, takes and keeps theirs, and
brings back what is asked for.

What is sent is leased meanwhile. A caller asks, after it has proven itself:

    put   here is a rank's copy of a snapshot: ``go`` (send it), ``have`` (it is here) or ``error``; after it ``ok`` or ``error``
    get   give me a rank's copy, or what all nodes have in common: so many ``shards``, or ``error``
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from resilience.checkpoint import limits
from resilience.checkpoint.arena import Slot
from resilience.checkpoint.saver.excerpts import Excerpt
from resilience.checkpoint.saver.pace import Pace
from resilience.checkpoint.saver.replicas import Key, Replica, Replicas, Sizes
from resilience.checkpoint.saver.throttle import Bucket
from resilience.checkpoint.saver.wire import Message, Wire, WireError
from resilience.errors import CheckpointError

_LOG = logging.getLogger("resilience.saver")
_NICE = 15
_CALLERS = 64  # at once; whoever comes then is hung up on
_AGAIN_S = 0.2
_MOST_HEADER = 100_000_000
_MOST = 1 << 48
UNLIMITED = Bucket(0.0, 0.0)


@dataclass(frozen=True)
class Parcel:
    """One rank's part of a snapshot on its way out."""

    key: Key
    rank: int
    serial: int
    shard: Excerpt
    digests: list[str] | None = None  # known ones: for what is kept here, so that damage done to it since is found

    def sizes(self) -> Message:
        """Return what goes before the bytes."""
        shard = self.shard
        return {
            "key": self.key,
            "rank": self.rank,
            "serial": self.serial,
            "data": shard.nbytes,
            "header": len(shard.header),
            "values": len(shard.values),
        }


class Shelf(Protocol):
    """What can be asked for. Called in the courier's threads."""

    def shared(self, key: Key) -> contextlib.AbstractContextManager[Sequence[Parcel]]:
        """Give what all nodes have in common of a snapshot, leased. Raises ``CheckpointError`` if it is not here."""


class Counter:
    """Listens for other savers of the job. ``secret`` is asked for with every call: it changes with the round."""

    def __init__(self, server: socket.socket, secret: Callable[[], str], replicas: Replicas, shelf: Shelf) -> None:
        self._server = server
        self._secret = secret
        self._replicas = replicas
        self._shelf = shelf
        self._open: set[Wire] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        server.setblocking(True)
        self.address: tuple[str, int] = server.getsockname()[:2]
        threading.Thread(target=self._accept, name="resilience-counter", daemon=True).start()

    def close(self) -> None:
        """Hang up on everybody."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._lock:
            for wire in list(self._open):
                wire.close()

    def _accept(self) -> None:
        lower_priority()
        while not self._closed.is_set():
            try:
                wire = Wire(self._server.accept()[0], self._secret())
            except OSError:  # it was gone already, or there are too many open files
                self._closed.wait(_AGAIN_S)
                continue
            with self._lock:
                full = len(self._open) >= _CALLERS
                self._open |= set() if full else {wire}
            if full:
                wire.close()
                continue
            threading.Thread(target=self._attend, args=(wire,), name="resilience-caller", daemon=True).start()

    def _attend(self, wire: Wire) -> None:
        try:
            wire.answer()
            while (message := wire.await_question()) is not None:
                self._obey(wire, message)
        except (OSError, CheckpointError, ValueError, TypeError, KeyError, MemoryError) as error:
            _LOG.debug("a caller was hung up on: %s: %s", type(error).__name__, error)
        finally:
            with self._lock:
                self._open.discard(wire)
            wire.close()

    def _obey(self, wire: Wire, message: Message) -> None:
        try:
            if message.get("op") == "put":
                self._take(wire, message)
            elif message.get("op") == "get":
                self._give(wire, message)
            else:
                raise WireError("nobody knows what is asked")
        except (CheckpointError, MemoryError, ValueError, TypeError, KeyError) as error:
            wire.send({"error": str(error)[:2000]})
            raise

    def _take(self, wire: Wire, message: Message) -> None:
        key, rank, serial = key_of(message["key"]), int(message["rank"]), int(message["serial"])
        self._replicas.settle(key_of(message["replicated"]))
        if self._replicas.has(key, rank, serial):
            wire.send({"have": True})
            return
        sizes = sizes_of(message)
        slot = self._replicas.make_room(rank, sizes)
        try:
            wire.send({"go": True})
            sums, digests = wire.receive_shard(*sizes.views(slot))
        except BaseException:
            self._replicas.give_back(rank, slot)
            raise
        self._replicas.seal(Replica(key, rank, serial, sizes, slot, sums, digests))
        wire.send({"ok": True})

    def _give(self, wire: Wire, message: Message) -> None:
        key = key_of(message["key"])
        if message.get("rank") is None:
            with self._shelf.shared(key) as parcels:
                _hand_over(wire, parcels)
            return
        found = self._replicas.find(key, int(message["rank"]))
        if found is None:
            raise WireError(f"there is no copy of rank {message['rank']} of step {key[1]} here")
        _hand_over(wire, [Parcel(key, found.rank, found.serial, found.excerpt(), found.digests)])


def _hand_over(wire: Wire, parcels: Sequence[Parcel]) -> None:
    wire.send({"shards": len(parcels)})
    for parcel in parcels:
        wire.send(parcel.sizes())
        wire.send_shard(parcel.shard, UNLIMITED, parcel.digests)


@dataclass(frozen=True)
class Trip:
    """Where copies go, and how fast they may."""

    addresses: Mapping[int, tuple[str, int]]  # by node
    secret: str
    here: str
    bucket: Bucket
    pace: Pace | None = None


def deliver(trip: Trip, parcels: Sequence[Parcel], replicated: Key, stop: threading.Event) -> int:
    """Give copies to all nodes of a trip; return how many bytes went. Raises ``CheckpointError`` if one has not got them."""
    lower_priority()
    if trip.pace is not None:
        trip.pace.begin()
    sent = 0
    for node, address in trip.addresses.items():
        try:
            with _called(address, trip) as wire:
                for parcel in parcels:
                    if stop.is_set():
                        raise WireError("it was called off")
                    answer = wire.ask({"op": "put", **parcel.sizes(), "replicated": replicated})
                    if answer.get("have"):
                        continue
                    wire.send_shard(parcel.shard, trip.bucket, pace=trip.pace)
                    _expect_ok(wire)
                    sent += parcel.shard.nbytes + len(parcel.shard.header) + len(parcel.shard.values)
        except (OSError, CheckpointError) as error:
            raise WireError(f"the node with rank {node} ({address[0]}:{address[1]}) has no copy: {error}") from error
    return sent


def _expect_ok(wire: Wire) -> None:
    answer = wire.receive()
    if not answer.get("ok"):
        raise WireError(str(answer.get("error"))[:2000])


@contextlib.contextmanager
def _called(address: tuple[str, int], trip: Trip) -> Iterator[Wire]:
    wire = Wire.call(address, trip.secret, trip.here)
    try:
        yield wire
    finally:
        wire.close()


@dataclass
class Fetched:
    """What was brought back: each rank's own, and what all nodes have in common."""

    key: Key
    own: dict[int, Replica]
    shared: list[Replica]
    nbytes: int = 0
    seconds: float = 0.0

    def close(self) -> None:
        """Let go of it."""
        for item in (*self.own.values(), *self.shared):
            item.slot.close()
        self.own, self.shared = {}, []


def bring_back(trip: Trip, key: Key, need: Mapping[str, Any]) -> Fetched:
    """Fetch what a node needs of a snapshot, each from the first that has it whole. Raises ``CheckpointError`` if nobody has."""
    began = time.monotonic()
    fetched = Fetched(key, {}, [])
    try:
        for rank, nodes in need["own"]:
            (fetched.own[int(rank)],) = _from_any(trip, [int(node) for node in nodes], key, int(rank))
        fetched.shared = _from_any(trip, [int(node) for node in need["shared"]], key, None)
    except BaseException:
        fetched.close()
        raise
    fetched.nbytes = sum(item.sizes.total for item in (*fetched.own.values(), *fetched.shared))
    fetched.seconds = time.monotonic() - began
    return fetched


def _from_any(trip: Trip, nodes: Sequence[int], key: Key, rank: int | None) -> list[Replica]:
    wrong = []
    what = f"rank {rank}'s copy" if rank is not None else "what all nodes share"
    for node in nodes:
        address = trip.addresses.get(node)
        try:
            if address is None:
                raise WireError("its address is not known")
            with _called(address, trip) as wire:
                found = _receive_all(wire, key, rank)
                if rank is not None and [item.rank for item in found] != [rank]:
                    raise WireError("it sent something else")
                return found
        except (OSError, CheckpointError, MemoryError, ValueError, TypeError, KeyError) as error:
            wrong.append(f"from the node with rank {node}: {error}")
            _LOG.warning("step %s: %s can't be had %s", key[1], what, wrong[-1])
    raise WireError(f"{what} of step {key[1]} can't be had ({'; '.join(wrong)})")


def _receive_all(wire: Wire, key: Key, rank: int | None) -> list[Replica]:
    number = int(wire.ask({"op": "get", "key": key, "rank": rank})["shards"])
    found: list[Replica] = []
    try:
        for _ in range(number):
            message = wire.receive()
            sizes = sizes_of(message)
            left, whose = limits.available()
            if sizes.total > left:
                raise MemoryError(f"it takes {sizes.total / 1e9:.2f} GB, and {whose} has {left / 1e9:.2f} GB left")
            slot = Slot.create(sizes.total)
            try:
                sums, digests = wire.receive_shard(*sizes.views(slot))
            except BaseException:
                slot.close()
                raise
            found.append(Replica(key, int(message["rank"]), int(message["serial"]), sizes, slot, sums, digests))
    except BaseException:
        for item in found:
            item.slot.close()
        raise
    return found


def sizes_of(message: Message) -> Sizes:
    """Return the sizes that a message tells. Raises :class:`WireError` for what can't be."""
    sizes = Sizes(int(message["data"]), int(message["header"]), int(message["values"]))
    numbers = (sizes.data, sizes.header, sizes.values)
    if min(numbers) < 0 or max(numbers) > _MOST or sizes.header > _MOST_HEADER:
        raise WireError(f"a shard of {numbers} bytes")
    return sizes


def key_of(item: Sequence[int]) -> Key:
    """Return the key of a snapshot as a message has it."""
    generation, step = item
    return int(generation), int(step)


def lower_priority() -> None:
    """Have this thread give way to all others: training comes first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
