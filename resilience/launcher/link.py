"""How the launchers of a job talk: a few keys in the rendezvous store, on a connection of their own.

1) ``offer/<node>``      (all) at each rendezvous: cycle number, what was learned, host and ranks
2) ``decision``          (node 0) one cycle number for the job, the merged timeouts, the map of nodes
3) ``alive/<node>``      (all) a counter, twice a second
4) ``alarm``             (first to notice) something happened; whoever wrote it owns the report
5) ``testimony/<node>``  (all) the stacks of this node's ranks, before anything is ended
6) ``report``            (owner) the report of the cycle, the same on every node
7) ``learned/<node>``, ``learned``  (all; node 0 merges) every few seconds

All keys live below the round's own prefix, so cycles never mix. No call waits for a key that may never come.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from resilience.launcher.hub import Hub
from resilience.pulse.timeouts import from_json, merge, to_json

_LOG = logging.getLogger("resilience.launcher")
_TICK_S = 0.5
_LEARN_EVERY_S = 5.0
_STORE_TIMEOUT_S = 10.0
_STACK_BUDGET = 256 * 1024  # characters of stack per rank, shared by all nodes of the job


@dataclass(frozen=True)
class Node:
    """One node of the job in this cycle."""

    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Agreement:
    """What all launchers of a cycle agree on."""

    cycle: int
    nodes: tuple[Node, ...]
    learned: dict[str, Any]


def agree(store: Any, me: int, world: int, offer: dict[str, Any]) -> Agreement:
    """Agree on the cycle and exchange what was learned. Blocks as long as the store's own timeout at most."""
    if world == 1:
        return Agreement(offer["cycle"], (Node(offer["host"], tuple(offer["ranks"])),), offer["learned"])
    store.set(f"resilience/offer/{me}", json.dumps(offer))
    if me == 0:
        offers = [json.loads(store.get(f"resilience/offer/{node}")) for node in range(world)]
        learned: dict[str, Any] = {}
        for item in offers:
            learned = merge(learned, from_json(item["learned"]))
        decision = {
            "cycle": max(item["cycle"] for item in offers),
            "nodes": [[item["host"], item["ranks"]] for item in offers],
            "learned": to_json(learned),
        }
        store.set("resilience/decision", json.dumps(decision))
    decided = json.loads(store.get("resilience/decision"))
    nodes = tuple(Node(host, tuple(ranks)) for host, ranks in decided["nodes"])
    return Agreement(decided["cycle"], nodes, decided["learned"])


class Link:
    """This launcher's line to the others, for one cycle. With a single node nothing is said."""

    def __init__(
        self,
        store: Any,
        me: int,
        agreement: Agreement,
        hub: Hub,
        on_report: Callable[[dict[str, Any]], None],
    ) -> None:
        self.nodes = agreement.nodes
        self._me = me
        self._hub = hub
        self._on_report = on_report
        self._prefix = f"resilience/{agreement.cycle}/"
        self._alone = len(agreement.nodes) == 1
        self._store: Any = None if self._alone else store.clone()
        self._alarm: str | None = None
        self._report: dict[str, Any] | None = None
        self._counter = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._learned_at = 0.0
        self._looked_at = time.monotonic()
        self._answered = time.monotonic()
        self._lost: dict[int, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resilience-link", daemon=True)
        if not self._alone:
            self._thread.start()

    def close(self) -> None:
        """Stop talking. Does not wait for a store call that hangs."""
        self._stop.set()

    def silent_for(self) -> float:
        """Return for how many seconds the store has not answered us."""
        return 0.0 if self._alone or self._stop.is_set() else time.monotonic() - self._answered

    def lost_nodes(self) -> dict[int, str]:
        """Return the nodes whose launchers are silent, with a sentence each."""
        return dict(self._lost)

    def report(self) -> dict[str, Any] | None:
        """Return the report of this cycle, if another node wrote one."""
        return self._report

    def raise_alarm(self, note: dict[str, Any]) -> bool:
        """Tell all nodes that something happened; True when we were first and the report is ours to write."""
        if self._alone:
            return True
        text = json.dumps({**note, "node": self._me})
        try:
            first = bytes(self._store.compare_set(self._prefix + "alarm", "", text)) == text.encode()
        except RuntimeError as error:
            _LOG.warning("the other nodes could not be told: %s", _first_line(error))
            return True
        if first:
            self._alarm = text  # our own: the thread need not answer it
        return first

    def collect(self, timeout: float) -> list[dict[str, Any]]:
        """Return the testimonies of the other nodes' ranks; nodes that do not answer in time are left out."""
        others = [node for node in range(len(self.nodes)) if node != self._me and node not in self._lost]
        deadline = time.monotonic() + timeout
        found: list[dict[str, Any]] = []
        while others and time.monotonic() < deadline:
            for node in list(others):
                text = self._read(f"testimony/{node}")
                if text is not None:
                    found += json.loads(text)
                    others.remove(node)
            if others:
                time.sleep(0.05)
        silent = self._without_pulse(others)
        for node in others:
            host = self.nodes[node].host
            _LOG.warning("node %s (%s) did not testify within %g s.", node, host, timeout)
            if node in silent:
                self._lost[node] = (
                    f"the launcher on {host} did not testify within {timeout:g} s; it probably died first"
                )
        return found

    def _without_pulse(self, nodes: list[int]) -> list[int]:
        """Return those of ``nodes`` whose counter stands still: they are not slow, they are gone."""
        if not nodes:
            return []
        before = [self._read(f"alive/{node}") for node in nodes]
        time.sleep(4 * _TICK_S)
        return [node for node, value in zip(nodes, before, strict=True) if self._read(f"alive/{node}") == value]

    def publish(self, report: dict[str, Any]) -> None:
        """Give the report to the other nodes."""
        if not self._alone:
            self._report = report
            self._write("report", json.dumps(report))

    def await_report(self, timeout: float) -> dict[str, Any] | None:
        """Wait for the report that another node owns."""
        deadline = time.monotonic() + timeout
        while self._report is None and time.monotonic() < deadline and not self._stop.wait(0.05):
            pass
        return self._report

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        while not self._stop.wait(_TICK_S):
            self._try(self._tick)
        self._try(self._look_for_report)  # it may have come since the last tick; there will be no next one

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
            self._answered = time.monotonic()
        except RuntimeError as error:  # torch's DistError family: the store is gone or out of reach
            _LOG.debug("the store did not answer: %s", _first_line(error))

    def _tick(self) -> None:
        self._counter += 1
        self._store.set(f"{self._prefix}alive/{self._me}", str(self._counter))
        if self._alarm is None:
            self._alarm = self._read("alarm")
            if self._alarm is not None:
                testimonies = self._hub.testify(self._hub.settings.monitor.testimony_timeout)
                self._write(
                    f"testimony/{self._me}", json.dumps([_short(item, len(self.nodes)) for item in testimonies])
                )
        else:
            self._look_for_report()
        if self._me == 0:
            self._look_for_silence()
        if time.monotonic() - self._learned_at > _LEARN_EVERY_S:
            self._learned_at = time.monotonic()
            self._exchange()

    def _look_for_report(self) -> None:
        text = self._read("report") if self._report is None else None
        if text is not None:
            report: dict[str, Any] = json.loads(text)
            self._on_report(report)
            self._report = report

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        self._looked_at, looked_at = now, self._looked_at
        limit = self._hub.settings.launcher.node_silence_timeout
        for node, text in enumerate(self._read_all("alive"), 1):
            value, since = self._seen.get(node, (b"", now))
            if value != text or now - looked_at > 4 * _TICK_S:  # or we were stopped ourselves
                since = now
            self._seen[node] = (text, since)
            if now - since > limit and node not in self._lost:
                self._lost[node] = f"the launcher on {self.nodes[node].host} has been silent for {now - since:.0f} s"

    def _read_all(self, name: str) -> list[bytes]:
        """Return a key of every other node; in one round trip once all have written it."""
        keys = [f"{self._prefix}{name}/{node}" for node in range(1, len(self.nodes))]
        if self._store.has_extended_api() and self._store.check(keys):
            return [bytes(value) for value in self._store.multi_get(keys)]
        return [bytes(self._store.get(key)) if self._store.check([key]) else b"" for key in keys]

    def _exchange(self) -> None:
        mine = json.dumps(to_json(self._hub.learner.learned))
        self._write(f"learned/{self._me}", mine)
        if self._me == 0:
            for text in self._read_all("learned"):
                self._hub.learn(json.loads(text or b"{}"))
            self._write("learned", json.dumps(to_json(self._hub.learner.learned)))
        else:
            self._hub.learn(json.loads(self._read("learned") or "{}"))

    def _read(self, key: str) -> str | None:
        try:
            if self._store.check([self._prefix + key]):
                return bytes(self._store.get(self._prefix + key)).decode()
        except RuntimeError:
            if threading.current_thread() is self._thread:
                raise
        return None

    def _write(self, key: str, text: str) -> None:
        try:
            self._store.set(self._prefix + key, text)
        except RuntimeError as error:
            if threading.current_thread() is self._thread:
                raise
            _LOG.warning("the other nodes could not be told: %s", _first_line(error))


def _short(testimony: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Cut a stack so that the testimony of thousands of ranks fits through one store."""
    room = max(2_000, _STACK_BUDGET // nodes)
    return {**testimony, "stack": testimony["stack"][:room]}


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
