"""The controller's duty for groups: a job that asks for one gets it, first; then its Pods are labelled.

1) (controller) tells of jobs, groups and Pods, in any order
2) (here) for a job: reads what it asks for, has the group in the cluster, and labels the Pods that are known to belong to it
3) (here) for a Pod: finds its job, and labels it once the group is there
4) (here) for a group that was changed or deleted: looks after its job again

Rule: only groups that were made here are changed; they are the job's (``ownerReferences``), and go with it.

Hazard: whoever creates the Pods is not waited for. A Pod may be seen by its scheduler before it is labelled: its ``schedulerName``
makes the right scheduler look at it, and a gang scheduler takes up Pods again whose labels change. A Pod template that carries the
labels from the start, as ``resilience kubernetes job render`` makes it, leaves no such gap.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from resilience.integrations.kubernetes.api import Api, Conflict, NotFound
from resilience.integrations.kubernetes.parts import DELETED, PODS, Kind, Thing
from resilience.integrations.kubernetes.podgroups.apply import CREATED, UPDATED, Later, Refused, ensure
from resilience.integrations.kubernetes.podgroups.group import PodGroupError
from resilience.integrations.kubernetes.podgroups.jobs import KINDS, Wish, finished, wish
from resilience.integrations.kubernetes.podgroups.members import Complaint, Verdict, compare, job_of, look, slim
from resilience.integrations.kubernetes.podgroups.schedulers import SCHEDULERS
from resilience.integrations.kubernetes.podgroups.telling import Teller

_LOG = logging.getLogger("resilience.kubernetes")
_NAMES = {known.kind: name for name, known in KINDS.items()}
_GROUPS = tuple(known.kind for known in SCHEDULERS.values())


class PodGroups:
    """The part. One thread calls it; everything it knows it was told, and is told again after a restart."""

    name = "podgroups"

    def __init__(self, api: Api, teller: Teller | None = None) -> None:
        self._api = api
        self._tell = teller or Teller(api)
        self._jobs: dict[str, Thing] = {}  # by uid
        self._uids: dict[tuple[str, str, str], str] = {}  # (kind, namespace, name) of a job: its uid
        self._pods: dict[str, Thing] = {}  # by uid, what is kept of them
        self._members: dict[
            str, set[str]
        ] = {}  # uids of Pods, by the uid of what controls them or by what their labels name
        self._ready: dict[str, Wish] = {}  # by a job's uid: the group that is there
        self._groups: dict[tuple[Kind, str, str], Thing] = {}  # as they were told
        self._refused: dict[tuple[Kind, str, str], set[str]] = {}  # uids of jobs for which a group is somebody else's

    @classmethod
    def build(cls, api: Api, options: object) -> PodGroups:
        """Make it for the controller."""
        return cls(api)

    def kinds(self) -> Sequence[Kind]:
        """Return what this part wants to be told of."""
        return (*_NAMES, *_GROUPS, PODS)

    def tick(self, now: float) -> None:
        """Time passes; nothing here depends on it."""

    def changed(self, kind: Kind, verb: str, thing: Thing) -> None:
        """Something is there, has changed, or is gone."""
        if kind == PODS:
            self._pod(verb, thing)
        elif kind in _NAMES:
            self._job(_NAMES[kind], verb, thing)
        else:
            self._group(kind, verb, thing)

    # -- what is told -----------------------------------------------------------------------------------------------

    def _job(self, name: str, verb: str, job: Thing) -> None:
        metadata = job["metadata"]
        uid, key = str(metadata["uid"]), (name, metadata.get("namespace", ""), metadata["name"])
        if verb == DELETED:
            self._jobs.pop(uid, None)
            self._ready.pop(uid, None)
            if self._uids.get(key) == uid:
                del self._uids[key]
            self._tell.forget(uid)
            return
        # In a list the API server leaves out what all of its items are.
        known = KINDS[name]
        self._jobs[uid] = {**job, "kind": known.name, "apiVersion": known.api_version}
        self._uids[key] = uid
        self._settle(uid)

    def _pod(self, verb: str, pod: Thing) -> None:
        uid = str(pod["metadata"]["uid"])
        keys = self._keys(pod)
        self._forget(uid)
        if verb == DELETED or not keys:
            self._tell.forget(uid)
            return
        self._pods[uid] = slim(pod)
        for key in keys:
            self._members.setdefault(key, set()).add(uid)
        job = next((found for key in keys if (found := self._uids_of(key)) in self._jobs), "")
        if job in self._ready:
            self._label(uid, job)

    def _forget(self, uid: str) -> None:
        """Take a Pod from the jobs that it was last known to be of: what it says now may name none of them."""
        known = self._pods.pop(uid, None)
        for key in self._keys(known) if known is not None else ():
            members = self._members.get(key, set())
            members.discard(uid)
            if not members:
                self._members.pop(key, None)

    def _group(self, kind: Kind, verb: str, group: Thing) -> None:
        key = (kind, group["metadata"].get("namespace", ""), group["metadata"]["name"])
        owners = group["metadata"].get("ownerReferences") or ()
        concerned = {str(one.get("uid", "")) for one in owners if one.get("controller")}
        if verb == DELETED:
            self._groups.pop(key, None)
            concerned |= self._refused.pop(key, set())
        else:
            self._groups[key] = group
        for uid in sorted(concerned & self._jobs.keys()):
            self._settle(uid)

    @staticmethod
    def _keys(pod: Thing) -> list[str]:
        uid, named = job_of(pod)
        return [key for key in (uid, "/".join(named) if named[0] else "") if key]

    def _uids_of(self, key: str) -> str:
        """Return the uid of a job, given one, or a ``kind/namespace/name`` that labels tell."""
        kind, _, rest = key.partition("/")
        namespace, _, name = rest.partition("/")
        return self._uids.get((kind, namespace, name), key)

    # -- what is done -----------------------------------------------------------------------------------------------

    def _settle(self, uid: str) -> None:
        """Have a job's group in the cluster, then label its Pods."""
        job = self._jobs[uid]
        metadata = job["metadata"]
        self._ready.pop(uid, None)
        if finished(job) or metadata.get("deletionTimestamp"):
            return
        try:
            wanted = wish(job)
        except PodGroupError as error:
            self._tell.warn(job, Complaint("InvalidPodGroup", f"{error} No PodGroup was made."))
            return
        if wanted is None:
            return
        for note in wanted.notes:
            self._tell.warn(job, Complaint("PodGroupNote", note))
        if not self._have(job, wanted):
            return
        self._ready[uid] = wanted
        named = f"{job['kind']}/{metadata.get('namespace', '')}/{metadata['name']}"
        members = self._members.get(uid, set()) | self._members.get(named, set())
        for pod in sorted(members & self._pods.keys()):
            self._label(pod, uid)

    def _have(self, job: Thing, wanted: Wish) -> bool:
        """Have a group in the cluster; return whether it is there. A job's status changes often: what was told is asked first."""
        group, by = wanted.group, wanted.scheduler
        key = (by.kind, group.namespace, group.name)
        told = self._groups.get(key)
        if told is not None and compare(told, by.resource(group)) == Verdict():
            return True
        try:
            done, self._groups[key] = ensure(self._api, group, by)
        except Refused as refusal:
            self._refused.setdefault(key, set()).add(str(job["metadata"]["uid"]))
            self._tell.warn(job, refusal.warning)
            return False
        except Later as error:
            self._tell.warn(job, Complaint("NoPodGroupYet", str(error)))
            raise
        if done in (CREATED, UPDATED):
            text = f"PodGroup {group.name!r} was {done}: minMember {group.min_member}, queue {group.queue!r}."
            _LOG.info("%s/%s: %s", group.namespace, group.name, text)
            self._tell.note(job, f"PodGroup{done.title()}", text)
        return True

    def _label(self, uid: str, job: str) -> None:
        """Do what is to be done about one Pod."""
        pod = self._pods[uid]
        metadata = pod["metadata"]
        finding = look(pod, self._ready[job])
        if finding.patch is not None:
            try:
                self._pods[uid] = slim(self._patched(metadata, finding.patch))
            except (Conflict, NotFound):
                return  # it is gone, or another one has its name: we are told of either
        if finding.warning is not None:
            told = pod if finding.warning.reason in ("GroupIsFixed", "OtherGroup") else self._jobs[job]
            self._tell.warn(told, finding.warning)

    def _patched(self, metadata: Any, patch: Any) -> dict[str, Any]:
        return self._api.patch(PODS, metadata["name"], patch, metadata.get("namespace", ""))
