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
_POLL_S = 0.005


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

    # -- waiting ----------------------------------------------------------------------------------------------------

    def await_level(self, receipt: Receipt, level: Level, timeout: float) -> None:
        """Wait until a save has come to ``level``, or never will, or something else went wrong, or for so many seconds."""
        deadline = time.monotonic() + timeout
        self.hear()  # what has failed already need not fail a second time
        failures = self.failures  # before it is asked for: it may fail at once
        if level == Level.DURABLE and not self._want_on_disk(receipt):
            return
        while not receipt.level.reaches(level) and receipt.level not in (Level.SKIPPED, Level.FAILED):
            self.hear()
            if time.monotonic() > deadline or self.failures != failures:
                return
            time.sleep(_POLL_S)

    def _want_on_disk(self, receipt: Receipt) -> bool:
        """Have a snapshot written now; False if it will not be: another one is newer, and this one's slot may be taken."""
        if receipt.level in (Level.DURABLE, Level.SKIPPED, Level.FAILED):
            return False
        return bool(self.ask({"op": "secure", "step": receipt.step})["coming"])

    def await_end(self, newest: Receipt, timeout: float) -> None:
        """Wait until the last save is durable, or never will be. Raises :class:`SaveError` after so many seconds."""
        deadline = time.monotonic() + timeout
        while not newest.level.reaches(Level.DURABLE) and newest.level != Level.FAILED:
            self.hear()
            if time.monotonic() > deadline:
                raise SaveError(
                    f"step {newest.step} is not durable yet ({newest.level}); the saver goes on without us."
                )
            time.sleep(_POLL_S)
