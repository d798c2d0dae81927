"""``resilience slurm watch``: on other nodes than the first, it sees that a job does not outlive its batch script.

With ``--no-kill`` a job keeps the nodes that it has left when one is lost. If that is the first, the batch script and the store are
gone with it, the launchers end, and Slurm shows a running job in which nothing runs, until its time is up.

1) (follower) starts it as a step of its own on the last nodes of the job, one or two of them, beside the launchers
2) (watcher) asks Slurm now and then. A job that runs, and whose batch host is none of its nodes any more, it requeues
3) (Slurm) ends it with the job, whatever the job's end is

Rule: it judges only what it has seen otherwise: a batch host that was never among the nodes has another kind of name.

Hazard: two of them may ask for the same requeue. Slurm refuses the second, and the state is asked for again then. And an srun that
is killed while its node lives on has its step cancelled: the watch ends with the follower, as it should.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from resilience.integrations.slurm import chain, jobs
from resilience.integrations.slurm.node import ourselves
from resilience.integrations.slurm.scontrol import SlurmAway, SlurmError, field, scontrol

from resilience import config
from resilience.command import Parser

_LOG = logging.getLogger("resilience.slurm")
_EVERY_S = 20.0
_WATCHERS = 2
_SAID = 500  # characters of what srun says
WATCH, REQUEUE, OVER = "watch", "requeue", "over"
# What sbatch's --gpus-per-node and --gpus leave for srun. Beside --gres=none Slurm refuses the step ("Invalid Trackable RESource").
_OF_GPUS = ("SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_LIVES = (chain.RUNNING, "SUSPENDED", "STOPPED")


@dataclass(frozen=True)
class Seen:
    """What Slurm says of a job: its state, which of its starts it is, and on which nodes."""

    state: str
    restart: int
    batch_host: str
    hosts: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the batch host is one of the nodes."""
        return self.batch_host in self.hosts


def judge(first: Seen, now: Seen, restart: int) -> str:
    """Say what to do. Pure. ``first``: the first look at this start of the job, ``restart``."""
    if now.state not in _LIVES or now.restart != restart:
        return OVER
    return REQUEUE if now.state == chain.RUNNING and now.hosts and first.is_whole and not now.is_whole else WATCH


def srun_command(job: str, restart: int, nodes: int) -> list[str]:
    """Return the command that starts the watchers beside the launchers, on the last nodes; the batch host is the first. Pure."""
    count = min(_WATCHERS, nodes - 1)
    srun = ["srun", "--overlap", "--no-kill", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    srun += [f"--relative={nodes - count}", "--cpus-per-task=1", "--mem=0", "--gres=none", "--kill-on-bad-exit=0"]
    return [*srun, "--wait=0", *ourselves(), "slurm", "watch", f"--job={job}", f"--restart={restart}"]


def srun_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of that srun: it asks for none of the job's GPUs. Pure."""
    return {name: text for name, text in variables.items() if name not in _OF_GPUS}


@dataclass
class Watch:
    """The follower's side: the step, and what it said. Without it the job goes on; that it is missing is said once."""

    log: Path
    _step: subprocess.Popen[bytes] | None = None
    _told: bool = False

    def start(self, start: Callable[..., subprocess.Popen[bytes]], job: str, restart: int, nodes: int) -> None:
        """Start it. What it says is in a file of its own, so that nothing of it is between the launchers' lines."""
        try:
            variables = srun_environment(config.environment())
            with self.log.open("ab") as file:
                self._step = start(srun_command(job, restart, nodes), stdout=file, stderr=file, env=variables)
        except OSError as error:
            self._tell(str(error))

    @property
    def has_ended(self) -> bool:
        """Whether nobody watches any more, and that has not been said."""
        return self._step is not None and self._step.poll() is not None and not self._told

    def look(self) -> None:
        """Say it where nobody watches any more."""
        if self._step is not None and self.has_ended:
            try:
                said = " ".join(self.log.read_text(encoding="utf-8", errors="replace").split())[-_SAID:]
            except OSError as error:
                said = str(error)
            self._tell(f"its srun ended with {self._step.returncode}: {said or 'it says nothing'}")

    def _tell(self, why: str) -> None:
        self._told = True
        _LOG.warning(
            "no other node watches over this one (%s). The job goes on; should this node be lost, requeue it by hand.",
            why,
        )

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Return what is to be ended."""
        return [self._step] if self._step is not None else []


def main(argv: list[str]) -> int:
    """Watch over a job from another node than its first; return when it does not run any more."""
    parser = Parser(prog="resilience slurm watch")
    parser.add_argument("--job", required=True)
    parser.add_argument("--restart", type=int, default=0, metavar="N", help="which of its starts it is")
    parser.add_argument("--every", type=float, default=_EVERY_S, metavar="S", help="seconds from one look to the next")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to stop is for the launchers
    first: Seen | None = None
    while True:
        try:
            text = scontrol("show", "job", "-o", args.job)
            now = seen(text)
        except SlurmAway:
            time.sleep(args.every)
            continue
        except SlurmError as error:  # Slurm does not know it any more, or there is no scontrol
            sys.stderr.write(f"resilience slurm watch: {error}.\n")
            return 1
        if first is None:
            first = now
            _log_to(field(text, "StdErr"))
            # Two of them take turns.
            time.sleep(args.every / 2 * (config.environment().get("SLURM_PROCID", "0") != "0"))
        verdict = judge(first, now, args.restart)
        if verdict == OVER:
            return 0
        if verdict == REQUEUE and not _requeue(args.job, now):
            return 1
        time.sleep(args.every)


def seen(text: str) -> Seen:
    """Return what ``scontrol show job`` says. Raises a :class:`SlurmError` where the nodes' names can't be told."""
    nodes, restart = field(text, "NodeList"), field(text, "Restarts")
    hosts = tuple(scontrol("show", "hostnames", nodes).split()) if nodes else ()
    number = int(restart) if restart.isdecimal() else 0
    return Seen(field(text, "JobState"), number, field(text, "BatchHost"), hosts)


def _log_to(path: str) -> None:
    """Have what is said in the job's own log: srun, which would hand it on, is lost with the first node."""
    if path and Path(path).exists():
        handler = logging.FileHandler(path, encoding="utf-8", delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s resilience slurm: %(message)s", "%H:%M:%S"))
        _LOG.addHandler(handler)
        _LOG.setLevel(logging.INFO)


def _requeue(job: str, now: Seen) -> bool:
    """Requeue a job that has lost its batch script; return whether that may still come true."""
    _LOG.warning(
        "the first node, %s, is lost, and the batch script with it: %s can't go on without. The job is requeued.",
        now.batch_host,
        ", ".join(now.hosts),
    )
    try:
        jobs.requeue(job, now.restart)
    except (jobs.Ended, SlurmAway):
        return True
    except SlurmError as error:
        if jobs.look(job, now.restart).state == chain.RUNNING:
            _LOG.error(
                "the job is NOT requeued: %s. Cancel it, and submit it again: it holds its nodes for nothing.", error
            )
            return False
    return True
