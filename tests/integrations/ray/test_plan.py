"""What a job on Ray does when something happens to it: a simulated cluster, and no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from resilience.integrations.ray.claims import PINNED_S, made
from resilience.integrations.ray.layout import Node
from resilience.integrations.ray.plan import HEALTHY_S, Rules, Seen, decide
from resilience.integrations.ray.state import KEPT_LINES, Phase, State, news, noted, recalled

from tests.integrations.ray.world import LABEL, running, world


def test_nothing_starts_before_all_nodes_have_room() -> None:
    it = world("aab", 4, None)
    assert it.run(5).phase is Phase.GATHERING
    assert it.state.launches == 0
    it.nodes["late"] = "b"
    assert it.run(3).phase is Phase.RUNNING
    assert it.running() == [True] * 4


@pytest.mark.parametrize(("nodes", "said"), [(1, "1 node has room"), (2, "2 nodes have room")])
def test_nodes_that_have_room_are_counted_in_words(nodes: int, said: str) -> None:
    it = world("aa", nodes, None)
    it.run(5)
    assert any(said in line for line in it.state.lines)


def test_too_few_nodes_in_any_group_are_said_and_waited_for() -> None:
    it = world("aab", 4)
    it.run(5)
    assert "it waits" in it.state.reason
    it.nodes["late"] = "b"
    assert it.run(3).phase is Phase.RUNNING


def test_job_with_groups_that_waits_has_a_claim_for_every_node_that_it_lacks() -> None:
    """Otherwise no autoscaler would know. Those that stand when all are there are kept, and the ranks are contiguous."""
    it = world("b", 4)
    it.run(5)
    assert len(it.claims) == 4
    (kept,) = (claim for claim, seen in it.claims.items() if seen.node)
    it.nodes |= {"m1": "a", "m2": "b", "m3": "a"}
    assert it.run(3).phase is Phase.RUNNING
    assert it.racks() == ["a", "a", "b", "b"]
    assert kept in it.claims
    assert it.running() == [True] * 4


def test_node_without_the_label_that_came_for_a_job_with_groups_is_given_back() -> None:
    it = world("aa", 4)
    it.run(3)
    it.nodes |= {"m1": "", "m2": ""}
    it.run(5)
    assert it.state.phase is Phase.GATHERING
    assert not {"m1", "m2"} & {seen.node for seen in it.claims.values()}
    it.nodes |= {"m3": "b", "m4": "b"}
    assert it.run(3).phase is Phase.RUNNING
    assert it.racks() == ["a", "a", "b", "b"]


def test_nodes_that_are_enough_but_not_in_their_groups_are_waited_for_and_left_to_others() -> None:
    it = world("aab", 4, size=2)
    it.run(3)
    assert len(it.claims) == 4
    it.nodes["other"] = "c"
    it.run(3)
    assert not any(it.claims for _ in range(300) if it.tick(0.5))
    assert "it waits" in it.state.reason
    it.nodes["late"] = "c"
    it.run(3)
    assert it.racks() == ["a", "a", "c", "c"]
    assert it.running() == [True] * 4


def test_job_that_waits_in_vain_starts_with_fewer_nodes_where_they_are_enough() -> None:
    it = world("aaa", 4, None)
    it.rules = replace(it.rules, min_nodes=3)
    assert it.run(110).phase is Phase.GATHERING
    assert it.run(15).phase is Phase.RUNNING
    assert it.running() == [True, True, True, False]
    assert "3 of 4 nodes have room, and 3 are enough" in it.state.lines[-1]
    it.nodes["late"] = "a"
    it.run(15)
    assert it.running() == [True] * 4


def test_job_whose_free_node_is_never_given_starts_with_fewer_nodes_where_they_are_enough() -> None:
    it = world("aaa", 3, None)
    it.rules = replace(it.rules, min_nodes=2)
    it.slow = {"n2a"}
    assert it.run(110).phase is Phase.GATHERING
    assert it.run(40).phase is Phase.RUNNING
    assert it.run(15).slots[2].node == ""
    assert it.running() == [True, True, False]
    it.slow = set()
    it.run(15)
    assert it.running() == [True] * 3


def test_job_is_done_when_the_nodes_that_were_enough_have_done_its_work() -> None:
    it = running("aaaa", 4, None)
    it.rules = replace(it.rules, min_nodes=3)
    it.kill_node(it.node(1))
    it.run(5)
    it.end(0, 0, 2)
    assert it.run(2).phase is Phase.RUNNING
    it.end(0, 3)
    it.run(2)
    assert not it.state.phase.over  # the launcher of the lost node may still run
    assert it.run(60).phase is Phase.SUCCEEDED
    assert it.state.launches == 4


def test_job_that_needs_all_nodes_is_not_done_without_one_of_them() -> None:
    it = running("aaaa", 4, None)
    it.kill_node(it.node(1))
    it.run(5)
    it.end(0, 0, 2, 3)
    assert it.run(5).phase is Phase.RUNNING


def test_node_lost_after_another_had_finished_is_not_waited_for_if_the_store_knows_that_the_job_had_too() -> None:
    it = running("aa", 2, None)
    it.end(0, 0)
    it.run(1)
    it.kill_node(it.node(1))
    it.run(3)
    assert it.running() == [True, False]  # it asks
    it.end(0, 0)
    assert it.run(60).phase is Phase.SUCCEEDED
    assert it.state.exit_code == 0
    assert "as its store knows" in it.state.reason


def test_node_lost_after_another_had_left_it_alone_has_both_train_on_once_there_is_one() -> None:
    """Whoever waited long enough for the others ends with 0, though they are not done."""
    it = running("aa", 2, None)
    it.end(0, 0)
    it.run(1)
    it.kill_node(it.node(1))
    it.run(600, step=5)
    it.end(75, 0)
    it.run(20)
    assert (it.running(), it.state.failures) == ([False, False], 0)
    it.nodes["late"] = "a"
    it.run(20)
    assert it.running() == [True, True]
    it.end(0)
    assert it.run(60).phase is Phase.SUCCEEDED


def test_group_of_one_whose_node_died_after_it_had_finished_moves_when_it_is_needed_again() -> None:
    it = running("aabbcc", 4)
    assert it.racks() == ["a", "a", "b", "b"]
    it.end(0, 0)
    it.run(1)
    it.kill_node(it.node(0))
    it.run(400, step=5)
    assert it.racks() == ["", "a", "b", "b"], "it has finished, and nobody misses it"
    it.end(0, 1)
    it.kill_actor(2)
    it.end(75, 3)
    it.run(600, step=5)
    assert it.racks() == ["c", "c", "b", "b"], it.state.lines


@pytest.mark.parametrize("code", [75, -9])
def test_store_and_launcher_lost_after_another_had_finished_form_again_with_it(code: int) -> None:
    it = running("aaa", 3, None)
    it.end(0, 0)
    it.run(1)
    it.lose_store()
    it.run(1)
    it.end(code, 1)
    it.run(10)
    it.end(0, 2)  # and so does one that finishes in the old round
    it.run(10)
    assert (it.running(), {slot.round for slot in it.state.slots}) == ([True] * 3, {2})
    it.end(0)
    assert it.run(1).phase is Phase.SUCCEEDED


def test_launcher_killed_when_enough_others_have_finished_is_not_started_again() -> None:
    it = running("aaaa", 4, None)
    it.rules = replace(it.rules, min_nodes=3)
    it.end(0, 0, 1, 2)
    it.tick()
    it.end(-9, 3)
    assert it.run(5).phase is Phase.SUCCEEDED
    assert it.state.launches == 4


def test_launcher_that_hangs_when_all_others_have_finished_is_ended_and_the_next_one_asks() -> None:
    it = running("aaaa", 4, None)
    it.end(0, 0, 1, 2)
    it.run(120)
    assert "the launcher of node 3 will be ended" in it.state.reason
    it.run(1670, step=5)
    assert it.state.launches == 4, "it may be writing"
    it.run(30)
    assert (it.state.launches, it.running()) == (5, [False] * 3 + [True])
    assert it.state.failures == 0
    it.run(1900, step=5)  # it hangs too
    assert (it.state.launches, it.running()) == (6, [False] * 3 + [True])
    it.end(0, 3)
    assert it.run(5).phase is Phase.SUCCEEDED
    assert "as its store knows" in it.state.reason


def test_launcher_that_hangs_when_enough_others_have_finished_is_ended_and_the_job_is_done() -> None:
    it = running("aaaa", 4, None)
    it.rules = replace(it.rules, min_nodes=3)
    it.end(0, 0, 1, 2)
    assert it.run(1700, step=5).phase is Phase.RUNNING
    assert it.run(200, step=5).phase is Phase.SUCCEEDED


@pytest.mark.parametrize("code", [1, -15])
def test_launcher_on_a_drained_node_that_our_signal_ends_early_is_no_failure(code: int) -> None:
    it = running("aaa", 2, None)
    it.leaving.add(it.node(0))
    it.tick()
    it.end(code, 0)
    it.run(5)
    assert it.state.failures == 0


def test_actor_that_is_gone_after_its_launcher_had_finished_is_no_failure() -> None:
    it = running("aa", 2, None, failures=0)
    it.end(0, 0)
    it.tick()
    claim = it.state.slots[0].claim
    it.claims[claim] = replace(it.claims[claim], life="", gone="killed")
    it.run(3)
    assert (it.state.phase, it.state.failures) == (Phase.RUNNING, 0)
    it.end(0, 1)
    assert it.run(1).phase is Phase.SUCCEEDED


class CountedLabels(dict[str, str]):
    """Labels of nodes that count how often they are read."""

    reads = 0

    def get(self, *args: object) -> str | None:  # type: ignore[override]
        CountedLabels.reads += 1
        return super().get(*args)  # type: ignore[call-overload]


def waits_for_half(nodes: int, label: str | None) -> tuple[int, int]:
    """Return how often labels are read, and how long the state is, where half of the nodes are there: at first, and when claims
    that Ray has not placed are looked at again."""
    there = tuple(Node(f"{i:056x}", "", CountedLabels({"kind": "x", LABEL: "ab"[i % 2]})) for i in range(nodes // 2))
    rules = Rules("job", nodes, nodes, {"kind": "x"}, label)
    CountedLabels.reads = 0
    first = decide(rules, State(), Seen(there), 1000.0)
    assert sum(bool(slot.claim) for slot in first.slots) == nodes
    then = decide(rules, first, Seen(there), 1001.0 + PINNED_S)
    return CountedLabels.reads, len(first.as_text()) + len(then.as_text())


@pytest.mark.parametrize("label", [None, LABEL])
def test_waiting_for_twice_as_many_nodes_is_twice_the_work_and_twice_the_state(label: str | None) -> None:
    few, many = waits_for_half(200, label), waits_for_half(400, label)
    assert few[0] > 0
    assert many[0] < 3 * few[0]
    assert many[1] < 3 * few[1]


def test_claims_that_a_slow_supervisor_took_long_to_make_do_not_count_as_refused() -> None:
    it = world("aaa", 3, None)
    it.slow = {"n2a"}
    it.tick()
    claims = set(it.claims)
    it.now += 3 * PINNED_S
    it.state = made(it.state, claims, it.now)
    it.run(PINNED_S - 1)
    assert set(it.claims) == claims
    it.slow = set()
    assert it.run(2).phase is Phase.RUNNING
    assert set(it.claims) == claims


def test_job_that_waits_for_nodes_lets_others_have_them_now_and_then() -> None:
    it = world("aab", 4, None)
    it.run(5)
    assert len(it.claims) == 4
    given_back = [not it.claims for _ in range(300) if it.tick(0.5)]
    assert any(given_back)
    assert not all(given_back)


def test_node_that_is_drained_while_others_are_awaited_is_not_started_on() -> None:
    it = world("aa", 3, None)
    it.run(3)
    held = {seen.node for seen in it.claims.values()} - {""}
    assert len(held) == 2
    it.leaving = {min(held)}
    it.nodes["late"] = "a"
    it.run(5)
    assert (it.state.phase, it.state.launches) == (Phase.GATHERING, 0)
    it.nodes["later"] = "a"
    it.run(15)
    assert it.running() == [True] * 3
    assert not it.leaving & {it.node(rank) for rank in range(3)}


def test_nodes_that_somebody_else_took_are_not_insisted_on() -> None:
    it = world("aabb", 2)
    it.slow = {"n0a"}
    it.run(5)
    assert it.state.phase is Phase.GATHERING
    it.nodes = {"n2b": "b", "n3b": "b"}
    it.run(60)
    assert it.state.phase is Phase.RUNNING


def test_actor_that_died_gets_a_new_launch_where_it_was_and_the_others_none() -> None:
    it = running("aabb", 4)
    home = it.node(1)
    it.kill_actor(1)
    it.run(3)
    assert (it.node(1), it.state.launches, it.running()) == (home, 5, [True] * 4)


def test_lost_node_is_replaced_in_its_rack() -> None:
    it = running("aaabbb", 4)
    lost = it.node(3)
    it.kill_node(lost)
    it.run(5)
    assert it.racks() == ["a", "a", "b", "b"]
    assert lost not in [it.node(rank) for rank in range(4)]
    assert (it.running(), it.state.groups.moves) == ([True] * 4, 0)


def test_lost_node_waits_for_one_that_comes_before_the_threshold() -> None:
    it = running("aabbcc", 4)
    it.kill_node(it.node(3))
    it.run(290)
    assert it.running() == [True, True, True, False]
    it.nodes["late"] = "b"
    it.run(5)
    assert (it.node(3), it.state.groups.moves) == ("late", 0)
    it.run(600)
    assert it.state.groups.moves == 0


def test_group_moves_as_a_whole_at_the_threshold() -> None:
    it = running("aabbcc", 4, threshold=300)
    before = [it.node(0), it.node(1)]
    it.kill_node(it.node(2))
    it.run(298)
    assert it.state.groups.moves == 0
    it.run(10)
    assert it.racks() == ["a", "a", "c", "c"]
    assert [it.node(0), it.node(1)] == before
    assert (it.running(), it.state.launches) == ([True] * 4, 6)
    assert any("group 1 moves from RACK_ID=b to c" in line for line in it.state.lines)


def test_group_that_finds_no_room_elsewhere_stays_and_moves_when_there_is() -> None:
    it = running("aabbc", 4, threshold=100)
    it.kill_node(it.node(2))
    it.run(500)
    assert (it.state.groups.moves, it.running()) == (0, [True, True, False, True])
    assert sum("no other RACK_ID has room for 2" in line for line in it.state.lines) == 1
    it.nodes["late"] = "c"
    it.run(5)
    assert it.racks() == ["a", "a", "c", "c"]


def test_second_and_third_group_failover_are_handled_like_the_first() -> None:
    it = running("aabbccddee", 4, threshold=100)
    for moves, (rank, racks) in enumerate([(2, "aacc"), (2, "aadd"), (0, "eedd")], 1):
        for name in [name for name, rack in it.nodes.items() if rack == it.racks()[rank]][:1]:
            it.kill_node(name)
        it.run(110)
        assert (it.racks(), it.state.groups.moves, it.running()) == (list(racks), moves, [True] * 4)


def test_node_that_dies_while_its_group_moves_does_not_strand_the_group() -> None:
    it = running("aabbccdd", 4, threshold=100)
    it.kill_node(it.node(2))
    it.run(99)
    it.slow = {name for name, rack in it.nodes.items() if rack == "c"}
    it.run(120)
    it.nodes = {name: rack for name, rack in it.nodes.items() if rack != "c"}
    it.run(120)
    assert (it.racks(), it.running()) == (["a", "a", "d", "d"], [True] * 4)


@pytest.mark.parametrize("code", [14, 76, 80, 128, 201, 202])
def test_node_at_fault_is_left_and_not_used_again(code: int) -> None:
    it = running("aaa", 2, None)
    broken = it.node(1)
    it.end(code, 1)
    it.run(5)
    assert broken in it.state.excluded
    assert it.node(1) not in ("", broken)
    it.kill_node(it.node(1))
    it.run(20)
    assert it.node(1) == ""  # only the broken one is left, and it is not taken
    it.nodes["late"] = "a"
    it.run(5)
    assert it.node(1) == "late"


@pytest.mark.parametrize(("racks", "apart"), [("aa", 0.5), ("aa", 20), ("aaa", 0.5), ("aaa", 20)])
def test_check_that_fails_on_every_node_excludes_none_and_ends_the_job_with_words(racks: str, apart: float) -> None:
    it = running(racks, 2, None, failures=2)
    for number in (1, 2, 3):
        first = [slot.claim for slot in it.state.slots]
        for rank in (0, 1):
            if it.state.slots[rank].claim == first[rank]:
                it.end(80, rank)
                it.run(apart)
        it.run(30)
        if number < 3:
            assert (it.state.phase, it.state.excluded, it.running()) == (Phase.RUNNING, {}, [True, True]), (
                it.state.lines
            )
            assert it.state.failures == number
    it.run(40)
    assert (it.state.phase, it.state.excluded) == (Phase.FAILED, {})
    assert "the check fails on every node, so the check or the cluster is at fault" in it.state.reason


def test_nodes_that_fail_a_check_which_another_one_passed_are_excluded() -> None:
    it = running("aaaa", 3, None)
    broken = {it.node(0), it.node(1)}
    it.end(80, 0, 1)
    it.run(120)
    it.end(80, 2)  # a while later it is another check
    it.run(5)
    assert broken < set(it.state.excluded)
    assert len(it.state.excluded) == 3


def test_nodes_that_fail_a_check_which_another_one_could_not_finish_are_excluded() -> None:
    it = running("aaaa", 3, None)
    broken = {it.node(0), it.node(1)}
    it.end(80, 0)
    it.tick()
    it.end(75, 2)
    it.tick()
    it.end(80, 1)
    it.run(5)
    assert set(it.state.excluded) == broken


@pytest.mark.parametrize(("code", "phase"), [(1, "FAILED"), (2, "FAILED"), (77, "FAILED"), (78, "STOPPED")])
def test_code_that_says_the_jobs_outcome_ends_it_with_that(code: int, phase: str) -> None:
    it = running("aa", 2, None)
    it.end(code, 0)
    it.run(5)
    assert it.state.phase is Phase.ENDING
    assert it.running() == [False, True]  # the other has a moment to end by itself
    it.end(code, 1)
    it.run(1)
    assert (it.state.phase.value, it.state.exit_code, it.claims) == (phase, code, {})


def test_launcher_that_does_not_end_by_itself_is_not_waited_for_for_ever() -> None:
    it = running("aa", 2, None)
    it.end(77, 0)
    it.run(40)
    assert (it.state.phase, it.claims) == (Phase.FAILED, {})


def test_job_ends_when_the_last_launcher_has_finished() -> None:
    it = running("aa", 2, None)
    it.end(0, 0)
    it.run(30)
    assert it.state.phase is Phase.RUNNING
    it.kill_node(it.node(0))  # it has done its work
    it.run(5)
    assert (it.state.phase, it.state.launches) == (Phase.RUNNING, 2)
    it.end(0, 1)
    it.run(1)
    assert (it.state.phase, it.state.exit_code, it.claims) == (Phase.SUCCEEDED, 0, {})


def test_lost_store_has_everybody_form_again_with_another_and_counts_once() -> None:
    it = running("aabb", 4)
    it.lose_store()
    it.run(2)
    assert (it.state.round, it.state.launches) == (2, 4)  # they end by themselves
    it.end(75)
    it.run(5)
    assert (it.running(), it.state.launches, it.state.failures) == ([True] * 4, 8, 1)
    assert {slot.round for slot in it.state.slots} == {2}


def test_launcher_that_was_cut_off_is_started_again_in_the_same_round() -> None:
    it = running("aa", 2, None)
    it.end(75, 1)
    it.run(7)
    assert (it.state.round, it.running(), it.state.failures) == (1, [True, True], 1)


@pytest.mark.parametrize("apart", [0.5, 3, 15])
def test_store_that_hangs_is_replaced_once_all_launchers_were_cut_off(apart: float) -> None:
    it = running("aabb", 4)
    for rank in range(4):
        it.end(75, rank)
        it.run(apart)
    it.run(10)
    assert (it.state.round, it.running(), it.state.failures) == (2, [True] * 4, 1)
    assert {slot.round for slot in it.state.slots} == {2}
    assert any("another store" in line for line in it.state.lines)


@pytest.mark.parametrize(("nodes", "hung", "times"), [(2, {1}, 2), (4, {2}, 2), (4, {0, 3}, 2), (3, {0, 1}, 3)])
def test_launcher_that_hangs_is_ended_once_the_others_have_waited_for_it_again(
    nodes: int, hung: set[int], times: int
) -> None:
    it = running("a" * nodes, nodes, None)
    stuck = {it.state.slots[rank].launch for rank in hung}
    for number in range(1, times + 1):
        assert {it.state.slots[rank].launch for rank in hung} == stuck, number
        it.run(it.rules.join_s, step=5)
        for rank in sorted(set(range(nodes)) - hung):
            it.end(75, rank)
            it.run(1)
    it.run(10)
    assert (it.state.phase, it.state.round, it.running()) == (Phase.RUNNING, 2, [True] * nodes), it.state.lines
    assert not {slot.launch for slot in it.state.slots} & stuck
    ranks = ", ".join(map(str, sorted(hung)))
    assert any(f"{ranks}: held for hung and ended" in line for line in it.state.lines)


def test_launcher_that_hung_when_the_store_was_lost_is_ended_once_the_others_have_waited_for_it_again() -> None:
    it = running("aaa", 3, None)
    stuck = it.state.slots[1].launch
    it.lose_store()
    it.run(1)
    for number in range(3):  # of the round before, and twice in vain
        it.end(75, 0, 2)
        it.run(it.rules.join_s if number else 10, step=5)
    it.run(10)
    assert (it.state.phase, it.running()) == (Phase.RUNNING, [True] * 3), it.state.lines
    assert it.state.slots[1].launch > stuck
    assert {slot.round for slot in it.state.slots} == {it.state.round}
    assert any("the launcher of node 1: held for hung and ended" in line for line in it.state.lines)


def test_launcher_that_is_cut_off_twice_does_not_end_the_many_others() -> None:
    it = running("aaaa", 4, None)
    for _ in range(2):
        it.end(75, 2)
        it.run(60)
    assert (it.state.round, it.state.launches, it.running()) == (1, 6, [True] * 4)


def test_launcher_that_was_cut_off_in_hours_past_is_not_cut_off_again() -> None:
    it = running("aa", 2, None)
    for _ in range(3):
        it.end(75, 0)
        it.run(HEALTHY_S + it.rules.join_s + 60, step=10)
    assert (it.state.round, it.state.launches, it.running()) == (1, 5, [True, True])


def test_store_that_hangs_below_a_job_of_one_node_is_replaced() -> None:
    it = running("a", 1, None)
    it.end(75)
    it.run(3)
    assert (it.state.round, it.running()) == (2, [True])


def test_store_that_never_serves_is_replaced_and_ends_the_job_if_none_does() -> None:
    it = world("aa", 2, None, failures=2)
    it.store = False
    it.run(200)
    assert (it.state.phase, it.state.round) == (Phase.RUNNING, 2)
    assert it.run(400).phase is Phase.FAILED
    assert "did not serve within 180 s" in it.state.reason


def test_crash_loop_ends_the_job_and_says_so() -> None:
    it = running("aa", 2, None, failures=3)
    for _ in range(4):
        it.end(-9, 1)
        it.run(40)
    assert it.run(40).phase is Phase.FAILED
    assert "that is failure 4" in it.state.reason


@pytest.mark.parametrize("code", [-9, 75])
def test_incident_that_ends_all_launchers_of_a_large_job_is_one_failure(code: int) -> None:
    it = running("a" * 12, 12, None)
    for rank in range(12):  # not all at the same moment
        it.end(code, rank)
        it.run(2)
    it.run(40)
    assert (it.state.phase, it.running(), it.state.failures) == (Phase.RUNNING, [True] * 12, 1), it.state.lines


def test_all_actors_of_a_large_job_that_die_at_once_are_one_failure() -> None:
    it = running("a" * 12, 12, None)
    for rank in range(12):
        it.kill_actor(rank)
    it.run(5)
    assert (it.state.phase, it.running(), it.state.failures) == (Phase.RUNNING, [True] * 12, 1)


def test_launchers_of_a_large_job_that_all_keep_ending_are_a_crash_loop() -> None:
    it = running("a" * 12, 12, None, failures=3)
    for _ in range(4):
        it.end(-9)
        it.run(10)
    assert it.run(40).phase is Phase.FAILED
    assert "that is failure 4" in it.state.reason


def test_failures_far_apart_are_no_loop() -> None:
    it = running("aa", 2, None, failures=3)
    for _ in range(10):
        it.kill_actor(1)
        it.run(HEALTHY_S + 1, step=20)
    assert (it.state.phase, it.running()) == (Phase.RUNNING, [True, True])


def test_lost_nodes_are_no_loop_however_many() -> None:
    it = running("a" * 30, 2, None, failures=1)
    for _ in range(20):
        it.kill_node(it.node(1))
        it.run(2)
    assert it.running() == [True, True]


def test_launcher_that_waits_in_vain_for_a_lost_node_is_no_failure_however_often() -> None:
    it = running("aa", 2, None, failures=1)
    it.kill_node(it.node(1))
    for _ in range(5):
        it.run(20)
        if it.running()[0]:
            it.end(75, 0)
    assert (it.state.phase, it.state.failures, it.state.launches) == (Phase.RUNNING, 0, 2), it.state.lines
    it.nodes["late"] = "a"
    it.run(20)
    assert it.running() == [True, True]


def test_stop_asks_every_launcher_and_ends_when_all_have_left() -> None:
    it = running("aa", 2, None)
    it.stop = True
    it.run(2)
    assert it.asked_to_stop == {1, 2}
    assert it.state.phase is Phase.STOPPING
    it.end(79)
    it.run(1)
    assert (it.state.phase, it.state.exit_code, it.claims) == (Phase.STOPPED, 79, {})


def test_stop_that_is_not_heeded_ends_them_after_the_grace() -> None:
    it = running("aa", 2, None)
    it.stop = True
    it.end(79, 0)
    it.run(60)
    assert (it.state.phase, it.claims) == (Phase.STOPPED, {})
    assert "the launcher of node 1 was ended" in it.state.reason


def test_launcher_that_dies_with_its_actor_while_the_job_is_stopped_is_not_waited_for() -> None:
    it = running("aa", 2, None)
    it.stop = True
    it.run(2)
    it.kill_actor(0)
    it.end(79, 1)
    it.run(1)
    assert it.state.phase is Phase.STOPPED
    assert "that of node 0 ended with -9" in it.state.reason
    assert any("the actor of node 0 died, and its launcher with it" in line for line in it.state.lines)


def test_node_that_is_lost_while_the_job_is_stopped_is_named() -> None:
    it = running("aa", 2, None)
    it.stop = True
    it.run(2)
    it.kill_node(it.node(0))
    it.run(1)
    it.end(79, 1)
    it.run(180)
    assert it.state.phase is Phase.STOPPED
    assert "node 0 (127.0.0.1) was lost" in it.state.reason


def test_stop_has_the_grace_that_a_launcher_promised_though_the_supervisor_has_forgotten_it() -> None:
    it = running("aa", 2, None)
    it.grace_s = 150.0
    it.tick()
    it.stop = True
    it.run(5)
    it.grace_s = 0.0  # another life has heard nobody yet
    it.run(100)
    assert it.state.phase is Phase.STOPPING
    it.run(75)
    assert it.state.phase is Phase.STOPPED


def test_launcher_that_fails_while_the_job_is_stopped_is_told_of() -> None:
    it = running("aa", 2, None)
    it.stop = True
    it.run(2)
    it.end(1, 0)
    it.end(79, 1)
    it.run(1)
    assert (it.state.phase, it.state.reason) == (Phase.STOPPED, "a stop was asked for; that of node 0 ended with 1")
    assert any("the launcher of node 0 (127.0.0.1) ended with 1: failed" in line for line in it.state.lines)
    assert [slot.ended for slot in it.state.slots] == [1, 79]


def test_launcher_that_ended_before_the_stop_is_not_waited_for() -> None:
    it = running("aa", 2, None)
    it.end(-9, 0)
    it.tick()
    it.stop = True
    it.run(1)
    it.end(79, 1)
    it.run(2)
    assert (it.state.phase, it.claims) == (Phase.STOPPED, {})


@pytest.mark.parametrize("code", [79, 77])
def test_job_is_not_over_while_a_launcher_may_run_on_a_node_that_ray_gave_up(code: int) -> None:
    it = running("aa", 2, None)
    it.kill_node(it.node(1))
    it.run(2)
    it.stop = code == 79
    it.end(code, 0)
    it.run(45)
    assert not it.state.phase.over
    it.run(20)
    assert it.state.phase.over


def test_stop_while_nodes_are_awaited_gives_back_what_there_is() -> None:
    it = world("a", 2, None)
    it.run(2)
    it.stop = True
    it.run(1)
    assert (it.state.phase, it.claims) == (Phase.STOPPED, {})


def test_job_that_finishes_while_it_is_stopped_has_succeeded() -> None:
    it = running("aa", 2, None)
    it.stop = True
    it.run(1)
    it.end(0)
    assert it.run(1).phase is Phase.SUCCEEDED


def test_job_whose_driver_is_gone_ends() -> None:
    it = running("aa", 2, None)
    it.driver_gone = True
    it.run(1)
    it.end(79)
    it.run(1)
    assert (it.state.phase, it.state.reason) == (Phase.STOPPED, "the program that submitted it is gone")


def test_job_that_others_preempted_is_started_again_and_nothing_is_counted() -> None:
    it = running("aa", 2, None)
    it.end(79, 0)
    it.run(5)
    assert it.state.launches == 2  # the other one leaves too, any moment now
    it.end(79, 1)
    it.run(3)
    assert (it.state.round, it.running(), it.state.failures) == (2, [True, True], 0)


def test_launcher_that_was_preempted_alone_is_started_again_by_and_by() -> None:
    it = running("aa", 2, None)
    it.end(79, 0)
    it.run(60)
    assert (it.state.round, it.running()) == (1, [True, True])


def test_node_that_is_drained_is_left_at_an_agreed_step() -> None:
    it = running("aaa", 2, None)
    leaving, stays = it.node(1), it.node(0)
    it.leaving = {leaving}
    it.run(2)
    assert it.asked_to_stop == {2}
    it.end(79)
    it.run(5)
    assert (it.node(0), it.running()) == (stays, [True, True])
    assert it.node(1) not in (leaving, "")


@pytest.mark.parametrize("left", [False, True])
def test_actor_that_goes_with_its_drained_node_is_no_failure(left: bool) -> None:
    it = running("aaa", 2, None, failures=0)
    it.leaving = {it.node(1)}
    it.run(2)
    if left:
        it.end(79, 1)
        it.tick()
    claim = it.state.slots[1].claim
    it.claims[claim] = replace(it.claims[claim], life="", gone="the actor died because its node was preempted")
    it.run(5)
    assert (it.state.phase, it.state.failures) == (Phase.RUNNING, 0)
    it.kill_node(next(iter(it.leaving)))
    it.end(79, 0)
    it.run(60)
    assert (it.state.failures, it.running()) == (0, [True, True])


def test_node_that_is_drained_before_its_launcher_runs_is_left_at_once() -> None:
    it = running("aaa", 2, None)
    it.end(-9, 1)
    it.tick()
    it.leaving = {it.node(1)}
    it.run(5)
    assert it.node(1) not in it.leaving | {""}
    assert it.running() == [True, True]


def test_drained_node_whose_script_says_nothing_does_not_fail_the_job() -> None:
    it = running("aaa", 2, None)
    it.leaving = {it.node(1)}
    it.run(2)
    it.end(1, 1)
    it.run(60)
    assert (it.state.phase, it.running()) == (Phase.RUNNING, [True, True])
    assert it.node(1) not in it.leaving


def test_actor_that_can_not_even_begin_ends_the_job_with_what_ray_says() -> None:
    it = world("aa", 2, None)
    for _ in range(400):
        it.tick()
        for claim, seen in it.claims.items():
            it.claims[claim] = replace(seen, life="", gone="No module named 'resilience'")
    assert it.state.phase is Phase.FAILED
    assert "No module named 'resilience'" in it.state.reason


def test_actor_that_somebody_ended_for_good_is_replaced() -> None:
    it = running("aa", 2, None)
    claim = it.state.slots[1].claim
    it.claims[claim] = replace(it.claims[claim], life="", gone="killed")
    it.run(3)
    assert (it.state.slots[1].claim > claim, it.running()) == (True, [True, True])


def test_node_that_was_not_to_be_had_and_is_now_ends_the_wait() -> None:
    it = running("aaaa", 3, None)
    spare = next(name for name in it.nodes if name not in (it.node(0), it.node(1), it.node(2)))
    it.slow = {spare}
    it.kill_node(it.node(0))
    it.kill_node(it.node(1))
    it.run(5)  # one claims the spare, which somebody else has; the other's claim says that it must not have it
    it.end(0, 0)
    # And the first needs none any more.
    it.state = it.state.with_slot(replace(it.state.slots[0], ended=0, round=1, claim=0, pinned=""))
    it.slow = set()
    it.run(15)
    assert it.node(1) == spare


def test_job_that_waits_for_days_makes_few_claims_since_ray_remembers_all_of_them() -> None:
    nothing = world("", 4, None)
    nothing.run(6 * 3600, step=10)
    assert nothing.state.claims == 4, "there is nothing to give back"
    half = world("aa", 4, None)
    half.run(6 * 3600, step=10)
    assert 4 * 4 < half.state.claims < 4 * 40, "others have had their chance, less often each time"
    half.nodes |= {"late0": "a", "late1": "a"}
    assert half.run(60).phase is Phase.RUNNING
    assert all(half.running())


def test_job_that_has_waited_long_waits_no_longer_for_the_last_nodes_than_any_other() -> None:
    it = world("a", 4, None)
    it.rules = replace(it.rules, min_nodes=3)
    it.run(3600, step=5)
    assert it.state.phase is Phase.GATHERING
    it.nodes |= {"late0": "a", "late1": "a"}
    assert it.run(140).phase is Phase.RUNNING
    assert sum(it.running()) == 3


def test_free_node_has_one_waiting_claim_made_anew_and_not_all_of_its_rack() -> None:
    it = running("aaaaa", 4)
    (spare,) = it.nodes.keys() - {it.node(rank) for rank in range(4)}
    it.slow = {spare}
    for rank in (0, 1, 2):
        it.kill_node(it.node(rank))
    it.run(5)
    waits = it.state.slots[2].claim
    it.state = it.state.with_slot(replace(it.state.slots[0], ended=0, round=1, claim=0, pinned=""))
    it.slow = set()
    it.run(15)
    assert it.node(1) == spare
    assert it.state.slots[2].claim == waits


def test_claim_that_ray_put_on_a_node_of_another_slot_is_made_anew() -> None:
    it = running("aa", 2, None)
    it.kill_node(it.node(1))
    it.run(2)
    slot = it.state.slots[1]
    assert (slot.claim, slot.node, slot.pinned) != (0, "", "x")
    # Room for two, and its list of others was old.
    it.claims[slot.claim] = it.claims[slot.claim].__class__(it.node(0), "odd")
    it.run(1)
    assert it.node(1) != it.node(0)
    it.nodes["late"] = "a"
    it.run(5)
    assert it.node(1) == "late"


def test_state_is_the_same_after_it_was_written_down() -> None:
    it = running("aabbcc", 4)
    it.kill_node(it.node(2))
    it.end(201, 0)
    it.run(5)
    assert State.from_text(it.state.as_text()) == it.state


def test_only_the_newest_lines_are_kept() -> None:
    state = State()
    for number in range(KEPT_LINES + 50):
        state = noted(state, 0.0, f"line {number}")
    assert len(state.lines) == KEPT_LINES
    assert state.lines[-1].endswith(f"line {KEPT_LINES + 49}")
    assert noted(state, 1.0, f"line {KEPT_LINES + 49}") == state


def test_new_lines_are_told_also_when_old_ones_have_gone_for_them() -> None:
    state, told = State(), list[str]()
    for number in range(3 * KEPT_LINES):
        after = noted(noted(state, 0.0, f"line {number}"), 0.0, "the same each time")
        told += news(state.lines, after.lines)
        state = after
    assert len(told) == 6 * KEPT_LINES
    assert news(state.lines, state.lines) == ()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"slots": 1}', State().as_text().replace("GATHERING", "ODD")])
def test_state_that_can_not_be_read_is_that_of_a_job_that_failed_and_wants_nothing(text: str) -> None:
    it = running("aa", 2, None)
    it.state = recalled(text, it.now)
    it.tick()
    assert (it.state.phase, it.state.exit_code, it.claims) == (Phase.FAILED, 1, {})
    assert "can't be read" in it.state.reason
    assert recalled(State(round=3).as_text(), 0.0) == State(round=3)
