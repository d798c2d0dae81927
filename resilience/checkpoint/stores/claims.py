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
    """Another job writes checkpoints into this directory. ``leaving``: it has ended, and only its last snapshot is yet to come."""

    def __init__(self, text: str, *, leaving: bool = False) -> None:
        super().__init__(text)
        self.leaving = leaving


def in_use(path: object, holder: str) -> DirectoryInUse:
    """Say who has a directory, as far as its lock tells."""
    try:
        known = json.loads(holder)
        who = f"host {known['host']}, pid {known['pid']}" + (f", run {known['run']}" if known.get("run") else "")
        leaving = bool(known.get("leaving"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        who, leaving = "unknown", False
    if leaving:
        return DirectoryInUse(f"{path}: an earlier job's last snapshot is still being written ({who}).", leaving=True)
    return DirectoryInUse(
        f"{path}: another job writes its checkpoints here ({who}). Nothing was written. Give each job a directory of its own, or "
        "end the other one."
    )


def patiently(claim: Callable[[], T], patience: float, moving: float = 0.0) -> T:
    """Claim a directory; wait for an earlier job whose last snapshot is still being written. Raises :class:`DirectoryInUse`.

    ``moving``: wait so long for anybody. In a job of several nodes rank 0 may have moved, and its old node may not know yet.
    """
    began, said = time.monotonic(), False
    while True:
        try:
            return claim()
        except DirectoryInUse as error:
            if time.monotonic() > began + (patience if error.leaving else moving):
                raise
            if not said:
                _LOG.info("%s Waiting for it.", error)
            said = True
            time.sleep(0.1)
