"""What a group of Pods is that start together or not at all, whatever scheduler places them.

Rule: a description that exists is valid. Whatever can't be meant raises when it is built, and says which field and why.

Hazard: the name of a group, its queue and its roles end up as label values of Pods, and those hold 63 characters, not the 253 of
an object's name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from resilience.errors import ConfigError

DEFAULT_QUEUE = "default"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_LONGEST = 63
_PRIORITIES = range(101)


class PodGroupError(ConfigError):
    """A group of Pods that can't be meant."""


class GroupIsFixed(PodGroupError):  # noqa: N818 - reads as what it is
    """Somebody tried to move a Pod to another group."""

    def __init__(self, pod: str, now: str, wanted: str) -> None:
        self.pod, self.now, self.wanted = pod, now, wanted
        super().__init__(
            f"Pod {pod} belongs to PodGroup {now!r}, and a Pod's group can't be changed: it was left there. To have it in "
            f"{wanted!r}, delete the Pod and create it again with that group's labels."
        )


@dataclass(frozen=True)
class Role:
    """Pods that do the same: so many of them must be there too."""

    name: str
    min_member: int

    def __post_init__(self) -> None:
        _check_value("a role's name", self.name)
        _check_count(f"min_member of role {self.name!r}", self.min_member)


@dataclass(frozen=True)
class Owner:
    """The job that a group belongs to: when it is deleted, the cluster's garbage collector deletes the group."""

    api_version: str
    kind: str
    name: str
    uid: str

    def __post_init__(self) -> None:
        for what in ("api_version", "kind", "name", "uid"):
            if not getattr(self, what):
                raise PodGroupError(f"the owner of a PodGroup needs {what}: it is empty.")

    def reference(self) -> dict[str, object]:
        """Return it as an entry of ``metadata.ownerReferences``."""
        return {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


@dataclass(frozen=True)
class PodGroup:
    """Pods that start together: ``min_member`` of them, and of each role as many as it asks for.

    ``priority`` is from 0 to 100, larger first; None leaves it to the scheduler. ``namespace`` may be empty: the current one.
    """

    name: str
    min_member: int
    queue: str = DEFAULT_QUEUE
    priority: int | None = None
    roles: tuple[Role, ...] = ()
    namespace: str = ""
    owner: Owner | None = None

    def __post_init__(self) -> None:
        _check_count("min_member", self.min_member)
        for what in ("name", "queue", "namespace"):
            if not isinstance(getattr(self, what), str):
                raise PodGroupError(f"the {what} of a PodGroup is {getattr(self, what)!r:.80}, not a text.")
        if not _SUBDOMAIN.fullmatch(self.name):
            raise PodGroupError(
                f"{self.name!r} can't be the name of a PodGroup: small letters, digits, '-' and '.', first and last a letter or "
                "a digit."
            )
        _check_value("the name of a PodGroup", self.name)
        _check_value("the queue", self.queue)
        if self.namespace and not (_LABEL.fullmatch(self.namespace) and len(self.namespace) <= _LONGEST):
            raise PodGroupError(f"{self.namespace!r} can't be a namespace.")
        if self.priority is not None and (type(self.priority) is not int or self.priority not in _PRIORITIES):
            raise PodGroupError(f"priority {self.priority!r}: it must be a number from 0 to 100.")
        names = [role.name for role in self.roles]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PodGroupError(f"the role {twice[0]!r} is there twice. Give each role once, with its min_member.")

    def role(self, name: str) -> Role:
        """Return a role by its name."""
        for role in self.roles:
            if role.name == name:
                return role
        known = ", ".join(role.name for role in self.roles) or "none"
        raise PodGroupError(f"PodGroup {self.name} has no role {name!r}. Its roles: {known}.")


def whole(text: str) -> int | None:
    """Return the number that a text is, or None. Digits that only look like some (``²``) and numbers without end are none."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def _check_count(what: str, number: object) -> None:
    if type(number) is not int or number < 1:
        raise PodGroupError(f"{what} is {number!r}: it must be a whole number of at least 1.")


def _check_value(what: str, text: str) -> None:
    if len(text) > _LONGEST:
        raise PodGroupError(
            f"{what}, {text!r}, has {len(text)} characters. Pods carry it as a label, which holds {_LONGEST}."
        )
    if not _VALUE.fullmatch(text):
        raise PodGroupError(f"{text!r} can't be {what}: letters, digits, '-', '_' and '.', and not empty.")
