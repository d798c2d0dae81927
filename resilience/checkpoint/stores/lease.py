"""One job at a time in an object store, which has no locks: an object that says who has the place, renewed every few seconds.

1) take(run)     creates ``.lock``, on condition that it is not there; or, if its holder shows no more signs of life, replaces it
2) (a thread)    renews it; whoever finds another's name in it has lost the place, and is told so by check()
3) give_back()   removes it

No clock is compared with another's: a holder counts as dead when it has not renewed for as long as we look, or when it is a
process of this very host that is gone. Hazard: a holder that was cut off for longer than that may still write; what it commits has
a name of its own, since manifests are created on condition too, so that nothing is ever overwritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from resilience.checkpoint.stores.claims import DirectoryInUse, in_use
from resilience.checkpoint.stores.client import Client, in_words

_LOG = logging.getLogger("resilience.checkpoint")
NAME = ".lock"
RENEW_S = 4.0
DEAD_S = 12.0  # without renewal; below what a rank waits for its saver's answer
_LOOK_S = 0.25


@dataclass(frozen=True)
class Holder:
    """Who has the place."""

    token: str = ""
    host: str = ""
    pid: int = 0
    realm: str = ""  # the boot and the namespace that the pid belongs to
    run: str = ""
    leaving: bool = False
    beat: int = 0

    @classmethod
    def here(cls, run: str) -> Holder:
        """Return ourselves."""
        return cls(secrets.token_hex(8), socket.gethostname(), os.getpid(), _realm(), run)

    @classmethod
    def of(cls, data: bytes) -> Holder:
        """Read one; what can't be read is somebody unknown."""
        try:
            found = json.loads(data)
            return cls(**{field.name: found[field.name] for field in dataclasses.fields(cls)})
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls()

    def as_bytes(self) -> bytes:
        """Return it as it is kept."""
        return json.dumps(asdict(self)).encode()

    def is_gone(self) -> bool:
        """Whether it is a process of this host that is no more."""
        if not self.realm or self.realm != _realm() or type(self.pid) is not int or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False


def _realm() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


class Lease:
    """Our hold on a place."""

    def __init__(self, client: Client, run: str) -> None:
        self._client = client.hasty()
        self._me = Holder.here(run)
        self._edition = ""  # of what we wrote last, where the store has such a thing
        self._lost: Holder | None = None
        self._turn = threading.Lock()  # between the thread and whoever says something
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    # -- having it --------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Take the place. Raises :class:`DirectoryInUse`."""
        while True:
            try:
                self._client.create(NAME, self._me.as_bytes())
                break
            except FileExistsError:
                if self._take_over():
                    break
        self._look_whether_conditions_hold()
        self._thread = threading.Thread(target=self._renew_for_ever, name="resilience-lease", daemon=True)
        self._thread.start()

    def _take_over(self) -> bool:
        """Take the place of a holder that is dead; False if somebody else was quicker. Raises :class:`DirectoryInUse`."""
        try:
            edition = self._client.edition(NAME)
            seen = self._client.read(NAME)
            if not Holder.of(seen).is_gone():
                self._wait_for_a_sign(seen)
            self._edition = self._client.replace(NAME, self._me.as_bytes(), edition)
        except (FileNotFoundError, FileExistsError):
            return False
        return Holder.of(self._client.read(NAME)).token == self._me.token

    def _wait_for_a_sign(self, seen: bytes) -> None:
        """Return if the holder gives none. Raises :class:`DirectoryInUse` if it does."""
        until = time.monotonic() + DEAD_S
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            now = self._client.read(NAME)
            if now != seen:
                raise self._in_use(Holder.of(now))
        _LOG.warning(
            "%s: its last job ended without a word (%s). Taking over.", self._client.url, _who(Holder.of(seen))
        )

    def _look_whether_conditions_hold(self) -> None:
        """A store that overwrites what was to be created can't keep two jobs apart. It must be known before the first commit."""
        try:
            self._client.create(NAME, Holder.here("").as_bytes())
        except FileExistsError:
            return
        self._edition = self._client.put(NAME, self._me.as_bytes())
        _LOG.warning(
            "%s: this store takes no notice of conditions (If-None-Match): two jobs that begin here at the same time are not kept "
            "apart. See to it that there is one.",
            self._client.url,
        )

    def _in_use(self, holder: Holder) -> DirectoryInUse:
        return in_use(self._client.url, json.dumps(asdict(holder)) if holder.token else "")

    def check(self) -> None:
        """Raise :class:`DirectoryInUse` if another job has taken the place. Asks nobody."""
        if self._lost is not None:
            raise self._in_use(self._lost)

    def confirm(self) -> None:
        """Make sure that it is ours now; the object is made anew if somebody has removed it. Raises :class:`DirectoryInUse`."""
        with self._turn:
            self._renew()
        self.check()

    def say_leaving(self, leaving: bool) -> None:
        """Let others know whether we are about to end."""
        self._me = dataclasses.replace(self._me, leaving=leaving)
        with contextlib.suppress(Exception), self._turn:  # whoever waits for us sees it with the next renewal
            self._renew()

    def give_back(self) -> None:
        """Let others have it."""
        self._over.set()
        with self._turn, contextlib.suppress(Exception):  # it is renewed no more: others come in a moment all the same
            if self._lost is None and Holder.of(self._client.read(NAME)).token == self._me.token:
                self._client.remove(NAME)

    # -- renewing ---------------------------------------------------------------------------------------------------

    def _renew_for_ever(self) -> None:
        while not self._over.wait(RENEW_S) and self._lost is None:
            try:
                with self._turn:
                    if not self._over.is_set():
                        self._renew()
            except Exception as error:  # noqa: BLE001 - a thread's boundary, and a server that will be back
                _LOG.debug("%s: the claim could not be renewed: %s", self._client.url, in_words(error))

    def _renew(self) -> None:
        """Write our name anew, unless another one is there."""
        self._me = dataclasses.replace(self._me, beat=self._me.beat + 1)
        edition, self._edition = self._edition, ""
        try:
            if edition or self._is_ours():
                self._edition = self._client.replace(NAME, self._me.as_bytes(), edition)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # then the next look says who
                self._client.create(NAME, self._me.as_bytes())
        except FileExistsError:
            self._is_ours()  # or an answer was lost, and it is what we wrote ourselves

    def _is_ours(self) -> bool:
        """Look whose name is there."""
        found = Holder.of(self._client.read(NAME))
        if found.token != self._me.token and self._lost is None:
            self._lost = found
            _LOG.error(
                "%s: another job has this place now (%s). Nothing more is written.", self._client.url, _who(found)
            )
        return self._lost is None


def _who(holder: Holder) -> str:
    return f"host {holder.host}, pid {holder.pid}" if holder.token else "unknown"
