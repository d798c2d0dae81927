"""What all our commands have in common: a word that is not known is refused, and the nearest one named."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from resilience.errors import nearest

_NO_CHOICE = re.compile(r"invalid choice: '([^']*)'")


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, and whose errors name the nearest flag or word. So do parsers that it makes."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**({"allow_abbrev": False} | more))

    def error(self, message: str) -> NoReturn:
        """Say it, and what was meant; end with 2."""
        unknown = [word for word in message.partition("unrecognized arguments:")[2].split() if word.startswith("-")]
        if unknown:
            # Without the dashes before them, which all flags share: '--lr' is not nearly '--port'.
            known = [flag.lstrip("-") for flag in _flags(self) if "_" not in flag]
            word = unknown[0].partition("=")[0].lstrip("-")
            message += "." + nearest(word, known).replace("'", "'--", 1) + _behind_dashes(self)
        elif found := _NO_CHOICE.search(message):
            message += f".{nearest(found[1], _choices(self))}"
        super().error(message)


def dispatch(prog: str, usage: str, commands: Mapping[str, str], argv: list[str]) -> int:
    """Run the command that the first word names; return the exit code.

    ``commands`` has ``module:function`` for each name. It is imported when it is called, with the words behind the name: what
    the others need may not be installed.
    """
    word = argv[0] if argv else "--help"
    if word in ("-h", "--help"):
        sys.stdout.write(usage)
        return 0
    if word not in commands:
        sys.stderr.write(f"{prog}: unknown command {word!r}.{nearest(word, commands)}\n{usage}")
        return 2
    module, _, name = commands[word].partition(":")
    return int(getattr(importlib.import_module(module), name)(argv[1:]))


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its commands: flags that a command does not know are refused by the parser above it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _parsers(inner)


def _behind_dashes(parser: argparse.ArgumentParser) -> str:
    """Return where flags of the script stand, for a command that takes a script."""
    takes_script = any(action.dest == "script" for one in _parsers(parser) for action in one._actions)
    return " Flags of the training script stand behind --, as in `-- train.py --lr 0.1`." if takes_script else ""


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for one in _parsers(parser) for action in one._actions for flag in action.option_strings]


def _choices(parser: argparse.ArgumentParser) -> list[str]:
    return [str(word) for one in _parsers(parser) for action in one._actions for word in action.choices or ()]
