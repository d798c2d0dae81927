"""A wire between two savers for snapshots: messages and raw bytes over TCP, in threads that may wait.

1) (who listens) sends a nonce
2) (who calls)   sends the proof of it, and a nonce of its own
3) (who listens) sends the proof of that
4) (who calls)   asks, as often as it likes; with each shard go its sizes, its bytes, and last its digests

Both know the secret of the job, as on a :mod:`line`. Nothing that arrives is unpickled or evaluated; every length is checked before
it is believed, every wait has a deadline, and a stranger gets no further than 3).
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import xxhash

from resilience.checkpoint import digest
from resilience.checkpoint.saver.excerpts import Excerpt
from resilience.checkpoint.saver.line import PROVE_S, proof
from resilience.checkpoint.saver.pace import Pace
from resilience.checkpoint.saver.throttle import Bucket
from resilience.errors import CheckpointError

Message = dict[str, Any]
_LENGTH = struct.Struct("!I")
_MOST = 1 << 20
_STRANGER_MOST = 4096
_PIECE = 1 << 20
_SILENCE_S = 30.0  # the other end neither sends nor takes anything for so long
_CALL_S = 10.0
_SIOCGIFADDR = 0x8915


class WireError(CheckpointError):
    """The other end can't be reached, is not who it should be, says no, or sends what is not what it should be."""


class Wire:
    """One end, blocking. Raises :class:`WireError` and ``OSError``."""

    def __init__(self, sock: socket.socket, secret: str) -> None:
        self._sock = sock
        self._secret = secret.encode()
        sock.settimeout(_SILENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def call(cls, address: tuple[str, int], secret: str, here: str = "") -> Wire:
        """Call a saver, from an address of this node if one is given; return when both have proven themselves."""
        try:
            sock = socket.create_connection(address, _CALL_S, (here, 0) if here else None)
        except OSError as error:
            raise WireError(f"{address[0]}:{address[1]} can't be reached: {error}") from error
        wire = cls(sock, secret)
        try:
            nonce = secrets.token_hex(16)
            theirs = wire.receive(_STRANGER_MOST).get("nonce")
            wire.send({"proof": proof(wire._secret, "replica caller", theirs), "nonce": nonce})
            answer = wire.receive(_STRANGER_MOST).get("proof")
            if not hmac.compare_digest(str(answer), proof(wire._secret, "replica called", nonce)):
                raise WireError("its proof is wrong")
        except (OSError, WireError) as error:
            wire.close()
            where = f"{address[0]}:{address[1]}"
            raise WireError(f"{where} is gone, or one of us does not know the secret of the job ({error})") from error
        return wire

    def answer(self) -> None:
        """Let a caller prove itself. Raises if it does not, in time."""
        deadline = time.monotonic() + PROVE_S
        nonce = secrets.token_hex(16)
        self._sock.settimeout(PROVE_S)
        self.send({"nonce": nonce})
        message = self.receive(_STRANGER_MOST, deadline)
        if not hmac.compare_digest(str(message.get("proof")), proof(self._secret, "replica caller", nonce)):
            raise WireError("a caller does not know the secret of the job")
        self.send({"proof": proof(self._secret, "replica called", message.get("nonce"))})
        self._sock.settimeout(_SILENCE_S)

    def close(self) -> None:
        """Hang up, also on whoever waits in another thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    # -- messages ---------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message."""
        data = json.dumps(message, separators=(",", ":")).encode()
        self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, most: int = _MOST, deadline: float = 0.0) -> Message:
        """Receive a message, of so many bytes at most."""
        (length,) = _LENGTH.unpack(self._bytes(_LENGTH.size, deadline))
        if length > most:
            raise WireError(f"a message of {length} bytes, and at most {most} were expected")
        try:
            message = json.loads(self._bytes(length, deadline))
        except (ValueError, RecursionError) as error:
            raise WireError("a message that is none") from error
        if not isinstance(message, dict):
            raise WireError("a message that is none")
        return message

    def ask(self, message: Message) -> Message:
        """Send a message and return the answer. Raises :class:`WireError` if that is a refusal."""
        self.send(message)
        answer = self.receive()
        if "error" in answer:
            raise WireError(str(answer["error"])[:2000])
        return answer

    def await_question(self) -> Message | None:
        """Return the next thing that a caller asks; ``None`` when it has hung up."""
        return self.receive() if self._sock.recv(1, socket.MSG_PEEK) else None

    def _bytes(self, length: int, deadline: float = 0.0) -> bytes:
        room = bytearray(length)
        self._fill(memoryview(room), deadline)
        return bytes(room)

    def _fill(self, room: memoryview, deadline: float = 0.0) -> None:
        at = 0
        while at < len(room):
            if deadline:  # byte by byte would be an answer in time, each
                self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            got = self._sock.recv_into(room[at:])
            if not got:
                raise WireError("the other end hung up in the middle")
            at += got

    # -- shards -----------------------------------------------------------------------------------------------------

    def send_shard(
        self, shard: Excerpt, bucket: Bucket, known: list[str] | None = None, pace: Pace | None = None
    ) -> None:
        """Send header, values and tensors, and their digests; the tensors' are computed on the way if they are not ``known``.
        ``pace``: gives way to whoever needs the processors."""
        self._sock.sendall(shard.header)
        self._sock.sendall(shard.values)
        chunk, found, at = digest.chunk_size(shard.nbytes), list[str](), 0
        running = xxhash.xxh3_128()
        for piece in shard.pieces(_PIECE):
            for part in _cut(piece, chunk - at % chunk, chunk):
                pause = max(bucket.take(len(part), time.monotonic()), pace.courtesy() if pace is not None else 0.0)
                if pause:
                    time.sleep(pause)
                self._sock.sendall(part)
                at += len(part)
                if known is None:
                    running.update(part)
                    if at % chunk == 0 or at == shard.nbytes:
                        found.append(running.hexdigest())
                        running = xxhash.xxh3_128()
        sums = [digest.short(shard.header), digest.short(shard.values)]
        self.send({"sums": sums, "digests": found if known is None else known})

    def receive_shard(self, header: memoryview, values: memoryview, data: memoryview) -> tuple[list[int], list[str]]:
        """Receive header, values and tensors into memory of ours; return their digests, which were found to be right."""
        self._fill(header)
        self._fill(values)
        chunk, found = digest.chunk_size(len(data)), []
        for start, end in digest.chunks(len(data), chunk):
            self._fill(data[start:end])
            found.append(digest.digest(data[start:end]))
        told = self.receive()
        sums = [digest.short(header), digest.short(values)]
        if told.get("digests") != found or told.get("sums") != sums:
            raise WireError("what arrived is not what was sent: the digest is wrong")
        return sums, found


def _cut(data: memoryview, first: int, most: int) -> Iterator[memoryview]:
    """Yield data in parts that end where chunks do: so many bytes are left of the one that has been begun."""
    yield data[:first]
    for at in range(first, len(data), most):
        yield data[at : at + most]


def address_of(interface: str) -> str:
    """Return the address of an interface of this node, or the address itself. Raises ``CheckpointError`` if there is none."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise CheckpointError(
                f"replica_interface={interface!r}: {socket.gethostname()} has no such interface with an IPv4 address (it has "
                f"{names}). Nothing was set up."
            ) from error
    return socket.inet_ntoa(packed[20:24])


def interface_of(host: str) -> str:
    """Return the interface that has an address, as far as it can be told."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return ""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(CheckpointError):
            if address_of(name) == address:
                return name
    return ""


def own_address(towards: tuple[str, int]) -> str:
    """Return the address of this node on the way to another. Nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
