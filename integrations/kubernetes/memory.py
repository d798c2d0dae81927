"""What the controller remembers of a job's groups: one ConfigMap per job, in the controller's own namespace.

Pods can't hold it, since those of a group that moves are all deleted; their owners are other people's things, of kinds that nobody
knows beforehand, and the right to change them all would be a large one. So it is kept at home, and removed when the job is over.

Rule: what is about to be done is written before it is done. A controller that starts anew goes on from there.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from resilience.integrations.kubernetes.api import Api, NotFound
from resilience.integrations.kubernetes.parts import Kind

from resilience.groups.escalation import State

_LOG = logging.getLogger("resilience.kubernetes")
MANAGED = "resilience.dev/state=groups"
_MAPS = Kind("", "v1", "configmaps", MANAGED)
_ANY_MAP = Kind("", "v1", "configmaps")
_LARGEST = 64 << 20  # of what one unpacks to


@dataclass
class Seat:
    """Where a seat is: its group, the rack and the node it was last seen on, and its pod's name."""

    group: str
    rack: str = ""
    node: str = ""
    pod: str = ""


@dataclass
class Record:
    """All that is remembered of one job. ``plain``: manifests of pods that nobody else would make again, by seat; ``doomed``: pods
    that are to go, uid by name; ``marked``: nodes that carry the job's label, and since when; ``telling``: what was decided, and
    of which objects an Event is to say so; ``origins``: uids of the owners that the job's pods were last seen to have."""

    namespace: str
    job: str
    seats: dict[str, Seat] = field(default_factory=dict)
    state: State = field(default_factory=State)
    plain: dict[str, Any] = field(default_factory=dict)
    doomed: dict[str, str] = field(default_factory=dict)
    making: list[str] = field(default_factory=list)  # seats whose plain pods are to be made again
    marked: dict[str, float] = field(default_factory=dict)
    telling: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """Return which job it is."""
        return (self.namespace, self.job)

    def as_text(self) -> str:
        """Return it as JSON."""
        data = {**self.__dict__, "seats": {name: seat.__dict__ for name, seat in self.seats.items()}}
        return json.dumps({**data, "state": self.state.as_text()}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Record:
        """Read what :meth:`as_text` wrote. Raises ``ValueError`` for anything else."""
        try:
            data = json.loads(text)
            data["seats"] = {name: Seat(**seat) for name, seat in data["seats"].items()}
            data["state"] = State.from_text(data["state"])
            found = cls(**data)
            for name, blank in cls("", "").__dict__.items():
                if type(getattr(found, name)) is not type(blank):
                    raise TypeError(f"{name} has another form")
            return found
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a record of a job's groups: {error!r}") from error


class Memory:
    """The ConfigMaps. What has not changed is not written. ``only``: the namespace whose jobs are looked after, empty for all; what
    controllers of other namespaces remember in the same place is theirs."""

    def __init__(self, api: Api, namespace: str, only: str = "") -> None:
        self._api = api
        self._namespace = namespace
        self._only = only
        self._versions: dict[str, str] = {}  # by name, of those that can't be read too: they are written over
        self._texts: dict[tuple[str, str], str] = {}

    def load(self) -> Iterator[Record]:
        """Yield what an earlier controller left."""
        for found in self._api.list_all(_MAPS, self._namespace)[0]:
            record = self._read(found)
            if record is not None and self._only in ("", record.namespace):
                yield record

    def again(self, key: tuple[str, str]) -> Record | None:
        """Return what another replica has written of a job meanwhile; nothing where it is gone or can't be read."""
        self._texts.pop(key, None)
        self._versions.pop(_name(key), None)
        for found in self._api.list_all(_ANY_MAP, self._namespace)[0]:
            if found["metadata"]["name"] == _name(key):
                return self._read(found)
        return None

    def _read(self, found: dict[str, Any]) -> Record | None:
        name = found["metadata"]["name"]
        self._versions[name] = found["metadata"]["resourceVersion"]
        try:
            packed = zlib.decompressobj().decompress(base64.b64decode(found["data"]["record"]), _LARGEST)
            record = Record.from_text(packed.decode())
            if _name(record.key) != name:
                raise ValueError(f"it is of another job, {'/'.join(record.key)}")
        except (KeyError, ValueError, zlib.error) as error:
            _LOG.error("ConfigMap %s can't be read (%s); it is left until its job is written anew.", name, error)
            return None
        self._texts[record.key] = record.as_text()
        return record

    def save(self, record: Record) -> None:
        """Write a record, if it has changed. Raises ``Conflict`` where another replica has written it."""
        text = record.as_text()
        if self._texts.get(record.key) == text:
            return
        thing = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": _name(record.key),
                "labels": dict([MANAGED.split("=")]),
                "annotations": {
                    "resilience.dev/job": f"{record.namespace}/{record.job}",
                    "resilience.dev/groups": _words(record),
                },
            },
            "data": {"record": base64.b64encode(zlib.compress(text.encode(), 9)).decode()},
        }
        written = self._write(thing)
        self._versions[_name(record.key)] = written["metadata"]["resourceVersion"]
        self._texts[record.key] = text

    def _write(self, thing: dict[str, Any]) -> dict[str, Any]:
        """A map that somebody has removed is made again."""
        version = self._versions.get(thing["metadata"]["name"])
        if version is not None:
            known = {**thing, "metadata": {**thing["metadata"], "resourceVersion": version}}
            with contextlib.suppress(NotFound):
                return self._api.replace(_MAPS, known, self._namespace)
        return self._api.create(_MAPS, thing, self._namespace)

    def forget(self, record: Record) -> None:
        """Remove a record."""
        self._texts.pop(record.key, None)
        if self._versions.pop(_name(record.key), None) is not None:
            with contextlib.suppress(NotFound):
                self._api.delete(_MAPS, _name(record.key), self._namespace)


def _words(record: Record) -> str:
    """Say for people where a job's groups stand."""
    waiting = [
        f"group {group}: {', '.join(sorted(it.absent))} without a node" for group, it in record.state.incidents.items()
    ]
    return "; ".join([f"{record.state.moves} group failovers", *waiting])[:2000]


def _name(key: tuple[str, str]) -> str:
    digest = hashlib.sha256("/".join(key).encode()).hexdigest()[:16]
    return f"resilience-groups-{digest}"
