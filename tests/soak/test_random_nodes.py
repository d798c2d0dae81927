"""Three launchers, two places, a store of its own: whatever is struck at whatever instant, the job goes on and ends well."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from resilience.failover import exits
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


ENDS = ("launcher killed", "launcher ended")
ORDERS = {"raise": 0, "exit 201": 201, "exit 3": 0, "crash": 0, "control ExcludeThisNode": exits.NODE_LEFT}
"""What ranks are told to do, and the code that their launcher may end with because of it."""


def strike(node: Job, rng: random.Random) -> tuple[str, set[int]]:
    """Hit a launcher or one of its ranks; return what was done, and with what the launcher may end for it."""
    ranks = [pid for pid in children(node.pid) if pid not in node.monitors()]
    what = rng.choice(["launcher killed", "launcher ended", "rank killed", "rank stopped", "told"])
    if what == "launcher killed":
        os.kill(node.pid, signal.SIGKILL)
        return what, {-signal.SIGKILL}
    if what == "launcher ended":
        os.kill(node.pid, signal.SIGINT)
        return what, {1, 130, -signal.SIGINT}  # while it trains, while it waits, in its imports
    if what == "told":
        order = rng.choice(list(ORDERS))
        node.order(f"raise {rng.random()}" if order == "raise" else order)
        return order, {ORDERS[order]}
    if ranks:
        os.kill(rng.choice(ranks), signal.SIGKILL if what.endswith("killed") else signal.SIGSTOP)
    return what, {0}


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.timeout(600)
def test_job_survives_whatever_happens_to_its_nodes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(1000 + seed)
    script = [str(WORKLOADS / "fleet.py"), "10000000"]
    with serving() as port, Fleet(tmp_path, "2", OPTIONS, script, port=port) as it:
        it.env = {"RESUME": str(tmp_path)}  # ranks move between nodes: without progress a second failure ends the job
        for _ in range(3):
            it.add()
        struck: list[str] = []
        may: dict[Job, set[int]] = {}
        finish = False

        def here() -> list[Job]:
            """Who is in the job; a launcher that was ended may take its time."""
            return [node for node in it.nodes if node.process.poll() is None and 0 in may.get(node, {0})]

        def supply() -> None:
            """Replace the launchers that left, as a scheduler would, until the job is over."""
            while len(here()) < 3 and not any(node.process.poll() == 0 for node in it.nodes):
                it.add()
            for node in it.nodes if finish else ():
                (node.progress / "finish").touch()

        def both_places_train() -> bool:
            supply()
            notes = [[note for rank in range(2) for note in node.notes(rank)] for node in it.nodes]
            return sum(any("step" in note[1] and float(note[2]) > mark for note in some) for some in notes) >= 2

        def over() -> bool:
            supply()
            return all(node.process.poll() is not None for node in it.nodes)

        for _ in range(rng.randint(2, 4)):
            time.sleep(rng.uniform(0, 6))  # anywhere: imports, rendezvous, start, training, restart
            target = rng.choice(here())
            what, codes = strike(target, rng)
            struck.append(f"{target.folder.name}: {what}")
            may[target] = (may.get(target, {0}) | codes) - ({0} if what in ENDS else set())
            supply()
        mark = time.monotonic()
        wait_for(both_places_train, lambda: f"both places to train again after {struck}\n{it.logs()}", 150)
        finish = True
        wait_for(over, lambda: f"all launchers to end after {struck}\n{it.logs()}", 150)
        for node in it.nodes:
            code = node.process.poll()
            assert code in may.get(node, {0}), f"{node.folder.name}: {code} after {struck}\n{it.logs()}"
            wait_for(lambda node=node: not [pid for pid in node.family() if alive(pid)], "all processes to end", 30)  # type: ignore[misc]
