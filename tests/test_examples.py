"""Every example runs, and says the same under plain python, plain torchrun and our launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.jobs import Fleet, children, command_line, job, wait_for

ROOT = Path(__file__).parent.parent
TRAIN = str(ROOT / "examples" / "train.py")
pytestmark = pytest.mark.spawns


def torchrun(folder: Path) -> list[str]:
    """Plain torchrun with two ranks; what it keeps for them is in a folder that goes away."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--log-dir={folder / 'torchrun'}"]


def loss_of(command: list[str]) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=env, timeout=150)
    assert done.returncode == 0, done.stderr
    found = re.search(r"loss (\S+) after \d+ steps on (\d+) ranks", done.stdout)
    assert found, done.stdout
    return found.group(0)


@pytest.mark.parametrize(
    ("ranks", "other"),
    [pytest.param(1, lambda _: [sys.executable], marks=pytest.mark.rare), (2, torchrun)],
    ids=["python", "torchrun"],
)
def test_the_example_learns_the_same_under_every_launcher(
    tmp_path: Path, ranks: int, other: Callable[[Path], list[str]]
) -> None:
    commands = [
        [*other(tmp_path), TRAIN],
        [sys.executable, "-m", "resilience.run", f"--nproc-per-node={ranks}", f"--ft-run-dir={tmp_path}", TRAIN],
    ]
    with ThreadPoolExecutor() as pool:
        losses = set(pool.map(loss_of, commands))
    assert len(losses) == 1, losses


def test_the_checkpoint_example_learns_the_same_under_every_launcher_and_with_a_kill(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "checkpoint.py")

    def command(name: str, *words: str) -> list[str]:
        return [*words, script, str(tmp_path / name)]

    undisturbed = loss_of(command("a", *torchrun(tmp_path)))
    alone = loss_of(command("b", sys.executable))
    assert alone.endswith("on 1 ranks")
    with job(tmp_path / "c", ["--max-restarts=3", "--nproc-per-node=2"], [script, str(tmp_path / "c" / "ck")]) as it:
        ranks = wait_for(
            lambda: [pid for pid in children(it.pid) if "checkpoint.py" in command_line(pid)], "the ranks to start"
        )
        wait_for((tmp_path / "c" / "ck").exists, "the first of them to be ready to save")
        os.kill(ranks[0], signal.SIGKILL)
        assert it.wait() == 0, it.log()
        assert undisturbed in it.log()


@pytest.mark.long
def test_the_example_of_fsdp2_ends_the_same_under_every_launcher_and_with_a_kill(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "fsdp2.py")
    undisturbed = loss_of([*torchrun(tmp_path), script, str(tmp_path / "a")])
    assert undisturbed.endswith("on 2 ranks")
    with job(tmp_path / "b", ["--max-restarts=3", "--nproc-per-node=2"], [script, str(tmp_path / "b" / "ck")]) as it:
        ranks = wait_for(
            lambda: [pid for pid in children(it.pid) if "fsdp2.py" in command_line(pid)], "the ranks to start"
        )
        wait_for((tmp_path / "b" / "ck").exists, "the first of them to be ready to save")
        os.kill(ranks[0], signal.SIGKILL)
        assert it.wait() == 0, it.log()
        assert undisturbed in it.log()


@pytest.mark.long
def test_the_example_of_fabric_ends_the_same_after_a_kill(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "lightning_fabric.py")
    straight = loss_of([*torchrun(tmp_path), script, str(tmp_path / "a")])
    assert straight.endswith("on 2 ranks")
    with job(tmp_path / "b", ["--max-restarts=3", "--nproc-per-node=2"], [script, str(tmp_path / "b" / "ck")]) as it:
        ranks = wait_for(
            lambda: [pid for pid in children(it.pid) if "lightning_fabric.py" in command_line(pid)],
            "the ranks to start",
        )
        wait_for((tmp_path / "b" / "ck").exists, "the first of them to be ready to save")
        os.kill(ranks[0], signal.SIGKILL)
        assert it.wait() == 0, it.log()
        assert straight in it.log()


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([(2, 16), (1, 48)], id="2-1", marks=pytest.mark.long),
        pytest.param([(2, 16), (3, 34), (1, 48)], id="2-3-1", marks=pytest.mark.rare),
    ],
)
def test_the_elastic_example_sees_every_sample_of_an_epoch_once_whoever_is_there(
    tmp_path: Path, runs: list[tuple[int, int]]
) -> None:
    script, seen, at = str(ROOT / "examples" / "elastic.py"), list[int](), 0
    for ranks, until in runs:
        with job(
            tmp_path / str(ranks), [f"--nproc-per-node={ranks}"], [script, str(tmp_path / "ck"), str(until)]
        ) as it:
            assert it.wait() == 0, it.log()
            told = re.findall(r"rank \d of (\d): samples (\d+) to (\d+), mine (\[.*?\])", it.log())
            assert len(told) == ranks, it.log()
            assert {(int(of), int(before)) for of, before, _, _ in told} == {(ranks, at)}
            at = int(told[0][2])
            seen += [number for _, _, _, mine in told for number in json.loads(mine)]
    assert sorted(seen) == list(range(48))


_DIES = """
import os, runpy, sys
from resilience.checkpoint.flash import FlashCheckpoint
save = FlashCheckpoint.save
def dying(self, step):
    receipt = save(self, step, wait=60 if step == 20 else 0)
    if step == 20:
        self.wait()
        os.kill(os.getpid(), 9)
    return receipt
FlashCheckpoint.save = dying
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.long
def test_the_example_of_one_process_ends_the_same_after_a_kill_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "checkpoint_single.py")

    def run(folder: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words, script, str(tmp_path / folder)]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)

    straight = run("a").stdout.split(",")[0]
    assert re.fullmatch(r"loss 0\.\d+ after 48 steps", straight)
    assert run("b", "-c", _DIES).returncode == -signal.SIGKILL
    again = run("b").stdout
    assert again.split(",")[0] == straight
    assert again.strip().endswith("from step 21")


def test_the_guard_example_learns_from_data_with_a_bad_sample_and_says_what_it_left_out(tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / "guard.py"), str(tmp_path / "checkpoints")]
    command = [*torchrun(tmp_path), *script]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=env, timeout=150)
    assert done.returncode == 0, done.stderr
    found = re.search(r"loss (\S+) after 100 steps on 2 ranks, from step 0", done.stdout)
    assert found
    assert float(found.group(1)) < 20, "not a number is not below anything"
    left_out = re.findall(r"batch (\d+) is left out; rollback \d of at most 3 in a row\. \(rank 0\)", done.stderr)
    assert len(set(left_out)) in (2, 3), done.stderr  # one in each epoch of forty steps


@pytest.mark.long
def test_the_preemption_example_stops_together_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / "preemption.py"), str(tmp_path / "checkpoints")]
    ends: list[list[int]] = []
    for run in range(2):
        with Fleet(tmp_path / str(run), "2", [], script) as it:
            it.env = {"STEPS": "100000" if run == 0 else str(ends[0][0] + 50)}
            for _ in range(2):
                it.add()
            if run == 0:
                wait_for(lambda it=it: any("step 200:" in node.log() for node in it.nodes), it.logs)  # type: ignore[misc]
                os.kill(it.nodes[1].pid, signal.SIGTERM)
            assert [node.wait() for node in it.nodes] == [79 if run == 0 else 0] * 2, it.logs()
            told = [re.findall(r"step (\d+) is the last one", node.log()) for node in it.nodes]
            assert told[0] == told[1], "all ranks left at the same step"
            ends.append([int(told[0][0]), int(told[1][0])])
    assert ends[1][0] == ends[0][0] + 49


def test_the_demo_survives_a_kill_and_a_hang(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "resilience.run", "--nproc-per-node=2", "--max-restarts=3"]
    command += [f"--ft-run-dir={tmp_path / 'run'}", str(ROOT / "examples" / "demo.py"), str(work)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "done: loss" in done.stdout
    told = subprocess.run(
        [sys.executable, "-m", "resilience", "report", str(tmp_path / "run")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "ended by signal 9" in told.stdout
    assert "in section 'load'" in told.stdout
    assert told.stdout.endswith("2 cycles failed\n")
