"""``resilience kubernetes job render``: a flag for every value, and a values file below them."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import yaml
from resilience.integrations.kubernetes.job.render import notes, render
from resilience.integrations.kubernetes.job.values import JobValues, ValuesError, from_file, from_mapping

_PROG = "resilience kubernetes job"


def main(argv: list[str]) -> int:
    """Run a command; return the exit code."""
    parser = argparse.ArgumentParser(prog=_PROG, description="A training job to start from.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="render|values")
    one = commands.add_parser(
        "render",
        help="print a complete job as YAML",
        usage=f"{_PROG} render [--values FILE] [--nodes N …] [-- script.py arguments …]",
        allow_abbrev=False,
    )
    one.add_argument("--values", metavar="FILE", help="YAML file with any of the values below; flags go before it")
    for item in dataclasses.fields(JobValues):
        if item.name != "script":
            _add(one, item)
    one.add_argument("script", nargs="*", help="the training script and its arguments, behind --")
    commands.add_parser("values", help="print every value with its default, as a values file", allow_abbrev=False)
    args = parser.parse_args(argv)
    if args.command == "values":
        sys.stdout.write(all_values())
        return 0
    given = from_file(args.values) if args.values else {}
    flags = {item.name: getattr(args, item.name) for item in dataclasses.fields(JobValues)}
    values = from_mapping(
        {**given, **{name: told for name, told in flags.items() if told not in (None, [])}}, args.values or "flags"
    )
    for note in notes(values):
        sys.stderr.write(f"{_PROG} render: note: {note}\n")
    sys.stdout.write(yaml.safe_dump_all(render(values), sort_keys=False, width=120))
    return 0


def _add(parser: argparse.ArgumentParser, item: dataclasses.Field[Any]) -> None:
    flag, doc = f"--{item.name.replace('_', '-')}", str(item.metadata["doc"]).replace("%", "%%")
    default = {} if item.default is dataclasses.MISSING else item.default
    more: dict[str, Any] = {
        "dest": item.name,
        "help": f"{doc} (default: {default})" if default not in ("", (), {}) else doc,
    }
    if isinstance(default, bool):
        parser.add_argument(flag, action="store_const", const=True, **more)
    elif isinstance(default, int):
        parser.add_argument(flag, type=int, metavar="N", **more)
    elif isinstance(default, tuple):
        parser.add_argument(flag, action="append", metavar="X", **more)
    elif isinstance(default, dict):
        parser.add_argument(flag, action=_Pairs, metavar="NAME=X", **more)
    else:
        parser.add_argument(flag, metavar="X", **more)


class _Pairs(argparse.Action):
    """``--env NAME=X``, as often as one likes."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        name, sign, text = str(values).partition("=")
        if not sign or not name:
            raise ValuesError(f"{option_string} {values}: write NAME=X.")
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), name: text})


def all_values() -> str:
    """Return a values file with every value, its default and what it means."""
    lines = []
    for item in dataclasses.fields(JobValues):
        default: Any = {} if item.default is dataclasses.MISSING else item.default
        shown = yaml.safe_dump(list(default) if isinstance(default, tuple) else default, default_flow_style=True)
        lines.append(f"{item.name}: {shown.splitlines()[0]}  # {item.metadata['doc']}\n")
    return "".join(lines)
