"""One job at a time: what a place of checkpoints says to whoever comes while another has it.

A claim is held by a lock in a file system (:mod:`local`), by a lease in an object store (:mod:`lease`); both are signed in JSON.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from resilience.errors import CheckpointError

_LOG = logging.getLogger("resilience.checkpoint")
T = TypeVar("T")


class DirectoryInUse(CheckpointError):  # noqa: N818 - reads as what it is
    """Another job writes checkpoints into this directory. ``leaving``: it has ended, and only its last snapshot is yet to come.
    ``run``: which run it is of, if it says so; our own, if a launcher of ours that is held for lost still lives."""

    def __init__(self, text: str, *, leaving: bool = False, run: str = "") -> None:
        super().__init__(text)
        self.leaving, self.run = leaving, run


def in_use(path: object, holder: str) -> DirectoryInUse:
    """Say who has a directory, as far as its lock tells."""
    try:
        known = json.loads(holder)
        run = str(known.get("run") or "")
        who = f"host {known['host']}, pid {known['pid']}" + (f", run {run}" if run else "")
        leaving = bool(known.get("leaving"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        who, leaving, run = "unknown", False, ""
    if leaving:
        text = f"{path}: an earlier job's last snapshot is still being written ({who})."
        return DirectoryInUse(text, leaving=True, run=run)
    return DirectoryInUse(
        f"{path}: another job writes its checkpoints here ({who}). Nothing was written. Give each job a directory of its own, or "
        "end the other one.",
        run=run,
    )


def patiently(claim: Callable[[], T], patience: float, moving: Callable[[str], float] = lambda run: 0.0) -> T:
    """Claim a directory; wait for an earlier job whose last snapshot is still being written. Raises :class:`DirectoryInUse`.

    ``moving``: how long to wait for a run that has it: it may be an earlier life of ours, whose node does not know yet that it is.
    """
    began, said = time.monotonic(), False
    while True:
        try:
            return claim()
        except DirectoryInUse as error:
            if time.monotonic() > began + (patience if error.leaving else moving(error.run)):
                raise
            if not said:
                _LOG.info("%s Waiting for it.", error)
            said = True
            time.sleep(0.1)
