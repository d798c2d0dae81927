"""Looks after the saver on a rank's behalf: asks it, has another one take its place, hears what went wrong in the background.

None of it happens in a save, but for two loads: whether something went wrong, and whether the saver has given a sign of life.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from resilience.checkpoint.ledger import L_ALIVE, L_FAILURES
from resilience.checkpoint.link import Link, Place
from resilience.checkpoint.receipt import Level, Receipt
from resilience.checkpoint.stager import Stager
from resilience.errors import LinkError, ResilienceError, SaveError

_LOG = logging.getLogger("resilience.checkpoint")
_SILENT_NS = 5_000_000_000
_LOOK_S = 0.005


class Attendant:
    """Between a rank and its saver. ``raises``: a failure in the background is raised by the next call, else it is said, but for
    the ``most``-th."""

    def __init__(self, link: Link, stager: Stager, place: Place, *, raises: bool, most: int) -> None:
        self._link = link
        self._stager = stager
        self._place = place
        self._raises = raises
        self._most = most
        self._words = stager.ledger.words
        self._heard = self._words[L_FAILURES]
        self._failures = 0
        self._looked_ns = time.monotonic_ns()

    @property
    def failures(self) -> int:
        """How often something went wrong so far."""
        return self._words[L_FAILURES]

    def ask(self, message: dict[str, Any], timeout: float = 30.0) -> dict[str, Any]:
        """Ask the saver; if it is gone, the one that takes its place."""
        try:
            return self._link.ask(message, timeout=timeout)[0]
        except LinkError:
            self._come_again()
            return self._link.ask(message, timeout=timeout)[0]

    def _come_again(self) -> None:
        """The saver is gone: have another one go on with what is in memory."""
        known = self._link.come(self._stager.ledger.number)
        if known is None:
            self._stager.deposit(self._link)
        else:  # the launcher held it; we have it mapped already
            known[0].close()
            for slot in known[1]:
                slot.close()

    def await_level(self, receipt: Receipt, level: Level, deadline: float, failures: int) -> None:
        """Wait until a save has come to a level, never will, something else has failed than the so many things before, or it is
        too late."""
        while not receipt.level.reaches(level) and not receipt.is_settled:
            self.hear()
            if time.monotonic() > deadline or self.failures != failures:
                return
            time.sleep(_LOOK_S)

    def await_durable(self, receipt: Receipt, deadline: float) -> None:
        """Wait until a save is on disk, or has failed. Raises :class:`SaveError` when it is too late."""
        while not receipt.level.reaches(Level.DURABLE) and receipt.level != Level.FAILED:
            self.hear()
            if time.monotonic() > deadline:
                raise SaveError(
                    f"step {receipt.step} is not durable yet ({receipt.level}); the saver goes on without us."
                )
            time.sleep(_LOOK_S)

    def look(self) -> None:
        """Have a thread find another saver when this one has given no sign of life for too long. Never waits."""
        now = time.monotonic_ns()
        if now - max(self._words[L_ALIVE], self._looked_ns) > _SILENT_NS:
            self._looked_ns = now
            threading.Thread(target=self._revive, name="resilience-revive", daemon=True).start()

    def _revive(self) -> None:
        rank = self._place.rank
        try:
            self._come_again()
            _LOG.warning("the saver was gone; another one goes on with what is in memory (rank %s).", rank)
        except (ResilienceError, OSError) as error:
            _LOG.warning("the saver does not answer, and no other could be started (rank %s): %s", rank, error)

    def hear(self) -> None:
        """If something went wrong in the background, ask what, and raise or say it."""
        if self._words[L_FAILURES] == self._heard:
            return
        self._heard = self._words[L_FAILURES]
        try:
            texts = self.ask({"op": "failures"}, timeout=5.0)["failures"]
        except LinkError as error:
            texts = [f"something went wrong, and the saver can't be asked what: {error}"]
        if not texts:
            return
        self._failures += len(texts)
        what = f"{'; '.join(texts)} (rank {self._place.rank}). The snapshot is still in memory; training can go on."
        if self._raises or self._failures >= self._most:
            raise SaveError(what)
        _LOG.warning("%s", what)
