"""The ``resilience`` command.

Adapters bring commands of their own, as entry points of the group ``resilience.commands``: a name, and a ``main(argv)`` that
returns the exit code. They are loaded when they are called, so that whoever does not call them needs nothing of theirs.
"""

from __future__ import annotations

import importlib.metadata
import io
import sys
from collections.abc import Callable

from resilience import __version__, kin
from resilience.command import Parser
from resilience.errors import ConfigError, ResilienceError, nearest

_USAGE = """\
usage: resilience run [torchrun's options] [--ft-…] script.py [arguments]
       resilience config [--ft-…]
       resilience report RUN_DIR
       resilience checkpoint list|show|verify|export|import|prune DIRECTORY
       resilience store [--port PORT]
       resilience nodecheck [--accelerator NAME] [--nnodes N --rdzv-endpoint HOST:PORT]
       resilience kubernetes manifests|controller|uncordon|podgroup|job …
       resilience slurm render|values|follow|epilog …
       resilience --version

  run         start a training script and keep it running: torchrun, with a monitor per rank
  config      print every setting, its value and where it came from
  report      print what happened in a run: one block for each cycle that failed
  checkpoint  look after checkpoints on disk
  store       serve the rendezvous store on a host that does not train
  nodecheck   check this node, alone or together with others, and say whether it is fit to train
  kubernetes  training jobs on Kubernetes: a job to start from, groups of Pods, the controller
  slurm       training jobs on Slurm: a batch script to start from, and the chain of its requeues
"""
_PLUGINS = "resilience.commands"
_EXTRAS = {"kubernetes": "kubernetes"}  # commands of adapters that we ship: the extra that brings what they need


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    kin.hear_of_children()
    words = sys.argv[1:] if argv is None else argv
    command = words[0] if words else "--help"
    if command in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if command in ("-V", "--version"):
        sys.stdout.write(f"resilience {__version__}\n")
        return 0
    commands = {
        "run": run,
        "config": print_config,
        "report": print_report,
        "checkpoint": keep_checkpoints,
        "store": serve_store,
        "nodecheck": check_node,
    }
    try:
        act = commands.get(command) or plugin(command)
        if act is None:
            known = {*commands, *_EXTRAS, *plugins()}
            sys.stderr.write(f"resilience: unknown command {command!r}.{nearest(command, known)}\n{_USAGE}")
            return 2
        return act(words[1:])
    except ResilienceError as error:
        sys.stderr.write(f"resilience {command}: {error}\n")
        return 2


def plugins() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the commands that adapters bring, by name."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=_PLUGINS)}


def plugin(name: str) -> Callable[[list[str]], int] | None:
    """Return the command of an adapter, or None; raise where its package lacks something."""
    entry = plugins().get(name)
    extra = _EXTRAS.get(name)
    install = f" Install it: pip install 'resilience-sdk[{extra}]'" if extra else ""
    if entry is None and extra is None:
        return None
    if entry is None:
        raise ConfigError(f"this installation has no command {name!r}.{install}")
    load = entry.load

    def act(argv: list[str]) -> int:
        try:
            return int(load()(argv))
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] == "resilience":
                raise  # a mistake of ours, not a package that is not there
            raise ConfigError(f"it needs the package {error.name!r}, which is not installed.{install}") from error

    return act


def run(argv: list[str]) -> int:
    """Start a job."""
    from resilience.launcher.cli import main as launch  # noqa: PLC0415 - the other commands need no torch

    return launch(argv)


def print_config(argv: list[str]) -> int:
    """Print every setting with where its value came from."""
    from resilience.launcher import cli  # noqa: PLC0415

    parser = cli.Parser(prog="resilience config", description="Print every setting and where it came from.")
    cli.add_settings(parser)
    settings = cli.settings_from(parser.parse_args(argv))
    rows = list(settings.rows())
    name_width, value_width, source_width = (max(len(row[i]) for row in rows) for i in range(3))
    for name, value, source, doc in rows:
        sys.stdout.write(f"{name:{name_width}}  {value:{value_width}}  {source:{source_width}}  {doc}\n")
    for note in settings.notes:
        sys.stdout.write(f"note: {note}\n")
    return 0


def keep_checkpoints(argv: list[str]) -> int:
    """Look after checkpoints on disk."""
    from resilience.checkpoint.cli import main as keep  # noqa: PLC0415

    return keep(argv)


def serve_store(argv: list[str]) -> int:
    """Serve the rendezvous store."""
    from resilience.launcher.store import main as serve  # noqa: PLC0415

    return serve(argv)


def check_node(argv: list[str]) -> int:
    """Check this node."""
    from resilience.launcher.checkup import main as check  # noqa: PLC0415

    return check(argv)


def print_report(argv: list[str]) -> int:
    """Print the reports of a run's directory."""
    from pathlib import Path  # noqa: PLC0415

    from resilience.observe.report import as_text, is_run, read_all  # noqa: PLC0415

    parser = Parser(prog="resilience report", description="Print what happened in a run.")
    parser.add_argument("run_dir", help="the run's directory, as printed at its start and end")
    folder = Path(parser.parse_args(argv).run_dir)
    if not folder.is_dir():
        sys.stderr.write(
            f"resilience report: {folder} is not a directory. A run prints its directory at start and end.\n"
        )
        return 2
    if not is_run(folder):
        inside = ", ".join(str(path) for path in sorted(folder.iterdir()) if is_run(path))
        runs = f" These are: {inside}." if inside else ""
        sys.stderr.write(
            f"resilience report: {folder} is not a run's directory (it has neither cycles/ nor logs/).{runs}\n"
        )
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a message may hold what the terminal can't show
    reports = read_all(folder)
    for report in reports:
        for one in (*report.get("earlier", ()), report):  # with `min-healthy` a cycle may outlive several failures
            sys.stdout.write(as_text(one, str(folder)) + "\n\n")
    count = len(reports)
    sys.stdout.write(f"{count} cycle{'s' * (count != 1)} failed\n" if count else "no cycle failed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
