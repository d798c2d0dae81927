"""Reading back: every row or an error, this rank's own first, no damage unseen, and no memory shared with what was read."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import mmap
import os
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from resilience.checkpoint import decoding, digest, encoding, shards, writing
from resilience.checkpoint.manifest import Manifest
from resilience.checkpoint.plan import LEADER, OWN, SHARED, Collector, make_plan
from resilience.checkpoint.reading import Check, Opened, open_disk, open_memory, share_of_cores
from resilience.checkpoint.shards import ShardError, Wanted
from resilience.checkpoint.source import DamagedError, Ref, Shard, Source
from resilience.checkpoint.stager import copy
from resilience.checkpoint.state import Module
from resilience.checkpoint.stores import local
from resilience.errors import CheckpointError

WORLD = 3


def shard(*tensors: tuple[str, torch.Tensor, tuple[int, ...], int]) -> Shard:
    """Return a data section of float32 tensors, each with the shape of its whole and its first row."""
    pieces = shards.lay_out(
        Wanted(name, "F32", tuple(tensor.shape), whole, (row, *[0] * len(whole))[: len(whole)])
        for name, tensor, whole, row in tensors
    )
    return Shard(torch.cat([tensor.flatten() for _, tensor, _, _ in tensors]).view(torch.uint8), pieces)


def rows(first: int, last: int, of: int = 6) -> Shard:
    """Return the shard with some rows of ``w``, whose row n is filled with n."""
    numbers = torch.arange(float(first), float(last)).reshape(-1, 1).expand(-1, 2)
    return shard(("w", numbers, (of, 2), first))


# -- pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_rows_come_together_in_whatever_order_the_shards_come(order: tuple[int, ...]) -> None:
    pieces, source = [rows(0, 1), rows(1, 4), rows(4, 6)], Source()
    for number in order:
        source.add(pieces[number], own=number == 1)
    assert (source.shape_of("w"), source.dtype_of("w")) == ((6, 2), torch.float32)
    assert source.fresh(Ref("w"))[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    target = torch.full((6, 2), -1.0)
    source.copy_into("w", target)
    assert target[:, 1].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("there", "lacking"), [([(1, 6)], 0), ([(0, 2), (3, 6)], 2), ([(0, 5)], 5), ([(0, 2), (4, 6)], 2), ([(3, 3)], 0)]
)
def test_missing_rows_are_an_error_that_names_the_tensor_and_the_row(
    there: list[tuple[int, int]], lacking: int
) -> None:
    source = Source()
    for first, last in there:
        source.add(rows(first, last), own=False)
    target = torch.full((6, 2), -1.0)
    said = rf"tensor 'w' of shape \[6, 2\] lacks what begins at \[{lacking}, 0\]: a shard is missing"
    with pytest.raises(CheckpointError, match=said):
        source.copy_into("w", target)
    assert target.eq(-1).all()
    with pytest.raises(CheckpointError, match=r"tensor 'w' of shape \[6, 2\] lacks"):
        source.fresh({"a": [Ref("w")]})


def test_rows_that_add_up_but_overlap_are_no_whole_tensor() -> None:
    source = Source()
    source.add(rows(0, 4), own=False)
    source.add(rows(3, 5), own=False)
    with pytest.raises(CheckpointError, match=r"lacks what begins at \[5, 0\]"):
        source.fresh(Ref("w"))


def test_pieces_of_different_wholes_are_not_put_together() -> None:
    source = Source()
    source.add(rows(0, 3), own=False)
    source.add(rows(3, 6, of=7), own=False)
    with pytest.raises(CheckpointError, match=r"of shape \[6, 2\] lacks what begins at \[3, 0\]"):
        source.fresh(Ref("w"))


def cut(total: int, *edges: int) -> list[tuple[int, int]]:
    """Return the spans between some rows: how one node divides a tensor over its ranks."""
    return list(itertools.pairwise([0, *sorted(edges), total]))


def source_of(spans: Iterable[tuple[int, int]], of: int = 6) -> Source:
    source = Source()
    for first, last in spans:
        source.add(rows(first, last, of), own=False)
    return source


@pytest.mark.parametrize(
    "spans",
    [
        [*cut(6, 2, 4), *cut(6, 3)],
        [*cut(6, 3), *cut(6, 2, 4)],
        [*cut(6, 2, 4), *cut(6)],  # a node of one rank has it whole
        [*cut(6, 1, 2, 3), *cut(6, 2, 4), *cut(6, 5)],
        [*cut(6, 2, 4), (0, 3)],  # a rank's shard is lost, and another node has all
        [(3, 6), *cut(6, 2, 4)],
        [(0, 2), (2, 2), (3, 3), (2, 6)],
        [(0, 4), (2, 6), (0, 2)],  # of three nodes, none of which has all
        [(0, 2), (2, 4), (3, 6)],
        [(0, 3), (2, 4), (4, 6)],
    ],
)
def test_nodes_that_cut_a_tensor_differently_make_one_whole(spans: list[tuple[int, int]]) -> None:
    for order in (spans, spans[::-1]):
        source = source_of(order)
        assert source.fresh(Ref("w"))[:, 1].tolist() == [0, 1, 2, 3, 4, 5]
        target = torch.full((6, 2), -1.0)
        source.copy_into("w", target)
        assert target[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([(0, 2), (2, 4), (0, 3)], r"\[4, 0\]"),
        ([(2, 4), (4, 6), (3, 6)], r"\[0, 0\]"),
    ],
)
def test_nodes_that_cut_a_tensor_differently_and_lack_some_are_refused(spans: list[tuple[int, int]], said: str) -> None:
    for order in (spans, spans[::-1]):
        with pytest.raises(CheckpointError, match=f"lacks what begins at {said}: a shard is missing"):
            source_of(order).fresh(Ref("w"))


def test_split_of_any_number_of_ranks_goes_with_that_of_any_other() -> None:
    """As the ranks of nodes divide what DDP has on all of them, tensors without rows included."""
    shapes = [(7, 3), (0, 3), (), (1, 5), (40, 2), (5, 0), (3,), (0,), (2, 2, 2)]
    tensors = [torch.rand(shape) for shape in shapes]
    sizes = [(tuple(tensor.shape), 4) for tensor in tensors]
    for nodes in itertools.product((1, 2, 3, 4, 8), repeat=2):
        source = Source()
        for ranks, rank in [(number, rank) for number in nodes for rank in range(number)]:
            there = []
            for part in shards.split(sizes, ranks, rank):
                tensor = tensors[part.index]
                mine = tensor if part.rows is None else tensor[part.rows[0] : part.rows[1]]
                there.append((str(part.index), mine, tuple(tensor.shape), part.rows[0] if part.rows else 0))
            if there:
                source.add(shard(*there), own=False)
        found = source.tensors()
        assert len(found) == len(tensors)
        assert all(torch.equal(found[str(number)], tensor) for number, tensor in enumerate(tensors)), nodes


def test_tensor_that_is_nowhere_is_an_error_that_names_it() -> None:
    for target in (torch.ones(1), torch.nn.Parameter(torch.ones(1))):
        with pytest.raises(CheckpointError, match="tensor 'w' is missing"):
            Source().copy_into("w", target)
    with pytest.raises(CheckpointError, match="tensor 'w' is missing"):
        Source().fresh([Ref("w")])


def test_no_memory_is_taken_for_a_tensor_that_is_not_all_there() -> None:
    """The shape of the whole comes from a file: nobody has a petabyte."""
    source = Source()
    source.add(shard(("w", torch.ones(1, 4), (1 << 46, 4), 0)), own=False)
    with pytest.raises(CheckpointError, match=r"lacks what begins at \[1, 0\]"):
        source.fresh(Ref("w"))


@pytest.mark.parametrize("own_first", [True, False])
def test_own_tensor_goes_before_that_of_the_same_name_elsewhere(own_first: bool) -> None:
    source = Source()
    shards_there = [(shard(("w", torch.full((2,), number), (2,), 0)), number == 5.0) for number in (5.0, 7.0, 8.0)]
    for there, own in shards_there if own_first else reversed(shards_there):
        source.add(there, own)
    assert source.fresh(Ref("w")).tolist() == [5, 5]


def test_own_tensor_of_another_shape_goes_before_that_of_the_same_name_elsewhere() -> None:
    source = Source()
    for shape, own in (((3,), False), ((2,), True), ((4,), False)):
        source.add(shard(("w", torch.ones(shape), shape, 0)), own=own)
    assert source.shape_of("w") == (2,)
    assert source.fresh(Ref("w")).tolist() == [1, 1]


def test_first_of_two_strangers_is_taken_where_there_is_none_of_ones_own() -> None:
    source = Source()
    for number, shape in ((1.0, (3,)), (2.0, (2,))):
        source.add(shard(("w", torch.full(shape, number), shape, 0)), own=False)
    assert source.fresh(Ref("w")).tolist() == [1, 1, 1]


@pytest.mark.parametrize("shape", [(5, 2), (6, 1), (1, 2), (6,), (12,), ()])
def test_tensor_is_not_spread_over_a_target_of_another_shape(shape: tuple[int, ...]) -> None:
    source = Source()
    source.add(rows(0, 6), own=True)
    target = torch.full(shape, -1.0)
    with pytest.raises(CheckpointError, match=r"tensor 'w' has shape \[6, 2\]"):
        source.copy_into("w", target)
    assert target.eq(-1).all()


def test_target_may_be_a_parameter_that_is_not_contiguous() -> None:
    source = Source()
    source.add(rows(0, 4), own=True)
    source.add(rows(4, 6), own=False)
    parameter = torch.nn.Parameter(torch.zeros(2, 6).t())
    source.copy_into("w", parameter)
    assert parameter[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert parameter.requires_grad
    assert parameter.grad_fn is None


def test_fresh_finds_tensors_in_every_container_and_keeps_their_types() -> None:
    source = Source()
    source.add(rows(0, 6), own=True)
    tree: dict[str, Any] = {
        "list": [Ref("w")],
        "tuple": (Ref("w"), (Ref("w"),)),
        "ordered": OrderedDict(b=Ref("w"), a=1),
        "default": defaultdict(list, a=[Ref("w")]),
        "counter": Counter({"x": 3}),
        "deque": deque([1, Ref("w")], maxlen=2),
        "namespace": argparse.Namespace(a=argparse.Namespace(b=Ref("w"))),
        "set": {Ref("w")},
        "frozenset": frozenset([(Ref("w"), 1)]),
        "size": torch.Size([1]),
    }
    kinds = {key: type(value) for key, value in tree.items()}
    found = source.fresh(tree)
    assert {key: type(value) for key, value in found.items()} == kinds
    assert found["deque"].maxlen == 2
    assert found["default"].default_factory is list
    assert found["counter"] == Counter({"x": 3})
    assert list(found["ordered"]) == ["b", "a"]
    tensors = [
        found["list"][0],
        *found["tuple"][1],
        found["ordered"]["b"],
        found["default"]["a"][0],
        found["deque"][1],
        found["namespace"].a.b,
        *found["set"],
        *[pair[0] for pair in found["frozenset"]],
    ]
    assert all(tensor is found["tuple"][0] for tensor in tensors)
    assert found["tuple"][0][:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_fresh_tensors_are_new_ones_each_time_it_is_asked() -> None:
    there, source = rows(0, 6), Source()
    source.add(there, own=True)
    one, other = source.fresh(Ref("w")), source.fresh(Ref("w"))
    one.zero_()
    there.view("w").zero_()
    assert other[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_tensors_that_exist_are_written_and_used_instead_of_new_ones() -> None:
    source = Source()
    source.add(shard(("w", torch.full((2,), 5.0), (2,), 0), ("v", torch.full((2,), 7.0), (2,), 0)), own=True)
    room = torch.zeros(2)
    found = source.fresh({"a": Ref("w"), "b": (Ref("w"), Ref("v"))}, {"w": room})
    assert found["a"] is room
    assert found["b"][0] is room
    assert room.tolist() == [5, 5]
    assert found["b"][1].tolist() == [7, 7]


def test_tensor_of_another_shape_is_no_room_for_what_was_saved() -> None:
    source = Source()
    source.add(rows(0, 6), own=True)
    with pytest.raises(CheckpointError, match=r"tensor 'w' has shape \[6, 2\]"):
        source.fresh(Ref("w"), {"w": torch.zeros(2)})


def test_tensor_among_many_plain_values_is_found() -> None:
    source = Source()
    source.add(rows(0, 6), own=True)
    for kind in (list, tuple):
        found = source.fresh(kind([*range(100), Ref("w")]))
        assert type(found) is kind
        assert found[:-1] == kind(range(100))
        assert found[-1].shape == (6, 2)


# -- digests ----------------------------------------------------------------------------------------------------------


def test_chunks_cover_everything_once() -> None:
    for nbytes in (0, 1, 4095, 4096, 4097, 10_000):
        spans = list(digest.chunks(nbytes, 4096))
        assert b"".join(bytes(nbytes)[start:end] for start, end in spans) == bytes(nbytes)
        assert all(end - start <= 4096 for start, end in spans)


def test_chunks_grow_so_that_there_are_never_too_many() -> None:
    for nbytes in (0, 1 << 20, 16 << 30, (16 << 30) + 1, 1 << 45):
        assert -(-nbytes // digest.chunk_size(nbytes)) <= 1024
    assert digest.chunk_size(1 << 30) == 16 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1024, 1025, 5000])
def test_check_is_content_with_what_was_written(nbytes: int) -> None:
    data = os.urandom(nbytes)
    check = Check()
    check.add(memoryview(data), 1024, digest.digests(memoryview(data), 1024), "file")
    assert check.wrong() == ""


@pytest.mark.parametrize("at", [0, 1023, 1024, 2047, 2500, 4095, 4096, 4999])
def test_check_finds_one_flipped_bit_in_any_chunk(at: int) -> None:
    data = bytearray(os.urandom(5000))
    known = digest.digests(memoryview(data), 1024)
    data[at] ^= 1
    check = Check()
    check.add(memoryview(data), 1024, known, "rank-00001.safetensors")
    start = at // 1024 * 1024
    assert check.wrong() == f"rank-00001.safetensors, bytes {start} to {min(start + 1024, 5000)}: the digest is wrong"


@pytest.mark.parametrize("change", [lambda known: known[:-1], lambda known: [*known, known[0]], lambda known: []])
def test_check_wants_a_digest_for_every_chunk(change: Any) -> None:
    data = memoryview(bytes(5000))
    check = Check()
    check.add(data, 1024, change(digest.digests(data, 1024)), "file")
    assert "digests for 5 chunks" in check.wrong()


def test_chunks_that_change_places_are_found() -> None:
    data = os.urandom(2048)
    check = Check()
    check.add(memoryview(data[1024:] + data[:1024]), 1024, digest.digests(memoryview(data), 1024), "file")
    assert check.wrong().count("the digest is wrong") == 2


def test_check_that_could_not_be_made_is_not_taken_for_a_good_one() -> None:
    data = memoryview(bytes(2048))[::2]  # not in one piece: no digest of it can be computed
    check = Check()
    check.add(data, 1024, [digest.digest(bytes(1024))], "file")
    with pytest.raises((BufferError, ValueError)):
        check.wrong()


# -- whole snapshots --------------------------------------------------------------------------------------------------


def state_of(rank: int) -> dict[str, Any]:
    shared = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    return {
        "weight": torch.nn.Parameter(shared),
        "mean": torch.full((9,), float(rank)),
        "loader": {"position": 10 * rank, "left": [numpy.arange(rank + 1), torch.full((rank + 2,), rank)]},
        "raw": bytearray(b"abc"),
    }


def owner(tensor: torch.Tensor) -> int:
    if isinstance(tensor, torch.nn.Parameter):
        return SHARED
    return LEADER if tensor.shape == (9,) else OWN


def staged(rank: int) -> tuple[bytes, bytearray, bytes]:
    """Return header, data and values as a rank has them in its slot."""
    collector = Collector()
    collector.owner = owner
    values = encoding.encode(state_of(rank), "", collector.keep)
    made = make_plan(collector.found, rank, WORLD)
    data = bytearray(made.data_bytes)
    copy(made.targets(torch.frombuffer(data, dtype=torch.uint8)), made.sources(collector.found))
    return made.header, data, values


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of three ranks, with several chunks in each file."""
    monkeypatch.setattr(digest, "_CHUNK", 4096)
    files, values = [], []
    for rank in range(WORLD):
        header, data, encoded = staged(rank)
        name = f"rank-{rank:05d}"
        files.append(writing.write_file(tmp_path / f"{name}.safetensors", rank, header, memoryview(data)))
        values.append(writing.write_file(tmp_path / f"{name}.values", rank, b"", memoryview(encoded)))
    assert all(len(file.digests) >= 3 for file in files)
    local.write_manifest(tmp_path, Manifest(7, 1, 0, WORLD, 1.0, tuple(files), tuple(values)))
    return tmp_path


def opened(folder: Path, rank: int) -> Opened:
    return open_disk(folder, local.read_manifest(folder), rank)


def read_all(folder: Path, manifest: Manifest, rank: int = 0) -> None:
    """Read everything: files of other ranks are opened only if something in them is wanted."""
    open_disk(folder, manifest, rank).source.tensors()


def assert_state(found: dict[str, Any], rank: int) -> None:
    wanted = state_of(rank)
    assert torch.equal(found["weight"], wanted["weight"])
    assert found["mean"].tolist() == [0] * 9  # as the first rank had it
    assert found["loader"]["position"] == 10 * rank
    assert found["loader"]["left"][0].tolist() == list(range(rank + 1))
    assert found["loader"]["left"][1].tolist() == [rank] * (rank + 2)
    assert found["raw"] == bytearray(b"abc")


@pytest.mark.parametrize("rank", range(WORLD))
def test_checkpoint_on_disk_gives_each_rank_its_state(folder: Path, rank: int) -> None:
    found = opened(folder, rank)
    assert_state(found.source.fresh(found.values), rank)
    assert found.check.wrong() == ""


def test_default_device_of_torch_changes_nothing(folder: Path) -> None:
    """A script's ``torch.set_default_device("cuda")``: arrays are made of tensors on the CPU."""
    with torch.device("meta"):
        found = opened(folder, 1)
        state = found.source.fresh(found.values)
    assert_state(state, 1)
    assert state["weight"].device.type == "cpu"
    assert found.check.wrong() == ""


def test_rank_that_a_checkpoint_does_not_know_is_given_the_state_of_the_first(folder: Path) -> None:
    found = opened(folder, WORLD + 2)
    assert_state(found.source.fresh(found.values), 0)
    assert found.check.wrong() == ""


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("peer", range(WORLD))
@pytest.mark.parametrize("at", [0, 7, 8, 50, 300, 4000, 4095])
def test_flipped_bit_in_any_header_is_refused_at_once(folder: Path, peer: int, at: int) -> None:
    flip(folder / f"rank-{peer:05d}.safetensors", at)
    with pytest.raises(CheckpointError, match="header"):
        read_all(folder, local.read_manifest(folder))


@pytest.mark.parametrize("peer", range(WORLD))
@pytest.mark.parametrize("at", [4096, 4096 + 4095, 4096 + 4096, -1])
def test_flipped_bit_in_any_data_is_found_and_placed(folder: Path, peer: int, at: int) -> None:
    flip(folder / f"rank-{peer:05d}.safetensors", at)
    found = opened(folder, 0)
    found.source.fresh(found.values)
    assert f"rank-{peer:05d}.safetensors, bytes " in (wrong := found.check.wrong())
    assert wrong.count("the digest is wrong") == 1


@pytest.mark.parametrize("at", [0, 20, -1])
def test_flipped_bit_in_the_values_is_refused(folder: Path, at: int) -> None:
    flip(folder / "rank-00001.values", at)
    with pytest.raises(CheckpointError, match=r"rank-00001\.values: the digest is wrong"):
        opened(folder, 1)
    opened(folder, 0)  # which does not read them


@pytest.mark.parametrize("change", [-1, 1, -5000])
def test_file_of_another_size_is_refused(folder: Path, change: int) -> None:
    manifest, path = local.read_manifest(folder), folder / "rank-00002.safetensors"
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(CheckpointError, match=r"rank-00002\.safetensors has another size"):
        read_all(folder, manifest)


@pytest.mark.parametrize("name", ["rank-00000.values", "rank-00002.safetensors"])
@pytest.mark.parametrize("what", ["pipe", "device", "empty file"])
def test_what_is_no_file_is_neither_waited_for_nor_read_without_end(folder: Path, name: str, what: str) -> None:
    """All of them are 0 bytes long, and the manifest says so."""
    good, path = local.read_manifest(folder), folder / name
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
    nothing: dict[str, Any] = {"nbytes": 0, "head": 0, "digests": ()}
    shards_, values = (
        tuple(replace(file, **nothing) if file.name == name else file for file in files)
        for files in (good.shards, good.values)
    )
    forged = replace(good, shards=shards_, values=values)
    raised: list[Exception] = []

    def read() -> None:
        try:
            read_all(folder, forged)
        except Exception as error:  # noqa: BLE001 - what may come is what this is about
            raised.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    reading.join(10)
    waits = reading.is_alive()
    while reading.is_alive():  # somebody opens the other end, or it would wait for ever
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        reading.join(0.05)
    assert not waits
    (error,) = raised
    assert isinstance(error, (CheckpointError, OSError))
    assert name in str(error)
    assert ("no regular file" in str(error)) == (what != "empty file")


def test_link_to_a_file_elsewhere_is_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("rank-00001.values", "rank-00001.safetensors"):
        (folder / name).rename(elsewhere / name)
        (folder / name).symlink_to(elsewhere / name)
    found = opened(folder, 1)
    assert_state(found.source.fresh(found.values), 1)
    assert found.check.wrong() == ""


def test_file_that_is_gone_is_an_error(folder: Path) -> None:
    manifest = local.read_manifest(folder)
    (folder / "rank-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        open_disk(folder, manifest, 2)
    with pytest.raises(DamagedError, match="No such file"):
        read_all(folder, manifest)


def test_files_that_a_rank_needs_nothing_of_are_not_opened(folder: Path) -> None:
    """With a thousand ranks each would read all that all of them wrote."""
    manifest = local.read_manifest(folder)
    for rank in (0, 1):
        (folder / f"rank-0000{rank}.safetensors").unlink()
    found = open_disk(folder, manifest, 2)
    assert found.source.fresh(found.values["loader"])["position"] == 20
    with pytest.raises(DamagedError, match="No such file"):
        found.source.fresh(found.values["weight"])


def test_file_of_another_rank_in_the_place_of_ones_own_is_refused(folder: Path) -> None:
    one, other = (folder / f"rank-0000{rank}.safetensors" for rank in (1, 2))
    os.truncate(other, one.stat().st_size)
    other.write_bytes(one.read_bytes())
    with pytest.raises(CheckpointError):
        opened(folder, 2)


def test_restored_state_shares_no_memory_with_the_files(folder: Path) -> None:
    found = opened(folder, 1)
    state = found.source.fresh(found.values)
    target = torch.zeros(60, 100)
    found.source.copy_into(".weight", target)
    for path in folder.glob("rank-*"):  # in place: a mapping of the file would show it
        with path.open("r+b") as written:
            written.write(b"\xff" * path.stat().st_size)
    assert_state(state, 1)
    assert torch.equal(target, state_of(1)["weight"])
    state["weight"].zero_()
    assert target.any()


def test_restoring_leaves_the_files_as_they_are(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    found = opened(folder, 1)
    state = found.source.fresh(found.values)
    for tensor in (state["weight"], state["mean"], state["loader"]["left"][1]):
        tensor.fill_(9)
    state["loader"]["left"][0][:] = 9
    state["raw"][:] = b"zzz"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


_numbers = itertools.count()


class Slots:
    """The slots of the ranks, as the saver hands them out."""

    def __init__(self) -> None:
        self.name = f"slot-{next(_numbers)}-"  # those of other tests may still be looked into
        self.fds: list[int] = []
        self.message: dict[str, Any] = {"peers": [], "world": WORLD}
        self.values: dict[int, tuple[int, int, int]] = {}
        self.digests: dict[int, list[str]] = {}
        for rank in range(WORLD):
            header, data, encoded = staged(rank)
            at = shards.aligned(len(data))
            fd = os.memfd_create(self.name)
            os.pwrite(fd, data, 0)
            os.pwrite(fd, header + encoded, at)
            self.fds.append(fd)
            self.values[rank] = (at + len(header), len(encoded), digest.short(encoded))
            self.digests[rank] = digest.digests(memoryview(data), digest.chunk_size(len(data)))
            self.message["peers"].append(
                {"rank": rank, "header": [at, len(header), digest.short(header)], "data": len(data)}
            )

    def open(self, rank: int, known: Callable[[int], mmap.mmap | None] = lambda fd: None) -> Opened:
        mine = {"digests": self.digests[rank]}
        peers = [{**peer, **(mine if peer["rank"] == rank else {})} for peer in self.message["peers"]]
        message = {**self.message, "values": self.values[rank], "peers": peers}
        return open_memory(message, [os.dup(fd) for fd in self.fds], rank, WORLD, known)


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slots]:
    monkeypatch.setattr(digest, "_CHUNK", 4096)
    made = Slots()
    yield made
    for fd in made.fds:
        os.close(fd)


def open_slots(slots: Slots) -> int:
    """Return how many descriptors of these slots this process has."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += fd.readlink().name.startswith(f"memfd:{slots.name}")
    return found


def mappings_of(slots: Slots) -> list[int]:
    """Return how often this process has mapped each of these slots."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [sum(line.split()[4:5] == [str(os.fstat(fd).st_ino)] for line in lines) for fd in slots.fds]


def test_slot_that_is_mapped_already_is_read_through_that_mapping(slots: Slots) -> None:
    """A fresh one would be filled page by page."""
    mine = mmap.mmap(slots.fds[1], 0)

    def known(fd: int) -> mmap.mmap | None:
        return mine if os.path.samestat(os.fstat(fd), os.fstat(slots.fds[1])) else None

    found = slots.open(1, known)
    assert mappings_of(slots) == [1, 1, 1]
    assert_state(found.source.fresh(found.values), 1)
    assert found.check.wrong() == ""
    del found
    gc.collect()
    assert mappings_of(slots) == [0, 1, 0]
    mine.close()  # nothing looks into it any more
    assert open_slots(slots) == WORLD


def test_flipped_bit_is_found_through_the_mapping_that_is_known_too(slots: Slots) -> None:
    mine = mmap.mmap(slots.fds[1], 0)
    mine[5000] ^= 1
    found = slots.open(1, lambda fd: mine if os.path.samestat(os.fstat(fd), os.fstat(slots.fds[1])) else None)
    assert "memory, bytes 4096 to " in found.check.wrong()


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 8, 1), (8, 2, 4), (96, 8, 4), (12, 4, 3)]
)
def test_digests_take_no_more_threads_than_this_rank_has_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert share_of_cores(ranks) == threads


def test_digests_in_memory_are_checked_by_as_many_threads_as_this_rank_has_cores(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores, threads in ((WORLD, 1), (2 * WORLD, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        found = slots.open(1)
        assert found.check._pool._max_workers == threads
        assert found.check.wrong() == ""


@pytest.mark.parametrize("rank", range(WORLD))
def test_snapshot_in_memory_gives_each_rank_its_state(slots: Slots, rank: int) -> None:
    found = slots.open(rank)
    assert_state(found.source.fresh(found.values), rank)
    assert found.check.wrong() == ""


def test_flipped_bit_in_ones_own_slot_is_found(slots: Slots) -> None:
    os.pwrite(slots.fds[1], bytes([os.pread(slots.fds[1], 1, 5000)[0] ^ 1]), 5000)
    assert "memory, bytes 4096 to " in slots.open(1).check.wrong()


def test_restored_state_shares_no_memory_with_the_slot(slots: Slots) -> None:
    found = slots.open(1)
    state = found.source.fresh(found.values)
    for fd in slots.fds:
        os.pwrite(fd, b"\xff" * os.fstat(fd).st_size, 0)
    assert_state(state, 1)


def test_descriptors_are_closed_whatever_happens(slots: Slots) -> None:
    """The last rank opens: what goes wrong does so before its own slot, which threads would still be looking into."""
    assert open_slots(slots) == WORLD
    slots.open(2).check.wrong()
    last = slots.message["peers"].pop()
    with pytest.raises(ValueError, match="zip"):
        slots.open(2)
    slots.message["peers"].append(last)
    at, length, _ = slots.message["peers"][1]["header"]
    os.pwrite(slots.fds[1], b"x" * length, at)
    with pytest.raises(CheckpointError, match="header of rank 1 in memory is not what was sealed"):
        slots.open(2)
    slots.message["peers"][1]["header"][2] = digest.short(b"x" * length)
    with pytest.raises(ShardError):
        slots.open(2)
    gc.collect()  # a mapping has a descriptor of its own, and goes with the last that looks into it
    assert open_slots(slots) == WORLD


def test_snapshot_without_anything_of_this_rank_is_an_error_and_no_empty_state(slots: Slots) -> None:
    slots.values[9], slots.digests[9] = (0, 0, 0), []
    with pytest.raises(CheckpointError, match="nothing of rank 9"):
        slots.open(9)


def test_values_that_were_overwritten_are_an_error(slots: Slots) -> None:
    os.pwrite(slots.fds[0], b"\xc1" * 50, slots.values[0][0])
    with pytest.raises(CheckpointError, match="values of rank 0 in memory are not what was sealed"):
        slots.open(0)


# -- modules ----------------------------------------------------------------------------------------------------------


def test_module_with_parameters_of_every_form_is_restored() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    class Odd(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.two = torch.nn.Parameter(TwoTensor(torch.randn(3, 2), torch.randn(3, 2)))
            self.wide = torch.nn.Parameter(torch.randn(4, dtype=torch.complex128))
            self.plain = torch.nn.Parameter(torch.randn(5, 5))
            self.tied = self.plain
            self.register_buffer("scale", torch.randn(()))

    saved, other = Odd(1), Odd(2)
    collector = Collector()
    values = encoding.encode(Module("model", saved, False).state(), "model", collector.keep)
    made = make_plan(collector.found, 0, 1)
    slot = torch.zeros(made.data_bytes, dtype=torch.uint8)
    copy(made.targets(slot), made.sources(collector.found))
    source = Source()
    source.add(Shard(slot, shards.parse_header(made.header, made.data_bytes)), own=True)
    tree = decoding.decode(values, lambda name, form: Ref(name, tuple(form)))
    part = Module("model", other, False)
    assert part.check(tree, source, strict=True) == []
    part.load(tree, source)
    assert torch.equal(other.two.a, saved.two.a)
    assert torch.equal(other.two.b, saved.two.b)
    for name in ("wide", "plain", "scale"):
        assert torch.equal(getattr(other, name), getattr(saved, name)), name
    assert other.tied is other.plain
