"""Part ``faulty-nodes``: where a training pod ends with a code of the hardware, its node is taken out of scheduling.

A launcher that finds its node faulty says so by its exit code and its termination message; pods have no right to change nodes.
Exit code 80 alone marks nothing: where every node of a job fails its check, all end with 80 and none is to be marked. A launcher
whose node failed by itself has written its message before it ends, and one that was killed before does not end with 80.

Rule: a pod can get the node marked that it ran on, and no other, whatever its message claims. Only pods of the selector are heard.
A bare code is that of the pod's main container: others have codes of their own, as git's 128 for anything that went wrong.

Hazard: a broken driver that is rolled out everywhere would take out the cluster. So there is a brake: so many nodes an hour, then a
growing pause with an error in the log. What is held back is done later, not forgotten. Nodes are counted, not failures: a pod that
fails on one node again and again uses up nothing. The nodes themselves say since when they are out, so a restart changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resilience.integrations.kubernetes import nodes
from resilience.integrations.kubernetes.api import Api, KubernetesError, NotFound, Unreachable
from resilience.integrations.kubernetes.events import seconds
from resilience.integrations.kubernetes.nodes import Failure
from resilience.integrations.kubernetes.parts import DELETED, Kind, Thing

from resilience.command import Parser
from resilience.errors import ResilienceError
from resilience.failover.error_monitor import ErrorMonitor, NodeFault, from_message, of_code
from resilience.failover.exits import UNFIT

if TYPE_CHECKING:
    from resilience.integrations.kubernetes.controller import Options

_LOG = logging.getLogger("resilience.kubernetes")
_HOUR_S = 3600.0
MARKS_PER_HOUR = 20
_NOT_DONE = 2  # as of every other command that a cluster refuses
_NEVER_RAN = ("StartError", "ContainerCannotRun")  # a wrong command ends with 128 too, and says nothing about the node
_NOT_MARKED = (
    "pod %s ended with exit code %s and without a message of its launcher: node %s is not marked. Either every node of the job "
    "failed its check, which is not the nodes' fault, or the launcher's --ft-termination-log is not the container's "
    "terminationMessagePath; the pod's log says which."
)


def failures(pod: Thing) -> Iterator[Failure]:
    """Yield what a pod's containers tell of its node. Pure. The texts are anybody's: only the pod's own node is named."""
    node = _node(pod)
    for key, ended in _ends(pod) if node else ():
        fault = _fault(node, ended)
        if fault is not None:
            yield Failure(key, fault, seconds(ended.get("finishedAt")), _bound(pod))


def unmarked(pod: Thing) -> Iterator[str]:
    """Yield the ids of ends with exit code 80 that have no message of ours: for people to know of, and no mark. Pure."""
    for key, ended in _ends(pod) if _node(pod) else ():
        if _code(ended) == UNFIT and _fault(_node(pod), ended) is None:
            yield key


def _bound(pod: Thing) -> float:
    """Return when a pod was given its node, as the scheduler says; 0 where nobody does."""
    conditions = pod.get("status", {}).get("conditions") or ()
    given = [it for it in conditions if it.get("type") == "PodScheduled" and it.get("status") == "True"]
    return max((seconds(it.get("lastTransitionTime")) for it in given), default=0.0)


def _node(pod: Thing) -> str:
    return str(pod.get("spec", {}).get("nodeName") or "")


def _code(ended: Mapping[str, Any]) -> int:
    return int(ended.get("exitCode", 0))


def _main(pod: Thing) -> str:
    """Return the container that trains: the one that ``kubectl logs`` shows unless it is told another."""
    named = (pod["metadata"].get("annotations") or {}).get("kubectl.kubernetes.io/default-container")
    listed = pod.get("spec", {}).get("containers") or [{}]
    return str(named or listed[0].get("name", ""))


def _ends(pod: Thing) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield how the pod's containers ended, now and the last time, with what tells one end from another. Those of others than the
    main one count if they have a message of ours."""
    status, main = pod.get("status") or {}, _main(pod)
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        for state in ("lastState", "state"):
            ended: dict[str, Any] = (container.get(state) or {}).get("terminated") or {}
            if ended and (container["name"] == main or from_message(str(ended.get("message") or "")) is not None):
                which = ended.get("containerID") or ended.get("finishedAt") or container.get("restartCount", 0)
                yield f"{pod['metadata']['uid']}/{container['name']}/{which}", ended


def _fault(node: str, ended: dict[str, Any]) -> NodeFault | None:
    at = seconds(ended.get("finishedAt"))
    told = from_message(str(ended.get("message") or ""))
    if told is not None:
        return dataclasses.replace(told, node=node, at=at or told.at)
    if ended.get("reason") in _NEVER_RAN:
        return None
    return of_code(node, _code(ended), at=at)


class FaultyNodes:
    """See above."""

    name = "faulty-nodes"

    def __init__(
        self, api: Api, selector: str, per_hour: int = MARKS_PER_HOUR, clock: Callable[[], float] = time.time
    ) -> None:
        self._api = api
        self._pods = Kind("", "v1", "pods", selector)
        self._per_hour = per_hour
        self._clock = clock
        self._out: dict[str, float] | None = None  # since when; None: the nodes were not asked yet
        self._done: dict[str, set[str]] = {}  # by pod: failures that were dealt with

    @classmethod
    def build(cls, api: Api, options: Options) -> FaultyNodes:
        """Make it as the command line asks for."""
        return cls(api, options.pod_selector)

    def kinds(self) -> Sequence[Kind]:
        """See :class:`Part`."""
        return [self._pods]

    def changed(self, kind: Kind, verb: str, thing: Thing) -> None:
        """See :class:`Part`. A pod that is deleted may tell in its last state what it could not before."""
        uid, name = (
            str(thing["metadata"]["uid"]),
            f"{thing['metadata'].get('namespace', '')}/{thing['metadata']['name']}",
        )
        for failure in failures(thing):
            if failure.id in self._done.get(uid, ()):
                continue
            self._mark(failure, name)
            self._done.setdefault(uid, set()).add(failure.id)
        for key in unmarked(thing):
            if key not in self._done.get(uid, ()):
                _LOG.info(_NOT_MARKED, name, UNFIT, _node(thing))
                self._done.setdefault(uid, set()).add(key)
        if verb == DELETED:
            self._done.pop(uid, None)

    def tick(self, now: float) -> None:
        """See :class:`Part`. Nothing here depends on time."""

    def _mark(self, failure: Failure, pod: str) -> None:
        fault, now = failure.fault, self._clock()
        known = nodes.taken_out(self._api) if self._out is None else self._out
        self._out = {node: at for node, at in known.items() if at > now - _HOUR_S}
        others = len(self._out.keys() - {fault.node})

        def brake() -> None:
            if others >= self._per_hour:
                raise KubernetesError(
                    f"{others} nodes were taken out of scheduling within an hour, and {fault.node} ({fault.reason}) would be one "
                    "more. It is left in for now and looked at again. If so many are broken at once, the cause may not be the "
                    "nodes."
                )

        try:
            if nodes.mark(self._api, failure, pod=pod, now=now, brake=brake):
                self._out[fault.node] = now
        except NotFound:
            _LOG.info("node %s is not there any more: nothing to mark (%s).", fault.node, fault.reason)


class KubernetesErrorMonitor(ErrorMonitor):
    """Marks nodes directly, for launchers that are given the right to (outside pods, or with a role of their own)."""

    def __init__(self, api: Api | None = None) -> None:
        self._api = api

    def mark(self, fault: NodeFault) -> None:
        """See base class."""
        if self._api is None:
            self._api = Api.connect()
        failure = Failure(f"{fault.run}/{fault.reason}/{fault.code}/{fault.at}", fault, happened=fault.at)
        try:
            nodes.mark(self._api, failure)
        except NotFound as error:
            raise NotFound(
                f"the cluster has no node {fault.node!r}. Give the name that `kubectl get nodes` shows with --ft-node-name",
                error.status,
            ) from error

    def close(self) -> None:
        """See base class."""
        if self._api is not None:
            self._api.close()
            self._api = None


def uncordon(argv: list[str]) -> int:
    """``resilience kubernetes uncordon NODE``: put nodes back in service that were marked by us."""
    parser = Parser(
        prog="resilience kubernetes uncordon",
        description="Put nodes back in service: uncordon them, remove our taint and notes; what they were marked for stays known.",
    )
    parser.add_argument("node", nargs="+")
    parser.add_argument("--kubeconfig")
    parser.add_argument("--context")
    asked = parser.parse_args(argv)
    failed = 0
    try:
        api = Api.connect(asked.kubeconfig, asked.context)
        for node in asked.node:
            failed += not _released(api, node)
    except ResilienceError as error:  # no way to the cluster: the same for all that are left
        sys.stderr.write(f"resilience kubernetes uncordon: {error}\n")
        return _NOT_DONE
    return _NOT_DONE if failed else 0


def _released(api: Api, node: str) -> bool:
    """Put a node back in service, and say what was done; return whether there was nothing wrong. Others are not held up by it."""
    try:
        done = nodes.release(api, node)
    except Unreachable:
        raise
    except KubernetesError as error:
        why = "the cluster has no node of that name; nothing was changed" if isinstance(error, NotFound) else error
        sys.stderr.write(f"{node}: {why}\n")
        return False
    sys.stdout.write(f"{node}: {'in service again' if done else 'was not marked by us; nothing was changed'}\n")
    return True
