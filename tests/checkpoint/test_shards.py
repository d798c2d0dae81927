"""Shards: files that the safetensors library and torch itself can read, headers that can't lie, and a fair division of rows."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from resilience.checkpoint import plan, shards
from resilience.checkpoint.shards import (
    ALIGN,
    ITEM_SIZES,
    Part,
    Piece,
    ShardError,
    Wanted,
    build_header,
    header_length,
    lay_out,
    parse_header,
    split,
)

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (1, 5), (5, 1), (3, 0, 2), (0, 4), (6, 3), (2, 3, 4), (64, 33)]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of any bytes at all (a truth value is 0 or 1)."""
    source = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=source)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).view(shape)


def data_of(pieces: list[Piece], tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(bits(tensors[piece.name]) for piece in sorted(pieces, key=lambda piece: piece.start))


def some_pieces() -> list[Piece]:
    return lay_out(
        [
            Wanted("half", "F16", (3, 2), (3, 2), (0, 0)),
            Wanted("rows", "F32", (2, 3), (5, 3), (1, 0)),
            Wanted("scalar", "I64", (), (), ()),
            Wanted("empty", "F32", (0, 3), (0, 3), (0, 0)),
            Wanted("flags", "BOOL", (3,), (3,), (0,)),
        ]
    )


# -- headers ----------------------------------------------------------------------------------------------------------


def test_what_a_header_says_is_what_was_said() -> None:
    pieces = some_pieces()
    header = build_header(pieces)
    assert parse_header(header, sum(piece.nbytes for piece in pieces)) == pieces
    assert [piece.is_whole for piece in pieces] == [True, False, True, True, True]


def test_shard_without_tensors_has_a_header_too() -> None:
    assert parse_header(build_header([]), 0) == []


@pytest.mark.parametrize("number", [0, 1, 20, 29, 30, 31, 32, 33, 34, 35, 36, 100, 1000])
def test_header_takes_whole_blocks_whatever_is_in_it(number: int) -> None:
    pieces = lay_out(Wanted(f"name{index}", "F32", (1,), (1,), (0,)) for index in range(number))
    header = build_header(pieces)
    assert len(header) % ALIGN == 0
    assert header_length(header[:8], len(header)) == len(header)
    assert header.rstrip(b" ").endswith(b"}")


@pytest.mark.parametrize("length", range(3900, 4000, 7))
def test_header_is_never_a_block_longer_than_it_need_be(length: int) -> None:
    header = build_header(lay_out([Wanted("n" * length, "F32", (1,), (1,), (0,))]))
    assert len(header) - len(header.rstrip(b" ")) < ALIGN


def test_two_tensors_of_one_name_are_refused_when_written() -> None:
    for names in (("a", "a"), ("a", "__metadata__")):
        with pytest.raises(ShardError, match="one name"):
            build_header(lay_out(Wanted(name, "F32", (1,), (1,), (0,)) for name in names))


def test_header_that_the_library_would_not_read_is_refused_when_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MAX_HEADER", 5000)
    build_header(lay_out([Wanted("a", "F32", (1,), (1,), (0,))]))
    with pytest.raises(ShardError, match="header of"):
        build_header(lay_out(Wanted(f"name{index}", "F32", (1,), (1,), (0,)) for index in range(100)))


@pytest.mark.parametrize("prefix", [b"", b"1234567", (2**63).to_bytes(8, "little"), (4089).to_bytes(8, "little")])
def test_header_longer_than_its_file_is_refused(prefix: bytes) -> None:
    with pytest.raises(ShardError, match="header would be"):
        header_length(prefix, 4096)


# -- other programs read them -----------------------------------------------------------------------------------------


def test_every_dtype_has_the_size_that_torch_gives_it() -> None:
    assert {name: dtype.itemsize for name, dtype in plan.DTYPES.items()} == ITEM_SIZES


def test_file_opens_with_the_safetensors_library_for_all_dtypes_and_shapes(tmp_path: Path) -> None:
    tensors = {
        f"{name}.{number}": noise(shape, plan.DTYPES[name], number)
        for name in ITEM_SIZES
        for number, shape in enumerate(SHAPES)
    }
    pieces = lay_out(
        Wanted(name, plan.NAMES[tensor.dtype], tuple(tensor.shape), tuple(tensor.shape), (0,) * tensor.dim())
        for name, tensor in tensors.items()
    )
    path = tmp_path / "all.safetensors"
    path.write_bytes(build_header(pieces) + data_of(pieces, tensors))
    found = safetensors.torch.load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name
    with safetensors.safe_open(path, framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"
        assert bits(opened.get_slice("F32.8")[2:4]) == bits(tensors["F32.8"][2:4])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is what is meant
@pytest.mark.parametrize("ranks", [2, 3])
def test_torchs_own_reader_puts_the_rows_of_several_shards_together(tmp_path: Path, ranks: int) -> None:
    whole = {
        "weight": noise((7, 4), torch.float32, 1).nan_to_num(),
        "bias": noise((5,), torch.bfloat16, 2).nan_to_num(),
        "deep": torch.arange(24).reshape(4, 3, 2),
        "scale": torch.tensor(2.5),
    }
    sizes = [(tuple(tensor.shape), tensor.dtype.itemsize) for tensor in whole.values()]
    names, cut = list(whole), 0
    for rank in range(ranks):
        mine: dict[str, torch.Tensor] = {}
        described = []
        for part in split(sizes, ranks, rank):
            name = names[part.index]
            tensor, (first, last) = whole[name], part.rows or (0, None)
            mine[name] = tensor if part.rows is None else tensor[first:last]
            cut += part.rows is not None
            offsets = (first, *[0] * tensor.dim())[: tensor.dim()]
            described.append(
                Wanted(name, plan.NAMES[tensor.dtype], tuple(mine[name].shape), tuple(tensor.shape), offsets)
            )
        pieces = lay_out(described)
        (tmp_path / f"rank-{rank:05d}.safetensors").write_bytes(build_header(pieces) + data_of(pieces, mine))
    assert cut >= 2  # else it would show nothing
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for name, tensor in whole.items():
        assert bits(found[name]) == bits(tensor), name


# -- headers that lie -------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]


def changed(change: Change) -> tuple[bytes, int]:
    """Return the header of some pieces after a change of its JSON, with the offsets and wholes as values, and the data's size."""
    pieces = some_pieces()
    entries = json.loads(build_header(pieces)[8:])
    metadata = entries["__metadata__"]
    for key in ("DCP_SHARDING_INFO", "resilience"):
        metadata[key] = json.loads(metadata[key])
    change(entries)
    for key in ("DCP_SHARDING_INFO", "resilience"):
        if isinstance(metadata.get(key), dict):
            metadata[key] = json.dumps(metadata[key])
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text, sum(piece.nbytes for piece in pieces)


def put(value: Any, *path: str | int) -> Change:
    def change(entries: dict[str, Any]) -> None:
        place: Any = entries
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def drop(*path: str) -> Change:
    def change(entries: dict[str, Any]) -> None:
        place: Any = entries
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return change


def saved(name: str) -> tuple[str, ...]:
    return ("__metadata__", "DCP_SHARDING_INFO", name, "saved_offsets")


WHOLE = ("__metadata__", "resilience", "whole", "rows")

LIES: dict[str, Change] = {
    "hole": put([12, 36], "rows", "data_offsets"),
    "overlap": put([4, 28], "rows", "data_offsets"),
    "overlap of the whole": put([0, 24], "rows", "data_offsets"),
    "begins before the data": put([-8, 0], "scalar", "data_offsets"),
    "ends before it begins": put([32, 8], "rows", "data_offsets"),
    "too many bytes": put([32, 46], "half", "data_offsets"),
    "empty one beyond the end": put([100, 100], "empty", "data_offsets"),
    "empty one inside another": put([12, 12], "empty", "data_offsets"),
    "shape too large": put([3, 3], "half", "shape"),
    "negative shape": put([-3, -2], "half", "shape"),
    "truth as a number": put([3, 2, True], "half", "shape"),
    "fraction as a number": put([3.0, 2], "half", "shape"),
    "text as a number": put(["3", "2"], "half", "shape"),
    "text as a shape": put("32", "half", "shape"),
    "no shape": drop("half", "shape"),
    "dtype that is none": put("F17", "half", "dtype"),
    "dtype of another size": put("F32", "half", "dtype"),
    "dtype that is a list": put(["F16"], "half", "dtype"),
    "truth as an offset": put([False, 8], "scalar", "data_offsets"),
    "three offsets": put([0, 8, 8], "scalar", "data_offsets"),
    "entry that is a number": put(5, "scalar"),
    "tensor that has no bytes": put({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "one more"),
    "tensor less": drop("scalar"),
    "no metadata": drop("__metadata__"),
    "no sharding info": drop("__metadata__", "DCP_SHARDING_INFO"),
    "no wholes": drop("__metadata__", "resilience"),
    "no offsets of one": drop("__metadata__", "DCP_SHARDING_INFO", "rows"),
    "whole of fewer columns": put([5, 2], *WHOLE),
    "whole of fewer rows": put([2, 3], *WHOLE),
    "whole of fewer dimensions": put([5], *WHOLE),
    "whole of more dimensions": put([5, 3, 1], *WHOLE),
    "whole that is negative": put([-5, 3], *WHOLE),
    "whole that is a number": put(5, *WHOLE),
    "whole beyond all numbers": put([2**63, 3], *WHOLE),
    "whole of a scalar": put([5], "__metadata__", "resilience", "whole", "scalar"),
    "rows that end behind the last": put([4, 0], *saved("rows")),
    "negative row": put([-1, 0], *saved("rows")),
    "truth as a row": put([True, 0], *saved("rows")),
    "row beyond all numbers": put([2**70, 0], *saved("rows")),
    "columns of a tensor": put([1, 1], *saved("rows")),
    "offsets of too few dimensions": put([1], *saved("rows")),
    "offsets of a scalar": put([0], *saved("scalar")),
    "row of a whole tensor": put([1, 0], *saved("half")),
    "too many dimensions": put([3, 2, *[1] * 70], "half", "shape"),
}


@pytest.mark.parametrize("change", list(LIES.values()), ids=list(LIES))
def test_header_that_lies_is_refused(change: Change) -> None:
    with pytest.raises(ShardError):
        parse_header(*changed(change))


def test_header_of_these_tests_is_good_where_nothing_is_changed() -> None:
    """If it were not, none of them could fail."""
    assert sorted(parse_header(*changed(lambda entries: None)), key=repr) == sorted(some_pieces(), key=repr)


def test_tensor_where_its_items_are_not_aligned_is_refused() -> None:
    pieces = [Piece("byte", "U8", (1,), 0, 1, (1,), (0,)), Piece("floats", "F32", (1,), 1, 4, (1,), (0,))]
    with pytest.raises(ShardError, match="floats"):
        parse_header(build_header(pieces), 5)


@pytest.mark.parametrize("data_bytes", [0, 79, 81, 10**9])
def test_data_of_another_length_is_refused(data_bytes: int) -> None:
    pieces = some_pieces()
    assert sum(piece.nbytes for piece in pieces) not in (0, 79, 81)
    with pytest.raises(ShardError, match="the data"):
        parse_header(build_header(pieces), data_bytes)


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"null", b"5", b'{"__metadata__":[]}', b"\xff", b"[" * 100_000, b"{} {}", b"1" * 5000]
)
def test_header_that_is_something_else_is_refused(text: bytes) -> None:
    with pytest.raises(ShardError):
        parse_header(len(text).to_bytes(8, "little") + text, 0)


def test_bytes_after_the_header_are_refused() -> None:
    pieces = some_pieces()
    nbytes = sum(piece.nbytes for piece in pieces)
    for tail in (b"x", b"\0", b"{}"):
        with pytest.raises(ShardError):
            parse_header(build_header(pieces) + tail, nbytes)


@pytest.mark.parametrize("seed", range(4))
def test_any_damage_to_a_header_gives_pieces_or_a_shard_error(seed: int) -> None:
    source = random.Random(seed)
    pieces = some_pieces()
    nbytes, good = sum(piece.nbytes for piece in pieces), build_header(pieces).rstrip(b" ")
    read = 0
    for _ in range(1_500):
        damaged = bytearray(good)
        for _ in range(source.randint(1, 3)):
            kind, at = source.randrange(4), source.randrange(8, len(damaged))
            if kind == 0:
                damaged[at] ^= 1 << source.randrange(8)
            elif kind == 1:
                damaged[at] = source.choice(b'0123456789-.eE"[]{},: tfn')
            elif kind == 2:
                del damaged[at : at + source.randint(1, 20)]
            else:
                damaged[at:at] = good[source.randrange(8, len(good)) :][: source.randint(1, 20)]
        try:
            found = parse_header(bytes(damaged), nbytes)
        except ShardError:
            continue
        read += 1
        assert sum(piece.nbytes for piece in found) == nbytes  # whatever it says now, it says nothing impossible
        assert all(piece.start % ITEM_SIZES[piece.dtype] == 0 for piece in found)
    assert 0 < read < 1_500


# -- who stages what --------------------------------------------------------------------------------------------------


def rows_of(part: Part, shape: tuple[int, ...]) -> set[int]:
    if part.rows is not None:
        return set(range(*part.rows))
    return set(range(shape[0])) if shape and shape[0] else {0}  # a scalar, or an empty one, is one thing to keep


def bytes_of(part: Part, shape: tuple[int, ...], item: int) -> int:
    whole = math.prod(shape) * item
    return whole if part.rows is None else whole // shape[0] * (part.rows[1] - part.rows[0])


@pytest.mark.parametrize("seed", range(300))
def test_every_row_belongs_to_exactly_one_rank_and_all_have_about_the_same(seed: int) -> None:
    source = random.Random(seed)
    tensors = [
        (
            tuple(source.choice([0, 1, 1, 2, 3, 5, 17, 100]) for _ in range(source.randrange(4))),
            source.choice([1, 2, 4, 8]),
        )
        for _ in range(source.randrange(12))
    ]
    parts = source.randint(1, 9)
    shares = [split(tensors, parts, mine) for mine in range(parts)]
    for index, (shape, _) in enumerate(tensors):
        rows = [row for share in shares for part in share if part.index == index for row in rows_of(part, shape)]
        assert sorted(rows) == (list(range(shape[0])) if shape and shape[0] else [0])
    total = sum(math.prod(shape) * item for shape, item in tensors)
    largest_row = max((math.prod(shape[1:]) * item for shape, item in tensors), default=0)
    for share in shares:
        mine = sum(bytes_of(part, *tensors[part.index]) for part in share)
        assert abs(mine - total / parts) <= largest_row + 1
        assert all(part.rows is None or 0 <= part.rows[0] < part.rows[1] <= tensors[part.index][0][0] for part in share)
        assert [part.index for part in share] == sorted({part.index for part in share})


def test_one_rank_alone_has_everything_whole() -> None:
    tensors = [((4, 4), 4), ((), 8), ((0, 3), 2), ((1, 9), 1)]
    assert split(tensors, 1, 0) == [Part(0), Part(1), Part(2), Part(3)]


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5, 0), (1,), (1, 1000)])
def test_what_can_not_be_divided_is_one_ranks_and_whole(shape: tuple[int, ...]) -> None:
    shares = [split([(shape, 4)], 4, mine) for mine in range(4)]
    assert sorted(share for share in shares if share) == [[Part(0)]]


def test_nothing_is_divided_into_nothing() -> None:
    assert [split([], 3, mine) for mine in range(3)] == [[], [], []]


@pytest.mark.parametrize("seed", range(30))
def test_tensors_are_packed_without_holes_and_each_is_aligned(seed: int) -> None:
    source = random.Random(seed)
    wanted = []
    for number in range(source.randrange(30)):
        shape = tuple(source.randrange(5) for _ in range(source.randrange(4)))
        wanted.append(Wanted(f"{number}", source.choice(list(ITEM_SIZES)), shape, shape, (0,) * len(shape)))
    pieces = lay_out(wanted)
    at = 0
    for piece in pieces:
        assert piece.start == at
        assert piece.start % ITEM_SIZES[piece.dtype] == 0
        assert piece.nbytes == math.prod(piece.shape) * ITEM_SIZES[piece.dtype]
        at += piece.nbytes
    assert sorted((piece.name, piece.dtype, piece.shape) for piece in pieces) == sorted(item[:3] for item in wanted)
