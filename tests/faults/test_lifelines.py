"""Promises 1, 9 and 12: nothing of ours can block or crash training, and nothing is left behind, whoever is killed."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from resilience.failover import exits
from tests.jobs import WORKLOADS, Job, alive, job, train, wait_for

pytestmark = pytest.mark.spawns
TWO = ["--nproc-per-node=2", "--max-restarts=1"]
FOREVER = 100_000
UNTIL_TOLD = [str(WORKLOADS / "fleet.py"), str(FOREVER)]


def pids(it: Job) -> list[int]:
    return [int(it.await_note(rank, "step-5")[3]) for rank in range(2)]


def steps_of(it: Job, rank: int = 0) -> list[float]:
    return [float(note[2]) for note in it.notes(rank) if note[1].startswith("step-")]


def pace(times: list[float]) -> float:
    """The time of a step that nothing else on this machine held up."""
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    return gaps[len(gaps) // 10]


def test_a_killed_monitor_costs_nothing_and_its_successor_finds_the_next_hang(tmp_path: Path) -> None:
    options = [*TWO, "--ft-rank-section-timeouts=load:1.5"]
    with job(tmp_path, options, train(400, "load:sleep", 1, 150)) as it:
        pids(it)
        before = it.monitors()
        assert len(before) == 2
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(set(it.monitors()) - set(before)) == 2, "two new monitors")
        assert it.report(0)["culprit"]["rank"] == 1
        assert it.wait() == 0
        assert "a new one was started" in it.log()
        it.assert_nothing_left()


@pytest.mark.parametrize("who", ["monitors", "launcher"])
def test_training_goes_on_at_full_speed_while_we_are_stopped(tmp_path: Path, who: str) -> None:
    with job(tmp_path, TWO, UNTIL_TOLD, env={"DT": "0.005"}) as it:
        it.await_note(0, "step-200")
        stopped = it.monitors() if who == "monitors" else [it.pid]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        before = len(steps_of(it))
        wait_for(lambda: len(steps_of(it)) > before + 300, "steps without us")
        (it.progress / "finish").touch()
        it.await_note(0, "end")
        it.await_note(1, "end")
        assert all(state(pid) == "T" for pid in stopped if alive(pid))
        times = steps_of(it)
        assert pace(times[before:]) < 1.5 * pace(times[:before])
        for pid in stopped:
            if alive(pid):
                os.kill(pid, signal.SIGCONT)
        assert it.wait() == 0
        it.assert_nothing_left()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_job_ends_although_its_monitors_are_stopped(tmp_path: Path) -> None:
    with job(tmp_path, TWO, UNTIL_TOLD) as it:
        pids(it)
        for pid in it.monitors():
            os.kill(pid, signal.SIGSTOP)
        (it.progress / "finish").touch()
        assert it.wait() == 0
        it.assert_nothing_left()


def test_a_monitor_ends_its_hung_rank_by_itself_while_the_launcher_is_stopped(tmp_path: Path) -> None:
    options = [*TWO, "--ft-rank-section-timeouts=load:1", "--ft-testimony-timeout=1", "--ft-rank-term-timeout=1"]
    with job(tmp_path, options, train(20, "load:ignore-term", 1, 5)) as it:
        pid = int(it.await_note(1, "fault-ignore-term")[3])
        os.kill(it.pid, signal.SIGSTOP)
        wait_for(lambda: not alive(pid), "the hung rank to be ended by its monitor")
        os.kill(it.pid, signal.SIGCONT)
        assert it.report(0)["culprit"]["rank"] == 1
        assert it.wait() == 0
        it.assert_nothing_left()


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with job(tmp_path, TWO, train(FOREVER)) as it:
        ranks = pids(it)
        os.kill(it.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(alive, ranks)), "the ranks to end", timeout=15)
        it.assert_nothing_left()


def test_nothing_outlives_a_launcher_and_monitors_killed_together(tmp_path: Path) -> None:
    with job(tmp_path, TWO, train(FOREVER)) as it:
        ranks, monitors = pids(it), it.monitors()
        os.kill(it.pid, signal.SIGSTOP)
        for pid in [*monitors, it.pid]:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(alive, ranks)), "the ranks to end", timeout=15)
        wait_for(lambda: not it.family(), "everything to end", timeout=15)
        left = list(it.tmp.iterdir())
        assert len(left) == 1, "the scratch directory stays when nobody is left to remove it"
        with job(tmp_path / "next", TWO, train(3), env={"TMPDIR": str(it.tmp)}) as following:
            assert following.wait() == 0
        assert not list(it.tmp.iterdir()), "the next launcher sweeps it"


def test_children_of_a_killed_rank_go_with_it(tmp_path: Path) -> None:
    """DataLoader workers and helpers would hold the device."""
    script = [str(Path(__file__).parent.parent / "workloads" / "has_children.py")]
    with job(tmp_path, TWO, script) as it:
        child = int(it.await_note(1, "child")[3])
        rank = int(it.await_note(1, "parent")[3])
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: not alive(child), "the child to end", timeout=20)
        assert it.wait() == 0
        it.assert_nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, exits.PREEMPTED), (signal.SIGINT, exits.FAILED)])
def test_a_signal_to_the_launcher_ends_the_job_in_order(tmp_path: Path, number: int, code: int) -> None:
    """Right after the first steps, before any monitor has told its launcher that the script calls us."""
    with job(tmp_path, TWO, train(FOREVER)) as it:
        pids(it)
        os.kill(it.pid, number)
        assert it.wait() == code
        it.assert_nothing_left()
        assert not [line for line in it.log().splitlines() if "Traceback" in line and not line.startswith("[c0")]
        assert "/_worker/" not in it.log()


def test_ranks_without_a_trampoline_do_not_outlive_a_signal_that_comes_while_they_are_started(tmp_path: Path) -> None:
    with job(tmp_path, ["--nproc-per-node=6", "--no-python"], ["sleep", "600"]) as it:
        wait_for((it.run_dir / "logs" / "cycle_0" / "rank_5").exists, "the last rank's log")
        os.kill(it.pid, signal.SIGTERM)
        it.wait()
        it.assert_nothing_left()


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    script = [str(Path(__file__).parent.parent / "workloads" / "ignores_sigterm.py")]
    with job(tmp_path, TWO, script) as it:
        it.await_note(0, "ready")
        it.await_note(1, "ready")
        os.kill(it.pid, signal.SIGTERM)
        it.await_note(0, "term")
        assert it.process.poll() is None
        os.kill(it.pid, signal.SIGTERM)
        assert it.wait(timeout=20) == 1
        it.assert_nothing_left()


def test_a_job_that_fails_for_good_says_so_last_and_leaves_nothing(tmp_path: Path) -> None:
    with job(tmp_path, ["--nproc-per-node=2"], train(100, "load:raise", 1, 5)) as it:
        assert it.wait() == 1
        log = it.log()
        assert "--max-restarts is 0" in log
        assert log.index("cycle 0 failed") > log.rindex("[c0 n0 r")
        it.assert_nothing_left()


def test_restarts_that_are_used_up_end_the_job(tmp_path: Path) -> None:
    script = [str(Path(__file__).parent.parent / "workloads" / "always_fails.py")]
    with job(tmp_path, ["--nproc-per-node=2", "--max-restarts=2"], script) as it:
        assert it.wait() == 1
        assert [it.report(cycle)["action"] for cycle in range(3)] == ["restart", "restart", "stop"]
        assert "all 2 restarts are used" in it.log()
        assert {path.name for path in (it.run_dir / "logs").iterdir()} == {"cycle_0", "cycle_1", "cycle_2"}
        it.assert_nothing_left()


def test_learned_timeouts_survive_a_restart(tmp_path: Path) -> None:
    """Cycle 0 learns and dies; cycle 1 hangs before it could learn by itself, and is found."""
    script = [str(Path(__file__).parent.parent / "workloads" / "hangs_early_in_cycle_1.py")]
    options = ["--nproc-per-node=2", "--max-restarts=2", "--ft-learned-timeout-floor=3"]
    with job(tmp_path, options, script) as it:
        assert it.wait() == 0, it.log()
        culprit = it.report(1)["culprit"]
        assert (culprit["kind"], culprit["rank"]) == ("hang", 0)
        assert "learned" in culprit["message"]


def test_a_launcher_in_the_middle_of_another_jobs_environment_is_its_own(tmp_path: Path) -> None:
    """A worker that starts a job of its own (a sweep, a test) must not write the outer job's page."""
    script = [str(Path(__file__).parent.parent / "workloads" / "nested.py")]
    with job(tmp_path, ["--nproc-per-node=1"], script) as it:
        assert it.wait() == 0, it.log()
        it.await_note(0, "outer")
        it.assert_nothing_left()


def test_a_death_between_our_look_and_torchs_is_reported_too(tmp_path: Path) -> None:
    """The window is microseconds wide, so the launcher is made blind for once: torch is always first."""
    blind = tmp_path / "blind.py"
    blind.write_text(
        "import sys\nfrom resilience.launcher.agent import Agent\nAgent._look = lambda *_: None\n"
        "from resilience.launcher.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    )

    def through_the_blind_one(command: list[str]) -> list[str]:
        return [command[0], str(blind), *command[3:]]

    with job(tmp_path, TWO, train(200, "load:kill", 1, 5), wrap=through_the_blind_one) as it:
        assert it.wait() == 0, it.log()
        culprit = it.report(0)["culprit"]
        assert (culprit["rank"], culprit["kind"], culprit["step"]) == (1, "signal", 4)
        assert it.report(0)["victims"] == [0]
