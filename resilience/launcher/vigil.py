"""One cycle's watch: from the start of the workers until something happens that needs a verdict.

:meth:`Vigil.look` is one turn of the agent's loop. In this order: another node's verdict; the agreed stop; failures, hangs,
lost nodes and requests; the end; newcomers.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from resilience.config import Settings
from resilience.failover import exits, sentence
from resilience.failover import restart_policy as policies
from resilience.launcher.coroner import Coroner
from resilience.launcher.court import Court, Cycle, Verdict
from resilience.launcher.hub import Hub
from resilience.launcher.link import Link
from resilience.launcher.signals import Signals
from resilience.launcher.stopping import AgreedStop
from resilience.launcher.venue import Venue

_LOG = logging.getLogger("resilience.launcher")
_NOW_AND_THEN_S = 1.0
_OFTEN_S = 0.25
_LONG_S = 300.0
_TAKEN = "stop/taken"


class Vigil:
    """Everything that is looked at while the workers of one cycle run."""

    def __init__(
        self,
        *,
        link: Link,
        case: Cycle,
        court: Court,
        hub: Hub,
        coroner: Coroner,
        venue: Venue,
        signals: Signals,
        poll: Callable[[], RunResult],
        min_nodes: int,
    ) -> None:
        self.link = link
        self.case = case
        self.exit_codes: dict[int, int] = {}
        self.parked = False
        self._court = court
        self._hub = hub
        self._coroner = coroner
        self._venue = venue
        self._signals = signals
        self._poll = poll
        self._min_nodes = min_nodes
        self._settings: Settings = hub.settings
        self._policy = hub.settings.failover.restart_policy
        self._finished_at = 0.0
        self._waits_long = False
        self._known_lost: set[int] = set()
        self._told: set[int] = set()
        self._newcomers_due = self._hear_due = 0.0
        grace = hub.settings.failover.stop_grace
        self.stop = AgreedStop(hub.brakes, link, link.me, len(link.nodes), grace=grace, absent=link.lost_nodes)
        self._excluded = ""

    def testify(self) -> dict[str, Any]:
        """Return what this node has to say. Called in the link's thread when another node raises the alarm.

        What a parked node failed of was tried before: it must not hide what happened now.
        """
        said = self._court.testify(self.case, self.link.me, self.exit_codes or None)
        return {**said, "failures": [], "hangs": {}} if self.parked else said

    def look(self) -> Verdict | None:
        """Look at everything once; return a verdict if something happened."""
        verdict = self.link.verdict()
        if verdict is not None:
            return verdict
        self._mind_the_stop()
        late = self.stop.overdue(time.monotonic())
        if self.link.alarmed() or late:
            return self._try_case()
        if not self.parked and self._something_happened():
            return self._try_case() if self._concerns_all() else self._park()
        return self._how_it_stands() or self._newcomers()

    @property
    def limit(self) -> float:
        """How long a look may take, when a verdict has to be found."""
        return 4 * self._settings.monitor.testimony_timeout + self._settings.failover.failover_timeout + 60

    def _try_case(self) -> Verdict | None:
        stopping = self.stop.why if self.stop.under_way else ""
        return self._court.try_case(self.link, self.case, self.exit_codes or None, stopping)

    # -- the stop ---------------------------------------------------------------------------------------------------

    def _mind_the_stop(self) -> None:
        asked, now = self._signals.asked, time.monotonic()
        self._signals.pass_on(self._hub.pids())
        if asked is not None:
            self.stop.ask(f"{asked.name} to the launcher on {socket.gethostname()}")
        elif self.link.company and now >= self._hear_due:
            self._hear_due = now + _OFTEN_S
            self.stop.hear()
        self.stop.turn(now)
        if self.stop.in_vain:
            self._signals.end_in_vain(self._hub.pids())

    # -- failures ---------------------------------------------------------------------------------------------------

    def _something_happened(self) -> bool:
        """Whether a rank of this node failed or hangs, a node is lost, or a rank asked for something."""
        lost = set(self.link.lost_nodes()) - self._known_lost
        if self._coroner.dead() or self._hub.hangs() or self._asked_for_something() or lost:
            return True
        if self._finished_at:
            return False
        result = self._poll()
        if result.state == WorkerState.SUCCEEDED:
            self._finished_at = time.monotonic()
            if self._hub.brakes.stop_taken():
                self.link.post(_TAKEN, "1")  # before our state: whoever sees that all are done knows why
            self.link.set_state(policies.SUCCEEDED)
            if self.link.company:
                _LOG.info("all workers of this node ended with 0; waiting for the other nodes.")
        elif result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            # A death that came between our look and torch's: torch has ended the others already.
            self.exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            return True
        return False

    def _asked_for_something(self) -> bool:
        """Whether a rank asked for something that is to be done at once. While the job stops, an exclusion is noted and need not
        end ranks that are about to leave by themselves."""
        request = self._hub.request()
        if request is None or not self.stop.under_way or request["action"] == sentence.SHUTDOWN_WORKLOAD:
            return request is not None
        if not self._excluded:
            self._excluded = f"rank {request['rank']} asked for it: {request['description']}"
            self._venue.exclude(self._excluded)
            _LOG.warning("this node is excluded from the job, which stops; %s", self._excluded)
        return False

    def _concerns_all(self) -> bool:
        """Whether what happened is everybody's business: always, but for ``min-healthy`` with enough whole nodes."""
        if self._policy != policies.MIN_HEALTHY or self._hub.request() or self.stop.under_way:
            return True
        if self.exit_codes or self._coroner.dead() or self._hub.hangs():
            self.link.set_state(policies.FAILED)
        states = self.link.states(fresh=True).values()
        return policies.standing(states, self._policy, self._min_nodes) == policies.RESTART

    def _park(self) -> Verdict | None:
        """Leave the others alone: this node's workers are ended and it waits, or it only takes note of a lost node."""
        lost = self.link.lost_nodes()
        for node in set(lost) - self._known_lost:
            _LOG.warning("node %s is lost (%s); enough others are whole, they go on.", node, lost[node])
        self._known_lost |= set(lost)
        states = self.link.states()
        if states[self.link.me] != policies.FAILED:
            return None
        whole = sum(state != policies.FAILED for state in states.values())
        verdict = self._court.try_alone(self.link, self.case, self.exit_codes or None, whole, self._min_nodes)
        if verdict is None:
            return self._try_case()
        self.parked = verdict["sentence"]["action"] == sentence.WAIT
        return verdict

    # -- the end ----------------------------------------------------------------------------------------------------

    def _how_it_stands(self) -> Verdict | None:
        """Return the verdict that ends the job when there is nothing left to run. Until then a node that is done waits, as long as
        the others give signs of life: without it they could not form again, and with the store's host they would be lost."""
        states = self.link.states()
        if self._policy == policies.MIN_HEALTHY:
            self._tell_of(states)
        now = policies.standing(states.values(), self._policy, self._min_nodes)
        if now == policies.RESTART and self._policy == policies.MIN_HEALTHY:
            return self._try_case()
        if now != policies.FINISHED:
            self._say_who_is_late(states)
            return None
        stopped = self._hub.brakes.stop_taken() or (self.stop.under_way and self.link.peek(_TAKEN) is not None)
        detail = f"all ranks stopped together ({self.stop.why})" if stopped else ""
        code = exits.PREEMPTED if stopped else exits.FINISHED
        own = exits.NODE_LEFT if self._excluded else code
        order = {"action": sentence.FINISHED, "detail": detail, "exit_code": own, "job_code": code}
        first = min(set(states) - set(self.link.lost_nodes()), default=self.link.me)
        return {"sentence": order, "whole_job": self.link.me == first}

    def _say_who_is_late(self, states: dict[int, str]) -> None:
        """Say, once, which nodes this one waits for long after its own end."""
        if self._waits_long or not self._finished_at or time.monotonic() - self._finished_at < _LONG_S:
            return
        self._waits_long = True
        late = ", ".join(str(node) for node, state in states.items() if state == policies.RUNNING)
        _LOG.info("this node has been done for %g s; it waits for node %s, where workers still run.", _LONG_S, late)

    def _tell_of(self, states: dict[int, str]) -> None:
        """Say which other nodes have failed while this one goes on."""
        failed = {node for node, state in states.items() if state == policies.FAILED and node != self.link.me}
        for node in sorted(failed - self._known_lost - self._told):
            _LOG.warning("node %s (%s) failed; this node goes on.", node, self.link.nodes[node].title)
        self._told |= failed

    def _newcomers(self) -> Verdict | None:
        """Let nodes in that wait: all workers restart, which does not count. A node whose place another one has taken, while it was
        stopped, ends its workers: two of one rank would write the same checkpoints."""
        quiet = self._finished_at or self.stop.under_way or self._policy == policies.MIN_HEALTHY
        if quiet or time.monotonic() < self._newcomers_due or (self._venue.has_roster and self.link.me != 0):
            return None
        self._newcomers_due = time.monotonic() + _NOW_AND_THEN_S
        try:
            number = self._venue.newcomers()
        except RuntimeError as error:  # the link finds out whether the store is gone, and the watchdog acts
            _LOG.debug("the rendezvous store does not answer: %s", error)
            return None
        departed = self._venue.departed([node.id for node in self.link.nodes])
        if self.link.me in departed:
            _LOG.warning(
                "this node was taken out of the job while it was silent: its workers end, and it waits for a place."
            )
        elif number == 0 or self._replaces_a_lost_node(departed):
            return None
        else:
            came = f"{number} more node{'s' * (number > 1)} came"
            _LOG.info("%s: all workers are restarted, which does not count.", came)
        verdict: Verdict = {"sentence": {"action": sentence.RESTART, "detail": "a node came"}}
        if not self._venue.has_roster:
            return verdict
        if not self.link.raise_alarm({"cycle": self.case.number}):
            return None  # something happened meanwhile; the next turn looks at it
        return self.link.give_verdict(verdict)

    def _replaces_a_lost_node(self, departed: list[int]) -> bool:
        """Whether there is room because a node that waits was the first to miss one of ours: the next look tries that case.

        One that left by itself has said so; one that was only stopped for a while lives, and is not to blame.
        """
        if departed:
            self.link.states(fresh=True)
            for node in self.link.without_pulse([node for node in departed if node not in self.link.lost_nodes()]):
                self.link.miss(node, "gives no sign of life; a node that waits has its place")
        return any(node in self.link.lost_nodes() for node in departed)
