"""The actor on each of a job's Ray nodes: it runs the launcher that it is told to run, and says how that stands.

1) ``order``   (supervisor) this launch, or the wish to stop it; the same one again changes nothing
2) ``report``  (supervisor) answers when something has changed, at the latest after a while

Rule: it decides nothing, but when to end without being told (:mod:`fence`). Ray restarts it where it was; a new life has no
launcher until it is told.

Hazard: nothing here may import Ray at the top: the class is tried without.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.integrations.ray import cause, fence, grace, surroundings
from resilience.integrations.ray.process import Keeper, Order
from resilience.integrations.ray.silence import Silence

from resilience import config
from resilience.failover import exits

_LOOK_S = 1.0
MARGIN_S = 15.0  # beyond the launcher's own grace


@dataclass(frozen=True)
class _Told:
    """The newest order, as far as the cause of its launcher's end is to be found with it."""

    launch: int = 0
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    at: float = 0.0
    grace_s: float | None = None  # that its ranks have to leave


class NodeAgent:
    """One launcher's keeper."""

    def __init__(self, job: str = "") -> None:
        self._job = job
        self._life = uuid.uuid4().hex
        self._keeper = Keeper()
        self._told = _Told()
        self._ended = 0, ""
        # Only there when one has failed.
        self._error_file = Path(tempfile.gettempdir()) / f"resilience-{self._life}.json"
        self._heard = time.monotonic()
        self._silence: Silence | None = None  # of a supervisor that does not ask
        self._stop_asked: float | None = None
        self._raylet = fence.raylet_pid()
        self._closed = threading.Event()
        self._fence = threading.Thread(target=self._watch, name="resilience-fence", daemon=True)
        self._fence.start()

    def order(
        self, launch: int, flags: Sequence[str], variables: Mapping[str, str], cwd: str | None, stop: bool
    ) -> None:
        """Have this launch of the launcher run; with ``stop``, be asked to stop. Nobody hears what this raises, so it is told as
        the launch's end."""
        self._heard = time.monotonic()
        try:
            order = self._understood(launch, flags, variables, cwd, stop)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job must not wait for a launcher that never starts
            self._told = self._told if launch <= self._told.launch else _Told(launch, at=time.time())
            order = Order(launch, (), {}, cwd, stop, refused=f"{type(error).__name__}: {error}")
        self._keeper.give(order)

    def _understood(
        self, launch: int, flags: Sequence[str], variables: Mapping[str, str], cwd: str | None, stop: bool
    ) -> Order:
        variables = {
            **surroundings.given(flags, self._raylet),
            **variables,
            config.ENV_ERROR_FILE: str(self._error_file),
        }
        if launch > self._told.launch:
            self._told = _Told(
                launch, tuple(flags), variables, cwd, time.time(), grace.of_launcher(flags, variables, cwd)
            )
        return Order(launch, (sys.executable, "-m", "resilience.run", *flags), variables, cwd, stop)

    def report(self, version: int = -1, wait_s: float = 0.0) -> dict[str, Any]:
        """Say how it stands, once that is not ``version`` any more."""
        self._heard = time.monotonic()
        version, launch, code = self._keeper.look(version, wait_s)
        self._heard = time.monotonic()
        why = "" if code in (None, exits.FINISHED, exits.PREEMPTED) else self._why(launch)
        if code is not None:
            with suppress(OSError):
                self._error_file.unlink()  # a launcher that was asked to stop may have left one too
        known = {"life": self._life, "version": version, "launch": launch, "code": code}
        return {**known, "why": why, "grace_s": self._told.grace_s}

    def _why(self, launch: int) -> str:
        """Say why the launcher has ended: looked up once, for what it leaves here is not kept."""
        told = self._told
        if self._ended[0] != launch and told.launch == launch:
            try:
                why = self._keeper.why or self._cause(told)
            except Exception as error:  # noqa: BLE001 - whatever is found there: that the launcher has ended must be told
                why = f"why is not known: what it left can't be read ({type(error).__name__}: {error})"
            self._ended = launch, why
        return self._ended[1] if self._ended[0] == launch else ""

    def _cause(self, told: _Told) -> str:
        folder = cause.run_folder(told.flags, told.variables, told.cwd, self._keeper.pid)
        return cause.cause(folder, told.at, self._error_file, _name_in(told.flags))

    def _watch(self) -> None:
        """End a launcher whose node Ray has given up, or whose supervisor is gone for good; restart a supervisor that hangs."""
        while not self._closed.wait(self._pause()):
            try:
                if self._heed(self._verdict()):
                    return
            except Exception as error:  # noqa: BLE001 - what can't be asked now can be in a moment
                sys.stderr.write(f"resilience: this node can't ask how it stands: {type(error).__name__}: {error}\n")
                self._closed.wait(10 * _LOOK_S)

    def _pause(self) -> float:
        """Return when to look again. While the supervisor is silent each look asks the cluster's store for all nodes, and all nodes
        look: not so often, and not all at once."""
        suspects = time.monotonic() - self._heard > fence.SUSPECT_S
        return random.uniform(3 * _LOOK_S, 7 * _LOOK_S) if suspects else _LOOK_S

    def _verdict(self) -> fence.Verdict:
        silent_s = time.monotonic() - self._heard
        return fence.verdict(
            fence.raylet(self._raylet), silent_s, fence.given_up, lambda: fence.supervisor(self._job) is not None
        )

    def _heed(self, verdict: fence.Verdict) -> bool:
        """Do what a verdict says; return whether nothing is left to look after."""
        if verdict is fence.Verdict.UNASKED:
            self._silence = self._silence or Silence(time.monotonic())
            fence.wake(self._job, self._silence)
        else:
            self._silence = None
        if verdict is not fence.Verdict.ORPHANED:
            self._stop_asked = None
        if verdict is fence.Verdict.LOST or (verdict is fence.Verdict.ORPHANED and self._has_had_its_time()):
            self._keeper.end()
            fence.leave(verdict)
        return verdict is fence.Verdict.LOST

    def _has_had_its_time(self) -> bool:
        """Ask the launcher to stop, the first time; return whether it has ended, or has had the time that it promised its ranks."""
        if self._stop_asked is None:
            self._stop_asked = time.monotonic()
            self._keeper.stop()
        grace_s = config.FailoverConfig().stop_grace if self._told.grace_s is None else self._told.grace_s
        return not self._keeper.runs or time.monotonic() - self._stop_asked > grace_s + MARGIN_S

    def close(self) -> None:
        """End what runs, and look after it no more: for whoever has no worker of Ray's around it, which ends with all of it."""
        self._closed.set()
        self._keeper.end()
        self._fence.join()


def _name_in(flags: Sequence[str]) -> str:
    """Return what a launcher is told to call its node."""
    return next((word.partition("=")[2] for word in flags if word.startswith("--ft-node-name=")), "")
