"""``resilience slurm …``: a batch script to start from, and the parts that it and Slurm start."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilience import config
from resilience.command import Parser, dispatch
from resilience.errors import ConfigError

_USAGE = """\
usage: resilience slurm render [--values FILE] [options] [-- script.py arguments …]
       resilience slurm values
       resilience slurm follow --dir DIR [options] -- [options of resilience run] script.py …
       resilience slurm epilog --fault-dir DIR

  render  print a complete batch script, ready for `sbatch`
  values  print every value of it with its default, as a values file
  follow  in a batch script: start a launcher on every node, and requeue the job or end it when they have ended
  epilog  in Slurm's Epilog: drain the node where a job has left word that it is faulty

`resilience slurm node` and `resilience slurm watch` are what `follow` has srun start on the nodes: a launcher on each, and on the
last two those who requeue a job that has lost its first node. Nobody else calls them.
"""

# name: module:function, called with the words behind the name; returns the exit code
COMMANDS = {
    "epilog": "resilience.integrations.slurm.drain:epilog",
    "follow": "resilience.integrations.slurm.cli:follow",
    "node": "resilience.integrations.slurm.node:main",
    "render": "resilience.integrations.slurm.cli:render",
    "values": "resilience.integrations.slurm.cli:values",
    "watch": "resilience.integrations.slurm.watch:main",
}


def main(argv: list[str]) -> int:
    """Run a command; return the exit code."""
    return dispatch("resilience slurm", _USAGE, COMMANDS, argv)


def render(argv: list[str]) -> int:
    """Print a batch script."""
    from resilience.integrations import values as schema  # noqa: PLC0415 - what runs on nodes needs no YAML
    from resilience.integrations.slurm import render as rendering  # noqa: PLC0415
    from resilience.integrations.slurm.values import SlurmValues  # noqa: PLC0415

    prog = "resilience slurm render"
    parser = Parser(
        prog=prog,
        usage=f"{prog} [--values FILE] [--nodes N …] [-- script.py arguments …]",
        description="Print a complete batch script.",
    )
    schema.add_flags(parser, SlurmValues)
    told = schema.from_flags(SlurmValues, parser.parse_args(argv))
    for note in rendering.notes(told):
        sys.stderr.write(f"{prog}: note: {note}\n")
    sys.stdout.write(rendering.render(told))
    return 0


def values(argv: list[str]) -> int:
    """Print a values file."""
    from resilience.integrations import values as schema  # noqa: PLC0415
    from resilience.integrations.slurm.values import SlurmValues  # noqa: PLC0415

    Parser(prog="resilience slurm values").parse_args(argv)
    sys.stdout.write(schema.as_file(SlurmValues))
    return 0


def follow(argv: list[str]) -> int:
    """Follow a job in its batch script."""
    from resilience.integrations.slurm import chain, following, start  # noqa: PLC0415

    args = _follower_args(chain.MAX_REQUEUES).parse_args(argv)
    variables = config.environment()
    job, nodes, restart = _job(variables, args.needed)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s resilience slurm: %(message)s", datefmt="%H:%M:%S"
    )
    options = start.Options(
        job=job,
        restart=restart,
        folder=Path(args.dir).absolute(),
        nodes=nodes,
        needed=args.needed or nodes,
        host=args.store_host or socket.gethostname(),
        arguments=tuple(args.arguments),
        srun_args=tuple(args.srun_arg),
        fault_dir=args.fault_dir,
        finished_file=args.finished_file,
        drains=args.drain,
        max_requeues=args.max_requeues,
        cluster=variables.get("SLURM_CLUSTER_NAME", ""),
        names=_names(variables.get("SLURM_JOB_NODELIST", ""), args.arguments),
    )
    return following.Follower(options, asked=args.asked).run()


def _follower_args(max_requeues: int) -> Parser:
    parser = Parser(prog="resilience slurm follow")
    parser.add_argument(
        "--dir", required=True, help="for reports, logs and what the chain remembers; shared by all nodes"
    )
    parser.add_argument("--needed", type=int, default=0, metavar="N", help="nodes that the job can't go on without")
    parser.add_argument("--max-requeues", type=int, default=max_requeues, metavar="N")
    parser.add_argument("--finished-file", default="", metavar="FILE", help="the chain ends when it is there")
    parser.add_argument("--fault-dir", default="", metavar="DIR", help="where launchers leave faults for the epilog")
    parser.add_argument("--store-host", default="", metavar="HOST", help="name of this host for the others")
    parser.add_argument("--drain", action="store_true", help="drain faulty nodes: this user has operator rights")
    parser.add_argument("--asked", action="store_true", help="the job was asked to stop before this was started")
    parser.add_argument("--srun-arg", action="append", default=[], metavar="X", help="one more word for srun")
    parser.add_argument("arguments", nargs="+", help="of `resilience run`, behind --")
    return parser


def _job(variables: Mapping[str, str], needed: int) -> tuple[str, int, int]:
    """Return the job that we are in, how many nodes it has, and how often it was requeued; raise where it can't be followed."""
    job, nodes = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_JOB_NUM_NODES", "")
    if not (job.isdecimal() and nodes.isdecimal()):
        raise ConfigError(
            "this is no job of Slurm's (there is no SLURM_JOB_ID): it belongs in a batch script. Nothing was started. Submit the "
            "script: `sbatch FILE`."
        )
    array, restart = _array_and_restart(job, variables)
    if array:
        raise ConfigError(
            "this is a job of an array, and a requeue of one could stop the others. Nothing was started. Submit one job for each."
        )
    if needed < 0:
        raise ConfigError(
            f"--needed={needed}: give how many nodes the job can't go on without, or 0. Nothing was started."
        )
    if needed > int(nodes):
        raise ConfigError(
            f"the job has {nodes} nodes, and needs {needed} (--needed): it would wait for ever. Nothing was started. "
            "Render it anew for so many nodes, or submit it with --nodes as rendered."
        )
    return job, int(nodes), int(restart) if restart.isdecimal() else 0


def _array_and_restart(job: str, variables: Mapping[str, str]) -> tuple[str, str]:
    """Return which array the job is of, and how often it was requeued, in Slurm's words; empty for none.

    A job that was submitted from within another has inherited that one's variables, where it has none of its own. So what they say
    is asked of Slurm; if it does not answer, they count.
    """
    from resilience.integrations.slurm.scontrol import SlurmError, field, scontrol  # noqa: PLC0415

    array, restart = (variables.get(name, "") for name in ("SLURM_ARRAY_JOB_ID", "SLURM_RESTART_COUNT"))
    if not (array or restart):
        return "", ""
    try:
        shown = scontrol("show", "job", "-o", job)
    except SlurmError:
        return array, restart
    return (field(shown, "ArrayJobId") if field(shown, "JobId") else array), field(shown, "Restarts") or restart


def _names(nodes: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes of the job; none where Slurm can't say, or the user has given them other names."""
    from resilience.integrations.slurm.scontrol import SlurmError, scontrol  # noqa: PLC0415

    if not nodes or any(word.replace("_", "-").startswith("--ft-node-name") for word in arguments):
        return ()
    try:
        return tuple(scontrol("show", "hostnames", nodes).split())
    except SlurmError:
        return ()
