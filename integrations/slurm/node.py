"""``resilience slurm node``: what ``srun`` starts on every node. It takes from Slurm who this node is, and becomes the launcher.

Rule: it replaces itself (``exec``). Slurm's task is then the launcher, and what Slurm signals is the launcher and nobody else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from resilience.integrations.slurm.drain import message_name

from resilience import config
from resilience.command import Parser
from resilience.groups import topology


def main(argv: list[str]) -> int:
    """Become the launcher of this node; return only where that can't be."""
    parser = Parser(prog="resilience slurm node")
    parser.add_argument(
        "--run-dir", required=True, help="of this start of the job, on a file system that all nodes share"
    )
    parser.add_argument("--endpoint", default="", help="HOST:PORT of the rendezvous store; empty: none")
    parser.add_argument(
        "--fault-dir", default="", help="folder of this node where a fault is left for the operator's epilog"
    )
    parser.add_argument("arguments", nargs="*", help="of `resilience run`, behind --")
    args = parser.parse_args(argv)
    variables = config.environment()
    command = [*ourselves(), "run", *flags(args.run_dir, args.endpoint, args.fault_dir, variables), *args.arguments]
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.stderr.write(f"resilience slurm node: {command[0]} can't be started: {error.strerror}.\n")
    return 1


def ourselves() -> list[str]:
    """Return the command that this process was started by."""
    started = os.path.abspath(sys.argv[0])  # noqa: PTH100 - a link is kept: it may be the one in the environment
    if os.path.basename(started) == "resilience" and os.access(started, os.X_OK):  # noqa: PTH119
        return [started]
    return [sys.executable, "-m", "resilience"]


def flags(run_dir: str, endpoint: str, fault_dir: str, variables: Mapping[str, str]) -> Sequence[str]:
    """Return what the launcher is told of its node. Pure. The user's own flags come behind these, and win."""
    job = variables.get("SLURM_JOB_ID", "")
    found = [f"--ft-run-dir={run_dir}"]
    name = variables.get("SLURMD_NODENAME", "")
    if name:
        found.append(f"--ft-node-name={name}")
    if group := topology.from_slurm(variables).name:
        found.append(f"--ft-node-group={group}")
    if fault_dir:
        found.append(f"--ft-termination-log={fault_dir}/{message_name(job, name)}")
    if endpoint:
        restart = variables.get("SLURM_RESTART_COUNT", "0")
        found += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id=slurm-{job}-{restart}"]
        found.append("--rdzv-conf=is_host=false")
    return found
