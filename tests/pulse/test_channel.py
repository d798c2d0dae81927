from __future__ import annotations

import array
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.pulse import channel

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = channel.pair()
    ours.settimeout(5)
    theirs.settimeout(5)
    yield ours, theirs
    ours.close()
    theirs.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def send_raw(sock: socket.socket, data: bytes, fds: tuple[int, ...] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights)


def test_message_arrives_whole_with_its_descriptors(ends: Ends) -> None:
    read_end, write_end = os.pipe()
    channel.send(ends[0], {"op": "attach", "name": "ü", "n": [1, None]}, (write_end,))
    received = channel.receive(ends[1])
    assert received is not None
    message, fds = received
    assert message == {"op": "attach", "name": "ü", "n": [1, None]}
    os.write(fds[0], b"same pipe")
    assert os.read(read_end, 100) == b"same pipe"
    assert not os.get_inheritable(fds[0])
    for fd in (read_end, write_end, *fds):
        os.close(fd)


def test_two_messages_do_not_run_together(ends: Ends) -> None:
    channel.send(ends[0], {"n": 1})
    channel.send(ends[0], {"n": 2})
    assert [channel.receive(ends[1]), channel.receive(ends[1])] == [({"n": 1}, []), ({"n": 2}, [])]


def test_closed_end_is_the_end(ends: Ends) -> None:
    ends[0].close()
    assert channel.receive(ends[1]) is None
    with pytest.raises(OSError, match=r"pipe|reset"):
        channel.send(ends[1], {"op": "x"})


def test_silent_end_is_a_deadline_and_no_endless_wait(ends: Ends) -> None:
    ends[1].settimeout(0.01)
    with pytest.raises(TimeoutError):
        channel.receive(ends[1])


@pytest.mark.parametrize(
    "garbage",
    [b"\0", b"not json", b"[1,2]", b'"text"', b"17", b"null", b"\xff\xfe\x00", b'{"op":', b"9" * 5000, b"\x80\x04."],
)
def test_garbage_is_an_empty_message_and_its_descriptors_are_closed(ends: Ends, garbage: bytes) -> None:
    read_end, write_end = os.pipe()
    before = open_fds()
    send_raw(ends[0], garbage, (read_end, write_end))
    assert channel.receive(ends[1]) == ({}, [])
    assert open_fds() == before
    os.close(read_end)
    os.close(write_end)


def test_garbage_that_nests_without_end_is_an_empty_message_too(ends: Ends) -> None:
    send_raw(ends[0], b"[" * 100_000)
    assert channel.receive(ends[1]) == ({}, [])


def test_empty_packet_with_descriptors_leaves_none_open(ends: Ends) -> None:
    read_end, write_end = os.pipe()
    before = open_fds()
    send_raw(ends[0], b"", (read_end,))
    channel.receive(ends[1])
    assert open_fds() == before
    os.close(read_end)
    os.close(write_end)


def test_more_descriptors_than_any_message_has_are_not_kept(ends: Ends) -> None:
    pipes = [os.pipe() for _ in range(10)]
    before = open_fds()
    send_raw(ends[0], b"garbage", tuple(fd for pipe in pipes for fd in pipe))
    assert channel.receive(ends[1]) == ({}, [])
    assert open_fds() == before
    for pipe in pipes:
        for fd in pipe:
            os.close(fd)


def test_oversized_message_arrives_as_garbage_and_the_next_one_is_fine(ends: Ends) -> None:
    send_raw(ends[0], b'{"x":"' + b"y" * channel.MAX_BYTES + b'"}')
    assert channel.receive(ends[1]) == ({}, [])
    channel.send(ends[0], {"n": 1})
    assert channel.receive(ends[1]) == ({"n": 1}, [])


def test_message_beyond_the_socket_buffer_is_an_os_error(ends: Ends) -> None:
    with pytest.raises(OSError):
        channel.send(ends[0], {"x": "y" * (8 << 20)})


def test_listening_socket_is_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    server = channel.listen(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with channel.connect(str(path), 5.0) as client:
        accepted, _ = server.accept()
        channel.send(client, {"op": "hello"})
        accepted.settimeout(5)
        assert channel.receive(accepted) == ({"op": "hello"}, [])
        accepted.close()
    server.close()


def test_connecting_to_nobody_raises_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = open_fds()
    with pytest.raises(FileNotFoundError):
        channel.connect(str(tmp_path / "nobody"), 0.1)
    assert open_fds() == before
