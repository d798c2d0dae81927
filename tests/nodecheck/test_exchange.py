"""The whole exchange between nodes, in threads, with crews that only say how it went: nodes fail, hang back and vanish."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from resilience.nodecheck import crew as crew_module
from resilience.nodecheck.crew import Answer, Broken, Crew
from resilience.nodecheck.exchange import Examination, Interrupted, Terms
from resilience.nodecheck.judging import Ruling, as_table
from resilience.nodecheck.pairing import FAULTY, HEALTHY, STRAGGLER, UNDECIDED, VANISHED

NAMES = [f"host-{node}" for node in range(8)]
TERMS = Terms(folder="/run", address="here", wanted=1, timeout=5.0)


class Shared:
    """One board for all nodes."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.gone: dict[int, str] = {}

    def post(self, key: str, text: str) -> None:
        self.keys[key] = text

    def peek(self, key: str) -> str | None:
        return self.keys.get(key)

    def lost_nodes(self) -> Mapping[int, str]:
        return dict(self.gone)


class Gone(Exception):  # noqa: N818 - reads as what it is
    """A launcher that is killed."""


@dataclass
class Script:
    """How a node behaves. ``dies``: what it is doing when its launcher is killed."""

    broken: str = ""
    seconds: float = 0.1
    cut_off: bool = False
    says: str = "no route to host"
    gathers_in: float = 0.2
    dies: str = ""
    hangs_for: float = 0.0
    later: float = 0.0  # its GEMM when it tries again, if another
    later_broken: str = ""
    devices: int = 1
    wanted: int = 1
    real_devices: bool = False  # and not the host's processors
    log: list[str] = field(default_factory=list)


class Actor:
    """A crew that plays its script. Groups meet on the board itself."""

    accelerator = "cpu"

    def __init__(self, script: Script, me: int, board: Shared) -> None:
        self.script, self.me, self.board = script, me, board
        self.devices = script.devices
        self.host_only = not script.real_devices

    def load(self, timeout: float = 0.0) -> None:
        if self.script.broken == "does not load":
            raise Broken("it does not load")

    def alone(self, folder: str, timeout: float) -> list[Answer]:
        self.script.log.append("alone")
        self._die("alone")
        threading.Event().wait(self.script.hangs_for)
        again = self.script.log.count("alone") > 1
        if broken := self.script.later_broken if again else self.script.broken:
            raise Broken(broken)
        seconds = self.script.later if self.script.later and len(self.script.log) > 1 else self.script.seconds
        host: dict[str, Any] = {"figures": {}, "faults": [], "warnings": []}
        return [{"device": "cpu", "seconds": seconds, "rate": 1.0, "host": host}]

    def serve(self, timeout: float) -> int:
        return 1

    def gather(
        self, address: tuple[str, int], tag: str, *, first: int, world: int, timeout: float, give_up: Callable[[], str]
    ) -> list[Answer]:
        self.script.log.append("gather")
        self._die("gather")
        if self.script.cut_off:
            raise Broken(self.script.says)
        key = f"group/{tag}/{address[0]}"
        for rank in range(first, first + self.devices):
            self.board.keys[f"{key}/{rank}"] = str(self.script.gathers_in)
        while True:  # until everybody is there, as a collective
            there = [text for name, text in list(self.board.keys.items()) if name.startswith(f"{key}/")]
            if len(there) == world:
                return [{"seconds": max(map(float, there))}]
            why = give_up()
            if why:
                raise Broken(why)
            threading.Event().wait(0.01)

    def _die(self, doing: str) -> None:
        if self.script.dies == doing:
            self.board.gone[self.me] = "its launcher was killed"
            raise Gone


def check(
    *scripts: Script, fit: tuple[bool, ...] = (), board: Shared | None = None
) -> tuple[list[Ruling | Exception], Shared]:
    """Have all nodes check each other; return what each of them has in the end."""
    board = board or Shared()
    results: list[Any] = [None] * len(scripts)

    def node(me: int) -> None:
        crew = cast(Crew, Actor(scripts[me], me, board))
        terms = Terms(TERMS.folder, f"here-{me}", scripts[me].wanted, TERMS.timeout)
        try:
            results[me] = Examination(board, me, NAMES[: len(scripts)], crew=crew, terms=terms).run(
                bool(fit and fit[me])
            )
        except (Interrupted, Gone) as error:
            results[me] = error

    threads = [threading.Thread(target=node, args=(me,)) for me in range(len(scripts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results, board


def states(results: list[Ruling | Exception]) -> list[str]:
    """What all nodes that got to the end think of everybody; they must think the same."""
    rulings = [it for it in results if isinstance(it, Ruling)]
    assert rulings
    assert all(it == rulings[0] for it in rulings)
    return [item.state for item in rulings[0].judgements]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_healthy_nodes_all_read_the_same_ruling(count: int) -> None:
    results, _ = check(*(Script() for _ in range(count)))
    assert len(results) == count
    assert states(results) == [HEALTHY] * count


@pytest.mark.parametrize("first", [1, 4])
def test_nodes_with_different_numbers_of_workers_are_all_healthy(first: int) -> None:
    results, _ = check(*(Script(devices=count, wanted=count, real_devices=True) for count in (first, 2, 1)))
    assert states(results) == [HEALTHY] * 3


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("how", ["does not load", "the GEMM did not end within 60 s"])
def test_node_that_fails_by_itself_is_faulty_and_tried_with_nobody(bad: int, how: str) -> None:
    scripts = [Script(broken=how if node == bad else "") for node in range(3)]
    results, _ = check(*scripts)
    assert states(results) == [FAULTY if node == bad else HEALTHY for node in range(3)]
    assert "gather" not in scripts[bad].log


@pytest.mark.parametrize("bad", [0, pytest.param(1, marks=pytest.mark.rare), pytest.param(2, marks=pytest.mark.rare)])
def test_of_three_nodes_the_one_that_is_cut_off_is_found(bad: int) -> None:
    results, _ = check(*(Script(cut_off=node == bad) for node in range(3)))
    assert states(results) == [FAULTY if node == bad else HEALTHY for node in range(3)]


def test_why_an_all_gather_failed_is_in_the_verdict_in_one_harmless_line() -> None:
    says = "RuntimeError: no \x1b[31mroute\nto host \udcff" + 5000 * "x"
    results, _ = check(Script(), Script(), Script(cut_off=True, says=says))
    assert states(results) == [HEALTHY, HEALTHY, FAULTY]
    (ruling, *_) = results
    assert isinstance(ruling, Ruling)
    why = ruling.judgements[2].why
    assert "with nodes that get through to others: RuntimeError: no ?[31mroute to host ?xxx" in why
    assert why in as_table(ruling, ["a", "b", "c"])
    assert why.isprintable()
    assert len(why) < 1000


def test_two_nodes_that_do_not_get_through_are_undecided() -> None:
    results, _ = check(Script(), Script(cut_off=True))
    assert states(results) == [UNDECIDED, UNDECIDED]


def test_slow_node_tries_once_more_and_may_do_better() -> None:
    once, always = Script(seconds=1.0, later=0.1), Script(seconds=1.0)
    results, _ = check(Script(), once, always, Script(), Script())
    assert states(results) == [HEALTHY, HEALTHY, STRAGGLER, HEALTHY, HEALTHY]
    assert once.log.count("alone") == always.log.count("alone") == 2


def test_slow_node_that_fails_when_it_tries_once_more_is_faulty_and_its_partner_is_not() -> None:
    results, _ = check(Script(), Script(), Script(), Script(seconds=1.0, later_broken="the product is wrong"), Script())
    assert states(results) == [HEALTHY, HEALTHY, HEALTHY, FAULTY, HEALTHY]


@pytest.mark.parametrize("real", [True, False])
def test_milliseconds_make_a_straggler_of_an_accelerator_and_not_of_a_host(real: bool) -> None:
    quick = [Script(seconds=0.004, gathers_in=0.004, real_devices=real) for _ in range(4)]
    slow = Script(seconds=0.012, gathers_in=0.004, real_devices=real)
    results, _ = check(*quick, slow)
    assert states(results) == [HEALTHY] * 4 + [STRAGGLER if real else HEALTHY]


def test_node_with_a_slow_network_is_told_from_its_partner() -> None:
    results, _ = check(Script(), Script(), Script(), Script(gathers_in=3.0))
    assert states(results) == [HEALTHY, HEALTHY, HEALTHY, STRAGGLER]


@pytest.mark.parametrize("doing", ["alone", "gather"])
def test_node_that_vanishes_in_between_holds_nobody_up(doing: str) -> None:
    results, _ = check(Script(), Script(), Script(), Script(dies=doing))
    assert isinstance(results[3], Gone)
    assert states(results) == [HEALTHY, HEALTHY, HEALTHY, VANISHED]


def test_nodes_say_for_whom_they_wait_and_how_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("resilience"), "propagate", True)
    monkeypatch.setattr(crew_module, "REMIND_S", 0.05)
    caplog.set_level(logging.INFO, "resilience")
    results, _ = check(Script(), Script(), Script(), Script(hangs_for=1.0))
    assert states(results) == [HEALTHY] * 4
    assert re.search(r"the node check waits for node 3 \(host-3\), \d+ s more at most", caplog.text)
    assert "waits for node 0 (host-0), which hears all nodes" in caplog.text


@pytest.mark.parametrize("doing", ["alone", "gather"])
def test_without_node_0_the_others_stop_and_come_together_again(doing: str) -> None:
    results, _ = check(Script(dies=doing), Script(), Script())
    assert [type(it) for it in results] == [Gone, Interrupted, Interrupted]


def test_nodes_that_all_passed_just_now_are_not_checked_again() -> None:
    scripts = [Script(), Script()]
    results, _ = check(*scripts, fit=(True, True))
    assert states(results) == [HEALTHY, HEALTHY]
    assert all(isinstance(it, Ruling) and it.skipped for it in results)
    assert not any(script.log for script in scripts)


def test_newcomer_has_everybody_checked() -> None:
    results, _ = check(Script(), Script(), Script(broken="it is broken"), fit=(True, True, False))
    assert states(results) == [HEALTHY, HEALTHY, FAULTY]


def test_board_holds_plain_json() -> None:
    _, board = check(Script(), Script())
    told = {key: text for key, text in board.keys.items() if key.startswith("nodecheck/")}
    assert {key.split("/")[1] for key in told} == {"hello", "start", "alone", "step", "meet", "trial"}
    assert all(isinstance(json.loads(text), dict) for text in told.values())


class Garbling(Shared):
    """A board on which one word is nonsense."""

    def __init__(self, key: str, nonsense: str) -> None:
        super().__init__()
        self.key, self.nonsense = key, nonsense

    def post(self, key: str, text: str) -> None:
        super().post(key, self.nonsense if key == self.key else text)


GARBLED = ["", "{", "[]", "null", "3", "{}", '{"seconds": "many"}', "[" * 100_000]


@pytest.mark.parametrize("text", GARBLED)
@pytest.mark.parametrize("what", ["hello", "alone"])
def test_node_that_writes_nonsense_is_faulty_and_costs_the_others_nothing(what: str, text: str) -> None:
    results, _ = check(Script(), Script(), Script(), board=Garbling(f"nodecheck/{what}/2", text))
    assert states(results) == [HEALTHY, HEALTHY, FAULTY if what == "alone" else HEALTHY]
    if what == "alone":
        assert "it told the others nonsense" in as_table(next(it for it in results if isinstance(it, Ruling)), NAMES)


@pytest.mark.parametrize("text", GARBLED)
@pytest.mark.parametrize("key", ["start", "step/1"])
def test_nonsense_of_node_0_interrupts_the_others(key: str, text: str) -> None:
    results, _ = check(Script(), Script(), board=Garbling(f"nodecheck/{key}", text))
    assert all(isinstance(it, Interrupted) for it in results), results
    assert "what node 0 said can't be read" in str(results[1])
