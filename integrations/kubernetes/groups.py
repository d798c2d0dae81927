"""Part ``groups``: a group of nodes whose lost member gets no new node in time is failed over as a whole.

1) pods of a job tell who is in which group, by the scheduler's labels; that is remembered
2) a member that failed or is gone is missed until a pod of its seat has a node; ``escalation`` says when that takes too long
3) the nodes that the group was on, and those of their rack, are labelled for the job's pods to stay away from (see ``placement``)
4) all pods of the group are evicted together; their owner makes them again, and plain pods are made again here
5) when every seat has a node, or after an hour, the labels are taken away

Rule: what will be done is written down first; each step can be done twice. Pods are evicted, not deleted: that heeds disruption
budgets, and a Job that ignores disruptions does not count it as a failure.

Hazard: a plain pod on a node that is gone can't end, and its name stays taken. It is removed by force, but only where its node is
not ready or not there: the launchers' rendezvous has let go of it by then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from resilience.integrations.kubernetes import events, placement, pods
from resilience.integrations.kubernetes.api import Api, Conflict, KubernetesError, NotFound, Unreachable
from resilience.integrations.kubernetes.members import Member, member
from resilience.integrations.kubernetes.memory import Memory, Record
from resilience.integrations.kubernetes.observing import idle, is_anothers, is_over, observe, stranded, waiting
from resilience.integrations.kubernetes.parts import DELETED, NODES, Kind, Thing
from resilience.integrations.kubernetes.pauses import Pauses

from resilience.groups import escalation
from resilience.groups.escalation import Decision, Rules

if TYPE_CHECKING:
    from resilience.integrations.kubernetes.controller import Options

_LOG = logging.getLogger("resilience.kubernetes")
AVOID_S = 3600.0  # the old rack is avoided for as long at most: it may be the only one that is ever free again
_STUCK_S = 60.0
_LOOK_AGAIN_S = 15.0  # at a node that carries a job's label: it may have been registered again
Key = tuple[str, str]


class Groups:
    """See above."""

    name = "groups"

    def __init__(self, api: Api, options: Options) -> None:
        self._api = api
        self._options = options
        self._rules = Rules(options.group_threshold, options.max_group_failovers)
        self._kind = Kind("", "v1", "pods", options.pod_selector)
        self._memory = Memory(api, options.state_namespace, options.namespace)
        self._loaded = False
        self._records: dict[Key, Record] = {}
        self._pods: dict[Key, dict[str, Thing]] = {}
        self._jobs: dict[str, Key] = {}  # by a pod's uid
        self._dirty: set[Key] = set()
        self._pauses: Pauses[Key] = Pauses()
        self._labelled: dict[tuple[Key, str], float] = {}  # when that was last seen to be so

    @classmethod
    def build(cls, api: Api, options: Options) -> Groups:
        """Make it as the command line asks for."""
        return cls(api, options)

    def kinds(self) -> Sequence[Kind]:
        """See :class:`Part`."""
        return [self._kind]

    def changed(self, kind: Kind, verb: str, thing: Thing) -> None:
        """See :class:`Part`."""
        meta = thing["metadata"]
        uid, job = str(meta["uid"]), (meta.get("labels") or {}).get(self._options.job_label)
        before = self._jobs.pop(uid, None)
        if before is not None:  # its job may be another one now
            self._pods.get(before, {}).pop(uid, None)
            self._dirty.add(before)
        if job and verb != DELETED:
            key = self._jobs[uid] = (str(meta["namespace"]), str(job))
            self._pods.setdefault(key, {})[uid] = thing
            self._dirty.add(key)

    def tick(self, now: float) -> None:
        """See :class:`Part`. A job that can't be dealt with holds up no other."""
        if not self._loaded:
            self._records = {record.key: record for record in self._memory.load()}
            self._dirty |= {*self._records, *self._pods}
            self._loaded = True
        busy = {key for key, it in self._records.items() if it.state.incidents or it.doomed or it.making or it.marked}
        for key in sorted(self._dirty | busy):
            if not self._options.leading():
                return
            if not self._pauses.over(key, now):
                continue
            error = self._attempt(key, now)
            if error is None:
                self._dirty.discard(key)
                self._pauses.worked(key)
                continue
            self._pauses.failed(key, error, now, f"groups could not deal with job {'/'.join(key)}")
            if isinstance(error, Unreachable) and not error.status:
                return  # each may take as long as its deadline: the others have their turn next time, while this one pauses

    def _attempt(self, key: Key, now: float) -> Exception | None:
        try:
            try:
                self._turn(key, now)
            except Conflict:  # somebody else may have written what we remember: read it again
                written = self._memory.again(key)
                if written is not None:
                    self._records[key] = written
                raise
        except Exception as error:  # noqa: BLE001 - what is wrong with one job is no other's business
            return error
        return None

    def _acting(self) -> Api:
        """Return the API server for something to be changed there, if this replica still may: a round can outlast the lease."""
        if not self._options.leading():
            raise KubernetesError("this replica has lost its lease. It does nothing more; the one that leads goes on.")
        return self._api

    # -- one job ----------------------------------------------------------------------------------------------------

    def _turn(self, key: Key, now: float) -> None:
        known = self._pods.get(key, {})
        members = [member(pod) for pod in known.values()]
        before = self._records.get(key)
        if before is not None and is_anothers(before, members):
            _LOG.info("job %s was made anew: what was remembered of the one before is forgotten.", "/".join(key))
            self._end(before, gone=False)
            before = None
        if before is None and not any(it.place.known for it in members):
            return  # no groups here
        record = observe(before or Record(*key), members, now)
        record.doomed = {name: uid for name, uid in record.doomed.items() if uid in known}
        self._keep_plain(record, members, known)
        if is_over(record, members, now, AVOID_S):
            self._end(record, not known)
            return
        record.state = escalation.paused(record.state, idle(record, members))
        record.state = escalation.renewed(record.state, self._rules, now, stranded(record, members))
        decided = escalation.due(record.state, self._rules, now, waiting(record, members))
        for decision in decided:
            self._write_down(record, decision, members, now)
        self._memory.save(record)
        self._records[key] = record
        self._tell(record)
        self._warn_of_return(record, members, {decision.group for decision in decided if decision.move})
        try:
            self._carry_on(record, members, now)
        except pods.NamespaceGone as error:
            _LOG.warning("job %s: %s Its groups are not looked after any more.", "/".join(key), error)
            self._end(record, not known)
            return
        self._memory.save(record)

    def _keep_plain(self, record: Record, members: Sequence[Member], known: dict[str, Thing]) -> None:
        """Keep what is needed to make the pods again that nobody else would: the newest of each seat counts."""
        for it in sorted(members, key=lambda it: (it.created, it.uid)):
            if it.owner is None and it.seat in record.seats:
                record.plain[it.seat] = placement.manifest(known[it.uid])

    def _end(self, record: Record, gone: bool) -> None:
        self._unmark(record)
        self._memory.forget(record)
        self._records.pop(record.key, None)
        if gone:
            self._pods.pop(record.key, None)

    # -- a group that moves -----------------------------------------------------------------------------------------

    def _write_down(self, record: Record, decision: Decision, members: Sequence[Member], now: float) -> None:
        """Write into the record what a decision means, and what is to be told of it."""
        seats = [name for name, seat in record.seats.items() if seat.group == decision.group]
        about = [it for it in members if it.seat in seats and not it.finished]
        if not decision.move:
            record.state = escalation.refused(record.state, decision.group)
            record.telling.append(_news(record, decision, about, now))
            return
        record.state = escalation.moved(record.state, decision.group, seats, now)
        # What has failed stays to be looked at, unless it stands in the way of the pod that is made again under its name.
        record.doomed |= {it.name: it.uid for it in about if it.owner is None or it.phase != "Failed"}
        record.making += [name for name in seats if name in record.plain and name not in record.making]
        for node in self._old_nodes(record, seats):
            record.marked[node] = now
        record.telling.append(_news(record, decision, about, now))

    def _old_nodes(self, record: Record, seats: Sequence[str]) -> list[str]:
        ran_on = {record.seats[name].node for name in seats} - {""}
        claimed = {record.seats[name].rack for name in seats} - {""}
        return placement.nodes_left(ran_on, claimed, self._racks() if claimed else {})

    def _racks(self) -> dict[str, str]:
        """Return the rack of every node that has one, as the node's own label says."""
        label = self._options.rack_label
        found = self._api.list_all(Kind("", "v1", "nodes", label, namespaced=False))[0]
        return {str(node["metadata"]["name"]): str(node["metadata"]["labels"][label]) for node in found}

    def _tell(self, record: Record) -> None:
        """Record the Events that are due. A controller that is killed meanwhile tells them again, and nothing is there twice."""
        for news in record.telling:
            _LOG.warning("job %s/%s: %s.", record.namespace, record.job, news["message"])
            for thing in news["about"]:
                events.record(self._api, thing, news["reason"], news["message"], news["at"], key=news["key"])
        record.telling = []

    def _warn_of_return(self, record: Record, members: Sequence[Member], groups: AbstractSet[str]) -> None:
        """Say where nothing keeps pods of groups that move from coming back."""
        seats = {name for name, seat in record.seats.items() if seat.group in groups}
        known = self._pods.get(record.key, {})
        owned = [known[it.uid] for it in members if it.seat in seats and it.owner is not None and not it.finished]
        if self._options.taint_old_rack or all(placement.avoids(pod, *record.key) for pod in owned):
            return
        _LOG.warning(
            "job %s: its pods' template does not keep them away from nodes with the label %s, so they may come back to "
            "the same rack. Add that to the template (see docs/kubernetes-groups.md), or give --taint-old-rack.",
            *("/".join(record.key), placement.avoid_key(*record.key)),
        )

    def _carry_on(self, record: Record, members: Sequence[Member], now: float) -> None:
        """Do what the record says is to be done, as far as it goes now."""
        moving = any(it.moved_at is not None for it in record.state.incidents.values())
        if moving or record.doomed or record.making:
            for node, since in list(record.marked.items()):
                if now - since > AVOID_S:
                    self._unmark(record, [node])
                elif now - self._labelled.get((record.key, node), -_LOOK_AGAIN_S) >= _LOOK_AGAIN_S:
                    self._mark(record, node)
                    self._labelled[record.key, node] = now
        elif record.marked:
            self._unmark(record)
        by_uid = {it.uid: it for it in members}
        for uid in record.doomed.values():
            self._evict(record, by_uid[uid], now)
        if record.making and not record.doomed:  # old ones that are still there would hold the new ones in their rack
            self._make(record, members)

    def _mark(self, record: Record, node: str) -> None:
        """Keep the job's pods away from a node; from one that was registered again too."""
        with contextlib.suppress(NotFound):
            found = self._api.get(NODES, node)
            avoid = placement.avoid_key(*record.key)
            meta: dict[str, Any] = {"labels": {avoid: "true"}}
            change: dict[str, Any] = {"metadata": meta}
            taint = _taint(record)
            taints = found["spec"].get("taints") or []
            lacks_taint = self._options.taint_old_rack and taint not in taints
            if lacks_taint:
                meta["resourceVersion"] = found["metadata"]["resourceVersion"]
                change["spec"] = {"taints": [*taints, taint]}
            if lacks_taint or avoid not in (found["metadata"].get("labels") or {}):
                self._acting().patch(NODES, node, change)

    def _unmark(self, record: Record, names: Sequence[str] | None = None) -> None:
        """Let the job's pods come to nodes again."""
        for node in list(record.marked) if names is None else names:
            try:
                found = self._api.get(NODES, node)
                meta: dict[str, Any] = {"labels": {placement.avoid_key(*record.key): None}}
                change: dict[str, Any] = {"metadata": meta}
                taints = found["spec"].get("taints") or []
                left = [
                    it
                    for it in taints
                    if (it.get("key"), it.get("value")) != (placement.MOVED_TAINT, _taint(record)["value"])
                ]
                if left != taints:
                    meta["resourceVersion"] = found["metadata"]["resourceVersion"]
                    change["spec"] = {"taints": left or None}
                self._acting().patch(NODES, node, change)
            except NotFound:
                pass
            record.marked.pop(node, None)
            self._labelled.pop((record.key, node), None)

    def _evict(self, record: Record, it: Member, now: float) -> None:
        """Have a pod go; by force only where it can't go otherwise, and where nobody but us would make it again."""
        grace: int | None = None
        if it.leaving:
            meta = self._pods[record.key][it.uid]["metadata"]
            stuck = now - events.seconds(meta.get("deletionTimestamp")) > _STUCK_S
            if it.owner is not None or not stuck or not self._is_dead(it.node):
                return
            grace = 0
            _LOG.warning(
                "pod %s/%s can't end, its node %s does not answer: it is removed.", record.namespace, it.name, it.node
            )
        try:
            pods.evict(self._acting(), record.namespace, it.name, it.uid, grace)
        except (NotFound, Conflict):
            return  # it is gone already, or another one has its name

    def _is_dead(self, node: str) -> bool:
        try:
            found = self._api.get(NODES, node)
        except NotFound:
            return True
        conditions = found.get("status", {}).get("conditions") or ()
        return any(it.get("type") == "Ready" and it.get("status") != "True" for it in conditions)

    def _make(self, record: Record, members: Sequence[Member]) -> None:
        """Make plain pods again, where their group is to go."""
        rack_label = self._options.rack_label if self._racks() else ""
        for name in list(record.making):
            seat, plain = record.seats.get(name), record.plain.get(name)
            if seat is not None and plain is not None and not any(it.seat == name for it in members):
                made = placement.elsewhere(plain, record.namespace, self._options.job_label, seat.group, rack_label)
                if not pods.make(self._acting(), made, record.namespace):  # we, or somebody, made it before
                    _LOG.info("pod %s/%s is there already.", record.namespace, made["metadata"]["name"])
            record.making.remove(name)


def _taint(record: Record) -> dict[str, str]:
    return {"key": placement.MOVED_TAINT, "value": placement.job_word(*record.key), "effect": "NoSchedule"}


def _news(record: Record, decision: Decision, about: Sequence[Member], now: float) -> dict[str, Any]:
    """Return what Events say of a decision, and about what: the pods of the group, and whoever made them."""
    owners = {str(it.owner["uid"]): it.owner for it in about if it.owner is not None}
    of_pods = ({"apiVersion": "v1", "kind": "Pod", "name": it.name, "uid": it.uid} for it in about)
    return {
        "reason": "GroupFailover" if decision.move else "GroupFailoverRefused",
        "message": decision.reason,
        "key": f"{record.namespace}/{record.job}/{decision.group}/{record.state.moves}",
        "at": now,
        "about": [
            {
                "apiVersion": it["apiVersion"],
                "kind": it["kind"],
                "metadata": {"name": it["name"], "namespace": record.namespace, "uid": it["uid"]},
            }
            for it in (*owners.values(), *of_pods)
        ],
    }
