"""A real Slurm for the tests: munged, slurmctld and several slurmd on this host, on loopback, in a folder of its own.

Every node is one slurmd with a name, a port and a spool of its own; jobs see several nodes. Nothing of the machine's own Slurm or
munge is read or touched: configuration, key, sockets and ports are the cluster's. ``close`` ends everything by process id.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import MARK
from tests.jobs import alive, wait_for
from tests.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
NODE = "TESTS_SLURM_NODE"  # what a slurmd and everything below it carries
START_S = 30.0
LOOK_S = 0.2  # from one question to the next
GPUS = 2  # of each node
GRACE_S = 60  # of a job in the partition ``main`` that one in ``urgent`` takes the nodes of


def missing() -> str:
    """Return what these tests need and this machine has not; empty where everything is here."""
    if os.getuid() != 0:
        return "root: slurmd starts jobs as their users"
    absent = [name for name in PROGRAMS if _found(name) is None]
    return f"{', '.join(absent)} (make test-slurm installs Slurm)" if absent else ""


def _found(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin")


class Cluster:
    """``nodes`` slurmd, n1 to nN; n1 and n2 are below the switch ``left``, all others below ``right``.

    ``cred_expire``: how long Slurm leaves a requeued job alone, in seconds; 120 is Slurm's default, 5 the least that it takes.
    """

    def __init__(self, command: str, nodes: int = 4, cred_expire: int = 120) -> None:
        self._command = command
        self._cred_expire = cred_expire
        self._asked = 0.0
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.conf = self.folder / "slurm.conf"
        clean = {name: text for name, text in os.environ.items() if name != MARK and not name.startswith("SLURM_")}
        self.environment = {**clean, "SLURM_CONF": str(self.conf)}
        self._write()

    def _write(self) -> None:
        for name in ("state", "spool", "log", "munge", "faults", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(mode=0o755)
        (self.folder / "munge").chmod(0o711)
        key = self.folder / "munge" / "key"
        key.touch(0o400)
        key.write_bytes(secrets.token_bytes(128))
        host = socket.gethostname().partition(".")[0]
        control, *ports = free_ports(1 + len(self.nodes))
        lines = [
            "ClusterName=tests",
            f"SlurmctldHost={host}(127.0.0.1)",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self.folder}/munge/socket,cred_expire={self._cred_expire}",
            "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
            f"SlurmctldPort={control}",
            f"StateSaveLocation={self.folder}/state",
            f"SlurmdSpoolDir={self.folder}/spool/%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            "ProctrackType=proctrack/pgid",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "TopologyPlugin=topology/tree",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "MpiDefault=none",
            "ReturnToService=2",
            "SlurmdTimeout=10",
            "SlurmdParameters=config_overrides",
            "KillWait=10",
            "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0",
            f"Epilog={self.folder}/epilog",
            "GresTypes=gpu",
        ]
        for node, port in zip(self.nodes, ports, strict=True):
            has = f"CPUs=4 RealMemory=4000 Gres=gpu:{GPUS}"
            lines.append(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {has}")
        everywhere = f"Nodes={','.join(self.nodes)} MaxTime=INFINITE State=UP"
        lines.append(f"PartitionName=main {everywhere} Default=YES PriorityTier=1 GraceTime={GRACE_S}")
        lines.append(f"PartitionName=urgent {everywhere} PriorityTier=2 PreemptMode=OFF")
        epilog = self.folder / "epilog"
        told = [f'{name}="${name}"' for name in ("SLURM_JOB_ID", "SLURM_JOB_UID", "SLURMD_NODENAME")]
        bare = " ".join(["/usr/bin/env -i", f"SLURM_CONF={self.conf}", *told])  # and no search path
        epilog.write_text(f"#!/bin/sh\nexec {bare} {self._command} slurm epilog --fault-dir={self.folder}/faults\n")
        epilog.chmod(0o755)
        (self.folder / "faults").chmod(0o1733)
        self.conf.write_text("\n".join(lines) + "\n")
        left, right = ",".join(self.nodes[:2]), ",".join(self.nodes[2:])
        switches = [
            f"SwitchName=left Nodes={left}",
            f"SwitchName=right Nodes={right}",
            "SwitchName=top Switches=left,right",
        ]
        (self.folder / "topology.conf").write_text("\n".join(switches) + "\n")
        self._write_gpus()

    def _write_gpus(self) -> None:
        """Give each node devices that it can count: plain files do."""
        for number in range(GPUS):
            (self.folder / f"gpu{number}").touch()
        of_node = f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]"
        text = "".join(f"NodeName={node} {of_node}\n" for node in self.nodes)
        (self.folder / "gres.conf").write_text(text)

    # -- coming and going ---------------------------------------------------------------------------------------------

    def start(self) -> Cluster:
        """Start everything and wait until all nodes are idle."""
        at = self.folder / "munge"
        files = [f"--{what}-file={at}/{what}" for what in ("key", "pid", "log", "seed")]
        self._run("munged", "munged", "--foreground", f"--socket={at}/socket", *files, "--num-threads=2")
        wait_for((at / "socket").exists, "munge's socket", START_S)
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        wait_for(lambda: set(self.states().values()) == {"IDLE"}, f"idle nodes ({self.folder})", START_S)
        return self

    def start_controller(self) -> None:
        self._run("slurmctld", "slurmctld", "-D", "-f", str(self.conf))

    def stop_controller(self) -> None:
        self._end("slurmctld", signal.SIGKILL)

    def keep_state(self) -> Path:
        """Return a copy of what the controller has written down, for :meth:`put_back_state`: it then forgets what came later."""
        copy = Path(tempfile.mkdtemp(dir=self.folder))
        shutil.copytree(self.folder / "state", copy, dirs_exist_ok=True)
        return copy

    def put_back_state(self, copy: Path) -> None:
        shutil.rmtree(self.folder / "state")
        copy.rename(self.folder / "state")

    def start_node(self, node: str) -> None:
        self._run(node, "slurmd", "-D", "-N", node, "-f", str(self.conf), more={NODE: node})

    def lose_slurmd(self, node: str) -> None:
        """Have a node's slurmd end at once: Slurm gives the node up, and what runs there lives on."""
        self._end(node, signal.SIGKILL)

    def lose(self, node: str) -> None:
        """Have a node vanish at once: its slurmd, all of its steps and what they run."""
        ours = re.escape(f"SLURM_CONF={self.conf}")  # other clusters have nodes of that name too
        mark = re.compile(rf"(?s)\A(?=.*{ours}\0).*(?:{NODE}|SLURMD_NODENAME)={node}\0".encode())
        self._end(node, signal.SIGKILL)
        _kill_all(mark)

    def close(self) -> None:
        """End everything, and leave nothing behind."""
        if "slurmctld" in self._running:
            self._cancel()
        for name in [*self.nodes, "slurmctld", "munged"]:
            if name in self._running:
                self._end(name, signal.SIGKILL)
        _kill_all(re.compile(re.escape(f"SLURM_CONF={self.conf}".encode())))
        shutil.rmtree(self.folder)

    def _cancel(self) -> None:
        for job in self.run("squeue", "--noheader", "--format=%A", check=False).split():
            self.run("scancel", job, check=False)

    def _run(self, name: str, program: str, *words: str, more: Mapping[str, str] | None = None) -> None:
        path = _found(program) or program
        with (self.folder / "log" / name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                [path, *words],
                env={**self.environment, **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._running.pop(name)
        process.send_signal(number)
        process.wait(30)

    # -- asking -------------------------------------------------------------------------------------------------------

    def run(self, *words: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Run one of Slurm's commands and return what it says."""
        mark = {MARK: os.environ[MARK]} if MARK in os.environ else {}
        done = subprocess.run(
            words,
            env={**self.environment, **mark, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=self.folder,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def _show(self, *words: str) -> str:
        """Ask Slurm, and not too often: who waits for an answer would keep the processor from those that are waited for."""
        time.sleep(max(0.0, self._asked + LOOK_S - time.monotonic()))
        self._asked = time.monotonic()
        return self.run("scontrol", "show", *words, check=False)

    def states(self) -> dict[str, str]:
        """Return the state of every node."""
        text = self._show("nodes", "-o")
        return {
            _field(line, "NodeName"): _field(line, "State") for line in text.splitlines() if line.startswith("NodeName")
        }

    def node(self, name: str) -> dict[str, str]:
        """Return a node's state and the reason for it."""
        text = self._show("node", name)
        reason = re.search(r"Reason=(.*)", text)
        return {"State": _field(text, "State"), "Reason": reason[1] if reason else ""}

    def job(self, number: int) -> dict[str, str]:
        """Return what Slurm says of a job."""
        text = self._show("job", "-o", str(number))
        return dict(re.findall(r"(\w+(?:/\w+)?)=(\S*)", text))

    def clear(self) -> None:
        """End all jobs and put every node back in service."""
        if "slurmctld" not in self._running:
            self.start_controller()
        self._cancel()
        wait_for(lambda: not self.run("squeue", "--noheader"), f"an empty queue: {self.run('squeue')}", 2 * START_S)
        for node, state in self.states().items():
            if node not in self._running:
                self.start_node(node)
            if state != "IDLE":
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        wait_for(lambda: set(self.states().values()) == {"IDLE"}, f"idle nodes: {self.states()}", START_S)


def _field(line: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S*)", line)
    return found[1] if found else ""


def carriers(mark: re.Pattern[bytes]) -> list[int]:
    """Return the processes whose environment has the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and mark.search((folder / "environ").read_bytes()):
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if alive(pid)]


def _kill_all(mark: re.Pattern[bytes]) -> None:
    """End all processes whose environment has the mark, and what they start meanwhile.

    They are stopped first, so that none sees another's end: an srun has a child that cancels its step then.
    """

    def gone() -> bool:
        pids = carriers(mark)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        return not pids

    wait_for(gone, f"the end of everything of the cluster: {carriers(mark)}", START_S)
