"""The elastic agent: torch's own, with ears and a loop of ours.

Everything private of torch that we override or read is in this file, and ``tests/launcher/test_torch_seams.py`` pins the
signatures. torch starts, polls and stops the workers; when to do what is ours:

1) rendezvous, and one agreement for the job (:mod:`agreement`): cycle number, nodes, what was learned and has failed; then the
   node check, if there is to be one (:class:`fitness.Fitness`)
2) start, with fresh pages and monitors on every rank (:class:`hub.Hub`)
3) watch (:class:`vigil.Vigil`): a failure, a hang, silence, a request, a verdict of another node, newcomers, the end
4) on any of them a verdict (:class:`court.Court`), the same on every node, and obey it: back to 1), or out

Around every wait there is a deadline (:class:`watchdog.Watchdog`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from resilience import config, kin
from resilience.failover import exits, sentence
from resilience.failover.error_monitor import NodeFault, of_code
from resilience.failover.history import History
from resilience.failover.restart_policy import LEFT
from resilience.launcher import cuda, lines
from resilience.launcher.agreement import Agreement, Node, agree, introduce
from resilience.launcher.coroner import Coroner, Papers, torch_can_read
from resilience.launcher.court import Court, Cycle, Verdict
from resilience.launcher.fitness import Fitness
from resilience.launcher.hub import Hub
from resilience.launcher.link import Link
from resilience.launcher.meeting import NotWanted
from resilience.launcher.roster import Outcome
from resilience.launcher.signals import Signals
from resilience.launcher.venue import Venue
from resilience.launcher.vigil import Vigil
from resilience.launcher.watchdog import Watchdog
from resilience.observe import report as reports

_LOG = logging.getLogger("resilience.launcher")
_BARRIER_MARGIN_S = 60.0
_LAST_CALL_S = 2.0  # for what the link says last
_MEETINGS = 5


class Agent(LocalElasticAgent):  # type: ignore[misc]  # torch is untyped here
    """torch's local agent, with monitors, verdicts and deadlines."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        hub: Hub,
        venue: Venue,
        court: Court,
        coroner: Coroner,
        publish: Callable[[reports.Report], None],
        on_stuck: Callable[[str], None],
        heed_signals: Callable[[], AbstractContextManager[None]],
        rendezvous_limit: float,
        fitness: Fitness | None = None,
        on_fault: Callable[[NodeFault], None] = lambda _: None,
        first_cycle: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(spec=spec, logs_specs=logs_specs, **options)
        self._hub = hub
        self._venue = venue
        self._court = court
        self._coroner = coroner
        self._publish = publish
        self._on_stuck = on_stuck
        self._heed_signals = heed_signals
        self._rendezvous_limit = rendezvous_limit
        self._fitness = fitness
        self._on_fault = on_fault
        self._stop_grace = float(options["shutdown_timeout"])
        self.cycle = -1
        self.first_cycle = first_cycle
        self.unstarted = 0  # cycles whose workers were never started: a node failed its check
        self.outcome: Outcome | None = None
        self._case = Cycle()
        self._link: Link | None = None
        self._vigil: Vigil | None = None
        self._signals = Signals(hub.bell.ring)
        court.asked = lambda: self._signals.asked.name if self._signals.asked is not None else ""
        court.let_go = self._signals.end_if_asked
        loop_limit = max(hub.settings.launcher.store_silence_timeout, 2 * spec.monitor_interval + 10)
        self._watchdog = Watchdog(on_stuck, loop_limit, self._store_silence)
        venue.answered = self._watchdog.turn

    # -- torch's hooks ----------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._fitness is not None:
            self._fitness.begin()
        self._meet(worker_group)
        while self._fitness is not None and not self._all_fit(self._fitness):
            self._meet(worker_group)

    def _meet(self, worker_group: WorkerGroup) -> None:
        with self._heed_signals(), self._watchdog.phase("the rendezvous did not complete", self._rendezvous_limit):
            for attempt in range(_MEETINGS):
                try:
                    super()._rendezvous(worker_group)
                    self._begin_cycle(worker_group)
                    break
                except DistStoreError as error:  # a node met us and was gone before all had agreed
                    if attempt + 1 == _MEETINGS or not self._venue.has_roster:
                        raise RendezvousConnectionError(f"the nodes could not agree: {error}") from error
                    _LOG.warning("a node of this round does not answer; the nodes come together again.")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._hub.prepare(self.cycle, [worker.global_rank for worker in worker_group.workers])
        before = kin.descendants(os.getpid())
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)
            self._hub.attach(pids)
        except BaseException:
            # By a signal: torch lets go of those that it had begun to start, and without the trampoline nobody else ends them.
            kin.end_all_but(before)
            raise
        self._coroner.begin(self._papers(worker_group, pids))
        self._signals.take()
        ranks = reports.ranks_in_words([worker.global_rank for worker in worker_group.workers])
        _LOG.info("%s of %s started.", ranks, worker_group.workers[0].world_size)
        return pids

    def _invoke_run(self, role: str = "default") -> RunResult:
        """The loop: start, watch, obey; until a verdict ends it."""
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            self._hub.bell.wait(group.spec.monitor_interval)
            self._watchdog.turn()
            assert self._vigil is not None
            with self._watchdog.phase("the verdict was not given", self._vigil.limit):
                verdict = self._vigil.look()
            if verdict is None:
                continue
            result = self._obey(verdict, group)
            if result is not None:
                return result
            if verdict["sentence"]["action"] != sentence.WAIT:
                self._signals.let_go()  # raises if somebody wants us to stop: then nothing is started again
                self._restart_workers(group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=int(self._stop_grace))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        with self._watchdog.phase("the workers did not stop", timeout + _BARRIER_MARGIN_S):
            try:
                self._hub.end_ranks(death_sig, timeout)
            except SignalException:
                _LOG.warning("a second signal: the workers are killed now.")
                self._hub.end_ranks(signal.SIGKILL, 0.0)
                raise
            finally:
                super()._shutdown(death_sig, timeout)

    # -- cycles -----------------------------------------------------------------------------------------------------

    def _begin_cycle(self, worker_group: WorkerGroup) -> None:
        """Agree with the other nodes on what begins, and tell the workers."""
        ranks = tuple(worker.global_rank for worker in worker_group.workers)
        me, world = worker_group.group_rank, worker_group.group_world_size
        node = Node(socket.gethostname(), ranks, self._venue.id, self._venue.name)
        learned = self._hub.learner.message()["learned"]
        if self._venue.meets:
            agreement = agree(
                worker_group.store,
                me,
                world,
                node=node,
                cycle=max(self.cycle + 1, self.first_cycle),
                learned=learned,
                history=self._case.history,
            )
        else:
            # A static rendezvous has no rounds: nobody waits for the others, so the cycle is counted by each node.
            nodes = introduce(worker_group.store, me, world, node)
            agreement = Agreement(self.cycle + 1, nodes, learned, self._case.history)
        self.cycle = agreement.cycle
        self._case = Cycle(agreement.cycle, agreement.offset_ns, agreement.history)
        self._remaining_restarts = worker_group.spec.max_restarts - agreement.history.total
        self._hub.learn(agreement.learned)
        config.tell_workers({config.ENV_CYCLE: str(self.cycle)})
        lines.set_place(self.cycle, me)
        self._close_link()
        store, alive = self._venue.connect(worker_group.store, world)
        self._link = Link(store, me, agreement, hub=self._hub, testify=self._testify, alive=alive)
        self._link.bell = self._hub.bell
        self._vigil = Vigil(
            link=self._link,
            case=self._case,
            court=self._court,
            hub=self._hub,
            coroner=self._coroner,
            venue=self._venue,
            signals=self._signals,
            poll=lambda: self._monitor_workers(worker_group),
            min_nodes=self._venue.min_nodes,
        )

    def _all_fit(self, fitness: Fitness) -> bool:
        """Check the nodes of this round. Who is unfit ends here; False when the others come together again, without it."""
        assert self._link is not None
        with self._watchdog.phase("the node check did not end", fitness.limit):
            result = fitness.examine(self._link, self.cycle, fixed=not self._venue.has_roster)
        for verdict in result.verdicts:
            self._venue.enact(verdict, whole_job=False)
        if result.report is not None:
            self._publish({**result.report, "last": result.outcome is not None})
        if result.fault is not None:
            self._on_fault(result.fault)
        if result.outcome is not None:
            self._go_alone(strands=not self._venue.has_roster)
            raise NotWanted(result.outcome)
        if not result.may_start:
            self.unstarted += 1
            fitness.warm()
        return result.may_start

    def _testify(self) -> dict[str, Any]:
        assert self._vigil is not None
        return self._vigil.testify()

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()

    def _store_silence(self) -> float:
        return self._link.silent_for() if self._link is not None else 0.0

    @property
    def parked(self) -> bool:
        """Whether the workers of this node have failed while others went on."""
        return self._vigil is not None and self._vigil.parked

    def close(self) -> None:
        """Stop the threads."""
        self._close_link()
        if self._link is not None:
            self._link.await_silence(_LAST_CALL_S)
        self._watchdog.close()
        self._coroner.close()

    # -- obeying ----------------------------------------------------------------------------------------------------

    def _obey(self, verdict: Verdict, group: WorkerGroup) -> RunResult | None:
        """Do what the verdict says; return None when the workers are to be started again, else how it ended."""
        assert self._link is not None
        order = verdict["sentence"]
        if "history" in verdict:
            self._case = Cycle(self._case.number, self._case.offset_ns, History.from_json(verdict["history"]))
        leaves = self._link.me in (order.get("leaver"), *order.get("also", ()))
        self._venue.enact(verdict, verdict.get("whole_job", True))
        if "report" in verdict:
            report = verdict["report"]
            speaks = reports.speaker([node.ranks for node in self._link.nodes], report["lost"])
            aside = verdict.get("whole_job", True) and self._link.me != speaks
            self._publish({**report, "last": not _goes_on(order, leaves), "aside": aside})
            self._end_ranks(hang=report["culprit"]["kind"] == "hang")
        if order["action"] == sentence.FINISHED:
            self.outcome = Outcome(order["exit_code"], order["detail"])
            self._say_goodbye()
            done = self._monitor_workers(group)
            # With min-healthy the job may be done although the workers of this node failed.
            return done if done.state == WorkerState.SUCCEEDED else _nothing_returned(group)
        if _goes_on(order, leaves):
            return None
        self.outcome = Outcome(_own_code(order, self._link.me, leaves), order["detail"])
        self._tell_of_broken_device(verdict)
        failures = self._failures(group)
        super()._shutdown(signal.SIGTERM, 1)
        group.state = WorkerState.FAILED
        if leaves:
            self._go_alone(bool(order.get("strands")))
        else:
            self._say_goodbye()
        return RunResult(WorkerState.FAILED, failures=failures)

    def _tell_of_broken_device(self, verdict: Verdict) -> None:
        """Have this node marked, if a worker of it ended with a code of the hardware."""
        assert self._link is not None
        code = verdict["sentence"].get("codes", {}).get(str(self._link.me))
        fault = of_code(self._venue.name, code or 0, run=self._venue.handler.get_run_id(), at=time.time())
        if fault is not None:
            self._on_fault(fault)

    def _go_alone(self, strands: bool) -> None:
        """Leave a job that others are in. ``strands``: they end too, and must have read why before the store goes with us."""
        assert self._link is not None
        if strands:
            return self._say_goodbye()
        self._link.set_state(LEFT)  # with min-healthy the others go on, and know of no verdict
        return self._venue.stay_if_needed(self._watchdog.turn)

    def _say_goodbye(self) -> None:
        """Let everybody read how the job ended before the store goes with us."""
        assert self._link is not None
        with self._watchdog.phase("the other nodes did not take leave", _BARRIER_MARGIN_S):
            static = not self._venue.meets and self._link.me == 0
            self._link.farewell(self._venue.hosts_the_store or static)
            self._venue.see_off_spares()

    def leave(self) -> None:
        """Leave the job as one that was ended from outside: the others need not wait for us."""
        if self._link is not None:
            self._link.set_state(LEFT)
        self._venue.leave()

    def _end_ranks(self, hang: bool) -> None:
        """End the ranks. Without them gone nothing can be restarted here: the devices are held."""
        monitor = self._hub.settings.monitor
        signum = monitor.rank_termination_signal if hang else signal.SIGTERM
        grace = monitor.rank_term_timeout if hang else self._stop_grace
        with self._watchdog.phase("the workers did not stop", grace + _BARRIER_MARGIN_S):
            if not self._hub.end_ranks(signum, grace):
                self._on_stuck("a rank could not be ended, not even with SIGKILL")
            cuda.wait_until_free(self._hub.pids().values(), grace)

    def _failures(self, group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Return the failed workers of this node, as torch wants them: it raises for an error file that it can't read."""
        codes = (self._vigil.exit_codes if self._vigil is not None else {}) or self._coroner.dead()
        errors = {rank: path for rank, path in self._papers(group, {}).errors.items() if torch_can_read(path)}
        return {
            worker.global_rank: ProcessFailure(
                local_rank=worker.local_rank,
                pid=worker.id,
                exitcode=codes[worker.global_rank],
                error_file=errors.get(worker.global_rank, ""),
            )
            for worker in group.workers
            if worker.global_rank in codes
        }

    def _papers(self, worker_group: WorkerGroup, pids: dict[int, int]) -> Papers:
        """Return where each rank's stderr and its error go, as far as they are redirected."""
        logs = self._pcontext.stderrs if self._pcontext is not None else {}
        errors = self._pcontext.error_files if self._pcontext is not None else {}

        def by_rank(paths: dict[int, Any]) -> dict[int, Any]:
            found = {worker.global_rank: paths.get(worker.local_rank) for worker in worker_group.workers}
            return {rank: path for rank, path in found.items() if path and path != os.devnull}

        return Papers(by_rank(pids), by_rank(logs), by_rank(errors))


def _goes_on(order: dict[str, Any], leaves: bool) -> bool:
    """Whether this launcher has workers, or may have them again, after a verdict."""
    return order["action"] not in sentence.ENDS and not leaves and not order.get("strands")


def _own_code(order: dict[str, Any], me: int, leaves: bool) -> int:
    """Return the exit code of this node after a verdict that ends it."""
    if order.get("strands") and not leaves:
        return exits.CUT_OFF
    own = order.get("codes", {}).get(str(me)) if me in order.get("also", ()) else None
    return int(own or order["exit_code"])


def _nothing_returned(group: WorkerGroup) -> RunResult:
    return RunResult(WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in group.workers})
