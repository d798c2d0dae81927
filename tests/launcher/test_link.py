"""The launchers' line to one another: who is silent is lost, who has taken leave is not."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from resilience.failover import restart_policy as policies
from resilience.failover.history import History
from resilience.launcher.agreement import Agreement, Node
from resilience.launcher.link import Link
from resilience.launcher.vigil import Vigil
from tests.jobs import wait_for

SILENT_S = 1.0


class Shared(HashStore):  # type: ignore[misc]
    """A store in this process, which has no deadlines."""

    def set_timeout(self, timeout: object) -> None:
        """Nothing here waits."""


def link(store: HashStore, me: int) -> Link:
    """One of two launchers."""
    hub: Any = SimpleNamespace(
        settings=SimpleNamespace(launcher=SimpleNamespace(node_silence_timeout=SILENT_S)),
        learner=SimpleNamespace(learned={}),
        learn=lambda _: None,
    )
    nodes = (Node("a", (0,), "id-0", "n0"), Node("b", (1,), "id-1", "n1"))
    return Link(store, me, Agreement(0, nodes, {}, History()), hub=hub, testify=lambda: {"testimonies": []})


def beats(store: HashStore, me: int) -> int:
    key = f"alive/id-{me}"
    return int(store.get(key)) if store.check([key]) else 0


@pytest.mark.parametrize(("leaver", "other"), [(1, 0), (0, 1)])
@pytest.mark.parametrize("says_so", [True, False])
def test_node_that_has_taken_leave_is_not_lost_however_long_it_is_silent(
    leaver: int, other: int, says_so: bool
) -> None:
    store = Shared()
    gone, stays = link(store, leaver), link(store, other)
    try:
        wait_for(lambda: beats(store, 0) > 2 and beats(store, 1) > 2, "both to be heard")
        if says_so:
            gone.set_state(policies.GONE)
        gone.close()
        if says_so:
            so_far = beats(store, other)
            wait_for(lambda: beats(store, other) > so_far + 4 * SILENT_S * 4, "four times as long as silence may be")
            assert stays.lost_nodes() == {}
            assert stays.collect(30.0) == [], "nobody waits for what it has to say"
        else:
            wait_for(stays.lost_nodes, "it to be missed")
            assert "has been silent" in stays.lost_nodes()[leaver]
    finally:
        for it in (gone, stays):
            it.close()
            it._thread.join()


def test_node_whose_workers_are_done_waits_for_those_that_are_not_however_long_they_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    states = {0: policies.SUCCEEDED, 1: policies.RUNNING}
    it = cast("Any", object.__new__(Vigil))
    it.link = SimpleNamespace(states=lambda: states, me=0, lost_nodes=dict, peek=lambda _: None)
    it.stop = SimpleNamespace(under_way=False)
    it._hub = SimpleNamespace(brakes=SimpleNamespace(stop_taken=lambda: False))
    it._policy, it._min_nodes, it._excluded = policies.ANY_FAILED, 2, ""
    it._finished_at, it._waits_long = 1000.0, False
    with caplog.at_level("INFO", "resilience.launcher"):
        for now in (1010.0, 1310.0, 9000.0):
            monkeypatch.setattr("resilience.launcher.vigil.time.monotonic", lambda now=now: now)
            assert it._how_it_stands() is None
    assert [record.message for record in caplog.records] == [
        "this node has been done for 300 s; it waits for node 1, where workers still run."
    ]
    states[1] = policies.SUCCEEDED
    assert it._how_it_stands()["sentence"]["exit_code"] == 0


def test_nothing_is_in_the_store_once_its_silence_was_awaited() -> None:
    it = link(Shared(), 0)
    wait_for(it._thread.is_alive, "it to talk")
    it.close()
    it.await_silence(30.0)
    assert not it._thread.is_alive()


TALKER = """
import sys, threading
from torch.distributed import TCPStore
from resilience.launcher import cli
from resilience.launcher.link import IN_STORE

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = TCPStore("127.0.0.1", server.port, is_master=False)
talks = threading.Event()

def talk():
    while True:
        client.set("a", "b")
        talks.set()

threading.Thread(target=talk, name=f"{IN_STORE}-test", daemon=True).start()
assert talks.wait(60)
print("last words")
cli._end_if_in_store(7)
sys.exit(1)
"""


@pytest.mark.spawns
def test_launcher_that_ends_while_a_thread_is_in_the_store_ends_with_its_own_code() -> None:
    """torch's C++ aborts a process whose interpreter ends a thread that is in it: that is code -6, whatever the job has done."""
    done = subprocess.run([sys.executable, "-c", TALKER], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (7, "last words\n"), done.stderr
