"""Kill or stop whatever there is, at any instant: the job finishes, the report is right, nothing is left."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.jobs import Job, alive, children, job, train

pytestmark = pytest.mark.spawns
ROUNDS = int(os.environ.get("SOAK_ROUNDS", "2"))
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, ROUNDS))]
OPTIONS = [
    "--nproc-per-node=2",
    "--max-restarts=3",
    "--ft-rank-section-timeouts=load:1.5,epoch:null,setup:5",
    "--ft-rank-heartbeat-timeout=2",
    "--ft-initial-rank-heartbeat-timeout=15",  # a rank may be stopped before it has said anything
    "--ft-rank-term-timeout=1",
]


def pick(it: Job, rng: random.Random) -> tuple[str, int]:
    """Choose somebody: a rank, a monitor or the launcher."""
    monitors = it.monitors()
    ranks = [pid for pid in children(it.pid) if pid not in monitors]
    who = rng.choice(["rank", "rank", "monitor", "launcher"])
    pids = {"rank": ranks, "monitor": monitors, "launcher": [it.pid]}[who]
    return who, rng.choice(pids) if pids else 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.timeout(300)
def test_whatever_is_struck_at_whatever_instant_the_promises_hold(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with job(tmp_path, OPTIONS, train(60)) as it:
        struck = []
        time.sleep(rng.uniform(0, 8))  # anywhere: imports, rendezvous, start, training, restart, end
        for _ in range(rng.randint(1, 3)):
            if it.process.poll() is not None:
                break
            who, pid = pick(it, rng)
            number = rng.choice(
                [signal.SIGKILL, signal.SIGSTOP] if who != "launcher" else [signal.SIGKILL, signal.SIGTERM]
            )
            if pid and alive(pid):
                os.kill(pid, number)
                struck.append((who, number.name))
            time.sleep(rng.uniform(0, 3))
        code = it.wait(200)
        ended = {name for who, name in struck if who == "launcher"}
        if "SIGKILL" in ended:
            assert code in (-signal.SIGKILL, 0), (struck, it.log())
        elif "SIGTERM" in ended:
            assert code in (1, 0, 79, -signal.SIGTERM), (struck, it.log())
        elif code == 77 and len(struck) > 1:  # it starts at step 0 in every cycle: the same blow twice is no progress
            assert "the same failure as in cycle" in it.log(), (struck, it.log())
        else:
            assert code == 0, (struck, it.log())
            assert [note[1] for note in it.notes(0)][-1] == "end"
        if "SIGKILL" not in ended or not any(who == "monitor" for who, _ in struck):
            it.assert_nothing_left()
