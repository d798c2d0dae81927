"""Start a job: build torch's agent with our parts around it, run it, and leave nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from resilience import config
from resilience.config import Settings
from resilience.failover import ends, exits, marking
from resilience.failover import progress as progressing
from resilience.failover.error_monitor import NodeFault
from resilience.failover.extension import Extension
from resilience.failover.failure import HARDWARE_CODES
from resilience.failover.marking import Marker
from resilience.groups import topology
from resilience.launcher import cuda, deadlines, fitness, lines, rundir
from resilience.launcher.agent import Agent
from resilience.launcher.coroner import Coroner
from resilience.launcher.court import Court
from resilience.launcher.fitness import Fitness
from resilience.launcher.hub import Hub
from resilience.launcher.link import IN_STORE
from resilience.launcher.logs import Console, CycleLogs
from resilience.launcher.meeting import NotWanted
from resilience.launcher.roster import Outcome
from resilience.launcher.signals import STOP, Prompt, end_on_signals
from resilience.launcher.venue import Venue, open_venue
from resilience.observe import report as reports

_LOG = logging.getLogger("resilience.launcher")
WORKER = str(Path(__file__).parent.parent / "_worker")
_LEAVE_S = 2.0  # after a signal nobody waits longer for a store that does not answer
_SHORT_LEAVE_S = 0.5  # … and not so long for one that has not for a second


@dataclass(frozen=True)
class Job:
    """What is to be run, and how."""

    launch: LaunchConfig
    entrypoint: Callable[..., Any] | str
    arguments: list[str]
    name: str
    settings: Settings
    own_logs: bool
    shown_ranks: set[int] | None


class Session:
    """Everything that exists while a job runs on this node, and the order in which it goes away."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.exit_code = exits.FAILED
        path, timeout = job.settings.failover.dynamic_failover_extension, job.settings.failover.failover_timeout
        self.extension = Extension(path, timeout) if path else None
        nodes = job.settings.nodes
        self.marker = Marker(nodes.error_monitor, nodes.error_monitor_timeout)
        self.fault: NodeFault | None = None
        self.run_dir, self.scratch = self._folders()
        self.fitness: Fitness | None = None
        try:
            self.fitness = self._fitness() if nodes.network_check else None
            self.hub = Hub(job.settings, job.launch.nproc_per_node, self.scratch.path)
        except BaseException:
            self.scratch.remove()
            if self.fitness is not None:
                self.fitness.close()
            rundir.drop_unused(self.run_dir)
            raise
        self.console = Console()
        lines.speak_through(self.console.say)
        self.last_words: reports.Report | None = None
        self.agent: Agent | None = None
        self.progress: progressing.Keeper | None = None
        self._prompt = Prompt(self.end_promptly)

    def _folders(self) -> tuple[Path, rundir.Scratch]:
        """Make the run's directory and the private one. A node whose own disk is at fault leaves word in one that was given.

        The word is that it is unfit, whatever it ends with: it never trains, and another node may do better.
        """
        nodes, wanted = self.job.settings.nodes, self.job.settings.launcher.run_dir
        made = ""
        try:
            self.run_dir = rundir.make_run_dir(wanted, self.job.launch.run_id)
            made = wanted or ""
            return self.run_dir, rundir.Scratch()
        except rundir.DiskFault as error:
            refusal = self._unfit(str(error)) if nodes.network_check else error
            if made:
                self.exit_code = exits.UNFIT
                self._leave_word()
            raise refusal from error

    def _unfit(self, why: str) -> NotWanted:
        """Report that this node can't even begin; there is no check to do it, and no other node to ask."""
        fault = fitness.own_fault(self.job.settings, why, self.job.launch.run_id, time.time())
        self.tell_of(fault)
        self.marker.close()
        if self.extension is not None:
            self.extension.close()
        return NotWanted(Outcome(exits.UNFIT, f"node {fault.node} is not fit and does not train: {why}"))

    def _fitness(self) -> Fitness:
        launch = self.job.launch
        return Fitness(
            self.job.settings.nodes,
            run_dir=str(self.run_dir),
            run_id=launch.run_id,
            wanted=launch.nproc_per_node,
            address=launch.local_addr,
        )

    def tell_of(self, fault: NodeFault) -> None:
        """Report that this node is faulty: to a controller that reads the termination message, and to the error monitor."""
        _LOG.error("node %s is faulty (%s): %s", fault.node, fault.reason, fault.message)
        self.fault = fault
        marking.leave_message(fault, self.job.settings.nodes.termination_log)
        self.marker.tell(fault)

    def run(self) -> None:
        """Run the job to its end. Raises ``ChildFailedError`` or ``SignalException`` as torch does."""
        launch, settings = self.job.launch, self.job.settings
        end_on_signals()
        config.tell_workers(
            {
                config.ENV_SOCKET: self.hub.socket_path,
                config.ENV_LAUNCHER_PID: str(os.getpid()),
                config.ENV_RUN: str(self.run_dir),
                config.ENV_NODE_GROUP: _group(settings),
                config.ENV_LATE_ATTACH: None if self._has_trampoline() else "1",
                "TORCHELASTIC_SIGNALS_TO_HANDLE": launch.signals_to_handle,
                **cuda.variables(self.run_dir, config.environment()),
            }
        )
        _LOG.info("reports and logs: %s", self.run_dir)
        deadlines.announce(launch, settings)
        if settings.launcher.run_dir is not None:  # else nobody knows where to look for it
            self.progress = progressing.Keeper(self.run_dir, self._node, self.hub.step, self._cycle)
            self._reserve_word()
        coroner = Coroner()
        if self.fitness is not None:
            self.fitness.load()
        with self._prompt.heed():
            venue = open_venue(_rendezvous(launch), settings)
        self.agent = Agent(
            spec=self._spec(venue.handler),
            logs_specs=self._logs(),
            hub=self.hub,
            venue=venue,
            court=Court(
                self.hub,
                coroner,
                settings,
                max_restarts=launch.max_restarts,
                extension=self.extension,
                flight=cuda.flight_folder(self.run_dir) if cuda.present() else None,
                fixed=not venue.meets,
            ),
            coroner=coroner,
            publish=self.publish,
            on_stuck=self.cut_off,
            heed_signals=self._prompt.heed,
            rendezvous_limit=deadlines.rendezvous_limit(launch),
            fitness=self.fitness,
            on_fault=self.tell_of,
            first_cycle=self._first_cycle() if venue.has_roster else 0,
            start_method=launch.start_method,
            log_line_prefix_template=launch.log_line_prefix_template,
            shutdown_timeout=launch.shutdown_timeout,
        )
        self._run_agent(self.agent, venue, launch)

    def _run_agent(self, agent: Agent, venue: Venue, launch: LaunchConfig) -> None:
        """What torch's ``launch_agent`` does around ``agent.run``; but who ends by itself does not end the job for others."""
        try:
            metrics.initialize_metrics(metrics.MetricsConfig(launch.metrics_cfg))
            result = agent.run()
            events.record(agent.get_event_succeeded(), launch.event_log_handler)
        except NotWanted:
            raise
        except BaseException as error:
            if isinstance(error, (SignalException, KeyboardInterrupt)):
                leave_in_time(agent, _LEAVE_S)
            else:
                agent.leave()
            if isinstance(error, (Exception, SignalException)):
                events.record(agent.get_event_failed(), launch.event_log_handler)
            if isinstance(error, Exception) and not venue.has_roster:
                venue.handler.shutdown()
            raise
        if not venue.has_roster:
            venue.handler.shutdown()
        self.exit_code = agent.outcome.exit_code if agent.outcome is not None else exits.FINISHED
        if result is not None and result.is_failed() and result.failures:
            raise ChildFailedError(name=self.job.name, failures=result.failures)
        if self.exit_code == exits.FINISHED and result is not None:
            restarts = max(0, agent.cycle - agent.first_cycle - agent.unstarted)
            ended = "enough nodes ended well, not this one" if agent.parked else "all workers ended with 0"
            _LOG.info("finished: %s, after %s restart%s.", ended, restarts, "s" * (restarts != 1))

    def _spec(self, handler: RendezvousHandler) -> WorkerSpec:
        launch = self.job.launch
        return WorkerSpec(
            role=launch.role,
            local_world_size=launch.nproc_per_node,
            entrypoint=self.job.entrypoint,
            args=tuple(self.job.arguments),
            rdzv_handler=handler,
            max_restarts=launch.max_restarts,
            monitor_interval=launch.monitor_interval,
            local_addr=launch.local_addr,
            event_log_handler=launch.event_log_handler,
            numa_options=launch.numa_options,
            duplicate_stdout_filters=launch.duplicate_stdout_filters,
            duplicate_stderr_filters=launch.duplicate_stderr_filters,
            virtual_local_rank=launch.virtual_local_rank,
        )

    def _logs(self) -> Any:
        return (
            CycleLogs(self.run_dir, self.console, self.job.shown_ranks)
            if self.job.own_logs
            else self.job.launch.logs_specs
        )

    def _has_trampoline(self) -> bool:
        return not isinstance(self.job.entrypoint, str) or WORKER in self.job.arguments

    def ended_by(self, signum: signal.Signals) -> None:
        """Choose the exit code after a signal: of a script that calls us, one that asks to stop is a preemption."""
        if signum in STOP and self.hub.adopted():
            self.exit_code = exits.PREEMPTED

    def end_promptly(self, signum: signal.Signals) -> None:
        """End on a signal that the main thread can't take: it waits in a store call. Runs in a thread of its own."""
        try:
            _LOG.warning("ended by %s, while the nodes came together. No workers run here.", signum.name)
            self.ended_by(signum)
            if signal.getsignal(signum) is signal.default_int_handler:
                self.exit_code = 128 + signum
            if self.agent is not None:
                leave_in_time(self.agent, _SHORT_LEAVE_S)
            self.close()
        finally:
            os._exit(self.exit_code)

    def publish(self, report: reports.Report) -> None:
        """Keep a report and show it; the one that ends the job is shown last of all."""
        last, aside = report.pop("last", False), report.pop("aside", False)
        try:
            self._keep(report)
            if aside and self.job.settings.launcher.shared_console:
                _LOG.error("%s", reports.as_line(report))
                return
            if last:
                self.last_words = report
            else:
                self._show(report)
        except SignalException:
            raise
        except Exception:  # noqa: BLE001 - what workers leave may be odd; a report must not end the job
            _LOG.exception("the report of cycle %s could not be made", report.get("cycle"))

    def _keep(self, report: reports.Report) -> None:
        try:
            reports.write(report, self.run_dir)
        except OSError as error:  # a full disk must not end the job; the text is still shown
            _LOG.error("the report could not be written to %s: %s.", self.run_dir, error.strerror or error)

    def _show(self, report: reports.Report) -> None:
        self.console.say(f"\n{reports.as_text(report, str(self.run_dir))}\n\n")

    def cut_off(self, why: str) -> None:
        """End this node: its launcher is stuck. Runs in the watchdog's thread; the main thread may never return."""
        self.exit_code = self.report_cut_off(why)
        monitor = self.job.settings.monitor
        self.hub.end_ranks(monitor.rank_termination_signal, monitor.rank_term_timeout)
        self.close()
        os._exit(exits.CUT_OFF)

    def report_cut_off(self, why: str) -> int:
        """Report that this node is cut off; return the exit code that says so."""
        testimonies = self.hub.testify(self.job.settings.monitor.testimony_timeout)
        pids, host = self.hub.pids(), os.uname().nodename
        evidence = reports.Evidence(
            cycle=self.agent.cycle if self.agent else 0,
            testimonies=testimonies,
            hangs=self.hub.hangs(),
            nodes=dict.fromkeys(pids, (-1, host)),
            pids=pids,
            lost=dict.fromkeys(pids, f"this node is cut off: {why}"),
        )
        done = f"the workers of this node were ended, the launcher ends with exit code {exits.CUT_OFF}"
        report = reports.conclude(reports.compose(evidence), "stop", done)
        self._keep(report)
        self.last_words = report
        return exits.CUT_OFF

    def close(self) -> None:
        """Take everything down, in order; show what there is to say last."""
        if self.agent is not None:
            self.agent.close()
        if self.fitness is not None:
            self.fitness.close()
        if self.progress is not None:
            self.progress.close()
        self.hub.end_ranks(signal.SIGKILL, 0.0)
        self.scratch.remove()  # before the monitors go: they take it away if we are killed first
        self.hub.close()
        if self.extension is not None:
            self.extension.close()
        self.marker.close()
        if self.last_words is not None:
            self._show(self.last_words)
        if self.exit_code != exits.FINISHED:
            meaning = exits.MEANINGS.get(self.exit_code) or HARDWARE_CODES.get(self.exit_code, "interrupted")
            _LOG.info("exit code %s: %s.", self.exit_code, meaning)
        if self.exit_code == exits.USAGE:
            rundir.drop_unused(self.run_dir)
        else:
            _LOG.info("reports and logs: %s", self.run_dir)
        self._leave_word()
        self._prompt.close()
        self.console.close()

    @property
    def _node(self) -> str:
        return self.job.settings.failover.node_name or socket.gethostname()

    def _first_cycle(self) -> int:
        """Return the number after the last one in a directory that this job has used before: no log of it is overwritten."""
        try:
            return progressing.begun(self.run_dir) + 1
        except OSError as error:
            _LOG.warning(
                "%s can't be looked into for earlier cycles (%s); they are counted from 0.", self.run_dir, error
            )
            return 0

    def _cycle(self) -> int:
        return self.agent.cycle if self.agent is not None else -1

    def _reserve_word(self) -> None:
        """Make sure that a disk which is full by then does not keep from others how this launcher ended."""
        try:
            ends.reserve(self.run_dir, self._node)
        except OSError as error:
            _LOG.warning("no room can be reserved in %s for how this node ends: %s.", self.run_dir, error.strerror)

    def _leave_word(self) -> None:
        """Write down how this launcher ends: what started it may hand on one exit code for all nodes."""
        try:
            ends.write(self.run_dir, ends.NodeEnd(self._node, self.exit_code, self.fault))
        except OSError as error:
            if self.exit_code != exits.USAGE or Path(self.run_dir).is_dir():  # else it was refused before that was made
                _LOG.warning("how this node ended can't be written to %s: %s.", self.run_dir, error.strerror or error)


def leave_in_time(agent: Agent, limit: float) -> None:
    """Have the others know that we leave, if the store takes it in time; else they see that we are silent."""
    leaving = threading.Thread(target=agent.leave, name=f"{IN_STORE}-leave", daemon=True)
    leaving.start()
    leaving.join(limit)


def _group(settings: Settings) -> str | None:
    """Return the name of the nodes that fail together with this one: copies of snapshots go to others."""
    place = topology.given(settings.failover.node_group, settings.failover.node_group_index)
    return place.name or place.key or None


def _rendezvous(launch: LaunchConfig) -> RendezvousParameters:
    return RendezvousParameters(
        backend=launch.rdzv_backend,
        endpoint=launch.rdzv_endpoint,
        run_id=launch.run_id,
        min_nodes=launch.min_nodes,
        max_nodes=launch.max_nodes,
        local_addr=launch.local_addr,
        **launch.rdzv_configs,
    )
