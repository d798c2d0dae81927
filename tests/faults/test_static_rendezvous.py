"""Signals to a launcher whose job has not begun: it waits for the store or for other nodes, in C++, and ends all the same."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.test_store import serving
from tests.jobs import Job, children, command_line, job, wait_for
from tests.ports import free_port

pytestmark = pytest.mark.spawns

ENDS_S = 20.0  # the waits that are cut short take from 60 s to 600 s; this machine may be busy
SCRIPT = ["never.py"]  # no worker runs


@contextmanager
def mute() -> Iterator[socket.socket]:
    """A host that takes connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(90)
        yield server


def static(rank: int, port: int) -> list[str]:
    return ["--nnodes=2", f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}"]


def dynamic(port: int) -> list[str]:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{port}"
    return ["--nnodes=2", "--rdzv-backend=c10d", endpoint, "--rdzv-conf=is_host=false", "--rdzv-id=job"]


def heeding(command: list[str]) -> list[str]:
    """Whoever runs the tests in the background may have SIGINT and SIGHUP ignored, and what is ignored stays so."""
    return ["env", "--default-signal=INT,HUP,TERM", *command]


def assert_ends(it: Job, signum: signal.Signals, code: int) -> None:
    os.kill(it.pid, signum)
    assert it.wait(ENDS_S) == code, it.log()
    assert f"ended by {signum.name}" in it.log()
    assert "Traceback" not in it.log()
    it.assert_nothing_left()


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 1), (signal.SIGINT, 130), pytest.param(signal.SIGHUP, 1, marks=pytest.mark.rare)],
    ids=["TERM", "INT", "HUP"],
)
def test_signal_ends_a_launcher_whose_static_store_does_not_answer(
    tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    with mute() as server, job(tmp_path, static(1, server.getsockname()[1]), SCRIPT, wrap=heeding) as it:
        connection, _ = server.accept()
        with connection:
            assert_ends(it, signum, code)


def test_signal_ends_a_launcher_at_whose_static_store_there_is_nobody(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and never listens
        with job(tmp_path, static(1, reserved.getsockname()[1]), SCRIPT, wrap=heeding) as it:
            wait_for(lambda: "deadlines:" in it.log(), "the launcher to look for the store")
            assert_ends(it, signal.SIGTERM, 1)


def test_signal_ends_a_launcher_that_serves_the_static_store_and_waits_for_the_others(tmp_path: Path) -> None:
    port = free_port()

    def serves() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    with job(tmp_path, static(0, port), SCRIPT, wrap=heeding) as it:
        wait_for(serves, lambda: f"the store to be served\n{it.log()}")
        assert_ends(it, signal.SIGTERM, 1)


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 1), pytest.param(signal.SIGINT, 130, marks=pytest.mark.rare)],
    ids=["TERM", "INT"],
)
def test_signal_ends_a_launcher_whose_dynamic_store_does_not_answer(
    tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    with mute() as server, job(tmp_path, dynamic(server.getsockname()[1]), SCRIPT, wrap=heeding) as it:
        connection, _ = server.accept()
        with connection:
            assert_ends(it, signum, code)


def test_signal_ends_a_launcher_that_waits_for_other_nodes_when_the_store_has_stopped(tmp_path: Path) -> None:
    with serving() as port, job(tmp_path, dynamic(port), SCRIPT, wrap=heeding) as it:
        wait_for(lambda: "1 of --nnodes=2:2 nodes are here" in it.log(), lambda: f"the launcher to wait\n{it.log()}")
        (store,) = [pid for pid in children(os.getpid()) if " store " in command_line(pid)]
        os.kill(store, signal.SIGSTOP)
        try:
            assert_ends(it, signal.SIGTERM, 1)
        finally:
            os.kill(store, signal.SIGCONT)
