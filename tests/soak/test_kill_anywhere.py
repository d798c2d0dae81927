"""Kill rank, saver and launcher, alone and in pairs, at any instant: what is restored is what was saved, on all ranks the same,
and no older than the last step that was acknowledged at a level that survives what was lost."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.test_store import serving
from tests.jobs import WORKLOADS, Fleet, Job, children, command_line, job, wait_for

pytestmark = pytest.mark.spawns
ROUNDS = int(os.environ.get("SOAK_ROUNDS", "2"))
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, ROUNDS))]
OPTIONS = ["--nproc-per-node=2", "--max-restarts=40", "--ft-rank-term-timeout=1", "--ft-testimony-timeout=1"]
VICTIMS = [
    ("rank",),
    ("saver",),
    ("launcher",),
    ("rank", "saver"),
    ("rank", "launcher"),
    ("saver", "launcher"),
    ("rank", "rank"),
]


@dataclass(frozen=True)
class Note:
    """What a rank wrote down."""

    at: float
    rank: int
    pid: int
    what: str
    step: int


def notes_of(*jobs: Job) -> list[Note]:
    found = []
    for it in jobs:
        for rank in range(4):
            for _, text, at, pid in it.notes(rank):
                what, _, step = text.partition("-")
                found.append(Note(float(at), rank, int(pid), what, int(step or -1)))
    return sorted(found, key=lambda note: note.at)


def savers(it: Job) -> list[int]:
    return [pid for pid in it.family() if "checkpoint/saver" in command_line(pid)]


def strike(it: Job, rng: random.Random) -> tuple[str, ...]:
    """Kill somebody, or two at once: stopped first, so that neither sees the other's death."""
    chosen = rng.choice(VICTIMS)
    ranks = [pid for pid in children(it.pid) if "snapshots.py" in command_line(pid)]
    rng.shuffle(ranks)
    pids = {"rank": ranks, "saver": savers(it), "launcher": [it.pid]}
    targets = [pids[who].pop() for who in chosen if pids[who]]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in targets:
            if it.process.poll() is None or pid != it.pid:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
    return chosen


def await_end(it: Job, struck: list[tuple[str, ...]]) -> None:
    """Wait until nobody of a job is left; who is, is said with its last words."""
    try:
        wait_for(lambda: not it.family(), f"everybody to be gone after {struck}", 60)
    except AssertionError as wrong:
        left = {pid: command_line(pid)[:200] for pid in it.family()}
        raise AssertionError(f"{wrong}: {left}\n{it.log()[-6000:]}") from None


def check(notes: list[Note], memory_lost_at: list[float], copies_lost_at: list[float] | None = None) -> None:
    """Nobody may have restored anything else than promise 5 allows. ``copies_lost_at``: what a node kept for others is gone since
    then; until a later step is replicated there are none."""
    assert not [note for note in notes if note.what == "BAD"], "what was restored is not what was saved"
    complete = durable = replicated = bar = farthest = -1
    seen: dict[int, list[int]] = {}
    losses = sorted([(at, True) for at in memory_lost_at] + [(at, False) for at in copies_lost_at or ()])
    for note in notes:
        while losses and losses[0][0] < note.at:
            if losses.pop(0)[1]:
                complete = max(durable, replicated)
            replicated, bar = -1, farthest
        if note.what == "complete":
            complete = max(complete, note.step)
        elif note.what == "replicated":
            complete = max(complete, note.step)
            replicated = max(replicated, note.step if note.step > bar else -1)
        elif note.what == "durable":
            durable, complete = max(durable, note.step), max(complete, note.step)
        elif note.what == "step":
            farthest = max(farthest, note.step)
        elif note.what in ("restored", "fresh"):
            assert note.step >= complete, f"rank {note.rank} went on from {note.step}, and {complete} was complete"
            seen.setdefault(note.rank, []).append(note.step)
    for together in zip(*seen.values(), strict=False):
        assert len(set(together)) == 1, f"the ranks went on from different steps: {seen}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.timeout(600)
def test_what_is_restored_is_what_was_saved_whoever_is_killed_at_whatever_instant(tmp_path: Path, seed: int) -> None:
    rng = random.Random(4000 + seed)
    directory = tmp_path / "checkpoints"
    struck: list[tuple[str, ...]] = []
    lost: list[float] = []
    nobody_else = False
    script = [str(WORKLOADS / "snapshots.py"), str(directory), "250", str(rng.choice([4, 2000, 30000]))]
    environment = {"DT": str(rng.choice([0.0, 0.005, 0.02])), "DISK_EVERY": str(rng.choice([1, 3, 10]))}
    environment["MODE"] = ("blocking", "overlap", "fsdp2")[seed % 3]
    ended = False
    while not ended:
        with job(tmp_path, OPTIONS, script, environment) as it:
            for _ in range(rng.randint(1, 3) if len(struck) < 6 else 0):
                # Anywhere: imports, slots, staging, deciding, persisting, restoring, the end.
                time.sleep(rng.uniform(0, 5))
                if it.process.poll() is not None:
                    break
                nobody_else = not savers(it)  # one was killed just now, and the launcher has not started another
                struck.append(strike(it, rng))
                if "launcher" in struck[-1]:
                    break
            code = it.wait(300)
            ended = code == 0
            assert ended or "launcher" in struck[-1], f"{code} after {struck}\n{it.log()[-6000:]}"
            await_end(it, struck)
            if not ended and ("saver" in struck[-1] or nobody_else):
                lost.append(time.monotonic())  # nobody holds the memory any more
            try:
                check(notes_of(it), lost)
            except AssertionError as wrong:
                raise AssertionError(f"{wrong}, after {struck}\n{it.log()[-6000:]}") from None
    last = [note for note in notes_of(it) if note.what == "end"]
    assert {note.rank for note in last} == {0, 1}
    assert [path.name for path in directory.iterdir() if path.name.startswith(".partial")] == []


NODE_OPTIONS = [*OPTIONS, "--ft-node-silence-timeout=5", "--ft-use-infra-group-rank=true"]


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param("0", id="no copies", marks=pytest.mark.rare),
        pytest.param("1", id="copies", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("seed", range(max(1, ROUNDS // 4)))
@pytest.mark.timeout(600)
def test_what_is_restored_on_two_nodes_is_what_was_saved_whoever_is_killed(
    tmp_path: Path, seed: int, copies: str
) -> None:
    """With copies in the memory of the other node a lost one costs no step that was replicated."""
    rng = random.Random(5000 + seed)
    script = [str(WORKLOADS / "snapshots.py"), str(tmp_path / "checkpoints"), "250", str(rng.choice([4, 2000]))]
    struck: list[tuple[str, ...]] = []
    lost: list[float] = []
    copies_lost: list[float] = []
    with serving() as port, Fleet(tmp_path, "2", NODE_OPTIONS, script, port=port) as it:
        it.env = {"DT": str(rng.choice([0.005, 0.02])), "DISK_EVERY": str(rng.choice([1, 3, 10])), "REPLICAS": copies}
        if copies == "1":
            it.env["DISK_EVERY"] = rng.choice(["10", "1000000"])
        gone: list[Job] = []
        for number in range(2):
            it.add(env={"GROUP_RANK": str(number)})
        for _ in range(rng.randint(2, 4)):
            time.sleep(rng.uniform(0, 7))
            node = rng.choice(it.nodes)
            if any(other.process.poll() is not None for other in it.nodes):
                break
            struck.append(strike(node, rng))
            if "saver" in struck[-1]:
                copies_lost.append(time.monotonic())
            if "launcher" in struck[-1]:  # a node is lost, and another one takes its place
                place = it.nodes.index(node)
                lost.append(time.monotonic() + 1.0 if "saver" not in struck[-1] else time.monotonic())
                gone.append(it.nodes.pop(place))
                it.add(env={"GROUP_RANK": str(place)})
                it.nodes.insert(place, it.nodes.pop())
        codes = [node.wait(300) for node in it.nodes]
        assert codes == [0, 0], f"{codes} after {struck}\n{it.logs()[-9000:]}"
        for node in (*gone, *it.nodes):
            await_end(node, struck)
        notes = notes_of(*gone, *it.nodes)
        try:
            check(notes, lost, copies_lost)
        except AssertionError as wrong:
            raise AssertionError(f"{wrong}, after {struck}\n{it.logs()[-9000:]}") from None
    assert {note.rank for note in notes if note.what == "end"} == {0, 1, 2, 3}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".partial")] == []
