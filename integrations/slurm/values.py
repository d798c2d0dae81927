"""What a batch script is made from: every value, what it means, and what it may be.

Rule: what stands in an ``#SBATCH`` line is one plain word, or refused: Slurm reads those lines by rules of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from resilience.integrations import flags
from resilience.integrations.values import ValuesError, settle, value

_WORD = re.compile(r"[^\s\"'\\#$`\x00-\x1f\x7f]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DAYS = re.compile(r"([0-9]{1,5})-([0-9]{1,2})(?::([0-5]?[0-9])(?::([0-5]?[0-9]))?)?")
_HOURS = re.compile(r"(?:([0-9]{1,6}):([0-5]?[0-9])|([0-9]{1,8})):([0-5]?[0-9])|([0-9]{1,8})")
_NO_LIMIT = ("UNLIMITED", "INFINITE")
_MOST_NODES = 65533
_MEMORY = re.compile(r"[0-9]{1,9}[KMGT]?")
_EARLY_S = 60  # Slurm may signal that much before it was asked to
_OURS = {
    "nnodes": "nodes",
    "nproc-per-node": "nproc_per_node",
    "ft-run-dir": "directory",
    "ft-stop-grace": "stop_grace",
}
_OURS |= {"max-restarts": "max_restarts", "ft-termination-log": "fault_dir"}
_MEETING = ("rdzv-endpoint", "rdzv-backend", "rdzv-id", "standalone", "master-addr", "master-port")
_LAUNCHER = {flag: f"give {name} instead" for flag, name in _OURS.items()}
_LAUNCHER |= dict.fromkeys(_MEETING, "where the nodes meet is settled when the job starts; leave it out")
_LAUNCHER |= {"node-rank": "a node has the rank that Slurm gives it; leave it out"}
_LAUNCHER |= {"help": "the launchers would print their help, and train nothing; leave it out"}
_TASKS = "one launcher runs on each node; give nproc_per_node for the ranks"
_SBATCH = {
    "array": "the jobs of an array can't be requeued one by one. Submit one job for each",
    "signal": "the signal before the time limit comes with stop_grace; give that instead",
    "no-requeue": "the job is requeued by what follows its end; give max_requeues=0 to have it end with the first failure",
    "open-mode": "requeues would begin the log anew; leave it out",
    "nodes": "give nodes, and spares, instead",
    "cpus-per-task": "srun has to be told too; give cpus_per_task instead",
    "job-name": "give name instead",
    "output": "give output instead",
    "time": "give time instead",
}
_SRUN = {
    "nodes": "give nodes, and spares, instead",
    "wait": "the job may go on when a launcher has ended; leave it out",
    "kill-on-bad-exit": "the job may go on when a launcher has failed; leave it out",
}
_SHORT = {"-N": "nodes", "-n": "ntasks", "-o": "output", "-c": "cpus-per-task", "-t": "time", "-J": "job-name"}
_SHORT |= {"-a": "array", "-W": "wait", "-K": "kill-on-bad-exit", "-h": "help"}
ASKED = "RESILIENCE_ASKED"  # a variable of the script's own
MARGIN_S = 30  # beyond --ft-stop-grace: ranks are ended, what is complete is written, the job is requeued


@dataclass(frozen=True)
class SlurmValues:
    """A training job. ``name`` and ``script`` are needed; everything else has a default that runs."""

    name: str = value("", "of the job")
    script: tuple[str, ...] = value(
        (), "the training script and its arguments, as after `resilience run`; a list, or one line"
    )
    nodes: int = value(1, "that train, one launcher on each")
    spares: int = value(0, "more nodes, which wait in the job and take over from one that leaves or is lost")
    min_nodes: int = value(0, "the job may go on with so few; 0: it needs all of nodes")
    nproc_per_node: int = value(0, "ranks on each node; 0: one for each GPU, or one")
    gpus_per_node: int = value(0, "--gpus-per-node; 0: none is asked for")
    cpus_per_task: int = value(0, "processors of each node, --cpus-per-task; 0: Slurm's default")
    memory: str = value("", "of each node, --mem; FlashCheckpoint's slots count too; empty: Slurm's default")
    time: str = value("", "time limit, --time; before it is up the job saves, and is requeued; empty: the partition's")
    partition: str = value("", "--partition")
    account: str = value("", "--account")
    qos: str = value("", "--qos")
    constraint: str = value("", "--constraint")
    exclude: str = value("", "nodes that the job must not get, --exclude")
    output: str = value("%x-%j.log", "--output; it is added to over requeues")
    directory: str = value(
        "runs", "for reports, logs and what the chain remembers; on a file system that all nodes share"
    )
    command: str = value("resilience", "the command, on every node; a path where it is not on PATH")
    setup: tuple[str, ...] = value((), "lines of shell before it, as `module load cuda`; a list of lines")
    env: Mapping[str, str] = value({}, "environment variables")
    max_restarts: int = value(10, "--max-restarts of the launcher")
    max_requeues: int = value(
        3, "requeues after failures, without progress in between; those after a preemption are free"
    )
    stop_grace: int = value(60, "--ft-stop-grace, in seconds; Slurm signals 30 s more before the time limit")
    finished_file: str = value(
        "",
        "the chain ends when this file is there, and only then (FAULT_TOL_FINISHED_FLAG_FILE); empty: when all end with 0",
    )
    drain: bool = value(False, "the job drains faulty nodes itself: its user has Slurm's operator rights")
    fault_dir: str = value("", "folder of each node where faults are left for `resilience slurm epilog`, which drains")
    store_host: str = value("", "name by which the nodes reach the first of them; empty: its host name")
    network_check: bool = value(False, "check every node before each start; a faulty one ends with 80 and never trains")
    accelerator: str = value("", "what is checked: cpu, nvidia, ascend or your own; empty: what torch finds")
    launcher_args: tuple[str, ...] = value((), "more flags for `resilience run`; a list, or one line")
    srun_args: tuple[str, ...] = value((), "more flags for srun; a list, or one line")
    sbatch_args: tuple[str, ...] = value((), "more #SBATCH flags; a list, or one line")

    def __post_init__(self) -> None:
        if isinstance(self.setup, str):  # one line of shell is no list of words
            object.__setattr__(self, "setup", tuple(self.setup.splitlines()))
        if type(self.time) is not str:
            raise ValuesError(f"time is {self.time!r}: write it in quotes. YAML takes 24:00:00 for a number, 86400.")
        if type(self.name) is not str:
            raise ValuesError(f"name is {self.name!r}: write it in quotes. YAML takes it for a number, 0123 for 83.")
        settle(self, needed=("name", "script"))
        self._check_numbers()
        self._check_words()
        self._check_launcher()
        self._check_shell()
        flags.check(self.launcher_args, self.env)

    def _check_numbers(self) -> None:
        least = {"nodes": 1, "spares": 0, "min_nodes": 0, "nproc_per_node": 0, "gpus_per_node": 0, "cpus_per_task": 0}
        least |= {"max_restarts": 0, "max_requeues": 0, "stop_grace": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValuesError(f"{name} is {getattr(self, name)}: it must be at least {lowest}.")
        if self.nodes + self.spares > _MOST_NODES:
            raise ValuesError(f"nodes and spares are {self.nodes + self.spares}: no job of Slurm's has so many.")
        if self.min_nodes > self.nodes:
            raise ValuesError(f"min_nodes is {self.min_nodes}, above nodes, {self.nodes}.")
        if self.stop_grace + MARGIN_S > 65535:
            raise ValuesError(f"stop_grace is {self.stop_grace}: Slurm takes at most {65535 - MARGIN_S}.")

    def _check_words(self) -> None:
        for name in ("name", "memory", "time", "partition", "account", "qos", "constraint", "exclude", "output"):
            text = getattr(self, name)
            if text and not _WORD.fullmatch(text):
                raise ValuesError(
                    f"{name} is {text!r}, which can't stand in an #SBATCH line: no spaces, quotes, #, $ or \\."
                )
        if "/" in self.name:
            raise ValuesError(f"name is {self.name!r}: without a slash, please. It is part of the log's name (%x).")
        for text in self.sbatch_args:
            if not (_WORD.fullmatch(text) and text.startswith("-")):
                raise ValuesError(f"sbatch_args has {text!r}: write --name=value, without spaces, quotes, #, $ or \\.")
        _refuse("sbatch_args", self.sbatch_args, _SBATCH)
        _refuse("srun_args", self.srun_args, _SRUN)
        limit, least = time_limit(self.time), self.stop_grace + MARGIN_S + _EARLY_S
        if limit is not None and limit <= least:
            raise ValuesError(
                f"time is {self.time!r}, and the signal to stop may come {least} s before it is up: the job would be requeued "
                "before it has begun. Give more time, or a shorter stop_grace."
            )
        if self.memory and not _MEMORY.fullmatch(self.memory):
            raise ValuesError(f"memory is {self.memory!r}: write 500M, 64G or 1T.")
        if self.accelerator and not self.network_check:
            raise ValuesError(
                f"accelerator is {self.accelerator!r}, which says what is checked, and network_check is off: switch it on, or "
                "leave accelerator out."
            )
        if self.fault_dir and not self.fault_dir.startswith("/"):
            raise ValuesError(f"fault_dir {self.fault_dir!r} must be absolute: it is a folder of every node.")
        if self.drain and self.fault_dir:
            raise ValuesError("drain has the job drain nodes, fault_dir has the epilog do it: give one of them.")

    def _check_launcher(self) -> None:
        """Refuse flags that would undo what the nodes are told by others: where they meet, and where they leave word."""
        _refuse("launcher_args", self.launcher_args, _LAUNCHER)
        for word in self.launcher_args:
            if word.startswith("--") and " --" in word:
                raise ValuesError(f"launcher_args has {word!r} as one flag: give --launcher-args once for each.")
            flag, given, _ = word.replace("_", "-").partition("=")
            if flag.startswith("--rd") and "--rdzv-conf".startswith(flag) and not (given and flag == "--rdzv-conf"):
                raise ValuesError(f"launcher_args has {word!r}: write --rdzv-conf=NAME=X,NAME=X as one word.")

    def _check_shell(self) -> None:
        for name in self.env:
            if not _VARIABLE.fullmatch(name):
                raise ValuesError(f"env has {name!r}, which is no name of a variable.")
            if name.startswith(ASKED):
                raise ValuesError(
                    f"env has {name!r}, which is the script's own: it says that the job was asked to stop."
                )
        for name in ("directory", "command"):
            if not getattr(self, name).strip():
                raise ValuesError(f"{name} is empty: leave it out for its default, or give a path.")
        for name in ("directory", "finished_file", "command"):
            if getattr(self, name).startswith(("~", "$")):
                raise ValuesError(
                    f"{name} is {getattr(self, name)!r}, and no shell reads it later: give an absolute path, or let your shell "
                    f'expand it now, as --{name.replace("_", "-")}="$HOME/…".'
                )
        texts = [*self.script, *self.launcher_args, *self.srun_args, *self.env.values(), *self.setup]
        texts += [self.directory, self.command, self.finished_file, self.fault_dir, self.store_host]
        for text in texts:
            if "\0" in text:
                raise ValuesError(f"{text!r} has a character in it that no command line can hold.")
        if any("\n" in line for line in self.setup):
            raise ValuesError("setup is a list of lines: one of them has a line break in it.")
        last = self.setup[-1] if self.setup else ""
        if (len(last) - len(last.rstrip("\\"))) % 2:
            raise ValuesError(
                f"setup ends with {last!r}: with that backslash the script's own next line would be part of it."
            )

    @property
    def ranks(self) -> int:
        """Return how many ranks run on each node."""
        return self.nproc_per_node or self.gpus_per_node or 1


def _refuse(name: str, words: Iterable[str], ours: Mapping[str, str]) -> None:
    """Raise for a flag that would undo what the script says itself, be it abbreviated, as Slurm and torch allow."""
    for word in words:
        long = word.startswith("--")
        flag = word[2:].partition("=")[0].replace("_", "-") if long else _SHORT.get(word[:2], "")
        if flag.startswith("ntasks") and "nodes" in ours:
            raise ValuesError(f"{name} has {word!r}: {_TASKS}.")
        if found := flags.undone(f"--{flag}", ours):
            raise ValuesError(f"{name} has {word!r}: {ours[found]}.")


def time_limit(text: str) -> int | None:
    """Return a time limit of Slurm's in seconds; None for none. Raises for what is no time."""
    if not text or text.upper() in _NO_LIMIT:
        return None
    if (found := _DAYS.fullmatch(text)) is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if (found := _HOURS.fullmatch(text)) is not None:
        hours, minutes, alone, seconds, whole = (int(part or 0) for part in found.groups())
        return hours * 3600 + (minutes + alone + whole) * 60 + seconds
    raise ValuesError(f"time is {text!r}: write minutes, H:MM:SS, D-HH:MM:SS or UNLIMITED.")
