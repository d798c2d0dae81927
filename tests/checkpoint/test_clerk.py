"""The clerk: what it writes is what the slots hold, and whatever goes wrong with one thing it goes on with the next."""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resilience.checkpoint import digest, writing
from resilience.checkpoint.arena import Slot
from resilience.checkpoint.ledger import Ledger, Seal
from resilience.checkpoint.saver.clerk import Clerk, Part, Written, commit, digests_of, parts_of, persist, prune
from resilience.checkpoint.saver.writes import Write
from resilience.checkpoint.stores.claims import DirectoryInUse
from resilience.checkpoint.stores.local import Directory
from resilience.errors import CheckpointError

DATA, HEADER, VALUES = b"d" * 10_000, b"h" * 4096, b"the values"


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot.create(20_000)
    made.map[: len(DATA)] = DATA
    made.map[12288 : 12288 + 4096] = HEADER
    made.map[16384 : 16384 + len(VALUES)] = VALUES
    yield made
    made.close()


@pytest.fixture
def seal() -> Seal:
    ledger = Ledger.create(2, rank=0, world=1)
    sums = (digest.short(HEADER), digest.short(VALUES))
    ledger.seal(0, (3, 7, 1, 1, len(DATA), 12288, 4096, 16384, len(VALUES), *sums, 5), on_disk=True)
    (found,) = ledger.seals()
    ledger.close()
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "not" / "there" / "yet")


class Told:
    """What the clerk says when it is through with something."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[Written] = queue.SimpleQueue()

    def __call__(self, written: Written) -> None:
        self._said.put(written)

    def wait(self) -> Written:
        return self._said.get(timeout=60)


def part(directory: Directory, slot: Slot, seal: Seal) -> Part:
    return Part(directory, f"{seal.step}", seal.key, {0: seal}, {0: slot}, {})


def complete(directory: Directory, seal: Seal, written: Written) -> str:
    """Commit what one node has written."""
    said = written.message()
    write = Write(seal.key, 1, 2, time.monotonic(), set(), said["shards"], said["values"])
    return commit(directory, f"{seal.step}", write, {"torch": "2.13"})


def test_checkpoint_on_disk_holds_what_the_slot_holds(directory: Directory, slot: Slot, seal: Seal) -> None:
    assert complete(directory, seal, persist(part(directory, slot, seal))) == ""
    (stored,) = directory.stored()
    contents = stored.manifest
    assert (contents.key, contents.cycle, contents.world, contents.facts) == ((3, 7), 2, 1, {"torch": "2.13"})
    assert (stored.path / "rank-00000.safetensors").read_bytes() == HEADER + DATA
    assert (stored.path / "rank-00000.values").read_bytes() == VALUES
    assert contents.shards[0].digests == (digest.digest(HEADER), *digests_of(slot, seal))


def test_shard_without_data_is_there_all_the_same(directory: Directory, slot: Slot, seal: Seal) -> None:
    """Tensors may be empty: their names, types and shapes are in the header."""
    written = persist(part(directory, slot, replace(seal, data=0)))
    assert [(file.head, file.nbytes) for file in written.shards] == [(seal.header, seal.header)]
    assert complete(directory, seal, written) == ""
    (stored,) = directory.stored()
    names = ["manifest.json", "rank-00000.safetensors", "rank-00000.values"]
    assert sorted(path.name for path in stored.path.iterdir()) == names


@pytest.mark.parametrize("field", ["data", "header_at", "header", "values_at", "values"])
def test_seal_that_points_outside_of_its_slot_is_refused(
    directory: Directory, slot: Slot, seal: Seal, field: str
) -> None:
    wild = replace(seal, **{field: 1 << 40})
    with pytest.raises(CheckpointError, match="outside of its slot"):
        parts_of(slot, wild)
    written = persist(part(directory, slot, wild))
    assert "step 7 could not be written" in written.why
    assert "outside of its slot" in written.why
    assert list(directory.path.iterdir()) == []


def test_files_that_are_none_are_never_committed(directory: Directory, slot: Slot, seal: Seal) -> None:
    """What other nodes say comes over a line: a manifest is not made of whatever they say."""
    written = persist(part(directory, slot, seal))
    changes: list[dict[str, object]] = [
        {"name": "../rank-00000.values"},
        {"digests": []},
        {"rank": -1},
        {"nbytes": "many"},
        {"more": 1},
    ]
    for change in changes:
        said = written.message()
        said["values"][0] |= change
        write = Write(seal.key, 1, 2, 0.0, set(), said["shards"], said["values"])
        assert "step 7 could not be written" in commit(directory, "7", write, {})
        assert directory.stored() == []


def test_clerk_says_what_it_wrote_and_what_it_could_not_write(directory: Directory, slot: Slot, seal: Seal) -> None:
    clerk, told = Clerk(), Told()
    for number in (seal, replace(seal, data=1 << 40), replace(seal, step=8)):
        clerk.write(part(directory, slot, number), told)
    good, bad, again = told.wait(), told.wait(), told.wait()
    assert (good.why, good.digests()) == ("", {0: digests_of(slot, seal)})
    assert bad.why.startswith(f"step 7 could not be written to {directory.path} (")
    assert bad.message() == {"op": "failed", "why": bad.why}
    assert again.why == ""


def test_clerk_survives_an_act_that_fails(
    directory: Directory, slot: Slot, seal: Seal, caplog: pytest.LogCaptureFixture
) -> None:
    clerk, told = Clerk(), Told()

    def act() -> None:
        raise OSError("a slot that is closed")

    with caplog.at_level(logging.ERROR):
        clerk.do(act)
        clerk.write(part(directory, slot, seal), told)
        assert told.wait().why == ""
    assert "a slot that is closed" in caplog.text


def test_progress_is_told_up_to_the_last_byte_of_all_ranks(
    directory: Directory, slot: Slot, seal: Seal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "_CHUNK", 4096)
    monkeypatch.setattr(writing, "PIECE", 4096)
    seen: list[tuple[int, int]] = []
    both = replace(part(directory, slot, seal), seals={0: seal, 1: seal}, slots={0: slot, 1: slot})
    persist(replace(both, progress=lambda written, total: seen.append((written, total))))
    of_one = [4096, 8192, len(DATA), len(DATA) + len(VALUES)]
    assert [written for written, _ in seen] == [*of_one, *(of_one[-1] + written for written in of_one)]
    assert {total for _, total in seen} == {2 * of_one[-1]}


def test_what_a_save_spent_its_time_on_is_told_to_who_debugs(
    directory: Directory, slot: Slot, seal: Seal, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "resilience.saver"):
        persist(part(directory, slot, seal))
    (text,) = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert text.startswith("step 7: ")
    assert [word in text for word in ("digest ", "write ", "fsync ", "sync ")] == [True] * 4


def test_failure_at_any_point_is_told_and_leaves_nothing_half_done(
    directory: Directory, slot: Slot, seal: Seal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails at the first call, next time at the second, and so on until a save gets through."""
    directory.path.mkdir(parents=True)
    errors, left = list[str](), 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= real is not os_open or bool(args[1] & os.O_CREAT)  # a refused direct one is no failure
            if left == 0:
                left = -1000
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **kwargs)

        return act

    os_open = os.open
    while left <= 0:
        left = len(errors) + 1
        wanted = replace(seal, step=len(errors))
        with monkeypatch.context() as patch:
            for name in ("open", "pwrite", "ftruncate", "fsync"):
                patch.setattr(os, name, failing(getattr(os, name)))
            written = persist(part(directory, slot, wanted))
            why = written.why or complete(directory, wanted, written)
        if why:
            directory.discard(f"{wanted.step}")  # as the chair would say
        assert not list(directory.path.glob(".partial-*"))
        if not why:
            assert wanted.step in [item.manifest.step for item in directory.stored()]
        errors += [why] if why else []
    assert len(errors) >= 15  # open, cut, sync and what is written of three files; then folders
    assert {text.rpartition(": ")[2] for text in errors} == {"Input/output error"}


def test_directory_that_somebody_works_in_stays_ours_until_that_is_over(directory: Directory) -> None:
    other = Directory(directory.path)
    directory.claim("this-job")
    with directory.at_work():
        closing = threading.Thread(target=directory.close)
        closing.start()
        closing.join(0.05)
        with pytest.raises(DirectoryInUse, match="this-job"):
            other.claim("other")
    closing.join(20)
    other.claim("other")
    other.close()


def test_older_ones_that_can_not_be_removed_are_said_and_no_failure(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(keep: int, keep_every: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(directory, "prune", refuse)
    prune(directory, 3, 0)
    assert "could not be removed" in caplog.text


@pytest.mark.parametrize("at", [12288, 16384])
def test_header_or_values_that_changed_since_they_were_sealed_are_not_written(
    directory: Directory, slot: Slot, seal: Seal, at: int
) -> None:
    slot.map[at] ^= 1
    written = persist(part(directory, slot, seal))
    assert "the memory of step 7 has changed since it was sealed" in written.why
    assert list(directory.path.iterdir()) == []
