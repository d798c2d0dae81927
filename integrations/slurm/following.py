"""``resilience slurm follow``: the one process of a batch script. It starts the launchers, and does what follows when they end.

1) starts the rendezvous store beside itself: every launcher may then leave, that of this node too, and none outlives this process
2) starts ``srun``, one launcher per node; where the job outlives a node, another for those who watch over this one (:mod:`watch`)
3) passes SIGUSR1 on, has faulty nodes drained, and ends the step when nodes have left and too few are there to go on
4) decides (:mod:`chain`), and requeues the job or ends with a code

Rule: what it remembers is in ``DIR/JOB/chain.json``; each start of the job has its run directory beside it, ``DIR/JOB/RESTART``.

Hazard: Slurm signals steps by itself when it ends a job (time limit, ``scancel``), and a second signal would end a launcher at
once. So SIGTERM is passed on only where Slurm says that the job still runs.
"""

from __future__ import annotations

import logging
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from resilience.integrations import cause
from resilience.integrations.slurm import chain, jobs, records
from resilience.integrations.slurm.deadlines import Deadlines
from resilience.integrations.slurm.drain import Drainer
from resilience.integrations.slurm.node import ourselves
from resilience.integrations.slurm.scontrol import SlurmAway, SlurmError
from resilience.integrations.slurm.start import Options, srun_command
from resilience.integrations.slurm.watch import Watch

from resilience import kin
from resilience.failover import ends, exits

_LOG = logging.getLogger("resilience.slurm")
_LOOK_S = 1.0
_ASK_S = 20.0  # between two looks at a job whose watch has ended
_STORE_S = 120.0
_PATIENCE_S = 600.0  # with a slurmctld that does not answer
_LEAVE_S = 5.0
_EARLY_S = 60.0  # srun that could not reach slurmctld has ended by then
_SETTLE_S = 5.0
_COME_BACK_S = 10.0  # for a node that was silent for so long that the others gave it up


@dataclass
class Follower:
    """See above. One start of a job, from the first process to the requeue."""

    options: Options
    asked: bool = False
    gave_up: bool = False
    _ended_by_slurm: bool = False
    _lost: tuple[int, float] | None = None  # the cycle in which a node was lost, and since when we know
    _passed_on: bool = False
    _interrupted: bool = False
    _others_heard: list[int] = field(default_factory=list)  # signals that ask for nothing
    _broken: str = ""
    _hurried: bool = False  # the step was ended for its silence: nothing more is to be heard of it
    _told_to_end: bool = False  # by Slurm, be it for good or not
    _srun: subprocess.Popen[bytes] | None = None
    _watch: Watch | None = None
    _next_look: float = 0.0  # at the job, for the sake of its watch
    _others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._deadlines = Deadlines(self.options)

    def run(self) -> int:
        """Follow the job to the end of this start; return the exit code of the batch script."""
        acts = {signal.SIGUSR1: self._on_usr1, signal.SIGTERM: self._on_term, signal.SIGINT: self._on_int}
        acts |= dict.fromkeys((signal.SIGUSR2, signal.SIGHUP), self._on_other)
        for number, act in acts.items():
            signal.signal(number, act)
        if self._is_finished(or_raise=True):
            _LOG.info("finished: %s is there. Nothing is started.", self.options.finished_file)
            return exits.FINISHED
        if shutil.which("srun") is None:
            raise SlurmError("there is no srun on PATH. Nothing was started, nothing is requeued.")
        self._claim()
        try:
            return self._follow(Drainer() if self.options.drains else None)
        finally:
            for process in self._helpers():
                _end(process)

    def _follow(self, drainer: Drainer | None) -> int:
        code = self._train(drainer)
        for process in self._helpers():  # and waited for at the very end: Slurm may leave us little time
            process.terminate()
        if self._interrupted:
            _LOG.info("ended by SIGINT: the job is not requeued.")
            return 128 + signal.SIGINT
        seen = jobs.look(self.options.job, self.options.restart)
        found = self._told_at_last(drainer, may_wait=chain.may_go_on(seen.state) and not self._hurried)
        if drainer is not None:
            drainer.close(_PATIENCE_S)
        return self._act(self._decide(code, found, seen))

    def _helpers(self) -> list[subprocess.Popen[bytes]]:
        return [*(self._watch.processes() if self._watch is not None else []), *self._others]

    def _claim(self) -> None:
        """Have a run directory that nobody else has written to."""
        home = self.options.home
        try:
            aside = records.claim(home, records.Start(self.options.cluster, self.options.restart))
        except OSError as error:
            raise SlurmError(
                f"{self.options.run_dir} can't be made: {error.strerror}. Nothing was started, nothing is requeued."
            ) from error
        if aside is not None:
            _LOG.warning(
                "%s had things of another job with this number: they are in %s now, and do not count.", home, aside
            )

    # -- training -----------------------------------------------------------------------------------------------------

    def _train(self, drainer: Drainer | None) -> int:
        endpoint = ""
        while not (self.asked or self._interrupted):
            began = time.monotonic()
            try:  # nothing else: what fails while they train must not end them
                endpoint = endpoint or self._start_store()
                if self.asked or self._interrupted:
                    break
                self._start_steps(endpoint)
            except (SlurmError, OSError) as error:
                _LOG.error("the launchers could not be started: %s", error)
                return exits.FAILED
            code = self._await_srun(drainer)
            if not self._is_to_be_started_again(code, time.monotonic() - began):
                return code
        return exits.PREEMPTED

    def _start_steps(self, endpoint: str) -> None:
        """Start the launchers; where the job outlives a node, those too who watch over this one."""
        self._srun = self._start(srun_command(self.options, endpoint))
        if self.options.needed < self.options.nodes:
            for process in self._watch.processes() if self._watch is not None else []:
                _end(process)
            self._watch = Watch(self.options.run_dir / "watch.log")
            self._watch.start(self._start, self.options.job, self.options.restart, self.options.nodes)
        if self.asked:  # while it was started, and so not passed on yet
            self._pass_on()

    def _await_srun(self, drainer: Drainer | None) -> int:
        assert self._srun is not None
        while True:
            try:
                code = self._srun.wait(_LOOK_S)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                self._look(drainer)

    def _is_to_be_started_again(self, code: int, took: float) -> bool:
        """Whether srun has failed for want of slurmctld alone. That is waited for here: it is no failure of the job's."""
        told = self.asked or self._told_to_end or self._interrupted
        if told or code == exits.FINISHED or took > _EARLY_S or records.has_begun(self.options.run_dir):
            return False
        try:
            if not jobs.was_away(self.options.job):
                return False
        except SlurmAway as error:
            _LOG.error("the launchers could not be started: %s", error)
            return False
        _LOG.info("slurmctld was away, so srun has ended with %s and started nothing: it is started again.", code)
        return True

    def _look(self, drainer: Drainer | None) -> None:
        while self._others_heard:
            name = signal.Signals(self._others_heard.pop()).name
            _LOG.warning("%s is ignored here; `scancel --signal=USR1 --batch %s` asks to stop.", name, self.options.job)
        if self._ended_by_slurm:
            self._ended_by_slurm = False
            seen = jobs.look(self.options.job, self.options.restart)
            if seen.preempted:  # its launchers have been told too
                self.asked = self._passed_on = True
            elif seen.state == chain.RUNNING:
                self._ask()
        found = self._told(drainer)
        overdue = self._deadlines.overdue(found, self.asked or self.gave_up, time.monotonic())
        if overdue:
            self._hurried = True
            _LOG.warning("%s: ending the step.", overdue)
        if (overdue or self._interrupted) and self._srun is not None:
            _end(self._srun)
        self._look_after_store()
        self._look_after_watch()
        if self.asked or self.gave_up:
            return
        needed, few = self.options.needed, chain.too_few(found, self.options.nodes, self.options.needed)
        if few or (needed == self.options.nodes and self._waits_in_vain()):
            self.gave_up = True
            what = "nodes have left" if few else "a node is lost"
            _LOG.warning("%s, %s are needed, and nobody takes their place: ending here.", what, needed)
            self._pass_on()

    def _look_after_store(self) -> None:
        """Say it where the store has died: launchers see a silence only, and name each other."""
        ended = next((code for store in self._others if (code := store.poll()) is not None), None)
        if ended is not None and not self._broken:
            how = f"exit code {ended}" if ended >= 0 else f"signal {-ended}"
            self._broken = f"the rendezvous store on {self.options.host} was ended by {how}"
            _LOG.error(
                "%s. The launchers can't go on without it: they end when it has been silent for some time.",
                self._broken,
            )

    def _look_after_watch(self) -> None:
        """Say it where nobody watches over this node any more; not where the job ends, and its steps with it."""
        if self._watch is None or self.asked or self._told_to_end or not self._watch.has_ended:
            return
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _ASK_S
        if jobs.look(self.options.job, self.options.restart).state == chain.RUNNING and not self._told_to_end:
            self._watch.look()

    def _waits_in_vain(self) -> bool:
        """Whether the launchers have been waiting for a lost node for some time."""
        cycle = records.lost_in(self.options.run_dir)
        if cycle is None:
            self._lost = None
        elif self._lost is None or self._lost[0] != cycle:
            self._lost = (cycle, time.monotonic())
        return self._lost is not None and time.monotonic() - self._lost[1] > _COME_BACK_S

    def _told(self, drainer: Drainer | None) -> tuple[ends.NodeEnd, ...]:
        """Return which launchers have ended; have the nodes drained that are faulty."""
        names = self.options.names
        found = tuple(end for end in ends.read(self.options.run_dir) if not names or end.node in names)
        for end in found:
            if drainer is not None and end.fault is not None and end.fault.node == end.node:  # nobody speaks of others
                drainer.tell(end.fault)
        return found

    def _told_at_last(self, drainer: Drainer | None, may_wait: bool = True) -> tuple[ends.NodeEnd, ...]:
        """Return how the launchers ended: what another node wrote may be seen here a little later on a shared file system."""
        deadline = time.monotonic() + (_SETTLE_S if self._srun is not None and may_wait else 0.0)
        while len(found := self._told(drainer)) < self.options.nodes and time.monotonic() < deadline:
            time.sleep(_LOOK_S / 4)
        return found

    def _start_store(self) -> str:
        """Start the rendezvous store; return where it is. Any free port: nothing has to be agreed on before.

        One node has it too: Slurm may give up a node whose processes live on, and start the job elsewhere. Its end is theirs.
        """
        host = self.options.host if self.options.nodes > 1 else "127.0.0.1"
        command = [*ourselves(), "store", "--port=0", f"--host={host}"]
        store = self._start(command, stdout=subprocess.PIPE)
        self._others.append(store)
        assert store.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(store.stdout, selectors.EVENT_READ)
            said = store.stdout.readline().decode("utf-8", "replace") if selector.select(_STORE_S) else ""
        found = re.search(r"serving (\S+:\d+)\.", said)
        if found is None:
            raise SlurmError(
                f"the rendezvous store did not start on {self.options.host}: {said.strip() or 'it says nothing'}"
            )
        return found[1]

    @staticmethod
    def _start(command: Sequence[str], **more: Any) -> subprocess.Popen[bytes]:
        """Start a process that Slurm's signals to the batch step do not reach, and that ends when this one is killed."""
        me = os.getpid()
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: kin.end_with(me),  # noqa: PLW1509 - there are no other threads yet
            **more,
        )

    # -- signals ------------------------------------------------------------------------------------------------------

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        self._ask()

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._ended_by_slurm = self._told_to_end = True

    def _on_int(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True

    def _on_other(self, number: int, frame: FrameType | None) -> None:
        self._others_heard.append(number)  # and said later: what is being written may be interrupted by this

    def _ask(self) -> None:
        self.asked = True
        self._pass_on()

    def _pass_on(self) -> None:
        """Have srun signal the launchers: it hands SIGUSR1 on to its tasks. Once: a second one would end them at once."""
        if self._srun is not None and not self._passed_on:
            self._passed_on = True
            with suppress(ProcessLookupError):
                self._srun.send_signal(signal.SIGUSR1)

    # -- what follows -------------------------------------------------------------------------------------------------

    def _decide(self, code: int, found: tuple[ends.NodeEnd, ...], seen: jobs.Seen) -> chain.Decision:
        step, failure = records.last_failure(self.options.run_dir)
        return chain.decide(
            chain.Situation(
                code=code,
                ends=found,
                nodes=self.options.nodes,
                needed=self.options.needed,
                most=self.options.most,
                state=seen.state,
                asked=self.asked or seen.preempted,
                gave_up=self.gave_up,
                finished=self._is_finished() if self.options.finished_file else None,
                cause="" if self._broken else failure,
                step=step,
                broken=self._broken,
                stop_failure=records.stop_failure(self.options.run_dir),
                culprit=cause.of_run(self.options.run_dir),
                history=records.recall(self.options.home),
                max_requeues=self.options.max_requeues,
            )
        )

    def _is_finished(self, or_raise: bool = False) -> bool:
        marker = self.options.finished_file
        try:
            return bool(marker) and Path(marker).exists()
        except OSError as error:
            if or_raise:
                raise SlurmError(
                    f"the finished marker {marker} can't be looked for: {error.strerror}. Nothing was started, nothing is requeued."
                ) from error
            _LOG.warning(
                "the finished marker %s can't be looked for: %s. It counts as not there.", marker, error.strerror
            )
            return False

    def _act(self, decision: chain.Decision) -> int:
        try:
            records.remember(self.options.home, decision.history)
        except OSError as error:
            _LOG.warning("what the chain is to remember can't be written to %s: %s.", self.options.home, error.strerror)
            decision = chain.without_memory(decision, self.options.restart, self.options.max_requeues)
        if not decision.requeue:
            _LOG.info("%s. The chain ends with exit code %s.", decision.why, decision.code)
            return decision.code
        _LOG.info("%s. The job is requeued.", decision.why)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # comes with the requeue, before we are done
        try:
            jobs.put_back(self.options.job, self.options.restart, decision.exclude)
        except jobs.Ended as error:
            _LOG.info("%s: it is not requeued from here.", error)
        except SlurmError as error:
            _LOG.error("the job is NOT requeued: %s. Submit it again to go on from its last checkpoint.", error)
        return decision.code


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
