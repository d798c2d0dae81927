"""The elastic agent: torch's own, with ears.

Everything private of torch that we override or read is in this file, and ``tests/launcher/test_torch_seams.py`` pins the
signatures. torch keeps doing the work: rendezvous, starting, polling, stopping, counting restarts. We add, in order:

1) after each rendezvous: one cycle number for the job (:func:`link.agree`)
2) around each start: fresh pages and monitors on every rank (:class:`hub.Hub`)
3) in each turn of the loop: hang, death or silence → testimony of all ranks, report, then the ladder
4) around every wait: a deadline (:class:`watchdog.Watchdog`)
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from resilience import config
from resilience.launcher import lines
from resilience.launcher.hub import Hub
from resilience.launcher.link import Agreement, Link, Node, agree
from resilience.launcher.logs import tail_of
from resilience.launcher.watchdog import Watchdog
from resilience.monitor.culprit import Death
from resilience.observe import report as reports

_LOG = logging.getLogger("resilience.launcher")
_BARRIER_MARGIN_S = 60.0


class Agent(LocalElasticAgent):  # type: ignore[misc]  # torch is untyped here
    """torch's local agent, with monitors, verdicts and deadlines."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        hub: Hub,
        publish: Callable[[reports.Report], None],
        on_stuck: Callable[[str], None],
        rendezvous_limit: float,
        **options: Any,
    ) -> None:
        super().__init__(spec=spec, logs_specs=logs_specs, **options)
        self._hub = hub
        self._publish = publish
        self._rendezvous_limit = rendezvous_limit
        self._stop_grace = float(options["shutdown_timeout"])
        self.cycle = -1
        self._link: Link | None = None
        self._attended = False
        self._condemned: dict[int, int] = {}
        self._on_stuck = on_stuck
        loop_limit = max(hub.settings.launcher.store_silence_timeout, 2 * spec.monitor_interval + 10)
        self._watchdog = Watchdog(on_stuck, loop_limit, self._store_silence)

    # -- torch's hooks ----------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._close_link()
        with self._watchdog.phase("the rendezvous did not complete", self._rendezvous_limit):
            super()._rendezvous(worker_group)
            self._begin_cycle(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._hub.prepare(self.cycle, [worker.global_rank for worker in worker_group.workers])
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._hub.attach(pids)
        self._attended = False
        self._condemned = {}
        ranks = reports.ranks_in_words([worker.global_rank for worker in worker_group.workers])
        _LOG.info("%s of %s started.", ranks, worker_group.workers[0].world_size)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._watchdog.turn()
        if not self._attended:
            self._look(worker_group)
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and not self._attended:
            self._look_back(worker_group, result)
        if self._condemned and result.state != WorkerState.FAILED:
            # They were ended by us for a hang, and may have left with 0: that is no success.
            return RunResult(WorkerState.FAILED, failures=self._failures())
        return result

    def _failures(self) -> dict[int, ProcessFailure]:
        pids = self._condemned.items()
        return {
            rank: ProcessFailure(local_rank=0, pid=pid, exitcode=-signal.SIGTERM, error_file="") for rank, pid in pids
        }

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

    def _exit_barrier(self) -> None:
        with self._watchdog.phase("the other nodes did not finish", self._exit_barrier_timeout + _BARRIER_MARGIN_S):
            self._close_link()
            super()._exit_barrier()

    # -- cycles -----------------------------------------------------------------------------------------------------

    def _begin_cycle(self, worker_group: WorkerGroup) -> None:
        """Agree on the cycle's number and tell the workers."""
        ranks = [worker.global_rank for worker in worker_group.workers]
        offer = {
            "cycle": self.cycle + 1,
            "host": socket.gethostname(),
            "ranks": ranks,
            "learned": self._hub.learner.message()["learned"],
        }
        if worker_group.spec.rdzv_handler.get_backend() == "static":
            # A static rendezvous has no rounds: nobody waits for the others, so the cycle is counted by each node.
            size, count = worker_group.group_world_size, len(ranks)
            nodes = tuple(Node(offer["host"], tuple(range(n * count, (n + 1) * count))) for n in range(size))
            agreement = Agreement(offer["cycle"], nodes, offer["learned"])
        else:
            agreement = agree(worker_group.store, worker_group.group_rank, worker_group.group_world_size, offer)
        self.cycle = agreement.cycle
        self._hub.learn(agreement.learned)
        config.tell_workers({config.ENV_CYCLE: str(self.cycle)})
        lines.set_place(self.cycle, worker_group.group_rank)
        self._link = Link(worker_group.store, worker_group.group_rank, agreement, self._hub, self._publish)

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()

    def _store_silence(self) -> float:
        return self._link.silent_for() if self._link is not None else 0.0

    def close(self) -> None:
        """Stop the threads."""
        self._close_link()
        self._watchdog.close()

    # -- incidents ----------------------------------------------------------------------------------------------------

    def _look(self, worker_group: WorkerGroup) -> None:
        """Attend to a hang, a death or a lost node, if there is one."""
        assert self._link is not None
        deaths = self._deaths(worker_group)
        hangs = self._hub.hangs()
        lost = self._link.lost_nodes()
        if not deaths and not hangs and not lost:
            return
        self._attended = True
        with self._watchdog.phase("testimony was not collected", 4 * self._hub.settings.monitor.testimony_timeout + 60):
            self._testify_and_report(worker_group, lost)
        monitor = self._hub.settings.monitor
        if deaths and not hangs:
            self._end(signal.SIGTERM, self._stop_grace)
        else:
            self._condemned = self._hub.pids()
            self._end(monitor.rank_termination_signal, monitor.rank_term_timeout)

    def _end(self, signum: int, grace: float) -> None:
        """End the ranks. Without them gone nothing can be restarted here: the devices are held."""
        with self._watchdog.phase("the workers did not stop", grace + _BARRIER_MARGIN_S):
            if not self._hub.end_ranks(signum, grace):
                self._on_stuck("a rank could not be ended, not even with SIGKILL")

    def _look_back(self, worker_group: WorkerGroup, result: RunResult) -> None:
        """Report a death that came between our look and torch's: torch has ended the others already."""
        self._attended = True
        ended = self._hub.ended_at()
        now = time.monotonic_ns()
        deaths = [Death(rank, item.exitcode, ended.get(rank, now)) for rank, item in result.failures.items()]
        with self._watchdog.phase("the death was not reported", 4 * self._hub.settings.monitor.testimony_timeout + 60):
            self._testify_and_report(worker_group, {}, deaths)

    def _testify_and_report(
        self, worker_group: WorkerGroup, lost: dict[int, str], deaths: list[Death] | None = None
    ) -> None:
        assert self._link is not None
        timeout = self._hub.settings.monitor.testimony_timeout
        owner = self._link.raise_alarm({"cycle": self.cycle})
        testimonies = self._hub.testify(timeout)
        if not owner and self._link.await_report(3 * timeout) is not None:
            return
        testimonies += self._link.collect(timeout + 2.0)  # a node that waits for a stopped monitor needs all of it
        deaths = self._deaths(worker_group) if deaths is None else deaths
        lost = lost | self._link.lost_nodes()
        report = self._compose(worker_group, testimonies, deaths, lost)
        self._link.publish(report)
        self._publish(report)

    def _compose(
        self,
        worker_group: WorkerGroup,
        testimonies: list[dict[str, Any]],
        deaths: list[Death],
        lost: dict[int, str],
    ) -> reports.Report:
        assert self._link is not None
        nodes = self._link.nodes
        left = self._remaining_restarts
        if left > 0:
            total = worker_group.spec.max_restarts
            detail = f"all workers are restarted ({total - left + 1} of {total} restarts used)"
        elif worker_group.spec.max_restarts == 0:
            detail = "the job was ended, because --max-restarts is 0; with --max-restarts=N it would be restarted"
        else:
            detail = f"the job was ended: all {worker_group.spec.max_restarts} restarts are used"
        log_paths = self._log_paths(worker_group)
        evidence = reports.Evidence(
            cycle=self.cycle,
            testimonies=testimonies,
            deaths=deaths,
            hangs=self._hub.hangs(),
            logs={rank: tail_of(Path(path)) for rank, path in log_paths.items()},
            log_paths=log_paths,
            hosts={rank: node.host for node in nodes for rank in node.ranks},
            pids=self._hub.pids(),
            lost={rank: why for node, why in lost.items() for rank in nodes[node].ranks},
        )
        return reports.compose(evidence, "restart" if left > 0 else "stop", detail)

    def _deaths(self, worker_group: WorkerGroup) -> list[Death]:
        """Return the workers that ended with a failure, without reaping them: that is torch's business."""
        ended = self._hub.ended_at()
        found = []
        for worker in worker_group.workers:
            try:
                info = os.waitid(os.P_PID, worker.id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                continue
            if info is not None and info.si_status != 0:
                code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                found.append(Death(worker.global_rank, code, ended.get(worker.global_rank, time.monotonic_ns())))
        return found

    def _log_paths(self, worker_group: WorkerGroup) -> dict[int, str]:
        """Return where each rank's stderr goes, as far as it is redirected."""
        paths = self._pcontext.stderrs if self._pcontext is not None else {}
        found = {worker.global_rank: paths.get(worker.local_rank) for worker in worker_group.workers}
        return {rank: path for rank, path in found.items() if path and path != os.devnull}
