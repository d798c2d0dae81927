"""Power may fail at any instant: no checkpoint is ever listed with wrong bytes, and none that was durable is gone."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilience.checkpoint import digest, writing
from resilience.checkpoint.manifest import Manifest
from resilience.checkpoint.stores.local import Directory
from tests.checkpoint.power import Disk, Operation, Recorder

WHERE = "a/b/checkpoints"
HEAD = b"h" * 4096


def tensors(step: int, rank: int) -> memoryview:
    """The bytes of a rank at a step: two blocks and a bit, page-aligned."""
    room = mmap.mmap(-1, 3 * 4096)
    room[:] = bytes([step * 16 + rank]) * len(room)
    return memoryview(room)[:8200]


def values(step: int, rank: int) -> bytes:
    return f"values of {rank} at {step}".encode()


def contents(step: int) -> dict[str, bytes]:
    """What a checkpoint consists of, besides its manifest."""
    found = {f"rank-{rank:05d}.safetensors": HEAD + bytes(tensors(step, rank)) for rank in range(2)}
    return found | {f"rank-{rank:05d}.values": values(step, rank) for rank in range(2)}


def write(directory: Directory, step: int) -> None:
    name = directory.partial(f"{step:08d}") / "rank-0000"
    shards = [writing.write_file(Path(f"{name}{r}.safetensors"), r, HEAD, tensors(step, r)) for r in range(2)]
    others = [writing.write_file(Path(f"{name}{r}.values"), r, b"", memoryview(values(step, r))) for r in range(2)]
    directory.commit(f"{step:08d}", Manifest(step, 1, 0, 2, float(step), tuple(shards), tuple(others)))


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(tmp_path, monkeypatch)


def job(recorder: Recorder, root: Path) -> list[Operation]:
    """Write three checkpoints and keep two, in a directory that is not there yet; return what was done on the disk."""
    directory = Directory(root / WHERE)
    directory.claim("test")
    for step in (1, 2, 3):
        write(directory, step)
        recorder.operations.append(("mark", step))
        if step == 3:
            recorder.operations.append(("mark", -1))  # what is about to be removed need not be there
        directory.prune(2)
    directory.close()
    return recorder.operations


def wrong(found: dict[str, bytes | None], place: Path, needed: set[int]) -> str:
    """Say what is wrong with what a disk holds after a cut; nothing, if all is well."""
    for path, left in found.items():
        if left is None:
            (place / path).mkdir()
        else:
            (place / path).write_bytes(left)
    listed = Directory(place / WHERE).stored()
    steps = [item.manifest.step for item in listed]
    if not needed <= set(steps):
        return f"{needed - set(steps)} was durable and is gone"
    for item in listed:
        files = {file.name: file for file in (*item.manifest.shards, *item.manifest.values)}
        there = {name: (item.path / name).read_bytes() for name in files}
        if there != contents(item.manifest.step):
            return f"{item.path.name} is listed and has wrong bytes"
        for name, file in files.items():
            data = memoryview(there[name])
            heads = [digest.digest(data[: file.head])] if file.head else []
            if (*heads, *digest.digests(data[file.head :], file.chunk)) != file.digests:
                return f"{item.path.name} is listed and has wrong digests"
    return ""


def cuts(operations: list[Operation]) -> Iterator[tuple[list[Operation], set[int]]]:
    """Yield what was done until each instant, and the steps that must be there from then on."""
    needed: set[int] = set()
    for number, operation in enumerate(operations):
        if operation[0] == "mark":
            needed = needed | {operation[1]} if operation[1] > 0 else needed - {-operation[1]}
        yield operations[: number + 1], needed


def first_wrong(operations: list[Operation], place: Callable[[], Path]) -> str:
    """Cut the power after every operation, in every way; return the first thing that is wrong then."""
    seen: set[int] = set()
    for done, needed in cuts(operations):
        for found in Disk(done).remains():
            state = hash((tuple(sorted(found.items(), key=lambda item: item[0])), *sorted(needed)))
            if state not in seen:
                seen.add(state)
                text = wrong(found, place(), needed)
                if text:
                    return f"after {len(done)} operations, the last {done[-1][:2]}: {text}"
    return "" if len(seen) > 100 else f"only {len(seen)} states were seen"


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    base = tmp_path_factory.mktemp("after-the-cut")
    numbers = iter(range(10**9))

    def fresh() -> Path:
        folder = base / str(next(numbers))
        folder.mkdir()
        return folder

    return fresh


def test_after_a_cut_at_any_instant_everything_listed_is_right_and_everything_durable_is_listed(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Callable[[], Path]
) -> None:
    operations = job(recorder, tmp_path)
    monkeypatch.undo()
    assert first_wrong(operations, place) == ""


def test_storage_that_leaves_out_any_one_of_its_syncs_is_found_out(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Callable[[], Path]
) -> None:
    operations = job(recorder, tmp_path)
    monkeypatch.undo()
    first = operations[: operations.index(("mark", 1)) + 1]
    syncs = [number for number, operation in enumerate(first) if operation[0] in ("fsync", "sync")]
    assert len(syncs) == 10  # three names above the files, five files, their folder, and its name
    for number in syncs:
        text = first_wrong([*first[:number], *first[number + 1 :]], place)
        assert "wrong bytes" in text or "was durable and is gone" in text, first[number]


def test_everything_is_synced_before_its_name_appears_and_the_name_after(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(tmp_path / "d")
    directory.claim("test")
    del recorder.operations[:]
    write(directory, 7)
    directory.close()
    monkeypatch.undo()
    operations = recorder.operations
    appears = operations.index(("rename", "d/.partial-00000007", "d/step-00000007"))
    created = [operation[1] for operation in operations if operation[0] == "create"]
    assert len(created) == 5
    files = {operation[1] for operation in operations if operation[0] == "write"}
    assert len(files) == 5
    for number in files:
        last = max(
            at for at, operation in enumerate(operations) if operation[:2] in (("write", number), ("cut", number))
        )
        assert last < operations.index(("fsync", number)) < appears
    manifest = operations.index(("rename", "d/.partial-00000007/.manifest.json", "d/.partial-00000007/manifest.json"))
    assert manifest < operations.index(("sync", "d/.partial-00000007")) < appears
    assert ("sync", "d") in operations[appears:]
