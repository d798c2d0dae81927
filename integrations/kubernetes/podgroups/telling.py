"""What was done and what can't be done, as Events of the job or Pod that it is about, and in the log: each once."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from resilience.integrations.kubernetes.events import NORMAL, WARNING, record
from resilience.integrations.kubernetes.parts import Thing
from resilience.integrations.kubernetes.podgroups.members import Complaint

if TYPE_CHECKING:
    from resilience.integrations.kubernetes.api import Api

_LOG = logging.getLogger("resilience.kubernetes")


class Teller:
    """Tells each thing once: here it is remembered by what it is about, in the cluster by the Event's name."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._said: dict[str, set[str]] = {}

    def warn(self, thing: Thing, warning: Complaint) -> None:
        """Say that something can't be."""
        metadata = thing["metadata"]
        if self._new(thing, warning.reason + warning.text):
            _LOG.warning("%s %s/%s: %s", thing["kind"], metadata.get("namespace", ""), metadata["name"], warning.text)
            record(self._api, thing, warning.reason, warning.text, time.time(), kind=WARNING)

    def note(self, thing: Thing, reason: str, text: str) -> None:
        """Say that something was done."""
        if self._new(thing, reason + text):
            record(self._api, thing, reason, text, time.time(), kind=NORMAL)

    def forget(self, uid: str) -> None:
        """Forget what was said of a thing that is gone."""
        self._said.pop(uid, None)

    def _new(self, thing: Thing, what: str) -> bool:
        said = self._said.setdefault(str(thing["metadata"]["uid"]), set())
        if what in said:
            return False
        said.add(what)
        return True
