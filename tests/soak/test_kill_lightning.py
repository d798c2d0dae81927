"""Kill rank, saver and launcher of a Lightning job at any instant, or ask it to stop: it ends as an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.integrations.lightning.test_faults import assert_same, run
from tests.jobs import Job, children, command_line
from tests.soak.test_kill_anywhere import await_end, savers

pytestmark = [pytest.mark.spawns, pytest.mark.long]
ROUNDS = max(1, int(os.environ.get("SOAK_ROUNDS", "3")) // 3)  # each takes as long as several of the others
OPTIONS = ["--nproc-per-node=2", "--max-restarts=20", "--ft-rank-term-timeout=1", "--ft-testimony-timeout=1"]
SLOWER = "slow:rank=0,step=0,seconds=0.1,cycle=any"  # so that most of what happens, happens in training
FAULTS = 5
STRIKES = ("rank", "rank", "rank and saver", "launcher", "preempted")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    with run(folder, OPTIONS) as it:
        assert it.wait(120) == 0, it.log()
    return folder


def strike(it: Job, what: str, rng: random.Random) -> None:
    ranks = [pid for pid in children(it.pid) if "lightning_train.py" in command_line(pid)]
    rng.shuffle(ranks)
    if what == "preempted":
        os.kill(it.pid, signal.SIGTERM)
        return
    targets = {"rank": ranks[:1], "rank and saver": [*ranks[:1], *savers(it)], "launcher": [it.pid]}[what]
    for pid in targets:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.timeout(900)
def test_a_lightning_job_ends_the_same_whoever_is_killed_at_whatever_instant(
    tmp_path: Path, undisturbed: Path, seed: int
) -> None:
    rng = random.Random(7000 + seed)
    struck: list[str] = []
    ended = False
    while not ended:
        with run(tmp_path, OPTIONS, {"RESILIENCE_SIMULATED_FAULT": SLOWER}) as it:
            while len(struck) < FAULTS and it.process.poll() is None:
                time.sleep(rng.uniform(0, 12))  # anywhere: imports, restoring, steps, validation, saving, the end
                if it.process.poll() is not None:
                    break
                struck.append(rng.choice(STRIKES))
                strike(it, struck[-1], rng)
                if struck[-1] in ("launcher", "preempted"):
                    break
            code = it.wait(300)
            ended = code == 0
            assert ended or struck[-1] in ("launcher", "preempted"), f"{code} after {struck}\n{it.log()[-6000:]}"
            await_end(it, [(one,) for one in struck])
    assert_same(tmp_path, undisturbed)
