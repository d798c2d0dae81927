"""Copies on their way between savers: strangers get nothing, damage is found, and what is kept is bounded."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from resilience.checkpoint import digest
from resilience.checkpoint.saver import courier, wire
from resilience.checkpoint.saver.courier import Counter, Parcel, Trip
from resilience.checkpoint.saver.excerpts import Excerpt
from resilience.checkpoint.saver.line import listen
from resilience.checkpoint.saver.replicas import Key, Replicas, Sizes
from resilience.checkpoint.saver.throttle import Bucket
from resilience.checkpoint.saver.wire import Wire, WireError, address_of
from resilience.errors import CheckpointError

K1, K2, K3 = (5, 1), (5, 2), (5, 3)
NEVER = (0, -1)
PLENTY = 1 << 40


def shard(size: int = 100_000, seed: int = 1) -> Excerpt:
    data = memoryview(bytes((index * seed) % 251 for index in range(size)))
    spans = ((10, size // 2), (size // 2 + 1, size)) if size > 100 else ()
    return Excerpt(b"header" * 50, memoryview(b"values"), data, spans)


def parcel(key: Key = K1, rank: int = 2, serial: int = 1, **more: int) -> Parcel:
    return Parcel(key, rank, serial, shard(**more))


class Node:
    """A saver's counter, and what it keeps."""

    def __init__(self, room: int = PLENTY, secret: str = "secret") -> None:
        self.replicas = Replicas(lambda: (room, "a machine of this test"))
        self.common: list[Parcel] = []
        self.counter = Counter(listen("127.0.0.1", 0), lambda: secret, self.replicas, self)
        self.address = ("127.0.0.1", self.counter.address[1])

    @contextlib.contextmanager
    def shared(self, key: Key) -> Iterator[Sequence[Parcel]]:
        if not self.common:
            raise CheckpointError("it is not here")
        yield self.common

    def trip(self, **more: object) -> Trip:
        return replace(Trip({0: self.address}, "secret", "", Bucket(0.0, 0.0)), **more)  # type: ignore[arg-type]

    def give(self, *parcels: Parcel, replicated: Key = NEVER) -> int:
        return courier.deliver(self.trip(), parcels, replicated, threading.Event())

    def close(self) -> None:
        self.counter.close()
        self.replicas.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- copies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1000, (16 << 20) + 1, 33 << 20])
def test_copy_that_is_given_comes_back_to_the_byte(node: Node, size: int) -> None:
    pattern = memoryview(bytes(range(256)) * (size // 256 + 1))[:size]
    sent = Parcel(K1, 2, 7, Excerpt(b"head", memoryview(b"values"), pattern, ((0, size),) if size else ()))
    assert node.give(sent) == size + 10
    assert node.replicas.listed() == [(*K1, 2)]
    node.common = [sent]
    brought = courier.bring_back(node.trip(), K1, {"own": [[2, [0]]], "shared": [0]})
    for item in (brought.own[2], brought.shared[0]):
        header, values, data = item.sizes.views(item.slot)
        assert (bytes(header), bytes(values), bytes(data) == bytes(pattern)) == (b"head", b"values", True)
        assert item.digests == digest.digests(pattern, digest.chunk_size(size))
        del header, values, data
    brought.close()


def test_copy_that_is_there_already_is_not_sent_again_but_one_of_a_later_seal_is(node: Node) -> None:
    assert node.give(parcel()) > 0
    assert node.give(parcel()) == 0
    assert node.give(parcel(serial=2)) > 0


def test_of_each_rank_two_copies_stay_at_most_and_the_replicated_one_always(node: Node) -> None:
    node.give(parcel(K1))
    node.give(parcel(K2), replicated=K1)
    assert node.replicas.listed() == [(*K1, 2), (*K2, 2)]
    node.give(parcel(K3), replicated=K1)
    assert node.replicas.listed() == [(*K1, 2), (*K3, 2)], "what nobody confirmed makes room"
    node.give(parcel((5, 4)), replicated=K3)
    assert node.replicas.listed() == [(*K3, 2), (5, 4, 2)]
    assert node.replicas.nbytes() <= 2 * (110_000 // 4096 + 2) * 4096


def test_what_is_settled_dropped_or_void_is_gone(node: Node) -> None:
    node.give(parcel(K1), parcel(K1, rank=3))
    node.give(parcel(K2), parcel(K2, rank=3), replicated=K1)
    node.replicas.drop(K1)
    node.replicas.drop(K2)
    assert node.replicas.listed() == [(*K1, 2), (*K1, 3)], "what is replicated is not dropped"
    node.replicas.go_back_to((5, 0))
    assert node.replicas.listed() == []


def test_full_memory_is_said_with_the_figures_and_nothing_is_kept() -> None:
    small = Node(room=50_000)
    try:
        with pytest.raises(
            WireError, match=r"rank 0 .* has no copy: a copy of rank 2 takes 0.00 GB, and a machine of this test"
        ):
            small.give(parcel())
        assert (small.replicas.listed(), small.replicas.nbytes()) == ([], 0)
    finally:
        small.close()


def test_copy_that_was_damaged_in_the_memory_of_its_keeper_is_refused_and_another_keeper_is_asked(node: Node) -> None:
    other = Node()
    try:
        node.give(parcel())
        other.give(parcel())
        node.common = other.common = [parcel()]
        kept = node.replicas.find(K1, 2)
        assert kept is not None
        kept.slot.map[50_000] ^= 1
        trip = node.trip(addresses={0: node.address, 4: other.address})
        brought = courier.bring_back(trip, K1, {"own": [[2, [0, 4]]], "shared": [4]})
        assert bytes(brought.own[2].sizes.views(brought.own[2].slot)[2]) == b"".join(shard().pieces(1 << 20))
        brought.close()
        with pytest.raises(WireError, match=r"rank 2's copy of step 1 can't be had .*the digest is wrong"):
            courier.bring_back(trip, K1, {"own": [[2, [0]]], "shared": [4]})
    finally:
        other.close()


def test_what_nobody_has_is_said_with_who_was_asked(node: Node) -> None:
    with pytest.raises(WireError, match="from the node with rank 0: there is no copy of rank 2 of step 1 here"):
        courier.bring_back(node.trip(), K1, {"own": [[2, [0]]], "shared": [0]})
    node.give(parcel())
    with pytest.raises(WireError, match=r"what all nodes share of step 1 can't be had .*it is not here"):
        courier.bring_back(node.trip(), K1, {"own": [[2, [0]]], "shared": [0]})
    with pytest.raises(WireError, match="its address is not known"):
        courier.bring_back(node.trip(addresses={}), K1, {"own": [[2, [0]]], "shared": [0]})


# -- on the way ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def through(address: tuple[str, int], change: Callable[[bytes, int], bytes | None]) -> Iterator[tuple[str, int]]:
    """A proxy that may change what callers send (given where it begins), or cut the line with ``None``."""
    server = socket.create_server(("127.0.0.1", 0))
    socks: list[socket.socket] = [server]

    def pump(source: socket.socket, target: socket.socket, tamper: bool) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                changed = change(data, at) if tamper else data
                at += len(data)
                if changed is None:
                    break
                target.sendall(changed)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller = server.accept()[0]
                called = socket.create_connection(address)
                socks.extend((caller, called))
                threading.Thread(target=pump, args=(caller, called, True), daemon=True).start()
                threading.Thread(target=pump, args=(called, caller, False), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()[:2]
    finally:
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def test_bit_that_is_flipped_on_the_way_is_found_and_nothing_is_kept(node: Node) -> None:
    def flip(data: bytes, at: int) -> bytes:
        place = 60_000 - at
        return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :] if 0 <= place < len(data) else data

    with through(node.address, flip) as address, pytest.raises(WireError, match="the digest is wrong"):
        courier.deliver(node.trip(addresses={0: address}), [parcel()], NEVER, threading.Event())
    assert node.replicas.listed() == []
    node.give(parcel())


def test_line_that_is_cut_in_the_middle_leaves_nothing_and_the_next_one_is_whole(node: Node) -> None:
    def cut(data: bytes, at: int) -> bytes | None:
        return None if at > 30_000 else data

    with through(node.address, cut) as address, pytest.raises(WireError, match="has no copy"):
        courier.deliver(node.trip(addresses={0: address}), [parcel()], NEVER, threading.Event())
    assert node.replicas.listed() == []
    node.give(parcel())
    assert node.replicas.listed() == [(*K1, 2)]


def test_bandwidth_limit_is_kept_on_the_wire(node: Node) -> None:
    began = time.monotonic()
    trip = node.trip(bucket=Bucket(2e6, began))
    courier.deliver(trip, [parcel(size=600_000)], NEVER, threading.Event())
    assert time.monotonic() - began >= 0.19, "0.6 MB at 2 MB/s, a tenth of a second's worth at once"


# -- strangers ----------------------------------------------------------------------------------------------------------


def frame(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


def test_caller_with_a_wrong_secret_is_refused_and_keeps_nothing_here(node: Node) -> None:
    with pytest.raises(WireError, match="does not know the secret"):
        courier.deliver(node.trip(secret="guess"), [parcel()], NEVER, threading.Event())
    assert node.replicas.listed() == []


def test_called_one_that_does_not_know_the_secret_is_given_nothing(node: Node) -> None:
    heard: list[bytes] = []

    def pretend(server: socket.socket) -> None:
        caller, _ = server.accept()
        with caller:
            caller.sendall(frame(b'{"nonce":"x"}'))
            heard.append(caller.recv(1 << 16))
            caller.sendall(frame(b'{"proof":"none"}'))
            heard.append(caller.recv(1 << 16))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,), daemon=True)
        thread.start()
        with pytest.raises(WireError, match="its proof is wrong"):
            courier.deliver(node.trip(addresses={0: server.getsockname()}), [parcel()], NEVER, threading.Event())
        thread.join(10)
    assert heard[1] == b""


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        frame(b"{}"),
        frame(b"[1]"),
        frame(b"{" * 3000),
        struct.pack("!I", 1 << 31) + b"x" * 5000,
        frame(b'{"proof":"00"}'),
        frame(b'{"op":"put","key":[5,1],"rank":2,"serial":1,"data":1,"header":1,"values":1,"replicated":[0,0]}'),
    ],
)
def test_stranger_is_hung_up_on_whatever_it_says(node: Node, words: bytes) -> None:
    with socket.create_connection(node.address) as stranger:
        stranger.settimeout(20)
        with contextlib.suppress(OSError):  # it may have hung up before all was said
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
    assert node.replicas.listed() == []
    node.give(parcel())


def test_strangers_that_say_nothing_do_not_keep_others_out_for_long(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PROVE_S", 0.3)
    crowd = [socket.create_connection(node.address) for _ in range(courier._CALLERS + 10)]
    try:
        wait_until(lambda: _gives(node))
    finally:
        for sock in crowd:
            sock.close()


def _gives(node: Node) -> bool:
    try:
        return node.give(parcel()) > 0
    except WireError:
        return False


@pytest.mark.parametrize(
    "question",
    [
        {"op": "what"},
        {"op": "put"},
        {"op": "put", **parcel().sizes(), "replicated": NEVER, "data": -1},
        {"op": "put", **parcel().sizes(), "replicated": NEVER, "data": 1 << 60},
        {"op": "put", **parcel().sizes(), "replicated": NEVER, "header": 1 << 30},
        {"op": "put", **parcel().sizes(), "replicated": "abc"},
        {"op": "get", "key": [1], "rank": 0},
        {"op": "get", "key": [1, 2], "rank": "x"},
    ],
    ids=str,
)
def test_question_that_makes_no_sense_is_answered_with_an_error(node: Node, question: dict[str, object]) -> None:
    caller = Wire.call(node.address, "secret")
    try:
        with pytest.raises(WireError):
            caller.ask(question)
    finally:
        caller.close()
    node.give(parcel())


# -- addresses ----------------------------------------------------------------------------------------------------------


def test_interface_is_known_by_its_name_and_by_its_address() -> None:
    assert address_of("lo") == address_of("127.0.0.1") == "127.0.0.1"
    assert wire.interface_of("127.0.0.1") == "lo"
    assert wire.own_address(("127.0.0.1", 9)) == "127.0.0.1"
    with pytest.raises(CheckpointError, match=r"replica_interface='nope0': .* has no such interface .*\(it has .*lo"):
        address_of("nope0")


def test_sizes_make_room_for_everything() -> None:
    assert Sizes(1, 2, 3).total == 4096 + 5
