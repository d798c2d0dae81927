"""Shows how far something long is, on a terminal; in a pipe it stays quiet."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

_PATIENCE_S = 1.0
_EVERY_S = 0.2
_WIDTH = 30


@contextlib.contextmanager
def shown(what: str, fraction: Callable[[], float], *, shows: bool = True) -> Iterator[None]:
    """Show a bar on stderr while the block runs, if that takes longer than a moment and stderr is a terminal.

    ``fraction`` is asked by another thread, five times a second; it must wait for nothing.
    """
    if not shows or not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_show, args=(what, fraction, over), name="resilience-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _show(what: str, fraction: Callable[[], float], over: threading.Event) -> None:
    began = time.monotonic()
    if over.wait(_PATIENCE_S):
        return
    while not over.wait(_EVERY_S):
        _print(bar(what, fraction(), time.monotonic() - began), end="")
    _print(bar(what, fraction(), time.monotonic() - began), end="\n")


def bar(what: str, fraction: float, seconds: float) -> str:
    """Return the line."""
    fraction = min(max(fraction, 0.0), 1.0)
    full = round(fraction * _WIDTH)
    return f"{what} [{'#' * full}{'.' * (_WIDTH - full)}] {fraction:4.0%} {seconds:.0f} s"


def _print(line: str, end: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone: nobody looks
        sys.stderr.write(f"\r\x1b[K{line}{end}")
        sys.stderr.flush()
