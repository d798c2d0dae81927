"""The rendezvous: launchers meet over a :mod:`roster` in torch's own store, written back by compare-and-set.

It takes the place of torch's dynamic rendezvous for the ``c10d`` backend, because that one can't let a node leave without
closing the job, lets a spare take the place of a node that only restarts, compares wall clocks of different hosts, and keeps
a pickle in the store. The same ``--rdzv-conf`` keys mean the same here. For all other backends torch's handlers are used.

Hazard: any store call may hang while a node is cut off. ``answered`` is told of every call that did not, and a watchdog ends
this launcher when it is not told for too long.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from resilience.failover.exits import PREEMPTED
from resilience.launcher import roster as rosters
from resilience.launcher.roster import Member, Outcome, Roster, Rules

_LOG = logging.getLogger("resilience.launcher")
_LOOK_S = 0.1
_FULL_LOOK_S = 0.2
_ALIVE_S = 0.2
_GONE_S = 2.0
_PATIENT_S = 5.0


class NotWanted(RendezvousClosedError):  # type: ignore[misc]  # noqa: N818 - torch is untyped; reads as what it is
    """This launcher has no part in the job (any more): the job is over, or the node is excluded."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.why)
        self.outcome = outcome


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, in seconds; ``--rdzv-conf`` has torch's names for them."""

    join: float = 600.0
    last_call: float = 30.0
    silence: float = 15.0
    lost: float = 60.0  # of a node that trains, before one that waits may take its place
    answer: float = 20.0  # of a node that came, until it has said what it brings: below the watchdog's, or that ends us

    @classmethod
    def from_conf(cls, conf: Mapping[str, Any], lost: float, store_silence: float = 60.0) -> Patience:
        """Read torch's keys."""
        return cls(
            float(conf.get("join_timeout", 600)),
            float(conf.get("last_call_timeout", 30)),
            float(conf.get("keep_alive_interval", 5)) * float(conf.get("keep_alive_max_attempt", 3)),
            lost,
            store_silence / 3,
        )


class Meeting(RendezvousHandler):  # type: ignore[misc]  # torch is untyped here
    """A rendezvous handler whose nodes can leave, wait as spares, be excluded, and keep their ranks."""

    def __init__(
        self,
        store: Any,
        run_id: str,
        me: Member,
        *,
        rules: Rules,
        patience: Patience,
        excluded_code: int,
    ) -> None:
        self.me = me
        self._server = store  # kept: if it is the one that serves, it must live as long as we do
        self._store = PrefixStore(f"resilience/{run_id}", store)
        self._run_id = run_id
        self._rules = rules
        self._patience = patience
        self._excluded_code = excluded_code
        self.answered: Callable[[], None] = lambda: None
        self.roster = Roster()
        self._said = ""
        self._arrived = False
        self._table: Any = None

    # -- torch's interface ------------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        """See base class."""
        return "c10d"

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and wait until it is complete.

        Raises ``RendezvousTimeoutError`` when too few nodes come; :class:`NotWanted` when the job is over or the node is
        excluded. A spare waits without a limit.
        """
        try:
            found = self._update(lambda roster: rosters.arrive(roster, self.me, self._rules))
            ended = found.outcome  # one that finished or was aborted is over for a late replacement too
            if ended is not None and ended.exit_code == PREEMPTED and not self._arrived and self._all_gone():
                _LOG.info("an earlier run of %s is over; this is the next one.", self._run_id)
                self._update(lambda roster: rosters.arrive(rosters.reopen(roster), self.me, self._rules))
            elif ended is not None and ended.exit_code != PREEMPTED and not self._arrived:
                self._check_in(late=True)
            self._arrived = True
            self._wait_for_round(_Waiting(self._patience))
            store = self._round_table()
        except RuntimeError as error:
            if isinstance(error, (RendezvousTimeoutError, NotWanted)):
                raise
            raise RendezvousConnectionError(f"the rendezvous store does not answer: {error}") from error
        self.me = self.roster.members[self.me.id]
        assert self.me.rank is not None
        return RendezvousInfo(store, self.me.rank, len(self.roster.members), RendezvousStoreInfo("", 0))

    def is_closed(self) -> bool:
        """See base class."""
        return self.look().outcome is not None

    def set_closed(self) -> None:
        """See base class."""
        self.close(Outcome(1, "the job was ended by another node"))

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait that the next round would take in; spares of a full job are not counted."""
        return self.look().newcomers(self._rules)

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """See base class."""
        self.set_closed()
        return True

    # -- ours -------------------------------------------------------------------------------------------------------

    def depart(self, nodes: list[str]) -> None:
        """Take nodes out of the job, ourselves or lost ones; the others go on or wait for a replacement."""
        self._update(lambda roster: rosters.depart(roster, nodes, self._rules))

    def exclude(self, name: str, why: str) -> None:
        """Keep a node out of the job for good."""
        self._update(lambda roster: rosters.exclude(roster, name, why))

    def close(self, outcome: Outcome) -> None:
        """End the job, for the launchers that wait too."""
        self._update(lambda roster: rosters.close(roster, outcome))

    def connect(self) -> tuple[Any, Any]:
        """Return the round's store and the job's, on a connection of their own, for another thread."""
        job = PrefixStore(f"resilience/{self._run_id}", self._server.clone())
        return PrefixStore(f"round_{self.roster.round}", job), job

    def look(self) -> Roster:
        """Read the roster."""
        text = self._text()
        self.answered()
        self.roster = Roster.from_text(text) if text else Roster()
        return self.roster

    # -- the store --------------------------------------------------------------------------------------------------

    def _round_table(self) -> Any:
        """Return the round's store, on a connection that is less patient: a node may be gone before it has said a word."""
        if self._table is None:
            self._table = self._server.clone()
            self._table.set_timeout(timedelta(seconds=self._patience.answer))
        return PrefixStore(f"resilience/{self._run_id}/round_{self.roster.round}", self._table)

    def _text(self) -> str:
        return bytes(self._store.get("roster")).decode() if self._store.check(["roster"]) else ""

    def _update(self, change: Callable[[Roster], Roster]) -> Roster:
        """Apply a change, again and again until nobody was quicker."""
        text = self._text()
        while True:
            before = Roster.from_text(text) if text else Roster()
            after = change(before)
            wanted = after.as_text()
            if wanted == text:
                break
            found = bytes(self._store.compare_set("roster", text, wanted)).decode()
            self.answered()
            if found == wanted:
                if after.is_complete and not before.is_complete:
                    self._store.set(f"complete/{after.round}", "1")
                break
            text = found
        self.roster = after
        return after

    def _wait_for_round(self, waiting: _Waiting) -> None:
        beat = 0
        while True:
            self._check_in()
            roster = self.roster
            if roster.is_complete and self.me.id in roster.members:
                return
            if roster.place_of(self.me.id) == "outside":  # taken out while we were silent, or the round before is over
                self._update(lambda it: rosters.arrive(it, self.me, self._rules))
                continue
            self._move_on(roster, waiting)
            if time.monotonic() >= waiting.alive_due:
                beat += 1
                self._store.set(f"alive/{self.me.id}", f"waiting {beat}")
                waiting.alive_due = time.monotonic() + _ALIVE_S
            self._pause(waiting)

    def _move_on(self, roster: Roster, waiting: _Waiting) -> None:
        """Complete the round if it is ready; take out who has died; give up when it takes too long."""
        if self.me.id not in roster.members:
            waiting.begin()  # a spare's patience with a round starts when it gets into one
            people = {**roster.expected, **roster.members}
            silent = waiting.silent(people, self.me.id, self._pulses, self._patience.lost)
            if silent:
                _LOG.warning("%s fell silent; its place is free.", _names(people, silent))
                self.depart(silent)
            self._say(
                "this node waits for the next round of the job."
                if roster.newcomers(self._rules)
                else "this node is a spare: the job has all the nodes it takes, and it waits for a place."
                if not self._rules.by_infra or self.me.infra is None
                else f"this node is one too many and waits for the job's end. It would take over only from a node with the "
                f"same rank from the infrastructure ({self.me.infra}); for hot spares give --ft-use-infra-group-rank=false."
            )
            return
        if rosters.ready(roster, self._rules, waiting.called(len(roster.members) >= self._rules.min_nodes)):
            new = [node for node in roster.members if node not in roster.expected and node != self.me.id]
            if not waiting.unheard(new, self._pulses):
                self._update(lambda it: self._completed(it, roster.round))
                return
        people = {**roster.expected, **roster.members}
        silent = waiting.silent(people, self.me.id, self._pulses, self._patience.silence)
        if silent:
            _LOG.warning("%s fell silent while the nodes came together; it is taken out.", _names(people, silent))
            self.depart(silent)
        if waiting.since() > _PATIENT_S:
            absent = [member.name for key, member in roster.expected.items() if key not in roster.members]
            whom = f" (not back yet: {', '.join(absent)})" if absent else ""
            nnodes = f"{self._rules.min_nodes}:{self._rules.max_nodes}"
            self._say(f"{len(roster.members)} of --nnodes={nnodes} nodes are here, waiting for more{whom}.")
        if waiting.over():
            self._give_up(len(roster.members))

    def _completed(self, roster: Roster, number: int) -> Roster:
        """Complete the round that we looked at, if it is still the one, and ready: we may have been slow."""
        fit = roster.round == number and rosters.ready(roster, self._rules, waited=True)
        return rosters.complete(roster, self._rules) if fit else roster

    def _give_up(self, came: int) -> None:
        """Leave a round that took too long, unless it has been completed with us in it this very moment."""

        def leave(roster: Roster) -> Roster:
            is_in = roster.is_complete and self.me.id in roster.members
            return roster if is_in else rosters.depart(roster, [self.me.id], self._rules)

        after = self._update(leave)
        if self.me.id not in after.members:
            raise RendezvousTimeoutError(f"{came} of at least {self._rules.min_nodes} nodes came together")

    def _pause(self, waiting: _Waiting) -> None:
        """Sleep, then look: at one small key often, at the whole roster now and then."""
        everybody = [*self.roster.members, *self.roster.waiting]
        first = bool(everybody) and everybody[0] == self.me.id
        time.sleep(_LOOK_S)
        done = not self.roster.is_complete and bool(self._store.check([f"complete/{self.roster.round}"]))
        self.answered()
        if done or time.monotonic() >= waiting.full_due:
            waiting.full_due = time.monotonic() + (_FULL_LOOK_S if first else 1.0 + len(everybody) / 500)
            self.look()

    def _check_in(self, late: bool = False) -> None:
        """Raise when there is no part in the job for us. ``late``: it was over before we came."""
        why = self.roster.excluded.get(self.me.name)
        if why is not None:
            if self.roster.place_of(self.me.id) != "outside":
                self.depart([self.me.id])
            raise NotWanted(Outcome(self._excluded_code, f"node {self.me.name} is excluded from the job: {why}"))
        if self.roster.outcome is not None:
            outcome = self.roster.outcome
            if self.me.id in self.roster.waiting:  # whoever holds the store waits until we have read it
                self.depart([self.me.id])
            if late:
                hint = f"That was before this launcher came: for another run give another --rdzv-id than {self._run_id}"
                outcome = dataclasses.replace(outcome, why=f"{outcome.why}. {hint}, or start the store anew")
            raise NotWanted(outcome)

    def _all_gone(self) -> bool:
        """Whether nobody of a job that is over gives signs of life any more."""
        people = [*self.roster.members, *self.roster.expected, *self.roster.waiting]
        before = self._pulses(people)
        deadline = time.monotonic() + _GONE_S
        while time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            self.answered()
            if self._pulses(people) != before:
                return False
        return True

    def _pulses(self, nodes: list[str]) -> list[bytes]:
        """Return the newest sign of life of each node; in one round trip where all have given one."""
        keys = [f"alive/{node}" for node in nodes]
        if keys and self._store.has_extended_api() and self._store.check(keys):
            return [bytes(value) for value in self._store.multi_get(keys)]
        return [bytes(self._store.get(key)) if self._store.check([key]) else b"" for key in keys]

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            _LOG.info("%s", text)


class _Waiting:
    """The clocks of one wait, all of them this host's own."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since = time.monotonic()
        self._enough_since: float | None = None
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._next_roll_call = 0.0
        self._first: dict[str, bytes] = {}
        self._heard: set[str] = set()
        self._next_listening = 0.0
        self.alive_due = 0.0
        self.full_due = 0.0

    def called(self, enough: bool) -> bool:
        """Whether there have been enough nodes for as long as the last call takes."""
        if not enough:
            self._enough_since = None
            return False
        self._enough_since = self._enough_since or time.monotonic()
        return time.monotonic() - self._enough_since >= self._patience.last_call

    def begin(self) -> None:
        """Start the clock of the round again."""
        self._since = time.monotonic()

    def unheard(self, nodes: list[str], pulses: Callable[[list[str]], list[bytes]]) -> bool:
        """Whether one of ``nodes`` has given no sign of life since we wait: it may have died while it waited."""
        unknown = [node for node in nodes if node not in self._heard]
        if not unknown or time.monotonic() < self._next_listening:
            return bool(unknown)
        self._next_listening = time.monotonic() + _LOOK_S + len(unknown) / 500
        for node, value in zip(unknown, pulses(unknown), strict=True):
            if self._first.setdefault(node, value) != value:
                self._heard.add(node)
        return any(node not in self._heard for node in unknown)

    def since(self) -> float:
        """For how long we have waited."""
        return time.monotonic() - self._since

    def over(self) -> bool:
        """Whether the round took too long."""
        return self.since() > self._patience.join

    def silent(
        self, people: Mapping[str, Member], me: str, pulses: Callable[[list[str]], list[bytes]], limit: float
    ) -> list[str]:
        """Return who has given no sign of life for too long; asks once a second."""
        now = time.monotonic()
        if now < self._next_roll_call:
            return []
        self._next_roll_call = now + 1.0 + len(people) / 500
        others = [node for node in people if node != me]
        for node, value in zip(others, pulses(others), strict=True):
            if node not in self._seen or self._seen[node][0] != value:
                self._seen[node] = (value, now)
        return [node for node in others if now - self._seen[node][1] > limit]


def _names(people: Mapping[str, Member], ids: list[str]) -> str:
    return ", ".join(people[node].name for node in ids)
