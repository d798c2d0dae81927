"""The controller: an ordinary Deployment that watches the cluster and has its parts act. ``resilience kubernetes controller``.

1) (main) connects, and waits until this replica leads
2) (watchers) list and watch what the parts asked for, each in a thread of its own
3) (this loop, one thread) hands every change to the parts, tries again what failed, and ticks once a second

Rule: everything is derived from what the API server holds. A controller that starts anew lists, and comes to the same deeds.

Hazard: a replica that has lost its lease must not act. It ends, and its Deployment starts it again.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from resilience.integrations.kubernetes import health, words
from resilience.integrations.kubernetes.api import Api, namespace_of_pod
from resilience.integrations.kubernetes.delivery import Delivery
from resilience.integrations.kubernetes.election import Election
from resilience.integrations.kubernetes.parts import Part
from resilience.integrations.kubernetes.watching import LISTED, Change, Watcher

from resilience.command import Parser
from resilience.errors import ResilienceError, nearest

_LOG = logging.getLogger("resilience.kubernetes")
_TICK_S = 1.0
_BATCH = 500
_HURRY_S = 5.0
LOST_LEASE = 75  # the exit code of a replica that may not act any more
JOB_LABEL = "resilience.dev/job"

# name: module:class. Each is built by ``Class.build(api, options)``.
PARTS = {
    "faulty-nodes": "resilience.integrations.kubernetes.faulty:FaultyNodes",
    "groups": "resilience.integrations.kubernetes.groups:Groups",
    "podgroups": "resilience.integrations.kubernetes.podgroups.part:PodGroups",
}


@dataclass(frozen=True)
class Options:
    """What the command line says. ``namespace``: only there, empty for the whole cluster; ``state_namespace``: where the lease and
    what must be remembered are kept; ``leading``: whether this replica may act, cheap enough to be asked before each deed."""

    namespace: str = ""
    state_namespace: str = "default"
    pod_selector: str = JOB_LABEL
    job_label: str = JOB_LABEL
    group_threshold: float = 300.0
    max_group_failovers: int = 3
    rack_label: str = "scheduling/rack-id"
    taint_old_rack: bool = False
    leading: Callable[[], bool] = lambda: True


class Controller:
    """The loop around the parts."""

    def __init__(self, api: Api, parts: Sequence[Part], namespace: str = "", election: Election | None = None) -> None:
        self._api = api
        self._delivery = Delivery(parts)
        self._namespace = namespace
        self._election = election
        self._changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
        self._turned = time.monotonic()
        self._watchers: list[Watcher] = []

    def run(self, stop: threading.Event) -> int:
        """Run until ``stop``, or until this replica may not act any more; return the exit code."""
        try:
            if self._election is not None:
                self._election.start()
                if not self._wait_to_lead(stop):
                    return 0
            for kind in self._delivery.kinds():
                watcher = Watcher(self._api, kind, self._namespace, self._changes)
                watcher.start()
                self._watchers.append(watcher)
            return self._loop(stop)
        finally:
            if self._election is not None:
                self._election.stand_back()  # watchers take their time to stop: it would lead once more meanwhile
            for watcher in self._watchers:
                watcher.stop(0.0 if stop.is_set() else 2.0)
            if self._election is not None:
                self._election.release()

    def well(self) -> bool:
        """Whether the loop turns and every watcher is at it. (Who stops trying to lead ends, by the clock of its lease.)"""
        turns = time.monotonic() - self._turned < 120.0
        return turns and all(watcher.lives() for watcher in self._watchers)

    def _wait_to_lead(self, stop: threading.Event) -> bool:
        assert self._election is not None
        said = False
        while not self._election.leading():
            self._turned = time.monotonic()
            if stop.wait(0.1):
                return False
            other = self._election.other
            if other and not said:
                said = True
                _LOG.info("waiting to lead: replica %s has the lease.", other)
        return True

    def _loop(self, stop: threading.Event) -> int:
        due = 0.0
        while not stop.is_set():
            self._turned = time.monotonic()
            if self._election is not None and not self._election.leading():
                _LOG.error("this replica could not renew its lease and ends, so that no two act. It is started again.")
                return LOST_LEASE
            self._take(stop, max(0.0, due - time.monotonic()))
            now = time.time()
            self._delivery.again(now)
            if time.monotonic() >= due:
                due = time.monotonic() + _TICK_S
                self._delivery.tick(now)
        return 0

    def _take(self, stop: threading.Event, patience_s: float) -> None:
        """Hand on what has come, a bounded number at a time."""
        wait: float = min(patience_s, 0.2)  # a request to stop is heeded as soon
        for _ in range(_BATCH):
            if stop.is_set():
                return
            try:
                change = self._changes.get(timeout=wait) if wait > 0 else self._changes.get_nowait()
            except queue.Empty:
                return
            wait = 0.0
            if change.verb == LISTED:
                self._delivery.listed(change.kind)
            else:
                self._delivery.deliver(change, time.time())


def named_parts(text: str) -> list[str]:
    """Return the parts that ``--parts`` names; raise for one that there is not."""
    names = [name for name in text.split(",") if name]
    _check(names)
    return names


def _check(names: Sequence[str]) -> None:
    if not names:
        raise ResilienceError(f"--parts is empty: nothing would be done. There are: {', '.join(PARTS)}.")
    for name in names:
        if name not in PARTS:
            raise ResilienceError(
                f"--parts: there is no part {name!r}.{nearest(name, PARTS)} There are: {', '.join(PARTS)}."
            )


def build(names: Sequence[str], api: Api, options: Options) -> list[Part]:
    """Make the parts that were asked for by name."""
    _check(names)
    made = []
    for name in names:
        module, _, attribute = PARTS[name].partition(":")
        factory: Callable[[Api, Options], Part] = getattr(importlib.import_module(module), attribute).build
        made.append(factory(api, options))
    return made


def main(argv: list[str]) -> int:
    """Run the controller; return the exit code."""
    asked = parser().parse_args(argv)
    logging.basicConfig(
        level=asked.log_level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    stop = threading.Event()
    _end_on_signals(stop)
    try:
        api = Api.connect(asked.kubeconfig, asked.context)
        election = None
        if not asked.no_leader_election:
            me = f"{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:8]}"
            election = Election(api, _home(asked), asked.lease_name, me, asked.lease_seconds)
        options = _options(asked, election)
        parts = build(named_parts(asked.parts), api, options)
        controller = Controller(api, parts, options.namespace, election)
        with health.serving(asked.health, controller.well):
            _LOG.info(
                "the controller runs: %s; pods with %s.", ", ".join(part.name for part in parts), options.pod_selector
            )
            return controller.run(stop)
    except ResilienceError as error:
        sys.stderr.write(f"resilience kubernetes controller: {error}\n")
        return 2


def _home(asked: argparse.Namespace) -> str:
    return asked.state_namespace or namespace_of_pod() or "default"


def _options(asked: argparse.Namespace, election: Election | None) -> Options:
    options = Options(
        asked.namespace,
        _home(asked),
        asked.pod_selector,
        asked.job_label,
        asked.group_threshold,
        asked.max_group_failovers,
        asked.rack_label,
        asked.taint_old_rack,
    )
    return options if election is None else replace(options, leading=election.leading)


def _end_on_signals(stop: threading.Event) -> None:
    """Have a thread end it that only waits for a signal. A handler must not: it runs in the main thread, in the middle of anything,
    and would wait for itself where that thread holds the event's lock."""
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.put(number))

    def await_one() -> None:
        asked.get()
        _end(stop)

    threading.Thread(target=await_one, name="resilience-signals", daemon=True).start()


def _end(stop: threading.Event) -> None:
    """End in order; and if that takes long, since a call hangs, without: everything is written down before it is done."""
    stop.set()
    last = threading.Timer(_HURRY_S, os._exit, (0,))
    last.daemon = True
    last.start()


def parser() -> Parser:
    """Return what reads the controller's arguments."""
    made = Parser(
        prog="resilience kubernetes controller",
        description="Take faulty nodes out of scheduling, and move groups of nodes together.",
    )
    add = made.add_argument
    add("--parts", default=",".join(PARTS), help="what it does, separated by commas (default: %(default)s)")
    add("--kubeconfig", help="default: the pod's service account, else the usual kubeconfig")
    add("--context", help="of the kubeconfig")
    add("--namespace", type=words.namespace, default="", help="look after this namespace only; default: all")
    add("--state-namespace", type=words.namespace, default="",
        help="where the lease and the state are kept; default: the pod's own, else 'default'")  # fmt: skip
    _add_groups(made)
    add("--lease-name", type=words.name, default="resilience-controller",
        help="of the leader election (default: %(default)s)")  # fmt: skip
    add("--lease-seconds", type=words.lease, default=15.0,
        help="how long a replica leads without renewing (default: %(default)g)")  # fmt: skip
    add("--no-leader-election", action="store_true", help="there is one replica only, for sure")
    add("--health", default="", metavar="[HOST:]PORT",
        help="serve /healthz there; without a host on loopback; default: nowhere")  # fmt: skip
    add("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    return made


def _add_groups(made: Parser) -> None:
    """Add what says which pods belong together, and when their nodes are left together."""
    add, known = made.add_argument, Options()
    add("--pod-selector", type=words.selector, default=known.pod_selector,
        help="labels of the pods of training jobs (default: %(default)s)")  # fmt: skip
    add("--job-label", type=words.label_key, default=known.job_label,
        help="label whose value is the name of a pod's job (default: %(default)s)")  # fmt: skip
    add("--group-threshold", type=words.seconds, default=known.group_threshold, metavar="SECONDS",
        help="a replacement that is blocked for longer moves its whole group (default: %(default)g)")  # fmt: skip
    add("--max-group-failovers", type=words.count, default=known.max_group_failovers, metavar="N",
        help="of one job, in all (default: %(default)s)")  # fmt: skip
    add("--rack-label", type=words.label_key, default=known.rack_label,
        help="label of nodes that names their rack (default: %(default)s)")  # fmt: skip
    add("--taint-old-rack", action="store_true",
        help="where pods can't avoid the old rack by themselves: keep everybody's new pods away from it meanwhile")  # fmt: skip
