"""Snapshots of a job on several nodes: one decision for all, one checkpoint in the shared directory, whoever is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.checkpoint.stores.local import Directory
from tests.checkpoint.conftest import savers
from tests.faults.test_checkpoint import saver_of
from tests.jobs import WORKLOADS, Fleet, Job, children, command_line, wait_for
from tests.ports import free_port

pytestmark = pytest.mark.spawns
OPTIONS = ["--max-restarts=4", "--ft-rank-term-timeout=2", "--ft-testimony-timeout=2"]
ONE, TWO = ["--nproc-per-node=1"], ["--nproc-per-node=2"]
DDP = str(WORKLOADS / "ddp_flash.py")
SNAPSHOTS = str(WORKLOADS / "snapshots.py")
CHAIR = pytest.param(True, id="of rank 0", marks=pytest.mark.long)


@contextmanager
def two_nodes(folder: Path, ranks: list[str], script: list[str], **env: str) -> Iterator[Fleet]:
    """Two launchers of one job."""
    with Fleet(folder, "2", [*OPTIONS, *ranks], script) as it:
        it.env = env
        for _ in range(2):
            it.add()
        yield it


def finals(it: Fleet) -> dict[int, str]:
    paths = {
        rank: node.progress / f"final_{rank}"
        for node in it.nodes
        for rank in range(2)
        if (node.progress / f"final_{rank}").exists()
    }
    return {rank: path.read_text() for rank, path in paths.items()}


def end(it: Fleet) -> None:
    assert [node.wait() for node in it.nodes] == [0] * len(it.nodes), it.logs()
    for node in it.nodes:
        node.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """How the training ends on two nodes when nothing happens. One rank each: sums of more than two depend on their order, and
    DDP orders its buckets anew after the first step of a process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with two_nodes(folder, ONE, [DDP, str(folder / "ck"), "24"]) as it:
        end(it)
        found = finals(it)
        assert sorted(found) == [0, 1]
        (item,) = Directory(folder / "ck").stored()
        assert (item.manifest.step, item.manifest.world) == (23, 2)
        return found


@pytest.mark.long
def test_ddp_on_two_nodes_with_a_kill_ends_bit_for_bit_like_one_without(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    with two_nodes(tmp_path, ONE, [DDP, str(tmp_path / "ck"), "24", "kill", "1", "13"]) as it:
        end(it)
        assert "the job goes on from step 13 (memory)" in it.logs()
        assert finals(it) == undisturbed


@pytest.mark.rare  # tests/real has it with a shared bucket
def test_ddp_on_two_nodes_goes_on_from_the_shared_directory_in_a_new_job(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    with two_nodes(tmp_path / "a", ONE, [DDP, str(tmp_path / "ck"), "11"]) as it:
        end(it)
    with two_nodes(tmp_path / "b", ONE, [DDP, str(tmp_path / "ck"), "24"]) as it:
        end(it)
        assert "the job goes on from step 10 (disk)" in it.logs()
        assert finals(it) == undisturbed


@pytest.mark.rare
def test_ddp_on_nodes_with_different_numbers_of_ranks_goes_on_from_the_shared_directory_in_a_new_job(
    tmp_path: Path,
) -> None:
    """Each node writes all of the model: one in thirds and the other in halves, then one in quarters and the other whole."""
    first = 0
    for ranks, steps in (((3, 2), 4), ((4, 1), 7), ((2, 3), 9)):
        with Fleet(tmp_path / f"{steps}", "2", OPTIONS, [DDP, str(tmp_path / "ck"), f"{steps}"]) as it:
            for number in ranks:
                it.add(f"--nproc-per-node={number}")
            end(it)
            found = [path for node in it.nodes for path in node.progress.glob("starts_*")]
            assert sorted(path.name for path in found) == [f"starts_{rank}" for rank in range(5)]
            assert {path.read_text() for path in found} == {f"{first}\n"}, it.logs()
        first = steps
        assert Directory(tmp_path / "ck").stored()[0].manifest.step == steps - 1


def notes(it: Fleet, what: str, cycle: int | None = None) -> list[tuple[int, int]]:
    """The ranks and steps of such notes, in all cycles or in one."""
    everything = [(rank, note) for node in it.nodes for rank in range(4) for note in node.notes(rank)]
    found = [(rank, note[1]) for rank, note in everything if cycle in (None, int(note[0]))]
    return [(rank, int(text[len(what) :])) for rank, text in found if text.startswith(what)]


def of_node(it: Fleet, chair: bool) -> Job:
    """The node that has rank 0, or the other one."""
    wait_for(lambda: len({rank for rank, _ in notes(it, "step-")}) == 4, "all ranks to train")
    return next(node for node in it.nodes if bool(node.notes(0)) == chair)


def ranks_of(node: Job) -> list[int]:
    return [pid for pid in children(node.pid) if "snapshots.py" in command_line(pid)]


def kill(*pids: int) -> None:
    """At once: stopped first, so that none sees another's death."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


@pytest.mark.parametrize("chair", [CHAIR, pytest.param(False, id="of the other node", marks=pytest.mark.rare)])
def test_saver_that_is_killed_is_replaced_and_the_nodes_go_on_deciding_together(tmp_path: Path, chair: bool) -> None:
    with two_nodes(tmp_path, TWO, [SNAPSHOTS, str(tmp_path / "ck"), "300", "64"], DISK_EVERY="7", DT="0.03") as it:
        node = of_node(it, chair)
        wait_for(lambda: notes(it, "complete-"), "a snapshot to be complete")
        kill(saver_of(node))
        after = max(step for _, step in notes(it, "step-"))
        wait_for(
            lambda: max(step for _, step in notes(it, "durable-") or [(0, 0)]) > after, "one to be durable after it"
        )
        end(it)
        assert not notes(it, "restored-"), "nobody had to restart"
        assert Directory(tmp_path / "ck").stored()[0].manifest.step == 299


@pytest.mark.parametrize("chair", [CHAIR, pytest.param(False, id="of the other node", marks=pytest.mark.rare)])
def test_rank_and_saver_killed_together_cost_no_step_that_was_complete(tmp_path: Path, chair: bool) -> None:
    script, env = [SNAPSHOTS, str(tmp_path / "ck"), "20", "64"], {"DISK_EVERY": "1000000", "DT": "0.02"}
    with two_nodes(tmp_path, TWO, script, UNTIL_LOST="1", **env) as it:
        node = of_node(it, chair)
        wait_for(lambda: len(notes(it, "complete-")) > 20, "snapshots to be complete")
        kill(saver_of(node), ranks_of(node)[0])
        known = max(step for _, step in notes(it, "complete-", cycle=0))
        end(it)
        restored = notes(it, "restored-")
        assert {rank for rank, _ in restored} == {0, 1, 2, 3}
        assert len({step for _, step in restored}) == 1
        made = max(step for _, step in notes(it, "step-", cycle=0))
        assert known <= restored[0][1] <= made + 1  # one may have been saved and not noted yet
        assert Directory(tmp_path / "ck").stored()[0].manifest.step == restored[0][1] + 20
        assert not notes(it, "BAD-")
        assert "(memory)" in it.logs()


@pytest.mark.long
def test_node_that_is_lost_and_replaced_goes_on_from_what_is_on_disk(tmp_path: Path) -> None:
    """Its memory went with it; what was durable is there for whoever takes its place."""
    script, env = [SNAPSHOTS, str(tmp_path / "ck"), "20", "64"], {"DISK_EVERY": "5", "DT": "0.03"}
    with two_nodes(tmp_path, [*TWO, "--ft-node-silence-timeout=8"], script, UNTIL_LOST="1", **env) as it:
        node = of_node(it, chair=False) if it.nodes[0].notes(0) else it.nodes[1]
        wait_for(lambda: len(notes(it, "durable-")) > 8, "snapshots to be durable")
        everybody = node.family()
        kill(*everybody)
        known = max(step for _, step in notes(it, "durable-"))
        it.nodes.remove(node)
        it.add()
        end(it)
        restored = notes(it, "restored-")
        assert len({step for _, step in restored}) == 1
        assert restored[0][1] >= known
        assert Directory(tmp_path / "ck").stored()[0].manifest.step == restored[0][1] + 20
        assert "(disk)" in it.logs()
        assert not notes(it, "BAD-")


@pytest.mark.long
def test_directory_that_is_not_shared_is_refused_in_words(tmp_path: Path) -> None:
    options = ["--max-restarts=0", *ONE]
    with Fleet(tmp_path, "2", options, [SNAPSHOTS, "ck", "10"]) as it:  # each launcher has a folder of its own
        for _ in range(2):
            it.add()
        codes = [node.wait() for node in it.nodes]
        assert 0 not in codes
        assert "Give a directory that all nodes share, or an object store" in it.logs()


@pytest.mark.rare
def test_plain_torchrun_on_two_nodes_gives_the_same_and_leaves_no_saver(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """Without a launcher of ours the first rank of each node starts the saver, which is nobody's child."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    agents = []
    for number in range(2):
        home = Path(tempfile.mkdtemp(prefix="tr-"))  # a node of its own, as far as sockets go
        mine = tmp_path / f"progress{number}"
        mine.mkdir()
        environment = {**os.environ, "PROGRESS": str(mine), "OMP_NUM_THREADS": "1", "TMPDIR": str(home)}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it torchrun's restarts fail on stale keys
        script = [DDP, str(tmp_path / "ck"), "24", "kill", "1", "13"]
        with (tmp_path / f"log{number}").open("wb") as log:
            conf = f"--rdzv-conf=is_host={'true' if number == 0 else 'false'}"
            started = subprocess.Popen([*command, conf, *script], env=environment, stdout=log, stderr=log)
            agents.append((started, home))
    try:
        logs = [(tmp_path / f"log{number}").read_text for number in range(2)]
        assert [agent.wait(150) for agent, _ in agents] == [0, 0], logs[0]()[-3000:] + logs[1]()[-3000:]
        found = {rank: path.read_text() for rank in range(2) for path in tmp_path.glob(f"progress*/final_{rank}")}
        assert found == undisturbed
        for _, home in agents:
            wait_for(lambda home=home: not savers(home), "the savers to end", 60)  # type: ignore[misc]
    finally:
        for agent, home in agents:
            agent.kill()
            agent.wait()
            for pid in savers(home):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(home, ignore_errors=True)
