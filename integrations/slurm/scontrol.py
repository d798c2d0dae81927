"""Slurm's own commands, and what went wrong with them in words.

Rule: they run in a session of their own. Slurm signals whole process groups; a requeue would end the command that asks for it.
"""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

from resilience.errors import ResilienceError

_T = TypeVar("_T")
TIMEOUT_S = 60.0
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_AWAY = (
    "unable to contact",
    "connection refused",
    "timed out",
    "zero bytes",
    "communication",
    "not responding",
    "backup",
    "connection reset",
    "no route to host",
    "network is unreachable",
    "resource temporarily unavailable",
    "protocol authentication error",  # munge is away, on either side, or a clock is wrong
    "unexpected message received",  # what requeue and update say of a job where nobody listens (22.05)
)
_PLACES = "/usr/bin:/usr/local/bin:/opt/slurm/bin:/usr/local/slurm/bin"  # Slurm runs an Epilog without a search path
_NOT_NOW = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # this machine may have room for a process later
DENIED = ("invalid user id", "permission denied", "not permitted", "access denied")


class SlurmError(ResilienceError):
    """Slurm refused something; its own words are in the message."""


class SlurmAway(SlurmError):  # noqa: N818 - reads as what it is
    """slurmctld does not answer: it may do so later."""


class SlurmDenied(SlurmError):  # noqa: N818 - reads as what it is
    """This user may not do that."""


def scontrol(*words: str, timeout: float = TIMEOUT_S) -> str:
    """Run ``scontrol`` and return what it prints; raise a :class:`SlurmError`."""
    program = shutil.which("scontrol") or shutil.which("scontrol", path=_PLACES)
    if program is None:
        raise SlurmError("there is no scontrol here: is Slurm's client installed, and on PATH?")
    try:
        done = subprocess.run(
            [program, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmAway(f"scontrol {words[0]} has not answered for {timeout:g} s") from error
    except OSError as error:
        kind = SlurmAway if error.errno in _NOT_NOW else SlurmError
        raise kind(f"{program} can't be started: {error.strerror or error}") from error
    if done.returncode == 0:
        return done.stdout
    said = " ".join((done.stderr or done.stdout).split()) or f"it ended with {done.returncode}"
    kinds = [(SlurmDenied, DENIED), (SlurmAway, _AWAY)]
    kind = next((kind for kind, marks in kinds if any(mark in said.lower() for mark in marks)), SlurmError)
    raise kind(f"scontrol {' '.join(words)}: {said}")


def insist(act: Callable[[], _T], limit: float, tell: Callable[[str], object]) -> _T:
    """Do something that slurmctld must answer to, again and again while it is away, not longer than ``limit`` seconds."""
    end = time.monotonic() + limit
    tries = 0
    while True:
        try:
            return act()
        except SlurmAway as error:
            pause = _PAUSES_S[min(tries, len(_PAUSES_S) - 1)]
            if time.monotonic() + pause > end:
                raise
            tell(f"{error}. It is tried again.")
            tries += 1
            time.sleep(pause)


def field(text: str, name: str) -> str:
    """Return the value of ``Name=value`` in what ``scontrol show`` prints; empty where there is none. It may have spaces in it."""
    found = re.search(rf"(?:^|\s){re.escape(name)}=([^\n]*?)(?=\s+[A-Z][\w/:]*=|[^\S\n]*$)", text, re.MULTILINE)
    return found[1] if found and found[1] != "(null)" else ""
