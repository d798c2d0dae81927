"""The launcher's own log lines: on stderr, each with the cycle and the node."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)


class _Lines(logging.Handler):
    place = "start"
    speak: Callable[[str], object] = staticmethod(_to_stderr)

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        trace = f"\n{logging.Formatter().formatException(record.exc_info)}" if record.exc_info else ""
        self.speak(f"resilience [{self.place}] {level}{record.getMessage()}{trace}\n")


_handler = _Lines()


def start(level: str) -> None:
    """Send our lines to stderr."""
    logger = logging.getLogger("resilience")
    logger.setLevel(level)
    logger.handlers = [_handler]
    logger.propagate = False


def set_place(cycle: int, node: int) -> None:
    """Say in every line from now on which cycle this is, and which node."""
    _handler.place = f"c{cycle} n{node}"


def speak_through(speak: Callable[[str], object]) -> None:
    """Send the lines through the console's thread, so that a paused terminal can't stop the launcher."""
    _handler.speak = speak


def says_more_than_the_report(record: logging.LogRecord) -> bool:
    """Leave out torch's lines about workers that failed or are sent a signal."""
    return not record.getMessage().startswith(("failed (exitcode", "Sending process"))
