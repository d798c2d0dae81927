"""Judgements: what a node fails by itself is its own fault; what all fail is nobody's; figures stand behind every word."""

from __future__ import annotations

import dataclasses
import json

import pytest

from resilience.nodecheck.judging import Alone, Ruling, as_table, judge, own_fault, slow_alone, sound
from resilience.nodecheck.pairing import FAULTY, HEALTHY, STRAGGLER, UNDECIDED, USUAL, VANISHED, Evidence, Trial

FINE = Alone("", "nvidia", 8, False, "8 × H100", 0.1, 400.0, wanted=8)
GOOD = [Trial((0, 1), True, 0.2), Trial((2, 3), True, 0.2)]


def ruling(told: dict[int, Alone], trials: list[Trial] = GOOD, nodes: int = 4) -> Ruling:
    return judge(nodes, told, Evidence(sound(told), trials), 1)


def four(**changes: Alone) -> dict[int, Alone]:
    return {node: changes.get(f"n{node}", FINE) for node in range(4)}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (Alone("the GEMM did not end within 60 s"), "did not end"),
        (Alone("", "nvidia", 0), "no device of the kind 'nvidia'"),
        (Alone("", "nvidia", 7, seconds=0.1, wanted=8), "it has 7 devices of the kind 'nvidia', its workers need 8"),
        (Alone("", "cpu", 1, True, "cpu", 0.1), "where other nodes have nvidia"),
        (Alone("", "nvidia", 8, seconds=0.1, faults=("the disk is full",)), "the disk is full"),
    ],
)
def test_what_is_wrong_with_a_node_by_itself_makes_it_faulty(told: Alone, words: str) -> None:
    found = ruling(four(n2=told), [Trial((0, 1, 3), True, 0.2)])
    assert [item.state for item in found.judgements] == [HEALTHY, HEALTHY, FAULTY, HEALTHY]
    assert words in found.judgements[2].why
    assert found.mark


def test_accelerator_of_ones_own_on_the_hosts_processors_that_counts_devices_must_have_enough() -> None:
    told = {0: Alone("", "xxxx", 2, host_only=True, seconds=0.1, wanted=3)}
    assert own_fault(0, told) == "it has 2 devices of the kind 'xxxx', its workers need 3"
    assert own_fault(0, {0: dataclasses.replace(told[0], wanted=2)}) == ""


def test_workers_without_devices_need_none() -> None:
    told = {0: Alone("", "cpu", 1, True, "cpu", 0.1, wanted=8)}
    assert own_fault(0, told) == ""


def test_each_node_is_measured_by_what_its_own_workers_need() -> None:
    two_of_two = Alone("", "nvidia", 2, seconds=0.1, wanted=2)
    two_of_three = Alone("", "nvidia", 2, seconds=0.1, wanted=3)
    assert [own_fault(node, {0: FINE, 1: two_of_two, 2: two_of_three}) for node in range(3)] == [
        "",
        "",
        "it has 2 devices of the kind 'nvidia', its workers need 3",
    ]


def test_where_every_node_fails_by_itself_nobody_is_marked() -> None:
    found = ruling({node: Alone("TypeError: use() takes 1 argument") for node in range(4)}, [])
    assert len(found.those(FAULTY)) == 4
    assert not found.mark
    assert "every node fails by itself" in found.note


def test_lone_node_that_fails_is_marked() -> None:
    assert ruling({0: Alone("broken")}, [], nodes=1).mark


def test_node_with_a_slow_gemm_is_a_straggler_with_the_figures() -> None:
    slow = Alone("", "nvidia", 8, False, "8 × H100", 0.31, 130.0)
    told = four(n1=slow)
    assert slow_alone(told, USUAL) == {1}
    found = ruling(told)
    assert found.judgements[1].state == STRAGGLER
    assert found.judgements[1].why == "its GEMM takes 0.31 s, 3.1 times the median of 0.1 s"
    assert found.unfit(exclude_straggler=False) == ()
    assert found.unfit(exclude_straggler=True) == (found.judgements[1],)


def test_node_with_a_slow_network_is_a_straggler_with_the_figures() -> None:
    trials = [*GOOD[:1], Trial((2, 3), True, 2.0), Trial((2, 0), True, 0.2), Trial((3, 1), True, 2.0)]
    found = ruling(four(), trials)
    assert [item.state for item in found.judgements] == [HEALTHY, HEALTHY, HEALTHY, STRAGGLER]
    assert "its all-gather takes 2 s" in found.judgements[3].why
    assert "10.0 times the median" in found.judgements[3].why


def test_node_that_never_said_a_word_has_vanished() -> None:
    told = four()
    del told[3]
    assert ruling(told, [Trial((0, 1, 2), True, 0.2)]).judgements[3].state == VANISHED


def test_two_nodes_whose_pair_fails_are_undecided_and_unmarked() -> None:
    told = {0: FINE, 1: FINE}
    found = ruling(told, [Trial((0, 1), False), Trial((0, 1), False)], nodes=2)
    assert len(found.those(UNDECIDED)) == 2
    assert found.unfit(exclude_straggler=True) == ()
    assert "a third one would tell" in found.note


def test_clock_that_is_off_is_worth_a_word_and_no_more() -> None:
    found = ruling(four(n3=Alone("", "nvidia", 8, False, "8 × H100", 0.1, 400.0, ahead_s=-4.2)))
    assert found.judgements[3].state == HEALTHY
    assert found.judgements[3].warnings == ("its clock is 4.2 s behind the others'",)


def test_ruling_and_what_a_node_tells_cross_the_board_as_json() -> None:
    told = Alone("", "cpu", 1, True, "cpu", 0.1, 5.0, {"a": 1.0}, ("x",), ("y",), 0.5)
    assert Alone.from_json(json.loads(json.dumps(told.as_json()))) == told
    found = ruling(four(n1=Alone("broken")), [Trial((0, 2, 3), True, 0.2)])
    assert Ruling.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_table_has_a_line_for_each_node_and_says_why() -> None:
    text = as_table(ruling(four(n1=Alone("broken")), [Trial((0, 2, 3), True, 0.2)]), ["a", "b", "c", "d"]).splitlines()
    assert text[0].split()[:2] == ["node", "verdict"]
    assert text[1].split()[:2] == ["a", "healthy"]
    assert "100.00 ms" in text[1]
    assert text[2].split()[:2] == ["b", "faulty"]
    assert text[-1] == "b: broken"


def test_table_of_many_nodes_shows_those_that_are_not_healthy() -> None:
    told = {node: FINE if node != 700 else Alone("broken") for node in range(1000)}
    trials = [Trial((node, node + 1), True, 0.2) for node in range(0, 1000, 2) if node != 700] + [
        Trial((701, 0), True, 0.2)
    ]
    text = as_table(ruling(told, trials, nodes=1000), [f"n{node}" for node in range(1000)])
    assert len(text.splitlines()) < 10
    assert "n700: broken" in text
    assert "and 999 healthy nodes, GEMM 100.00 ms (median), 100.00 ms (slowest)" in text
