"""Where this launcher meets the others: one face for our own rendezvous, torch's others, and the job that has only one node."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from resilience import config
from resilience.config import Settings
from resilience.failover import exits, sentence
from resilience.groups import topology
from resilience.launcher.meeting import Meeting, Patience
from resilience.launcher.ranks import infra_rank
from resilience.launcher.rendezvous import FreshStores, OneNode, rank_0_hosts_the_store
from resilience.launcher.roster import Member, Outcome, Roster, Rules

_LOG = logging.getLogger("resilience.launcher")
_LOOK_S = 0.5
_READ_S = 5.0
DEFAULT_PORT = 29400  # torch's


def open_venue(parameters: RendezvousParameters, settings: Settings) -> Venue:
    """Open the rendezvous that the command line asks for."""
    name = settings.failover.node_name or socket.gethostname()
    _, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    if parameters.backend != "c10d" or rank_0_hosts_the_store():
        inner = rendezvous_handler_registry.create_handler(parameters)
    elif parameters.max_nodes == 1 and parameters.endpoint == "localhost:0":
        inner = OneNode(parameters.run_id)
    else:
        _, store = create_backend(parameters)
        port = getattr(store, "port", port)
        address = parameters.local_addr or socket.getfqdn()
        # A container that starts again has the same address and number: it is another launcher all the same.
        place = topology.given(settings.failover.node_group, settings.failover.node_group_index)
        id_ = f"{address}_{os.getpid()}_{uuid.uuid4().hex[:8]}"
        me = Member(id_, name, infra_rank(config.environment()), group=place.name, group_index=place.index)
        by_infra = settings.failover.use_infra_group_rank
        rules = Rules(parameters.min_nodes, parameters.max_nodes, by_infra)
        launcher = settings.launcher
        patience = Patience.from_conf(parameters.config, launcher.node_silence_timeout, launcher.store_silence_timeout)
        inner = Meeting(store, parameters.run_id, me, rules=rules, patience=patience, excluded_code=exits.NODE_LEFT)
    return Venue(inner, FreshStores(inner, parameters.local_addr), name, parameters.min_nodes, port)


class Venue:
    """The rendezvous as the agent sees it. ``id`` is this launcher's in the roster, ``name`` its node's."""

    def __init__(
        self, inner: RendezvousHandler, handler: FreshStores, name: str, min_nodes: int, port: int = 0
    ) -> None:
        self.handler = handler
        self.name = name
        self.min_nodes = min_nodes
        self._meeting = inner if isinstance(inner, Meeting) else None
        self._alone = isinstance(inner, OneNode)
        self.id = self._meeting.me.id if self._meeting is not None else ""
        self._port = port

    @property
    def answered(self) -> Callable[[], None]:
        """Called whenever the store answered."""
        return self._meeting.answered if self._meeting is not None else lambda: None

    @answered.setter
    def answered(self, tell: Callable[[], None]) -> None:
        if self._meeting is not None:
            self._meeting.answered = tell

    @property
    def meets(self) -> bool:
        """Whether the nodes really come together in each round."""
        return self.handler.get_backend() != "static"

    @property
    def has_roster(self) -> bool:
        """Whether nodes can leave, wait and be excluded here."""
        return self._meeting is not None

    def names(self) -> dict[int, str]:
        """Return what the nodes of the round are called, by rank, where there is a roster."""
        members = self._meeting.roster.members.values() if self._meeting is not None else ()
        return {member.rank: member.name for member in members if member.rank is not None}

    def connect(self, store: Any, world: int) -> tuple[Any, Any]:
        """Return the round's store and the one for signs of life, on a connection of their own; nothing for a lone node."""
        if self._meeting is not None:
            return self._meeting.connect()
        return (None, None) if world == 1 or self._alone else (store.clone(), None)

    def newcomers(self) -> int:
        """Return how many nodes wait to be let in."""
        return int(self.handler.num_nodes_waiting())

    def departed(self, ids: Sequence[str]) -> list[int]:
        """Return which of a round's launchers, by their place in ``ids``, had no part in the job any more when the roster was last
        read."""
        roster = self._meeting.roster if self._meeting is not None else Roster()
        return [place for place, id_ in enumerate(ids) if id_ and id_ not in {**roster.expected, **roster.members}]

    def enact(self, verdict: Mapping[str, Any], whole_job: bool) -> None:
        """Write into the roster what a verdict means for it. Every node may do it: the second time changes nothing."""
        meeting = self._meeting
        if meeting is None:
            return
        order = verdict["sentence"]
        gone = [*verdict.get("departed", ()), *verdict.get("leavers", ())]
        try:
            for name in verdict.get("excluded", ()):  # by everybody: whoever is asked to leave may be killed first
                meeting.exclude(name, order["detail"])
            if gone:
                meeting.depart(gone)
            if order["action"] in sentence.ENDS and whole_job:
                code = order.get("job_code", order["exit_code"])
                meeting.close(Outcome(code, order["detail"] or "the job has finished"))
        except RuntimeError as error:
            _LOG.warning("the rendezvous store does not answer: %s", error)

    def exclude(self, why: str) -> None:
        """Keep this node out of the job's next runs."""
        if self._meeting is not None:
            try:
                self._meeting.exclude(self.name, why)
            except RuntimeError as error:
                _LOG.warning("the rendezvous store does not answer: %s", error)

    def leave(self) -> None:
        """Take this launcher out of the job; the others go on, or wait for another one."""
        if self._meeting is not None:
            try:
                self._meeting.depart([self.id])
            except RuntimeError as error:
                _LOG.debug("the rendezvous store does not answer: %s", error)

    @property
    def hosts_the_store(self) -> bool:
        """Whether the others would be lost without this process."""
        return self._meeting is not None and self._port > 0 and listens_on(self._port)

    def see_off_spares(self, timeout: float = 5.0) -> None:
        """Give the launchers that wait the time to read that the job is over."""
        deadline = time.monotonic() + timeout
        while self._meeting is not None and self.hosts_the_store and time.monotonic() < deadline:
            if not self._meeting.look().waiting:
                return
            time.sleep(0.05)

    def stay_if_needed(self, turn: Callable[[], None]) -> None:
        """If this launcher holds the store that the others meet in, keep it until the job is over: they would be lost."""
        meeting = self._meeting
        if meeting is None or not self.hosts_the_store or not _anybody(meeting.look()):
            return
        _LOG.warning(
            "this node has left the job, but its launcher holds the rendezvous store: it stays, without workers, until the "
            "job is over. With `resilience store` on another host it could go."
        )
        while True:
            turn()
            roster = meeting.look()
            if roster.outcome is not None or not _anybody(roster):
                self.see_off_spares()
                time.sleep(_READ_S * bool(roster.members))  # one of them is done: the others read here that all are
                return
            time.sleep(_LOOK_S)


def _anybody(roster: Roster) -> bool:
    return bool(roster.members or roster.expected or roster.waiting)


def listens_on(port: int) -> bool:
    """Whether this process listens on a TCP port."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(entry))  # noqa: PTH115 - the target is no path
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                return True
    return False
