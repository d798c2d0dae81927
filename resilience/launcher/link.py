"""How the launchers of a job talk: a few keys in the rendezvous store, on a connection of their own.

1) ``offer/<node>``      (all) at each rendezvous: cycle number, what was learned and what has failed, host and ranks
2) ``decision``          (node 0) one cycle number for the job, the merged timeouts and history, the map of nodes
3) ``alive/<id>``        (all) a counter, several times a second
4) ``alarm``             (first to notice) something happened; whoever wrote it owns the verdict
5) ``testimony/<node>``  (all) stacks, failures and requests of this node's ranks, before anything is ended
6) ``verdict``           (owner) the report of the cycle and what every node is to do, the same for all
7) ``state/<node>``      (all) running, failed or succeeded
8) ``learned/<node>``, ``learned``  (all; node 0 merges) every few seconds

All keys but ``alive`` live below the round's own prefix, so cycles never mix. No call waits for a key that may never come.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from resilience.failover.restart_policy import FAILED, GONE, LEFT, RUNNING
from resilience.launcher.agreement import Agreement
from resilience.launcher.bell import Bell
from resilience.launcher.hub import Hub
from resilience.pulse.timeouts import to_json

_LOG = logging.getLogger("resilience.launcher")
_TICK_S = 0.25
_LEARN_EVERY_S = 5.0
_STORE_TIMEOUT_S = 10.0
_STACK_BUDGET = 256 * 1024  # characters of stack per rank, shared by all nodes of the job
_FAREWELL_S = 15.0
_OWNER_SILENT_S = 5.0
IN_STORE = "resilience-store"  # so begin the names of threads that call torch's store


class Link:
    """This launcher's line to the others, for one cycle. With a single node that can't get company nothing is said."""

    def __init__(
        self,
        store: Any,
        me: int,
        agreement: Agreement,
        *,
        hub: Hub,
        testify: Callable[[], dict[str, Any]],
        alive: Any = None,
    ) -> None:
        """``store`` and ``alive`` (below the job's prefix) are on connections of their own; without ``store`` we are alone."""
        self.nodes = agreement.nodes
        self.me = me
        self._hub = hub
        self._testify = testify
        self._prefix = f"resilience/{agreement.cycle}/"
        self._store = store
        self._alive = alive if alive is not None else store
        self._alarm: str | None = None
        self._verdict: dict[str, Any] | None = None
        self._counter = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._learned_at = 0.0
        self._looked_at = time.monotonic()
        self._answered = time.monotonic()
        self._lost: dict[int, str] = {}
        self._board: dict[str, str] = {}
        self._state = RUNNING
        self._states: dict[int, str] = {me: RUNNING}
        self._stop = threading.Event()
        self.bell = Bell()  # rung when there is something to look at
        self._thread = threading.Thread(target=self._run, name=f"{IN_STORE}-link", daemon=True)
        if self._store is not None:
            self._thread.start()

    @property
    def company(self) -> bool:
        """Whether there are other nodes in this cycle."""
        return len(self.nodes) > 1

    def close(self) -> None:
        """Stop talking. Does not wait for a store call that hangs."""
        self._stop.set()

    def await_silence(self, timeout: float) -> None:
        """Wait for a call that is under way, after :meth:`close`: nothing should be in the store while the process ends."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    def silent_for(self) -> float:
        """Return for how many seconds the store has not answered us."""
        return 0.0 if self._store is None or self._stop.is_set() else time.monotonic() - self._answered

    def lost_nodes(self) -> dict[int, str]:
        """Return the nodes whose launchers are silent, with a sentence each."""
        return dict(self._lost)

    def miss(self, node: int, why: str) -> None:
        """Hold another node for lost: somebody else knows it, though it has not been silent here for long enough."""
        self._lost.setdefault(node, f"the launcher on {self.nodes[node].host} {why}")
        self.bell.ring()

    def verdict(self) -> dict[str, Any] | None:
        """Return the verdict of this cycle, if one was given."""
        return self._verdict

    def alarmed(self) -> bool:
        """Whether somebody else has raised an alarm in this cycle."""
        return self._alarm is not None

    def raise_alarm(self, note: dict[str, Any]) -> bool:
        """Tell all nodes that something happened; True when we were first and the verdict is ours to give."""
        if not self.company:
            return True
        text = json.dumps({**note, "node": self.me})
        try:
            first = bytes(self._store.compare_set(self._prefix + "alarm", "", text)) == text.encode()
        except RuntimeError as error:
            _LOG.warning("the other nodes could not be told: %s", _first_line(error))
            return True
        if first:
            self._alarm = text  # our own: the thread need not answer it
        return first

    def collect(self, timeout: float) -> list[dict[str, Any]]:
        """Return what the other nodes testify; nodes that do not answer in time are left out, and lost if they have no pulse."""
        self.states(True)
        away = {self.me, *self._lost, *self._took_leave()}
        others = [node for node in range(len(self.nodes)) if node not in away]
        deadline = time.monotonic() + timeout
        found: list[dict[str, Any]] = []
        while others and time.monotonic() < deadline:
            for node in list(others):
                text = self._read(f"testimony/{node}")
                if text is not None:
                    found.append(json.loads(text))
                    others.remove(node)
            if others:
                time.sleep(0.05)
        silent = self.without_pulse(others)
        for node in others:
            host = self.nodes[node].host
            _LOG.warning("node %s (%s) did not testify within %g s.", node, host, timeout)
            if node in silent:
                self._lost[node] = (
                    f"the launcher on {host} did not testify within {timeout:g} s; it probably died first"
                )
        return found

    def without_pulse(self, nodes: list[int]) -> list[int]:
        """Return those of ``nodes`` whose counter stands still: they are not slow, they are gone."""
        if not nodes:
            return []
        before = self._pulses(nodes)
        time.sleep(8 * _TICK_S)
        after = self._pulses(nodes)
        return [node for node in nodes if before.get(node) == after.get(node)]

    def _pulses(self, nodes: list[int]) -> dict[int, bytes]:
        try:
            return dict(zip(nodes, self._read_all([self._alive_key(node) for node in nodes], self._alive), strict=True))
        except RuntimeError:
            return {}

    def give_verdict(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """Give the verdict to the other nodes; return the one that holds, should somebody have been quicker."""
        if self.company:
            text = json.dumps(verdict)
            try:
                verdict = json.loads(bytes(self._store.compare_set(self._prefix + "verdict", "", text)))
            except RuntimeError as error:
                _LOG.warning("the other nodes could not be told: %s", _first_line(error))
        self._verdict = verdict
        return verdict

    def await_verdict(self, timeout: float, look_up: Callable[[], None] = lambda: None) -> dict[str, Any] | None:
        """Wait for the verdict that another node owns; not longer than that node gives signs of life. ``look_up`` is called now
        and then, and may raise."""
        owner = self._owner()
        deadline = time.monotonic() + timeout
        pulse, since = None, time.monotonic()
        while self._verdict is None and time.monotonic() < deadline and not self._stop.wait(0.05):
            look_up()
            now = self._pulses([owner]) if owner is not None else None
            if now != pulse:
                pulse, since = now, time.monotonic()
            elif owner is not None and time.monotonic() - since > _OWNER_SILENT_S:
                host = self.nodes[owner].host
                self._lost.setdefault(owner, f"the launcher on {host} raised the alarm and fell silent")
                break
        return self._verdict

    def _owner(self) -> int | None:
        """Return the node that raised the alarm, if it is known and another one."""
        text = self._alarm or self._read("alarm")
        node = json.loads(text)["node"] if text else self.me
        return None if node == self.me else int(node)

    # -- the board: see stopping.Board --------------------------------------------------------------------------------

    def post(self, key: str, text: str) -> None:
        """Write a key for the other nodes, and for ourselves."""
        self._board[key] = text
        if self.company:
            self._write(key, text)

    def peek(self, key: str) -> str | None:
        """Read a key that we or another node wrote, if it is there."""
        return self._board.get(key) or (self._read(key) if self.company else None)

    # -- states -----------------------------------------------------------------------------------------------------

    def set_state(self, state: str) -> None:
        """Say how this node's workers are; the others know soon."""
        self._states[self.me] = self._state = state
        if self.company:
            self._write(f"state/{self.me}", state)

    def states(self, fresh: bool = False) -> dict[int, str]:
        """Return how the nodes are; lost ones have failed. ``fresh``: ask now."""
        if fresh and self.company:
            try:
                self._read_states()
            except RuntimeError as error:
                _LOG.warning("the store did not answer: %s", _first_line(error))
        known = {node: self._states.get(node) or RUNNING for node in range(len(self.nodes))}
        return {node: FAILED if node in self._lost else state for node, state in known.items()}

    def farewell(self, hosts_the_store: bool) -> None:
        """Say that we go. Whoever hosts the store goes last: the others must have read how the job ended."""
        if not self.company:
            return
        self.set_state(GONE)
        deadline = time.monotonic() + (_FAREWELL_S if hosts_the_store else 0.0)
        while time.monotonic() < deadline:
            states = self.states(True)
            if all(state == GONE or node in self._lost for node, state in states.items()):
                return
            time.sleep(0.05)

    def _took_leave(self) -> list[int]:
        return [node for node, state in self._states.items() if state == GONE]

    def _read_states(self) -> None:
        nodes = range(len(self.nodes))
        texts = self._read_all([f"{self._prefix}state/{node}" for node in nodes], self._store)
        self._states = {node: text.decode() or RUNNING for node, text in zip(nodes, texts, strict=True)}
        self._states[self.me] = self._state
        for node, state in self._states.items():
            if state == LEFT and node != self.me and node not in self._lost:
                # It says so itself: nobody need wait for its silence, or for its testimony.
                self._lost[node] = f"the launcher on {self.nodes[node].host} left the job"
                self.bell.ring()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        pause = _TICK_S
        while not self._stop.wait(pause):
            try:
                self._tick()
                self._answered = time.monotonic()
                pause = _TICK_S
            except RuntimeError as error:  # torch's DistError family: the store is gone or out of reach
                _LOG.debug("the store did not answer: %s", _first_line(error))
                pause = min(2 * pause, 4.0)  # torch says a page about each failed call
            except Exception:  # noqa: BLE001 - a thread's boundary: one odd error file must not silence this node
                _LOG.exception("something went wrong beside the workers; it is tried again")

    def _alive_key(self, node: int) -> str:
        return f"alive/{self.nodes[node].id or node}"

    def _tick(self) -> None:
        self._counter += 1
        self._alive.set(self._alive_key(self.me), str(self._counter))
        if not self.company:
            return
        if self._alarm is None:
            self._alarm = self._read("alarm")
            if self._alarm is not None:
                said = self._testify()
                said["testimonies"] = [_short(item, len(self.nodes)) for item in said["testimonies"]]
                self._write(f"testimony/{self.me}", json.dumps(said))
                self.bell.ring()
        elif self._verdict is None:
            text = self._read("verdict")
            if text is not None:
                self._verdict = json.loads(text)
                self.bell.ring()
        if self._counter % 2 == 0:
            self._look_for_silence()
            self._read_states()
        if time.monotonic() - self._learned_at > _LEARN_EVERY_S:
            self._learned_at = time.monotonic()
            self._exchange()

    def _look_for_silence(self) -> None:
        """Node 0 watches all others, all others watch node 0. Who has taken leave is silent by right."""
        now = time.monotonic()
        self._looked_at, looked_at = now, self._looked_at
        limit = self._hub.settings.launcher.node_silence_timeout
        watched = [node for node in range(len(self.nodes)) if node != self.me] if self.me == 0 else [0]
        texts = self._read_all([self._alive_key(node) for node in watched], self._alive)
        for node, text in zip(watched, texts, strict=True):
            value, since = self._seen.get(node, (b"", now))
            if value != text or now - looked_at > 8 * _TICK_S:  # or we were stopped ourselves
                since = now
            self._seen[node] = (text, since)
            if now - since > limit and node not in (*self._lost, *self._took_leave()):
                self._lost[node] = f"the launcher on {self.nodes[node].host} has been silent for {now - since:.0f} s"
                self._write(f"state/{node}", FAILED)  # so that those who do not watch it know too
                self.bell.ring()

    def _read_all(self, keys: list[str], store: Any) -> list[bytes]:
        """Return several keys, empty where there is none; in one round trip once all are written."""
        if store.has_extended_api() and store.check(keys):
            return [bytes(value) for value in store.multi_get(keys)]
        return [bytes(store.get(key)) if store.check([key]) else b"" for key in keys]

    def _exchange(self) -> None:
        mine = json.dumps(to_json(self._hub.learner.learned))
        self._write(f"learned/{self.me}", mine)
        if self.me == 0:
            keys = [f"{self._prefix}learned/{node}" for node in range(1, len(self.nodes))]
            for text in self._read_all(keys, self._store):
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
