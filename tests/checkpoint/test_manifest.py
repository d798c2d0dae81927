"""The manifest: read as it was written, or refused. Never believed by halves."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from resilience.checkpoint import digest
from resilience.checkpoint.manifest import FORMAT, VERSION, File, Manifest, ManifestError

HEX = digest.digest(b"")
SHARD = File("rank-00000.safetensors", 0, 4096 + 20, 4096, 16, (HEX, HEX, HEX))
VALUES = File("rank-00000.values", 0, 3, 0, 16, (HEX,))
SMALL = Manifest(7, 2, 1, 1, 1700000000.5, (SHARD,), (VALUES,), {"torch": "2.13"})


def signed(contents: Any) -> bytes:
    """A manifest of any contents, with the right digest in front."""
    body = contents if isinstance(contents, bytes) else json.dumps(contents).encode()
    return f"{digest.NAME} {digest.digest(body)}\n".encode() + body


def as_dict() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SMALL.as_bytes().partition(b"\n")[2])
    return found


def test_manifest_is_read_as_it_was_written() -> None:
    assert Manifest.from_bytes(SMALL.as_bytes()) == SMALL
    assert Manifest.from_bytes(signed(as_dict())) == SMALL
    assert SMALL.key == (2, 7)
    assert SMALL.nbytes == 4096 + 20 + 3


def test_manifest_of_many_ranks_with_and_without_tensors_is_read_as_it_was_written() -> None:
    values = tuple(dataclasses.replace(VALUES, name=f"rank-{rank:05d}.values", rank=rank) for rank in range(40))
    empty = dataclasses.replace(values[3], nbytes=0, digests=())
    many = Manifest(0, 0, 0, 40, 0, (), (*values[:3], empty, *values[4:]))
    assert Manifest.from_bytes(many.as_bytes()) == many


def test_any_changed_byte_is_noticed() -> None:
    data = SMALL.as_bytes()
    for at in range(len(data)):
        for changed in {data[at] ^ 1, data[at] ^ 0x80, ord("\n"), 0} - {data[at]}:
            with pytest.raises(ManifestError):
                Manifest.from_bytes(data[:at] + bytes([changed]) + data[at + 1 :])


def test_manifest_that_was_cut_short_or_goes_on_is_refused() -> None:
    data = SMALL.as_bytes()
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            Manifest.from_bytes(data[:length])
    for more in (b"\n", b" ", b"\0", data):
        with pytest.raises(ManifestError):
            Manifest.from_bytes(data + more)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b"\xff\xfe",
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 9999,
        json.dumps([FORMAT, VERSION]).encode(),
        json.dumps({"format": FORMAT}).encode(),
        b'{"format": NaN}',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_body_that_is_no_manifest_is_refused_though_its_digest_is_right(body: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(signed(body))


def test_newer_version_is_refused_and_named() -> None:
    with pytest.raises(ManifestError, match=f"format version {VERSION + 1}; this program reads up to {VERSION}"):
        Manifest.from_bytes(signed({**as_dict(), "version": VERSION + 1, "unheard": "of"}))


NUMBERS: list[Any] = [-1, True, False, 1.0, 1.5, float("nan"), float("inf"), "1", None, [], {}, [1]]
TOP: dict[str, list[Any]] = {
    "world": [*NUMBERS, 0, 10**12],
    **dict.fromkeys(("step", "generation", "cycle"), NUMBERS),
    "version": [0, *NUMBERS, 10**30],
    "created": ["now", None, True, float("nan"), float("inf"), -1, 10**400, []],
    "facts": [None, [], "text", 1],
    "format": ["other", None, 1, []],
    "shards": [None, 1, "text", {}, [1], ["name"], [None], [[]], [{}]],
    "values": [None, 1, "text", {}, [], [1], ["name"], [None], [[]], [{}]],
    "surprise": [1],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in TOP.items() for value in values],
    ids=lambda item: repr(item)[:30],
)
def test_field_that_can_not_be_meant_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(signed({**as_dict(), name: value}))


@pytest.mark.parametrize("name", [name for name in as_dict() if name != "facts"])
def test_missing_field_is_refused(name: str) -> None:
    left = as_dict()
    del left[name]
    with pytest.raises(ManifestError):
        Manifest.from_bytes(signed(left))


PATHS: list[Any] = [
    "../x",
    "..",
    ".",
    "",
    "/etc/passwd",
    "a/b",
    "a\\b",
    ".hidden",
    "a\0b",
    "a\n",
    "é",
    "x" * 300,
    "manifest.json",
    None,
    5,
    ["a"],
    True,
]
IN_FILE: dict[str, list[Any]] = {
    "name": PATHS,
    "rank": [*NUMBERS, 1, 10**30],
    "nbytes": [*NUMBERS, 0, 4095, 4096, 10**30],
    "head": [*NUMBERS, 0, 10**30],
    "chunk": [*NUMBERS, 0, 1, 10**30],
    "digests": [
        None,
        "",
        "abc",
        HEX,
        [],
        [HEX],
        [HEX] * 4,
        [1, 2, 3],
        [None] * 3,
        ["x"] * 3,
        [HEX.upper() + "x"] * 3,
        {},
    ],
    "surprise": [1],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in IN_FILE.items() for value in values],
    ids=lambda item: repr(item)[:30],
)
def test_listed_file_that_can_not_be_meant_is_refused(name: str, value: Any) -> None:
    hostile = as_dict()
    hostile["shards"][0][name] = value
    with pytest.raises(ManifestError):
        Manifest.from_bytes(signed(hostile))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(File)])
def test_listed_file_without_one_of_its_fields_is_refused(name: str) -> None:
    hostile = as_dict()
    del hostile["values"][0][name]
    with pytest.raises(ManifestError):
        Manifest.from_bytes(signed(hostile))


@pytest.mark.parametrize("ranks", [[0, 2], [1, 2], [0, 0], [0], [0, 1, 2], []])
def test_values_of_every_rank_must_be_listed_once(ranks: list[int]) -> None:
    values = tuple(dataclasses.replace(VALUES, name=f"{number}.values", rank=rank) for number, rank in enumerate(ranks))
    with pytest.raises(ManifestError, match="all 2 ranks"):
        Manifest.from_bytes(Manifest(1, 1, 1, 2, 1.0, (), values).as_bytes())


def test_one_file_can_not_be_two() -> None:
    values = (VALUES, dataclasses.replace(VALUES, rank=1))
    with pytest.raises(ManifestError, match="twice"):
        Manifest.from_bytes(Manifest(1, 1, 1, 2, 1.0, (), values).as_bytes())
    with pytest.raises(ManifestError, match="twice"):
        Manifest.from_bytes(dataclasses.replace(SMALL, shards=(SHARD, SHARD)).as_bytes())
