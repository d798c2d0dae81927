"""What a save costs the training loop, how long until it is on disk, and how long to get it back, in seconds.

Every figure stands beside a plain figure of the same bytes taken right before and after it in the same process; *×* is the median
of the ratios of such neighbours, *worst ×* the largest. Sizes in GiB; one process, or with *DDP* two ranks under
``resilience run``, of which the slower one counts. Each has one thread, as torchrun gives it (``BENCH_THREADS`` changes that: on a
busy machine every tensor then waits for the scheduler, on both sides). *memcpy*: ``copy_`` of the same tensors, one after the
other, into touched memory. Several processes per size, taking turns.

*stall*: until the call returns. Peers are called as their users call them, without fsync. *durable*: until it is on disk, fsync
included, counted from the call's beginning unless noted; *raw* is direct writes of 16 MiB out of touched memory and an fsync; peers
are followed by an fsync. *from memory*: ``restore`` into a model that exists, digests checked, 1.5 s after the save, when the saver
has computed them (a rank that failed is back no sooner); *at once*: it has not. Under DDP after a rank was killed, in the new
processes. *from disk, cold*: nothing is in the page cache, as on another node; *warm*: everything is. ``torch.load`` is
followed by ``load_state_dict``, for all others load in place. *tensors*: the same memory cut into few or many tensors, in turn.
*lost*: a block of training steps with a save after the first of them, less one without, until all of it is written (peers:
without fsync); the first round is left out. *objects*: ``encoding.encode`` beside ``pickle.dumps`` of the same value; *again*: a
tuple that was in the save before. A growth is linear if *×* grows by no more than 15 %.

Not measured: accelerators, several nodes (but see ``replication``), network file systems, how long constructing takes.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, peers
from benchmarks.harness import Event, Row

_SIZES = {0.25: 3, 1.0: 2, 2.0: 1}  # GiB: processes
_PEERS = ("torch.save", "safetensors save_file", "dcp.save", "dcp.async_save")
_PEERS_AT = 1.0  # GiB: those in environments of their own
_LOADERS = ("torch.load", "torch.load, mmap", "dcp.load")
_COUNTS = (20, 2000, 20_000)
_KILLS = 2
_BLOCKS = 4  # rounds
_LINEAR = 1.15
_TIMEOUT_S = 240.0
Pair = Sequence[float]  # what is measured, and its measure before and after


def run() -> list[Row]:
    """Return all rows."""
    found: dict[float, list[Event]] = {size: [] for size in _SIZES}
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
    try:
        for turn in range(max(_SIZES.values())):
            for size, turns in _SIZES.items():
                if turn < turns:
                    found[size] += _one_process(folder / f"{size}-{turn}", size, last=turn == turns - 1)
        adam = _events("python", "snapshot", ["1", "adam", str(folder)])
        shutil.rmtree(folder / "flash", ignore_errors=True)
        overlap = _events("python", "snapshot", ["1", "overlap", str(folder)])
        found[_PEERS_AT] += peers.stalls(_PEERS_AT, folder)
        shutil.rmtree(folder)
        folder.mkdir()
        rows = [
            *_stalls(found, adam),
            *_overlaps(overlap),
            *_durables(found),
            *_from_memory(found, adam),
            *_from_disk(found),
        ]
        ddp = _ddp(folder)
        rows += [*ddp, *_tensors(folder), *_lost(folder)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [*rows, *_objects()]


def _events(kind: str, workload: str, arguments: Sequence[str]) -> list[Event]:
    """Run a workload to its end and return everything it told."""
    with harness.launch(kind, workload, arguments, OMP_NUM_THREADS=os.environ.get("BENCH_THREADS", "1")) as job:
        job.await_events("measured", 1, _TIMEOUT_S)
        return [
            told for event in ("stall", "durable", "memory", "load", "round", "block") for told in job.events(event)
        ]


def _one_process(folder: Path, size: float, last: bool) -> list[Event]:
    """Save in one process; the last time our peers do so too, and all load in another one."""
    folder.mkdir()
    told = _events("python", "snapshot", [str(size), "peers" if last else "model", str(folder)])
    if last:
        told += _events("python", "load", [str(size), str(folder)])
    shutil.rmtree(folder)
    return told


# -- rows -------------------------------------------------------------------------------------------------------------


def _ratios(pairs: Iterable[Pair]) -> list[float]:
    return [2 * took / (before + after) for took, before, after in pairs]


def _row(what: str, who: str, size: str, pairs: Sequence[Pair], against: str, *, aim: float | None = None) -> Row:
    """Return the row of figures that stand beside others."""
    if not pairs:
        return {"what": what, "who": who, "size": size, "note": harness.NOT_INSTALLED}
    times, ratios = [pair[0] for pair in pairs], _ratios(pairs)
    row: Row = {"what": what, "who": who, "size": size, "median s": statistics.median(times), "worst s": max(times)}
    row |= {"against": against, "×": statistics.median(ratios), "worst ×": max(ratios)}
    if aim is not None:
        row |= {"aim": f"≤ {aim:g}×", "met": statistics.median(ratios) <= aim}
    return row


def _behind(row: Row, ours: Row, figure: str = "median s") -> Row:
    """Add to a peer's row whether we are ahead of it."""
    return row if "note" in row else row | {"aim": "slower than ours", "met": row[figure] > ours[figure]}


def _pairs(told: Iterable[Event], event: str, **wanted: Any) -> list[Pair]:
    return [
        pair
        for item in told
        if item["event"] == event and all(item.get(key) == value for key, value in wanted.items())
        for pair in item["pairs"]
    ]


def _growth(what: str, rows: dict[float, Row]) -> Row:
    """Return whether something grows no faster than what stands beside it."""
    low, high = min(rows), max(rows)
    times, ratio = (rows[high][figure] / rows[low][figure] for figure in ("median s", "×"))
    note = (
        f"{high / low:g} times the bytes: {times:.1f} times as long, {times / ratio:.1f} times {rows[low]['against']}"
    )
    return {"what": what, "who": "ours", "note": note, "aim": "linear", "met": ratio <= _LINEAR}


def _stalls(found: dict[float, list[Event]], adam: list[Event]) -> list[Row]:
    rows, known = [], {}
    for size, told in found.items():
        cell = f"{size:g}"
        rows.append(_row("stall, first", "ours", cell, _pairs(told, "stall", who="ours, first"), "memcpy", aim=1.15))
        ours = _row("stall", "ours", cell, _pairs(told, "stall", who="ours"), "memcpy", aim=1.15)
        rows.append(ours)
        known[size] = ours
        for name in (*_PEERS, *(peers.NAMES if size == _PEERS_AT else ())):
            rows.append(_behind(_row("stall", name, cell, _pairs(told, "stall", who=name), "memcpy"), ours, "×"))
    for what, who in (("stall, first", "ours, first"), ("stall", "ours")):
        rows.append(_row(what, "ours, with Adam", "1", _pairs(adam, "stall", who=who), "memcpy", aim=1.15))
    return [*rows, _growth("stall", known)]


def _overlaps(told: list[Event]) -> list[Row]:
    who = "ours, overlap"
    return [
        _row("stall, first", who, "1", _pairs(told, "stall", who="overlap, first"), "memcpy", aim=0.1),
        _row("stall", who, "1", _pairs(told, "stall", who="overlap"), "memcpy", aim=0.1),
        _row(
            "stall of the next optimizer", who, "1", _pairs(told, "stall", who="overlap, the next optimizer"), "memcpy"
        ),
    ]


def _durables(found: dict[float, list[Event]]) -> list[Row]:
    rows, known = [], {}
    for size, told in found.items():
        pairs = _pairs(told, "durable")
        ours = _row("durable", "ours", f"{size:g}", [pair[:3] for pair in pairs], "raw", aim=1.2)
        after = [[took - stalled, *raw] for took, *raw, stalled in pairs]
        rows += [ours, _row("durable, from the call's end", "ours", f"{size:g}", after, "raw")]
        known[size] = ours
        for who in _PEERS:
            took = [item["durable"] for item in told if item.get("who") == who and "durable" in item]
            if took:
                row = {"what": "durable", "who": who, "size": f"{size:g}", "median s": statistics.median(took)}
                rows.append(_behind(row | {"worst s": max(took)}, ours))
    return [*rows, _growth("durable", known)]


def _from_memory(found: dict[float, list[Event]], adam: list[Event]) -> list[Row]:
    rows, known = [], {}
    for how, what in (("at once", "from memory, at once"), ("settled", "from memory")):
        for size, told in found.items():
            known[size] = _row(what, "ours", f"{size:g}", _pairs(told, "memory", how=how), "memcpy", aim=2)
            rows.append(known[size])
        rows.append(_row(what, "ours, with Adam", "1", _pairs(adam, "memory", how=how), "memcpy", aim=2))
    return [*rows, _growth("from memory", known)]


def _from_disk(found: dict[float, list[Event]]) -> list[Row]:
    rows = []
    for how in ("cold", "warm"):
        known: dict[float, Row] = {}
        for size, told in found.items():
            ours = _row(f"from disk, {how}", "ours", f"{size:g}", _pairs(told, "load", who="ours", how=how), "memcpy")
            rows.append(ours)
            known[size] = ours
            for who in _LOADERS:
                pairs = _pairs(told, "load", who=who, how=how)
                rows.append(_behind(_row(f"from disk, {how}", who, f"{size:g}", pairs, "memcpy"), ours))
        rows.append(_growth(f"from disk, {how}", known))
    return rows


# -- two ranks --------------------------------------------------------------------------------------------------------


def _ddp(folder: Path) -> list[Row]:
    """Have two ranks save, kill one, have them restore, and again."""
    options = ["--nproc-per-node=2", f"--max-restarts={_KILLS + 1}"]
    with harness.launch("resilience", "ddp", ["1", str(folder)], options) as job:
        for cycle in range(_KILLS + 1):
            ready = job.await_events("ready", 2, _TIMEOUT_S, lambda told: told["cycle"] == cycle)  # noqa: B023
            if cycle < _KILLS:
                os.kill(next(int(told["pid"]) for told in ready if told["rank"] == 1), signal.SIGKILL)
        saved, restored = job.events("saved"), job.events("restored")
    first, later = (_slowest(told for told in saved if (told["step"] == 0) is which) for which in (True, False))
    return [
        _row("stall, first", "ours, DDP", "1", first, "memcpy", aim=1.15),
        _row("stall", "ours, DDP", "1", later, "memcpy", aim=1.15),
        _row("from memory", "ours, DDP, killed", "1", _slowest(restored), "memcpy", aim=2),
    ]


def _slowest(told: Iterable[Event]) -> list[Pair]:
    """Return what the slowest rank took, and the slowest plain copies beside it."""
    groups = defaultdict(list)
    for item in told:
        groups[item["cycle"], item.get("step")].append(item["pair"])
    return [[max(column) for column in zip(*pairs, strict=True)] for pairs in groups.values()]


# -- many tensors -----------------------------------------------------------------------------------------------------


def _tensors(folder: Path) -> list[Row]:
    """Return how the number of tensors matters."""
    few, *more = (str(count) for count in _COUNTS)
    rounds = _events("python", "tensors", ["1", str(folder), few, *more])
    rows = []
    for what, key, part in (
        ("stall, first", "saves", rounds[:1]),
        ("stall", "saves", rounds[2:]),  # two slots: each has a first time
        ("from memory", "loads", rounds),
    ):
        turns = [told[key] for told in part if told[key]]
        for count in (few, *more):
            pairs = [[turn[count], turn[few], turn[few]] for turn in turns]
            aim = 2.0 if count == more[-1] and key == "saves" else None
            rows.append(_row(what, f"ours, {count} tensors", "1", pairs, f"{few} tensors", aim=aim))
    return rows


# -- what training loses ----------------------------------------------------------------------------------------------


def _lost(folder: Path) -> list[Row]:
    """Return what a save costs training in all, in seconds and in plain copies of the same bytes."""
    told = [item for item in _events("python", "training", ["1", str(folder), str(_BLOCKS)]) if item["round"]]
    rows: dict[str, Row] = {}
    for item in told:
        rows.setdefault(item["who"], {"what": "lost", "who": item["who"], "size": "1"})
    for who, row in rows.items():
        mine = [item for item in told if item["who"] == who]
        lost = [item["took"] - (item["before"] + item["after"]) / 2 for item in mine]
        copies = [cost / item["memcpy"] for cost, item in zip(lost, mine, strict=True)]
        row |= {"median s": statistics.median(lost), "worst s": max(lost), "against": "memcpy"}
        row |= {"×": statistics.median(copies), "worst ×": max(copies)}
    best = min(rows["ours"]["median s"], rows["ours, overlap"]["median s"])
    for who, row in rows.items():
        if not who.startswith("ours"):
            row |= {"aim": "slower than ours", "met": row["median s"] > best}
    return list(rows.values())


# -- objects ----------------------------------------------------------------------------------------------------------


def _objects() -> list[Row]:
    """Return what encoding costs beside pickling, for several kinds of values, and how it grows."""
    makers: dict[str, Callable[[int], Any]] = {
        "floats": lambda nbytes: [random.random() for _ in range(nbytes // 9)],
        "ints": lambda nbytes: [random.getrandbits(31) for _ in range(nbytes // 5)],
        "strings": lambda nbytes: [f"sample-{number:012d}" for number in range(nbytes // 26)],
        "nested dicts": lambda nbytes: [
            {"name": f"n{number}", "at": {"epoch": number, "loss": number / 7}, "seen": [number, number + 1]}
            for number in range(nbytes // 74)
        ],
    }
    makers["mixed"] = lambda nbytes: {name: make(nbytes // 4) for name, make in makers.items() if name != "mixed"}
    rows = []
    for name, make in makers.items():
        value = make(10_000_000)
        size = f"{len(pickle.dumps(value)) / 1e6:.0f} MB"
        rows.append(_row("objects", name, size, _beside_pickle(value, 7), "pickle.dumps", aim=1.5))
    rows.append(_again(makers["mixed"]))
    known = {
        megabytes: _row(
            "objects", "mixed", "", _beside_pickle(makers["mixed"](int(megabytes * 1e6)), 7), "pickle.dumps"
        )
        for megabytes in (2.5, 40.0)
    }
    return [*rows, _growth("objects", known)]


def _again(make: Callable[[int], Any]) -> Row:
    """Return what encoding costs once a tuple was encoded: it can't have changed."""
    from resilience.checkpoint import encoding
    from resilience.checkpoint.leaves import Leaves

    whole, leaves, found = tuple(make(10_000_000)["strings"]), Leaves(), list[Pair]()
    encoding.encode(whole, leaves=leaves)
    for _ in range(7):
        leaves.turn()
        took = _timed(lambda: encoding.encode(whole, leaves=leaves))
        pickled = _timed(lambda: pickle.dumps(whole))
        found.append([took, pickled, pickled])
    return _row("objects, again", "tuple", f"{len(pickle.dumps(whole)) / 1e6:.0f} MB", found, "pickle.dumps", aim=1.5)


def _beside_pickle(value: Any, rounds: int) -> list[Pair]:
    from resilience.checkpoint import encoding

    found: list[Pair] = []
    before = _timed(lambda: pickle.dumps(value))
    for _ in range(rounds):
        took = _timed(lambda: encoding.encode(value))
        after = _timed(lambda: pickle.dumps(value))
        found.append([took, before, after])
        before = after
    return found


def _timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
