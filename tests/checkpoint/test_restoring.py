"""Which snapshot the job goes on from, and what is remembered of those that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.checkpoint.saver import restores
from resilience.checkpoint.saver.restores import Tries
from resilience.checkpoint.saver.restoring import (
    DISK,
    MEMORY,
    TRIES,
    Candidate,
    Key,
    Round,
    candidates,
    pick,
    set_aside,
)
from resilience.checkpoint.stores.local import Directory

M9, D9 = Candidate((2, 9), MEMORY), Candidate((2, 9), DISK)
M8, D8 = Candidate((2, 8), MEMORY), Candidate((2, 8), DISK)
D50 = Candidate((1, 50), DISK)
ALL = [M9, D9, M8, D8, D50]


@pytest.mark.parametrize(
    ("in_memory", "on_disk", "expected"),
    [
        ([(2, 9), (2, 8)], [(2, 9), (2, 8), (1, 50)], ALL),
        ([(2, 8), (2, 9)], [(1, 50), (2, 8), (2, 9)], ALL),
        ([(2, 8)], [(2, 9)], [D9, M8]),  # newer on disk comes before older in memory
        ([], [(1, 50), (2, 8)], [D8, D50]),  # a later generation is newer, whatever its steps
        ([], [], []),
    ],
)
def test_candidates_come_newest_first_and_memory_before_disk(
    in_memory: list[Key], on_disk: list[Key], expected: list[Candidate]
) -> None:
    assert candidates(in_memory, [Candidate(key, DISK) for key in on_disk]) == expected


@pytest.mark.parametrize(
    ("step", "bad", "failed", "expected"),
    [
        (None, [], {}, M9),
        (None, [M9], {}, D9),  # what is bad in memory may be good on disk
        (None, [M9, D9], {}, M8),
        (None, [M9, D9, M8, D8], {}, D50),
        (None, ALL, {}, None),
        (None, [], {(2, 9): TRIES - 1}, M9),
        (None, [], {(2, 9): TRIES}, M8),  # in memory and on disk it is the same snapshot
        (None, [], {(2, 9): TRIES, (2, 8): TRIES + 1}, M8),  # only one is to blame
        (None, [M8], {(2, 9): TRIES}, D8),
        (None, [M8, D8, D50], {(2, 9): TRIES, (2, 8): TRIES}, M9),  # there is no other
        (None, [M8, D8, D50], {(2, 9): TRIES}, M9),
        (None, [M9, M8, D8, D50], {(2, 9): TRIES}, D9),
        (8, [], {}, M8),
        (8, [M8], {}, D8),
        (8, [M8, D8], {}, None),
        (9, [], {(2, 9): 99}, M9),  # it was asked for
        (50, [], {}, D50),
        (51, [], {}, None),
    ],
)
def test_newest_is_picked_that_is_neither_bad_nor_failed_from_twice(
    step: int | None, bad: list[Candidate], failed: dict[Key, int], expected: Candidate | None
) -> None:
    assert pick(ALL, step=step, bad=dict.fromkeys(bad, "rotten"), failed=failed) == expected


def test_step_that_was_saved_in_two_generations_means_the_later_one() -> None:
    found = candidates([], [Candidate((generation, 9), DISK) for generation in (1, 3, 2)])
    assert pick(found, step=9, bad={}, failed={}) == Candidate((3, 9), DISK)


def test_round_names_who_is_waited_for_first_to_ask_and_then_to_load() -> None:
    meeting = Round(range(4, 7))
    meeting.asked.update({6: None, 4: None})
    assert not meeting.all_asked()
    assert meeting.missing() == [5]
    meeting.asked[5] = None
    assert meeting.all_asked()
    meeting.choosing = False
    assert meeting.missing() == [4, 5, 6]
    meeting.loaded.update({4: "", 6: "its digest is wrong"})
    assert not meeting.all_loaded()
    assert meeting.missing() == [5]
    meeting.loaded[5] = "it is cut short"
    assert meeting.all_loaded()
    assert meeting.wrong() == "rank 5: it is cut short"


def test_what_is_passed_over_for_an_older_one_is_set_aside_once() -> None:
    assert set_aside(ALL, M8, {(2, 9): TRIES}) == [(2, 9)]
    assert set_aside(ALL, M8, {(2, 9): TRIES - 1}) == []  # it was bad
    assert set_aside(ALL, M9, {(2, 9): TRIES, (2, 8): TRIES}) == []
    assert set_aside(ALL, M8, {(2, 9): TRIES, (2, 8): TRIES}) == [(2, 9)]


def test_only_one_is_set_aside_without_progress_in_between() -> None:
    """Restarts that fail from the one before it too fail for another reason: to go back further would only lose more."""
    failed = {(2, 9): TRIES, (2, 8): 7}
    assert pick(ALL, bad={}, failed=failed) == M8
    left = [item for item in ALL if item.key != (2, 9)]  # it was marked, and a later job does not find it
    assert pick(left, bad={}, failed=failed) == M8
    assert set_aside(left, M8, failed) == []


def test_step_that_is_there_twice_is_tried_twice_in_the_order_given() -> None:
    twice = [Candidate((1, 9), DISK, "step-9.2"), Candidate((1, 9), DISK, "step-9")]
    found = candidates([], twice)
    assert pick(found, bad={}, failed={}) == twice[0]
    assert pick(found, bad={twice[0]: "rotten"}, failed={}) == twice[1]


def test_try_is_counted_once_in_a_life_and_taken_back_if_the_snapshot_was_bad(tmp_path: Path) -> None:
    tries = Tries(Directory(tmp_path), print)
    for _ in range(3):
        tries.add((1, 5))
    assert restores.read(Directory(tmp_path)) == {(1, 5): 1}
    tries.begin()
    tries.add((1, 5))
    assert restores.read(Directory(tmp_path)) == {(1, 5): 2}
    tries.take_back((1, 5))
    tries.take_back((1, 5))
    assert restores.read(Directory(tmp_path)) == {(1, 5): 1}
    tries.forget()
    assert restores.read(Directory(tmp_path)) == {}


# -- what is remembered -----------------------------------------------------------------------------------------------


def test_tries_are_read_as_they_were_written_and_leave_no_other_file(tmp_path: Path) -> None:
    for tries in ({(1, 5): 1, (2, 7): 2}, {}, {(3, 0): 9}):
        restores.write(Directory(tmp_path), tries)
        assert restores.read(Directory(tmp_path)) == tries
        assert len(list(tmp_path.iterdir())) == 1


def test_no_file_means_that_nothing_was_tried(tmp_path: Path) -> None:
    assert restores.read(Directory(tmp_path)) == {}
    assert restores.read(Directory(tmp_path / "absent")) == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[",
        b"{}",
        b'{"abc": 1}',
        b"5",
        b"null",
        b"[1]",
        b"[[1, 2]]",
        b"[[1, 2, 3, 4]]",
        b'[["a", 2, 3]]',
        b"[[1, 2, null]]",
        b"[[1, 2, Infinity]]",
        b"[[1, NaN, 2]]",
        b"\xff\xfe\xfd",
        b"[" * 100_000,
        b"[[[1], 2, 3]]",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_damaged_file_is_none(tmp_path: Path, data: bytes) -> None:
    restores.write(Directory(tmp_path), {(1, 5): 1})
    (path,) = tmp_path.iterdir()
    path.write_bytes(data)
    assert restores.read(Directory(tmp_path)) == {}


def test_file_that_was_cut_short_is_none(tmp_path: Path) -> None:
    restores.write(Directory(tmp_path), {(1, 5): 1, (2, 6): 2})
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert restores.read(Directory(tmp_path)) == {}


def test_tries_that_can_not_be_written_raise_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        restores.write(Directory(tmp_path / "absent"), {(1, 5): 1})
