"""Watch one kind of thing for as long as it takes: through disconnects, restarts of the server, and what it has forgotten.

1) (watcher's thread) lists, tells everything that is there as ADDED, and of what it knew and is gone as DELETED
2) (watcher's thread) watches from there on; a watch that ends or breaks goes on from the last resource version it has seen
3) (watcher's thread) lists again where the server says that this is too long ago (410)

Rule: what changed while nobody was connected is told in the end, deletions too.

Hazard: a thing may be told twice, and only its newest state: what lay between may never be told.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from resilience.integrations.kubernetes.api import Api, Forbidden, Gone, KubernetesError, NotFound, Watch
from resilience.integrations.kubernetes.parts import ADDED, DELETED, Kind, Thing

_LOG = logging.getLogger("resilience.kubernetes")
_PAUSES_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
_ABSENT_S = 60.0  # until a custom resource that is not installed is looked for again
_BOOKMARK = "BOOKMARK"
_SHORT_S = 0.5


@dataclass(frozen=True)
class Change:
    """What a watcher tells. ``LISTED`` has no thing: everything that was there has been told."""

    kind: Kind
    verb: str
    thing: Thing


LISTED = "LISTED"


class Watcher:
    """One thread that follows one kind, and puts what it sees into a queue."""

    def __init__(self, api: Api, kind: Kind, namespace: str, out: queue.SimpleQueue[Change]) -> None:
        self._api = api
        self._kind = kind
        self._namespace = namespace
        self._out = out
        self._known: dict[str, Thing] = {}  # by uid
        self._version = ""
        self._stop = threading.Event()
        self._watch: Watch | None = None
        self._failures = 0
        self._said = ""
        self._thread = threading.Thread(target=self._run, name=f"watch-{kind.plural}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def lives(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End; what is under way is given up."""
        self._stop.set()
        watch = self._watch
        if watch is not None:
            watch.end()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._version:
                    self._list()
                self._follow()
            except Gone:
                _LOG.info("the API server has forgotten what changed meanwhile; listing %s again.", self._kind.plural)
                self._version = ""
            except NotFound as error:
                self._missing(error)
            except KubernetesError as error:
                self._pause(error)
            except Exception as error:  # noqa: BLE001 - see below
                # A thread's boundary: without this this kind would be watched no more, and nobody would know.
                self._version = ""
                self._pause(error)

    def _list(self) -> None:
        items, version = self._api.list_all(self._kind, self._namespace)
        found = {item["metadata"]["uid"]: item for item in items}
        for uid in [uid for uid in self._known if uid not in found]:
            self._tell(DELETED, self._known[uid])
        for item in found.values():
            self._tell(ADDED, item)
        self._version = version
        self._fine()
        self._out.put(Change(self._kind, LISTED, {}))

    def _follow(self) -> None:
        with self._api.watch(self._kind, self._version, self._namespace) as watch:
            self._watch = watch
            self._fine()
            opened = time.monotonic()
            try:
                for verb, thing in self._until_stopped(watch):
                    if verb != _BOOKMARK:
                        self._tell(verb, thing)
                    self._version = str(thing["metadata"]["resourceVersion"])
            finally:
                self._watch = None
        if time.monotonic() - opened < _SHORT_S:  # somebody in between ends them early: do not hurry
            self._stop.wait(_SHORT_S)

    def _until_stopped(self, watch: Watch) -> Iterator[tuple[str, dict[str, Any]]]:
        for event in watch:
            if self._stop.is_set():
                return
            yield event

    def _tell(self, verb: str, thing: Thing) -> None:
        uid = str(thing["metadata"]["uid"])
        if verb == DELETED:
            self._known.pop(uid, None)
        else:
            self._known[uid] = thing
        self._out.put(Change(self._kind, verb, thing))

    # -- when it does not work --------------------------------------------------------------------------------------

    def _fine(self) -> None:
        if self._failures > 1:
            _LOG.info("the API server answers again; %s are watched.", self._kind.plural)
        self._failures, self._said = 0, ""

    def _missing(self, error: NotFound) -> None:
        """The kind is not installed: a part may say that this can be."""
        self._version = ""
        if not self._kind.optional:
            return self._pause(error)
        if not self._said:
            self._said = str(error)
            name = f"{self._kind.plural}.{self._kind.group}"
            _LOG.info("%s is not installed here; it is looked for again every %g s.", name, _ABSENT_S)
            self._out.put(Change(self._kind, LISTED, {}))
        self._stop.wait(_ABSENT_S)
        return None

    def _pause(self, error: Exception) -> None:
        if self._stop.is_set():
            return
        pause = _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
        self._failures += 1
        if not isinstance(error, KubernetesError):
            _LOG.error("%s can't be watched, it is tried again.", self._kind.plural, exc_info=error)
        elif str(error) != self._said and self._failures > 1:  # a watch breaks now and then, and once is nothing
            self._said = str(error)
            loud = logging.ERROR if isinstance(error, Forbidden) else logging.WARNING
            _LOG.log(loud, "%s can't be watched, it is tried again: %s", self._kind.plural, error)
        self._stop.wait(pause)
