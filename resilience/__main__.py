"""The ``resilience`` command."""

from __future__ import annotations

import argparse
import sys

from resilience import __version__
from resilience.errors import ResilienceError, nearest

_USAGE = """\
usage: resilience run [torchrun's options] [--ft-…] script.py [arguments]
       resilience config [--ft-…]
       resilience --version

  run      start a training script and keep it running: torchrun, with a monitor per rank
  config   print every setting, its value and where it came from
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    command = words[0] if words else "--help"
    try:
        if command == "run":
            from resilience.launcher.cli import main as run  # noqa: PLC0415

            return run(words[1:])
        if command == "config":
            return print_config(words[1:])
    except ResilienceError as error:
        sys.stderr.write(f"resilience {command}: {error}\n")
        return 2
    if command in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if command in ("-V", "--version"):
        sys.stdout.write(f"resilience {__version__}\n")
        return 0
    sys.stderr.write(f"resilience: unknown command {command!r}.{nearest(command, ['run', 'config'])}\n{_USAGE}")
    return 2


def print_config(argv: list[str]) -> int:
    """Print every setting with where its value came from."""
    from resilience.launcher.cli import add_settings, settings_from  # noqa: PLC0415

    parser = argparse.ArgumentParser(
        prog="resilience config", description="Print every setting and where it came from."
    )
    add_settings(parser)
    settings = settings_from(parser.parse_args(argv))
    rows = list(settings.rows())
    name_width, value_width, source_width = (max(len(row[i]) for row in rows) for i in range(3))
    for name, value, source, doc in rows:
        sys.stdout.write(f"{name:{name_width}}  {value:{value_width}}  {source:{source_width}}  {doc}\n")
    for note in settings.notes:
        sys.stdout.write(f"note: {note}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
