"""How the nodes check each other: a few keys on a board that all of them read.

1) ``hello/<node>``       (all) whether it has just passed a check
2) ``start``              (node 0) whether there is anything to check
3) ``alone/<node>``       (all) what its own devices and its host are like
4) ``step/<n>``           (node 0) who is tried together next, or the ruling: then it is over
5) ``meet/<n>/<node>``    (the first of a group) where the group's store is
6) ``trial/<n>/<node>``   (those in a group) how it went; back to 4)

Node 0 decides, by pure functions (:mod:`judging`, :mod:`pairing`); all nodes read one ruling. Every wait has a deadline and ends
early for a node that is known to be lost.

Hazard: a node that waits for its group waits for others' devices. It stops as soon as one of them says that it failed.
"""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from resilience.nodecheck.crew import LOAD_S, Broken, Crew, Reminder, harmless, titles
from resilience.nodecheck.judging import ODD, Alone, Judgement, Ruling, fitting, judge, slow_alone, sound
from resilience.nodecheck.pairing import (
    HEALTHY,
    MOST_ROUNDS,
    USUAL,
    Evidence,
    Group,
    Rule,
    Trial,
    first,
    following,
)

_LOOK_S = 0.02
_PER_NODE_S = 1 / 5000  # a thousand nodes look five times a second
_GREET_S = 30.0
_MARGIN_S = 10.0
_GRACE_S = 0.5
_SHOWN = 8
_Told = TypeVar("_Told")


class Board(Protocol):
    """Where the nodes write and read."""

    def post(self, key: str, text: str) -> None:
        """Write a key for the other nodes, and for ourselves."""

    def peek(self, key: str) -> str | None:
        """Read a key, if it is there."""

    def lost_nodes(self) -> Mapping[int, str]:
        """Return the nodes that are known to be gone, with a sentence each."""


class Interrupted(Exception):  # noqa: N818 - reads as what it is
    """The check can't go on: node 0 is gone, or the board is."""


@dataclass(frozen=True)
class Terms:
    """What is checked, and how long it may take. ``folder`` is the run's, ``address`` where other nodes reach this one."""

    folder: str
    address: str
    wanted: int  # devices that the node's workers need
    timeout: float
    rule: Rule = USUAL

    @property
    def limit(self) -> float:
        """How long a check may take at most, all in."""
        return _GREET_S + (MOST_ROUNDS + 1) * (self.patience + 2 * _MARGIN_S)

    @property
    def patience(self) -> float:
        """How long one step may take: its processes load, perhaps anew, and do a GEMM, open a store, gather."""
        return LOAD_S + 4 * self.timeout + _MARGIN_S


class Examination:
    """One check, as one node takes part in it."""

    def __init__(self, board: Board, me: int, names: Sequence[str], *, crew: Crew, terms: Terms) -> None:
        self._board = board
        self._me = me
        self._names = names
        self._nodes = len(names)
        self._crew = crew
        self._terms = terms
        self._ahead_s = 0.0  # our clock less node 0's
        self._told: dict[int, Alone] = {}
        self._trials: list[Trial] = []
        self._vanished: set[int] = set()
        self._groups: tuple[Group, ...] = ()

    def run(self, fit: bool = False) -> Ruling:
        """Take part to the end; return the ruling, the same on all nodes. ``fit``: this node has passed just now."""
        self._post(f"hello/{self._me}", {"fit": fit})
        if self._me == 0:
            self._post("start", {"check": self._anybody_new(), "clock_s": time.time()})
        start = self._await("start", _GREET_S + _MARGIN_S)
        try:
            self._ahead_s = time.time() - float(start["clock_s"])  # too large by the way of one message
            check = bool(start["check"])
        except ODD as error:
            raise Interrupted(f"what node 0 said can't be read ({type(error).__name__}: {error})") from error
        if not check:
            return Ruling(tuple(Judgement(node, HEALTHY) for node in range(self._nodes)), skipped=True)
        mine = self._alone()
        self._post(f"alone/{self._me}", mine.as_json())
        patience = self._terms.patience
        for number in range(1, MOST_ROUNDS + 2):
            if self._me == 0:
                self._lead(number, patience)
            order = self._await(f"step/{number}", patience + _MARGIN_S)
            try:
                if "ruling" in order:
                    return Ruling.from_json(order["ruling"])
                groups = [tuple(map(int, group)) for group in order["groups"]]
                devices = {int(node): int(count) for node, count in order["devices"].items()}
                again = self._me in order["again"]
            except ODD as error:
                raise Interrupted(f"what node 0 said can't be read ({type(error).__name__}: {error})") from error
            group = next((it for it in groups if self._me in it), None)
            if group is not None:
                self._take_part(number, group, devices, mine if again else None)
        raise Interrupted("the check did not come to an end")

    # -- node 0 -----------------------------------------------------------------------------------------------------

    def _anybody_new(self) -> bool:
        heard = self._collect("hello", range(self._nodes), _GREET_S, lambda it: bool(it["fit"]), lambda _: False)
        return not all(heard.values()) or len(heard) < self._nodes

    def _lead(self, number: int, patience: float) -> None:
        """Hear what the last step brought, and say what comes next."""
        terms, again = self._terms, []
        if number == 1:
            self._told = self._collect("alone", range(self._nodes), patience, Alone.from_json, Alone)
            groups = first(sound(self._told))
            again = sorted(slow_alone(self._told, fitting(self._told, terms.rule)))
        else:
            self._hear_trials(number - 1, patience)
            groups = following(self._evidence(), number - 1)
        self._groups = groups
        if groups:
            devices = {str(node): self._told[node].devices for group in groups for node in group}
            self._post(f"step/{number}", {"groups": groups, "again": again, "devices": devices})
            return
        ruling = judge(self._nodes, self._told, self._evidence(), number - 1)
        self._post(f"step/{number}", {"ruling": ruling.as_json()})

    def _evidence(self) -> Evidence:
        rule = fitting(self._told, self._terms.rule)
        return Evidence(sound(self._told), self._trials, self._vanished, rule)

    def _hear_trials(self, number: int, patience: float) -> None:
        members = [node for group in self._groups for node in group]
        heard = self._collect(f"trial/{number}", members, patience, _Tried.from_json, lambda odd: _Tried(why=odd))
        self._vanished |= set(members) - set(heard)
        for group in self._groups:
            said = [heard[node] for node in group if node in heard]
            passed = len(said) == len(group) and all(item.passed for item in said)
            words = tuple(heard[node].why if node in heard else "" for node in group)
            self._trials.append(Trial(group, passed, max((item.seconds for item in said), default=0.0), words))
        for node, item in heard.items():
            if item.alone is not None:
                self._told[node] = item.alone

    def _collect(
        self,
        what: str,
        nodes: Sequence[int],
        patience: float,
        read: Callable[[Any], _Told],
        odd: Callable[[str], _Told],
    ) -> dict[int, _Told]:
        """Return what the nodes wrote; without those that are lost, or do not write in time. What can't be ``read`` is that node's
        own doing: ``odd`` makes something of it, in words."""
        deadline = time.monotonic() + patience
        reminder = Reminder(deadline)
        found: dict[int, _Told] = {}
        missing = list(nodes)
        while missing and time.monotonic() < deadline:
            for node in list(missing):
                text = self._board.peek(_key(f"{what}/{node}"))
                if text is not None:
                    try:
                        found[node] = read(json.loads(text))
                    except ODD:
                        found[node] = odd(harmless(f"it told the others nonsense: {reprlib.repr(text)}"))
                    missing.remove(node)
            gone = set(self._board.lost_nodes())
            missing = [node for node in missing if node not in gone]
            if missing:
                reminder.say(self._called(missing))
                self._pause()
        return found

    # -- every node -------------------------------------------------------------------------------------------------

    def _alone(self) -> Alone:
        """Look at our own devices and host."""
        try:
            self._crew.load()
            answers = self._crew.alone(self._terms.folder, self._terms.timeout) if self._crew.devices else []
        except Broken as broken:
            return Alone(
                str(broken),
                self._crew.accelerator,
                self._crew.devices,
                ahead_s=self._ahead_s,
                wanted=self._terms.wanted,
            )
        host = answers[0]["host"] if answers else {"figures": {}, "faults": (), "warnings": ()}
        worst = max(answers, key=lambda item: float(item["seconds"]), default={"seconds": 0.0, "rate": 0.0})
        return Alone(
            "",
            self._crew.accelerator,
            self._crew.devices,
            self._crew.host_only,
            titles(answers),
            float(worst["seconds"]),
            float(worst["rate"]),
            host["figures"],
            tuple(host["faults"]),
            tuple(host["warnings"]),
            self._ahead_s,
            self._terms.wanted,
        )

    def _take_part(self, number: int, group: Group, devices: Mapping[int, int], again: Alone | None) -> None:
        """Try the group; ``again`` is what our devices did alone, if they are to do it once more before."""
        result: dict[str, Any] = {"passed": False, "seconds": 0.0, "why": ""}
        if again is not None:
            once_more = self._alone()
            better = once_more if once_more.error or once_more.seconds < again.seconds else again
            result["alone"] = better.as_json()
        try:
            result |= {"seconds": self._try_group(number, group, devices), "passed": True}
        except Broken as broken:
            result["why"] = str(broken)
        self._post(f"trial/{number}/{self._me}", result)

    def _try_group(self, number: int, group: Group, devices: Mapping[int, int]) -> float:
        """Take part in the collective of our group; return what it took."""
        timeout = self._terms.timeout
        give_up = self._watch(number, group)
        self._crew.load()
        if self._me == group[0]:
            port = self._crew.serve(timeout)
            self._post(f"meet/{number}/{self._me}", {"host": self._terms.address, "port": port})
        found = self._find(f"meet/{number}/{group[0]}", timeout + LOAD_S, give_up)
        try:
            place = (str(found["host"]), int(found["port"]))
        except ODD:
            raise Broken(f"node {group[0]} said nonsense of where its store is: {reprlib.repr(found)}") from None
        before = sum(devices[node] for node in group[: group.index(self._me)])
        world = sum(devices[node] for node in group)
        answers = self._crew.gather(
            place,
            f"step-{number}",
            first=before,
            world=world,
            timeout=timeout,
            give_up=give_up,
        )
        return max(float(item["seconds"]) for item in answers)

    def _watch(self, number: int, group: Group) -> Callable[[], str]:
        """Return what tells why there is no point in waiting for the group any longer, if there is none."""
        others = [node for node in group if node != self._me]
        due, since = [0.0], [0.0]

        def why() -> str:
            now = time.monotonic()
            if now < due[0]:
                return ""
            due[0] = now + 0.2
            for node in others:
                text = self._board.peek(_key(f"trial/{number}/{node}"))
                gone = node in self._board.lost_nodes()
                if gone or (text is not None and not _passed(text)):
                    since[0] = since[0] or now
                    # Our own device may be about to say what is wrong.
                    return (
                        f"node {node} of the group {'is gone' if gone else 'failed'}"
                        if now - since[0] > _GRACE_S
                        else ""
                    )
            return ""

        return why

    def _find(self, key: str, patience: float, give_up: Callable[[], str]) -> dict[str, Any]:
        """Wait for what the first node of our group says."""

        def look() -> None:
            why = give_up()
            if why:
                raise Broken(why)

        found = self._read(key, patience, "the first node of its group", look)
        if found is None:
            raise Broken("the first node of the group did not open a store in time")
        return found

    def _await(self, key: str, patience: float) -> dict[str, Any]:
        """Wait for what node 0 says."""

        def look() -> None:
            gone = self._board.lost_nodes().get(0)
            if gone is not None and self._me != 0:
                raise Interrupted(gone)

        whom = f"{self._called([0])}, which hears all nodes and says what is next"
        found = self._read(key, patience, whom, look)
        if found is None:
            raise Interrupted(f"node 0 did not say what is next ({key}) within {patience:g} s")
        return found

    def _read(self, key: str, patience: float, whom: str, look: Callable[[], None]) -> dict[str, Any] | None:
        """Wait for what somebody posts, or return nothing when it is too late; ``look`` raises if it will never come."""
        deadline = time.monotonic() + patience
        reminder = Reminder(deadline)
        while time.monotonic() < deadline:
            text = self._board.peek(_key(key))
            if text is not None:
                try:
                    found: Any = json.loads(text)
                except ODD:
                    found = None
                return found if isinstance(found, dict) else {}  # which nobody can read, either
            look()
            reminder.say(whom)
            self._pause()
        return None

    def _post(self, key: str, message: Mapping[str, Any]) -> None:
        self._board.post(_key(key), json.dumps(message))

    def _called(self, nodes: Sequence[int]) -> str:
        """Return what nodes are called, of many the first."""
        shown = ", ".join(f"node {node} ({self._names[node]})" for node in nodes[:_SHOWN])
        return shown + (f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else "")

    def _pause(self) -> None:
        time.sleep(_LOOK_S + self._nodes * _PER_NODE_S)


@dataclass(frozen=True)
class _Tried:
    """How a trial went, as one node of the group tells it. ``alone``: what its devices did alone meanwhile, if they did."""

    passed: bool = False
    seconds: float = 0.0
    why: str = ""
    alone: Alone | None = None

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> _Tried:
        alone = Alone.from_json(told["alone"]) if told.get("alone") else None
        return cls(bool(told["passed"]), float(told["seconds"]), str(told["why"]), alone)


def _passed(text: str) -> bool:
    try:
        return _Tried.from_json(json.loads(text)).passed
    except ODD:
        return False


def _key(key: str) -> str:
    return f"nodecheck/{key}"
