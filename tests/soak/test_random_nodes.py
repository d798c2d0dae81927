"""Three launchers, two places, a store of its own: whatever is struck at whatever instant, the job goes on and ends well."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.test_store import serving
from tests.jobs import WORKLOADS, Fleet, Job, alive, children, wait_for

pytestmark = pytest.mark.spawns
ROUNDS = max(1, int(os.environ.get("SOAK_ROUNDS", "3")) // 5)
OPTIONS = [
    "--max-restarts=50",
    "--ft-rank-section-timeouts=step:3,setup:20",
    "--ft-initial-rank-heartbeat-timeout=30",
    "--ft-rank-term-timeout=1",
    "--ft-testimony-timeout=2",
    "--ft-node-silence-timeout=5",
    "--ft-use-infra-group-rank=false",
]


def strike(node: Job, rng: random.Random) -> str:
    """Hit a launcher or one of its ranks."""
    ranks = [pid for pid in children(node.pid) if pid not in node.monitors()]
    what = rng.choice(["launcher killed", "launcher ended", "rank killed", "rank stopped", "told"])
    if what == "told":
        node.order(rng.choice([f"raise {rng.random()}", "exit 201", "exit 3", "crash", "control ExcludeThisNode"]))
    elif what.startswith("launcher"):
        os.kill(node.pid, signal.SIGKILL if what.endswith("killed") else signal.SIGINT)
    elif ranks:
        os.kill(rng.choice(ranks), signal.SIGKILL if what.endswith("killed") else signal.SIGSTOP)
    return what


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.timeout(600)
def test_job_survives_whatever_happens_to_its_nodes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(1000 + seed)
    script = [str(WORKLOADS / "fleet.py"), "10000000"]
    with serving() as port, Fleet(tmp_path, "2", OPTIONS, script, port=port) as it:
        it.env = {"RESUME": "1"}  # progress: only what repeats without any ends the job
        for _ in range(3):
            it.add()
        struck: list[str] = []
        ended: list[Job] = []

        def here() -> list[Job]:
            """Who is in the job; a launcher that was ended may take its time."""
            return [node for node in it.nodes if node.process.poll() is None and node not in ended]

        for _ in range(rng.randint(2, 4)):
            time.sleep(rng.uniform(0, 6))  # anywhere: imports, rendezvous, start, training, restart
            target = rng.choice(here())
            struck.append(f"{target.folder.name}: {strike(target, rng)}")
            if "launcher" in struck[-1]:
                ended.append(target)
            while len(here()) < 3:
                it.add()
        mark = time.monotonic()
        wait_for(
            lambda: (
                sum(
                    any(float(n[2]) > mark for r in range(2) for n in node.notes(r) if "step" in n[1])
                    for node in it.nodes
                )
                >= 2
            ),
            f"both places to train again after {struck}\n{it.logs()}",
            150,
        )
        for node in it.nodes:
            (node.progress / "finish").touch()
        codes = [node.wait(120) for node in here()]
        assert codes
        assert set(codes) <= {0}, f"{struck} {codes}\n{it.logs()}"
        assert 75 not in [node.wait(60) for node in ended], f"an ended launcher hung\n{it.logs()}"
        for node in it.nodes:
            wait_for(lambda node=node: not [pid for pid in node.family() if alive(pid)], "all processes to end", 30)  # type: ignore[misc]
