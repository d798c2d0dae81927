from __future__ import annotations

from typing import Any

import pytest

from resilience.failover.culprit import Blame, blame
from resilience.failover.failure import RankFailure, examine
from tests.fakes import witness


def died(rank: int, code: int, at_ns: int, log: str = "") -> RankFailure:
    return examine(rank, code, at_ns, log=log)


def raised(rank: int, at_ns: int, kind: str, message: str) -> RankFailure:
    error = {"message": {"message": f"{kind}: {message}", "extraInfo": {"py_callstack": "", "timestamp": "1"}}}
    return examine(rank, 1, at_ns, error=error)


GLOO = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3721"


def in_section(name: str, age: float = 12.0) -> list[dict[str, Any]]:
    return [{"name": name, "age_s": age}]


WAITS_IN_COLLECTIVE = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x2 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "train.py", line 30 in train
"""
WAITS_IN_BACKWARD = """Current thread 0x2 (most recent call first):
  File "/site-packages/torch/autograd/graph.py", line 824 in _engine_run_backward
  File "/site-packages/torch/autograd/__init__.py", line 347 in backward
"""
READS = """Thread 0x1 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 1 in a_thread_of_torch

Current thread 0x2 (most recent call first):
  File "dataset.py", line 3 in read
  File "train.py", line 20 in train
"""


def test_rank_behind_in_load_data_is_blamed_and_not_those_that_wait_in_backward() -> None:
    waiting = [
        witness(rank, entries={"load_data": 8, "backward": 8}, sections=in_section("backward")) for rank in range(7)
    ]
    behind = witness(7, entries={"load_data": 8, "backward": 7}, sections=in_section("load_data"))
    assert blame([*waiting, behind], [], hung=[0, 3]) == Blame(7, "hang", (0, 1, 2, 3, 4, 5, 6))


@pytest.mark.parametrize("culprit", range(4))
def test_rank_with_the_lowest_step_is_blamed_whichever_it_is(culprit: int) -> None:
    ranks = [witness(rank, step=6 if rank == culprit else 7, beats=8) for rank in range(4)]
    assert blame(ranks, [], hung=list(range(4))).rank == culprit


def test_rank_without_step_numbers_is_compared_by_its_heartbeats() -> None:
    ranks = [witness(0, step=None, beats=9), witness(1, step=None, beats=8)]
    assert blame(ranks, [], hung=[0, 1]).rank == 1


def test_stopped_rank_is_blamed_although_it_is_not_behind() -> None:
    ranks = [witness(0, step=7, state="S"), witness(1, step=8, state="T"), witness(2, step=7, state="R")]
    assert blame(ranks, [], hung=[0, 2]) == Blame(1, "hang", (0, 2))


def test_rank_0_that_saves_while_the_others_are_in_the_next_step_is_blamed() -> None:
    saving = witness(0, entries={"step": 8, "checkpointing": 2}, sections=in_section("checkpointing"))
    others = [witness(rank, entries={"step": 9}, sections=in_section("step")) for rank in (1, 2, 3)]
    assert blame([saving, *others], [], hung=[1, 2, 3]) == Blame(0, "hang", (1, 2, 3))


def test_section_that_only_some_ranks_have_is_not_compared() -> None:
    # Rank 0 has entered more sections in all, but of those that everybody has it is level: its stack decides.
    saving = witness(0, entries={"step": 9, "checkpointing": 50}, stack=WAITS_IN_COLLECTIVE)
    reading = witness(1, entries={"step": 9}, stack=READS)
    assert blame([saving, reading], [], hung=[0, 1]).rank == 1


HAS_A_HELPER = f"""{WAITS_IN_BACKWARD}
Thread 0x3 (most recent call first):
  File "overlap.py", line 61 in _work
"""


@pytest.mark.parametrize("waits", [WAITS_IN_COLLECTIVE, WAITS_IN_BACKWARD, HAS_A_HELPER])
def test_of_ranks_at_the_same_place_the_one_that_is_in_no_collective_is_blamed(waits: str) -> None:
    ranks = [witness(0, stack=waits, quiet=50.0), witness(1, stack=READS, quiet=5.0), witness(2, stack=waits)]
    assert blame(ranks, [], hung=[0, 1, 2]).rank == 1


def test_of_ranks_that_look_alike_the_one_that_is_silent_longest_is_blamed() -> None:
    ranks = [witness(0, quiet=10.0), witness(1, quiet=11.0), witness(2, quiet=9.0)]
    assert blame(ranks, [], hung=[0, 1, 2]).rank == 1


def test_death_beats_any_hang() -> None:
    ranks = [witness(0, step=1, state="T"), witness(1, step=7)]
    assert blame(ranks, [died(1, 1, 50)], hung=[0]) == Blame(1, "exit", (0,))


def test_earliest_death_wins_over_those_that_followed_from_it() -> None:
    deaths = [died(0, 1, 300), died(2, -9, 100), died(1, 1, 200)]
    assert blame([], deaths, hung=[]) == Blame(2, "signal", (0, 1))


def test_exit_code_and_signal_are_told_apart() -> None:
    assert blame([], [died(0, 3, 1)], []).kind == "exit"
    assert blame([], [died(0, -11, 1)], []).kind == "signal"


def test_rank_that_never_called_us_is_behind_those_that_did() -> None:
    stranger = witness(2, adopted=False, step=None, beats=0, entries={})
    others = [witness(rank, step=None, beats=0, entries={"setup": 1}) for rank in (0, 1)]
    assert blame([*others, stranger], [], hung=[2]) == Blame(2, "hang", (0, 1))


def test_rank_that_has_returned_is_not_blamed_for_one_that_still_trains() -> None:
    ranks = [witness(0, step=5, finishing=True), witness(1, step=9)]
    assert blame(ranks, [], hung=[1]).rank == 1


def test_rank_that_has_returned_and_does_not_end_is_blamed() -> None:
    ranks = [witness(0, step=5, finishing=True), witness(1, step=9, finishing=True)]
    assert blame(ranks, [], hung=[0]).rank == 0


def test_lost_node_is_blamed_and_the_ranks_elsewhere_are_victims() -> None:
    ranks = [witness(0), witness(1)]
    assert blame(ranks, [], hung=[0], lost=[3, 2]) == Blame(2, "node", (0, 1))


def test_hang_without_any_testimony_names_a_hung_rank() -> None:
    assert blame([], [], hung=[5, 4]) == Blame(4, "hang", (5,))


def test_nothing_known_blames_nobody() -> None:
    assert blame([], [], []) == Blame(None, "hang", ())


def test_order_of_the_testimonies_does_not_matter() -> None:
    ranks = [witness(rank, step=7 if rank != 2 else 6) for rank in range(5)]
    assert blame(ranks, [], [0]) == blame(ranks[::-1], [], [0])


def test_rank_that_raised_beats_those_whose_collectives_broke_even_if_they_were_seen_first() -> None:
    deaths = [raised(0, 100, "RuntimeError", GLOO), raised(1, 900, "ValueError", "bad batch")]
    assert blame([], deaths, []) == Blame(1, "exception", (0,))


def test_of_two_that_raised_the_earlier_nanosecond_is_the_cause() -> None:
    deaths = [raised(0, 1_000_000_001, "ValueError", "x"), raised(1, 1_000_000_000, "KeyError", "y")]
    assert blame([], deaths, []).rank == 1


def test_killed_rank_beats_the_ranks_that_lost_their_connection_to_it() -> None:
    deaths = [raised(0, 100, "torch.distributed.DistNetworkError", "Connection reset by peer"), died(3, -9, 200)]
    assert blame([], deaths, []) == Blame(3, "signal", (0,))


def test_rank_that_left_in_peace_is_blamed_when_all_others_fell_over_it() -> None:
    left = witness(2, state="gone", step=6, finishing=True)
    deaths = [raised(rank, 100 + rank, "RuntimeError", GLOO) for rank in (0, 1)]
    gone = [witness(rank, state="gone", step=7) for rank in (0, 1)]
    assert blame([*gone, left], deaths, []) == Blame(2, "left", (0, 1))


def test_only_echoes_and_nobody_left_blames_the_first_of_them() -> None:
    deaths = [raised(rank, 100 - rank, "RuntimeError", GLOO) for rank in (0, 1)]
    assert blame([witness(2)], deaths, []).rank == 1


def test_lost_node_beats_the_connections_that_broke_but_not_an_exception_of_its_own() -> None:
    echo, own = raised(0, 100, "RuntimeError", GLOO), raised(1, 200, "ValueError", "bad batch")
    assert blame([], [echo], [], lost=[3]).kind == "node"
    assert blame([], [echo, own], [], lost=[3]) == Blame(1, "exception", (0, 3))
    assert blame([], [died(0, 1, 5)], [], lost=[3]).kind == "node", "it left no words: it may well be an echo"
    assert blame([], [died(0, 201, 5)], [], lost=[3]).rank == 0, "a hardware code is a cause of its own"
