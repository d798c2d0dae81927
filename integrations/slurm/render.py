"""A complete batch script, so that ``sbatch`` is all that is left.

1) (#SBATCH) one task per node, a signal before the time limit, requeues allowed, one log for all starts
2) (script) the user's setup, then ``resilience slurm follow`` in the shell's place: it gets Slurm's signals at once

Rule: nothing of the values is read by the shell but ``setup``, which is shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from resilience.integrations.flags import unknown_accelerator
from resilience.integrations.slurm.values import ASKED, MARGIN_S, SlurmValues
from resilience.integrations.values import launcher_flags

from resilience.config import ENV_FINISHED_FLAG_FILE


def render(values: SlurmValues) -> str:
    """Return the script."""
    lines = ["#!/bin/bash", *(f"#SBATCH {flag}" for flag in _sbatch(values)), ""]
    lines += [
        f"{ASKED}=",
        f"trap '{ASKED}=--asked' USR1  # a request to stop while this script gets ready is remembered",
    ]
    lines += [*values.setup, *(f"export {name}={shlex.quote(text)}" for name, text in values.env.items())]
    if values.finished_file:
        lines.append(f"export {ENV_FINISHED_FLAG_FILE}={shlex.quote(values.finished_file)}")
    lines += [
        "",
        "trap '' USR1 USR2 HUP  # until the next line takes them",
        "exec " + " \\\n  ".join(_lines(values)),
        "",
    ]
    return "\n".join(lines)


def notes(values: SlurmValues) -> tuple[str, ...]:
    """Return what is to be said about a job that is otherwise fine."""
    found = []
    if not (values.drain or values.fault_dir):
        found.append(
            "faulty nodes are not drained: this job does not get them again, others may. Give fault_dir, with `resilience slurm "
            "epilog` in Slurm's Epilog, or drain where the job's user has operator rights."
        )
    if values.spares and values.min_nodes:
        found.append("spares take over before the job goes on with fewer than nodes.")
    return (*found, *unknown_accelerator(values.accelerator))


def _sbatch(values: SlurmValues) -> Iterator[str]:
    yield f"--job-name={values.name}"
    yield f"--nodes={values.nodes + values.spares}"
    yield "--ntasks-per-node=1"
    for flag, number in (("gpus-per-node", values.gpus_per_node), ("cpus-per-task", values.cpus_per_task)):
        if number:
            yield f"--{flag}={number}"
    words = {"mem": values.memory, "time": values.time, "partition": values.partition, "account": values.account}
    words |= {"qos": values.qos, "constraint": values.constraint, "exclude": values.exclude, "output": values.output}
    for flag, text in words.items():
        if text:
            yield f"--{flag}={text}"
    yield f"--signal=B:USR1@{values.stop_grace + MARGIN_S}"
    yield "--requeue"
    yield "--open-mode=append"
    if values.spares or 0 < values.min_nodes < values.nodes:
        yield "--no-kill"  # a lost node is not the end of the job
    yield from values.sbatch_args


def _lines(values: SlurmValues) -> Iterator[str]:
    """Yield the command, a line at a time."""
    yield f"{shlex.quote(values.command)} slurm follow ${ASKED}"
    flags = [f"--dir={values.directory}", f"--needed={values.min_nodes or values.nodes}"]
    flags.append(f"--max-requeues={values.max_requeues}")
    told = {"finished-file": values.finished_file, "fault-dir": values.fault_dir, "store-host": values.store_host}
    flags += [f"--{name}={text}" for name, text in told.items() if text]
    flags += ["--drain"] * values.drain + [f"--srun-arg={word}" for word in srun_arguments(values)]
    yield shlex.join(flags)
    yield f"-- {shlex.join(arguments(values))}"
    yield shlex.join(values.script)


def srun_arguments(values: SlurmValues) -> list[str]:
    """Return what srun is told besides what it always is. Since 22.05 it takes no ``--cpus-per-task`` over from the job."""
    return [*([f"--cpus-per-task={values.cpus_per_task}"] if values.cpus_per_task else []), *values.srun_args]


def arguments(values: SlurmValues) -> list[str]:
    """Return the launcher's arguments; where the nodes meet, and who they are, is known on the nodes only."""
    flags = [*launcher_flags(values), "--ft-shared-console=true"]  # srun writes what all of them say to one log
    if values.spares:
        flags.append("--ft-use-infra-group-rank=false")  # a spare takes any place
    return [*flags, *map(_not_host, values.launcher_args)]


def _not_host(word: str) -> str:
    """Return a flag of the user's; with ``--rdzv-conf`` no launcher takes it that it serves the store, which is beside it."""
    is_conf = word.startswith(("--rdzv-conf=", "--rdzv_conf="))
    return f"{word},is_host=false" if is_conf and "is_host" not in word else word
