"""``resilience kubernetes job render``: a flag for every value, and a values file below them."""

from __future__ import annotations

import sys

import yaml
from resilience.integrations import values as schema
from resilience.integrations.kubernetes.job.render import notes, render
from resilience.integrations.kubernetes.job.values import JobValues

from resilience.command import Parser

_PROG = "resilience kubernetes job"


def main(argv: list[str]) -> int:
    """Run a command; return the exit code."""
    parser = Parser(prog=_PROG, description="A training job to start from.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="render|values")
    one = commands.add_parser(
        "render",
        help="print a complete job as YAML",
        usage=f"{_PROG} render [--values FILE] [--nodes N …] [-- script.py arguments …]",
    )
    schema.add_flags(one, JobValues)
    commands.add_parser("values", help="print every value with its default, as a values file")
    args = parser.parse_args(argv)
    if args.command == "values":
        sys.stdout.write(schema.as_file(JobValues))
        return 0
    values = schema.from_flags(JobValues, args)
    for note in notes(values):
        sys.stderr.write(f"{_PROG} render: note: {note}\n")
    sys.stdout.write(yaml.safe_dump_all(render(values), sort_keys=False, width=120))
    return 0
