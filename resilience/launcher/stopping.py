"""The agreed stop: all ranks of all nodes leave their loop at the same step.

1) ``stop/asked``          (first to hear) somebody wants the job to stop: a signal to a launcher or to a rank
2) ``stop/calls/<node>``   (all) how often this node's ranks have called ``stop_requested``, and how fast they do
3) ``stop/proposal/<k>``   (the first node) a step above every rank's; or 0: nobody ever calls it, so nobody is waited for
4) ``stop/confirm/<k>/<node>``  (all) after arming it: no rank of ours was past it, or one was, and then k + 1 follows
5) ``stop/decision``       (the first node) all have confirmed: this is the step

Nodes that have left or are lost (``min-healthy`` goes on without them) have no part in it.

:class:`AgreedStop` is turned by the agent's loop and never waits.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from resilience.failover.failure import signal_name

_LOG = logging.getLogger("resilience.launcher")
_SETTLE_S = 0.02  # from arming a step until what a rank had in flight is visible
_AHEAD_S = 1.0  # how long the launchers need to agree; ranks that are quicker wait at the step
_TRIES = 8


class Board(Protocol):
    """Where the launchers write for each other."""

    def post(self, key: str, text: str) -> None:
        """Write a key."""

    def peek(self, key: str) -> str | None:
        """Read a key, if it is there."""


class Ranks(Protocol):
    """The ranks of this node."""

    def stop_asked(self) -> int:
        """Return the signal with which a rank was asked to stop, or 0."""

    def stop_calls(self) -> list[int]:
        """Return how often each rank has called ``stop_requested``."""

    def arm_stop(self, step: int) -> None:
        """Let ranks that reach ``step`` wait for the decision."""

    def passed(self, step: int) -> bool:
        """Whether a rank was past ``step`` when it was armed."""

    def confirm_stop(self, step: int) -> None:
        """Let ranks know that the others count on them to stop at ``step``."""

    def decide_stop(self, step: int) -> None:
        """Let ranks stop at ``step``."""

    def stop_taken(self) -> bool:
        """Whether a rank has left its loop because of the stop."""


class AgreedStop:
    """The stop of one cycle, as one node sees it."""

    def __init__(
        self,
        ranks: Ranks,
        board: Board,
        me: int,
        nodes: int,
        *,
        grace: float,
        absent: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._absent = absent
        self._ranks = ranks
        self._board = board
        self._me = me
        self._nodes = nodes
        self._grace = grace
        self._asked_at = 0.0
        self._turn: Callable[[float], None] = self._idle
        self._proposal = 0
        self._step = 0
        self._armed_at = 0.0
        self._pace = _Pace()
        self._round = 0
        self.why = ""
        self.in_vain = False  # nobody calls stop_requested: there is nobody to wait for
        self.agreed: int | None = None

    @property
    def under_way(self) -> bool:
        """Whether somebody wants the job to stop."""
        return self._asked_at > 0 and not self.in_vain

    def overdue(self, now: float) -> bool:
        """Whether the ranks had their time."""
        return self.under_way and now - self._asked_at > self._grace

    def ask(self, why: str) -> None:
        """Ask for the stop."""
        if self.in_vain:
            self._forget()
        if not self._asked_at:
            self.why = why
            self._board.post(self._key("asked"), why)
            self._begin(time.monotonic())

    def turn(self, now: float) -> None:
        """Do whatever can be done now."""
        if not self._asked_at:
            self._pace.see(now, max(self._ranks.stop_calls(), default=0))
            signum = self._ranks.stop_asked()
            if signum:
                self.ask(f"{signal_name(signum)} to a rank")
            return
        self._turn(now)

    def hear(self) -> None:
        """Look whether another node asks for the stop. Called by the link's thread's rhythm, not in every turn."""
        if self.in_vain and self._board.peek(self._key("asked", 1)) is not None:
            self._forget()
        if not self._asked_at:
            why = self._board.peek(self._key("asked"))
            if why is not None:
                self.why = why
                self._begin(time.monotonic())

    def _key(self, name: str, ahead: int = 0) -> str:
        """Return where something is written; a stop that was asked for in vain does not stand in the way of the next one."""
        number = self._round + ahead
        return f"stop/{number}/{name}" if number else f"stop/{name}"

    def _forget(self) -> None:
        """It was in vain, and is asked for again: by now the ranks may call."""
        self._round += 1
        self._asked_at = 0.0
        self._proposal = self._step = 0
        self.in_vain = False

    def _begin(self, now: float) -> None:
        self._asked_at = now
        calls = max(self._ranks.stop_calls(), default=0)
        self._board.post(self._key(f"calls/{self._me}"), json.dumps([calls, self._pace.per_second(now, calls)]))
        _LOG.info("a stop is asked for: %s.", self.why)
        self._turn = self._propose if self._leads() else self._follow

    def _here(self) -> list[int]:
        """Return the nodes that take part."""
        absent = set(self._absent())
        return [node for node in range(self._nodes) if node not in absent or node == self._me]

    def _leads(self) -> bool:
        return self._here()[0] == self._me

    def _idle(self, now: float) -> None:
        """Nothing to do any more."""

    # -- the first node -----------------------------------------------------------------------------------------------------

    def _propose(self, now: float) -> None:
        found = self._from_all("calls/{}")
        if found is None:
            return
        most, fastest = max(calls for calls, _ in found), max(pace for _, pace in found)
        most = max(most, *self._ranks.stop_calls(), 0)
        self._step = 0 if most == 0 else most + 1 + math.ceil(fastest * _AHEAD_S) * (1 + self._proposal)
        self._board.post(self._key(f"proposal/{self._proposal}"), str(self._step))
        self._turn = self._follow

    def _conclude(self, now: float) -> None:
        found = self._from_all(f"confirm/{self._proposal}/{{}}")
        if found is None:
            return
        late = [calls for calls in found if calls]
        if not late:
            self._board.post(self._key("decision"), str(self._step))
            self._turn = self._obey
        elif self._proposal + 1 < _TRIES:
            self._proposal += 1
            self._step = max(late) + 1 + math.ceil(self._pace.last * _AHEAD_S) * (1 + self._proposal)
            self._board.post(self._key(f"proposal/{self._proposal}"), str(self._step))
            self._turn = self._follow
        else:
            _LOG.error("the ranks could not agree on a step to stop at; they are ended when their time is over.")
            self._turn = self._idle

    def _from_all(self, key: str) -> list[Any] | None:
        texts = [self._board.peek(self._key(key.format(node))) for node in self._here()]
        return [json.loads(text) for text in texts if text is not None] if all(texts) else None

    # -- all nodes --------------------------------------------------------------------------------------------------

    def _follow(self, now: float) -> None:
        text = self._board.peek(self._key(f"proposal/{self._proposal}"))
        if text is None:
            if self._leads():  # whoever did is gone
                self._turn = self._propose
            return
        self._step = int(text)
        if self._step == 0:
            self.in_vain = True
            self._turn = self._idle
            _LOG.info("no rank has called stop_requested() yet: there is nothing to agree on.")
            return
        self._ranks.arm_stop(self._step)
        self._armed_at = now
        self._turn = self._vouch

    def _vouch(self, now: float) -> None:
        """Have the ranks be patient; only then, when none of them can be about to go on, look where they are."""
        if now - self._armed_at >= _SETTLE_S:
            self._ranks.confirm_stop(self._step)
            self._armed_at = now
            self._turn = self._confirm

    def _confirm(self, now: float) -> None:
        if now - self._armed_at < _SETTLE_S:
            return
        late = max(self._ranks.stop_calls(), default=0) if self._ranks.passed(self._step) else 0
        self._board.post(self._key(f"confirm/{self._proposal}/{self._me}"), json.dumps(late))
        self._turn = self._conclude if self._leads() else self._obey

    def _obey(self, now: float) -> None:
        if self._board.peek(self._key("decision")) is not None:
            self._ranks.decide_stop(self._step)
            self.agreed = self._step
            self._turn = self._idle
            _LOG.info(
                "all ranks stop together, at call %s of stop_requested(), and have %g s to leave.",
                self._step,
                self._grace,
            )
        elif self._board.peek(self._key(f"proposal/{self._proposal + 1}")) is not None:
            self._proposal += 1
            self._turn = self._follow
        elif self._leads():  # whoever did is gone, or it is ours
            self._turn = self._conclude


class _Pace:
    """How fast the ranks call, from two looks at least a second apart."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []
        self.last = 0.0

    def see(self, now: float, calls: int) -> None:
        if not self._seen or now - self._seen[-1][0] >= 1.0:
            self._seen = [*self._seen[-1:], (now, calls)]

    def per_second(self, now: float, calls: int) -> float:
        before, seen = self._seen[0] if self._seen else (now, calls)
        self.last = (calls - seen) / (now - before) if now - before > 0.05 else 0.0
        return self.last
