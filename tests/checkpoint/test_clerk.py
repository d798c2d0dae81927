"""The clerk: what it writes is what the slots hold, and whatever goes wrong with one thing it goes on with the next."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from resilience.checkpoint import digest
from resilience.checkpoint.arena import Slot
from resilience.checkpoint.ledger import Ledger, Seal
from resilience.checkpoint.saver.clerk import Clerk, Job, digests_of, parts_of, persist
from resilience.checkpoint.storage import Directory
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
    ledger.seal(0, (3, 7, 1, 1, len(DATA), 12288, 4096, 16384, len(VALUES), 5), on_disk=True)
    (found,) = ledger.seals()
    ledger.close()
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "not" / "there" / "yet")


class Told:
    """What the clerk says when it is through with a job."""

    def __init__(self) -> None:
        self.said: tuple[str, dict[int, list[str]]] | None = None
        self._event = threading.Event()

    def __call__(self, error: str, digests: dict[int, list[str]]) -> None:
        self.said = error, digests
        self._event.set()

    def wait(self) -> tuple[str, dict[int, list[str]]]:
        assert self._event.wait(60)
        assert self.said is not None
        return self.said


def job(directory: Directory, slot: Slot, seal: Seal, told: Told) -> Job:
    return Job(directory, seal.key, 2, 1, {0: seal}, {0: slot}, {}, 3, 0, {"torch": "2.13"}, told)


def test_checkpoint_on_disk_holds_what_the_slot_holds(directory: Directory, slot: Slot, seal: Seal) -> None:
    contents = persist(job(directory, slot, seal, Told()))
    (stored,) = directory.stored()
    assert stored.manifest == contents
    assert (contents.key, contents.cycle, contents.world, contents.facts) == ((3, 7), 2, 1, {"torch": "2.13"})
    assert (stored.path / "rank-00000.safetensors").read_bytes() == HEADER + DATA
    assert (stored.path / "rank-00000.values").read_bytes() == VALUES
    assert contents.shards[0].digests == (digest.digest(HEADER), *digests_of(slot, seal))


def test_shard_without_data_is_there_all_the_same(directory: Directory, slot: Slot, seal: Seal) -> None:
    """Tensors may be empty: their names, types and shapes are in the header."""
    contents = persist(job(directory, slot, replace(seal, data=0), Told()))
    assert [(file.head, file.nbytes) for file in contents.shards] == [(seal.header, seal.header)]
    (stored,) = directory.stored()
    names = ["manifest.json", "rank-00000.safetensors", "rank-00000.values"]
    assert sorted(path.name for path in stored.path.iterdir()) == names


@pytest.mark.parametrize("field", ["data", "header_at", "header", "values_at", "values"])
def test_seal_that_points_outside_of_its_slot_is_refused_and_nothing_is_written(
    directory: Directory, slot: Slot, seal: Seal, field: str
) -> None:
    wild = replace(seal, **{field: 1 << 40})
    with pytest.raises(CheckpointError, match="outside of its slot"):
        parts_of(slot, wild)
    with pytest.raises(CheckpointError, match="outside of its slot"):
        persist(job(directory, slot, wild, Told()))
    assert list(directory.path.iterdir()) == []


def test_clerk_says_what_it_wrote_and_what_it_could_not_write(directory: Directory, slot: Slot, seal: Seal) -> None:
    clerk = Clerk()
    good, bad, again = Told(), Told(), Told()
    clerk.write(job(directory, slot, seal, good))
    clerk.write(job(directory, slot, replace(seal, data=1 << 40), bad))
    clerk.write(job(directory, slot, replace(seal, step=8), again))
    assert good.wait() == ("", {0: digests_of(slot, seal)})
    error, digests = bad.wait()
    assert error.startswith(f"step 7 could not be written to {directory.path}: ")
    assert digests == {}
    assert again.wait()[0] == ""
    assert [item.manifest.step for item in directory.stored()] == [8, 7]


def test_clerk_survives_an_act_that_fails(
    directory: Directory, slot: Slot, seal: Seal, caplog: pytest.LogCaptureFixture
) -> None:
    clerk, told = Clerk(), Told()

    def act() -> None:
        raise OSError("a slot that is closed")

    with caplog.at_level(logging.ERROR):
        clerk.do(act)
        clerk.write(job(directory, slot, seal, told))
        assert told.wait()[0] == ""
    assert "a slot that is closed" in caplog.text


def test_checkpoint_that_is_written_is_no_failure_when_older_ones_can_not_be_removed(
    directory: Directory, slot: Slot, seal: Seal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prune(keep: int, keep_every: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(directory, "prune", prune)
    told = Told()
    Clerk().write(job(directory, slot, seal, told))
    assert told.wait()[0] == ""
    assert [item.manifest.key for item in directory.stored()] == [(3, 7)]
    assert "could not be removed" in caplog.text
