"""Promises 2 and 3: a hang is found wherever it is, everybody testifies before anything is ended, the culprit is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import WORKLOADS, job, train, wait_for

pytestmark = pytest.mark.spawns
TWO = ["--nproc-per-node=2", "--max-restarts=1"]
OUTLIVED = {"OUTLIVED": "1"}  # rank 0 is there when rank 1 goes wrong


def run_to_verdict(
    folder: Path, options: list[str], script: list[str], env: dict[str, str] | None = None
) -> dict[str, object]:
    """Run a job that hangs once; it must be found, restarted and finished. Returns the report of cycle 0."""
    with job(folder, [*TWO, *options], script, env) as it:
        assert it.wait() == 0, it.log()
        it.assert_nothing_left()
        return it.report(0)


@pytest.mark.parametrize(
    ("fault", "options", "told"),
    [
        ("load:sleep", ["--ft-rank-section-timeouts=load:1.5"], "in section 'load'"),
        ("load:gil", ["--ft-rank-section-timeouts=load:1.5"], "in section 'load'"),
        ("load:stop", ["--ft-rank-section-timeouts=load:1.5"], "stopped by a signal, in section 'load'"),
        pytest.param(
            "epoch:loop", ["--ft-rank-section-timeouts=epoch:4"], "in section 'epoch'", marks=pytest.mark.long
        ),
        ("between:sleep", ["--ft-rank-out-of-section-timeout=1.5"], "outside any section"),
        ("beats:loop", ["--ft-rank-heartbeat-timeout=3"], "no heartbeat"),
        ("after:sleep", ["--ft-rank-exit-timeout=3"], "not ended after its loop"),
        *(
            pytest.param(*case, marks=pytest.mark.rare)
            for case in (
                (
                    "load:ignore-term",
                    ["--ft-rank-section-timeouts=load:1.5", "--ft-rank-term-timeout=1"],
                    "in section 'load'",
                ),
                ("setup:sleep", ["--ft-rank-section-timeouts=setup:1.5"], "in section 'setup'"),
                ("load:sleep", ["--ft-rank-heartbeat-timeout=1.5"], "no heartbeat"),
                ("after:sleep", ["--ft-rank-out-of-section-timeout=1.5"], "outside any section"),
            )
        ),
    ],
)
def test_hang_is_found_explained_ended_and_the_job_restarted(
    tmp_path: Path, fault: str, options: list[str], told: str
) -> None:
    report = run_to_verdict(tmp_path, options, train(10, fault, 1, 5))
    culprit = report["culprit"]
    assert isinstance(culprit, dict)
    assert (culprit["rank"], culprit["kind"]) == (1, "hang")
    assert told in culprit["message"]
    assert "train.py" in culprit["stack"]
    assert culprit["pid"] > 0
    assert culprit["host"]
    assert report["action"] == "restart"
    assert report["victims"] == [0]
    assert report["remedy"]


def test_a_hung_rank_that_is_found_by_its_victim_is_still_the_culprit(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 and its clock expires first; rank 1 has no timeout at all."""
    report = run_to_verdict(tmp_path, ["--ft-rank-section-timeouts=wait:1.5,load:null"], [str(WORKLOADS / "waits.py")])
    culprit = report["culprit"]
    assert isinstance(culprit, dict)
    assert culprit["rank"] == 1
    assert "furthest behind" in culprit["message"]
    assert report["victims"] == [0]


def test_hang_in_an_import_is_found_before_the_script_can_call_us(tmp_path: Path) -> None:
    report = run_to_verdict(
        tmp_path, ["--ft-initial-rank-heartbeat-timeout=6"], [str(WORKLOADS / "hangs_in_import.py")]
    )
    culprit = report["culprit"]
    assert isinstance(culprit, dict)
    assert (culprit["rank"], culprit["kind"]) == (1, "hang")
    assert "since the process started" in culprit["message"]
    assert "slow_module.py" in culprit["stack"]


def test_hang_in_init_process_group_is_found(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "hangs_in_init.py")]
    report = run_to_verdict(tmp_path, ["--ft-initial-rank-heartbeat-timeout=15"], script)
    ranks = {item["rank"]: item["stack"] for item in report["ranks"]}  # type: ignore[attr-defined]
    assert "init_process_group" in ranks[0]
    culprit = report["culprit"]
    assert isinstance(culprit, dict)
    assert culprit["rank"] == 1


def test_with_no_timeout_given_a_hang_is_found_by_what_was_learned(tmp_path: Path) -> None:
    """Only the floor is lowered, so that the test does not take half a minute."""
    report = run_to_verdict(tmp_path, ["--ft-learned-timeout-floor=3"], train(60, "load:sleep", 1, 50))
    culprit = report["culprit"]
    assert isinstance(culprit, dict)
    assert (culprit["rank"], culprit["kind"]) == (1, "hang")
    assert "learned" in culprit["message"]
    assert culprit["step"] == 49


def test_a_script_that_never_calls_us_is_warned_about_and_left_alone(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "stranger.py"), "5", str(tmp_path / "go")]
    with job(tmp_path, ["--nproc-per-node=1", "--ft-unlearned-timeout=3"], script) as it:
        wait_for(lambda: "never called resilience" in it.log(), "the warning")
        (tmp_path / "go").touch()
        assert it.wait() == 0
        assert "stranger.py" in it.log()
        assert not (it.run_dir / "cycles").exists()


def test_a_script_that_never_calls_us_is_ended_by_a_timeout_that_was_given(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "stranger.py"), "600"]
    with job(tmp_path, ["--nproc-per-node=1", "--ft-initial-rank-heartbeat-timeout=1.5"], script) as it:
        assert it.wait() == 1
        assert it.report(0)["culprit"]["kind"] == "hang"
        assert it.report(0)["action"] == "stop"
        assert "--max-restarts is 0" in it.log()
        it.assert_nothing_left()


def test_a_sigterm_that_is_ignored_is_followed_by_sigkill_once(tmp_path: Path) -> None:
    options = [*TWO, "--ft-rank-section-timeouts=load:1", "--ft-rank-term-timeout=1"]
    with job(tmp_path, options, train(10, "load:ignore-term", 1, 5)) as it:
        pid = int(it.await_note(1, "fault-ignore-term")[3])
        it.report(0)
        it.await_note(1, "end", cycle=1)
        assert it.wait() == 0
        assert not Path(f"/proc/{pid}").exists()


def test_the_first_signal_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    options = [*TWO, "--ft-rank-section-timeouts=load:1", "--ft-rank-termination-signal=SIGUSR1"]
    with job(tmp_path, options, [str(WORKLOADS / "notes_signals.py")]) as it:
        it.report(0)
        wait_for(lambda: "SIGUSR1" in it.log(), "the rank to see SIGUSR1")
        assert it.wait() == 0


def test_every_rank_testifies_before_anything_is_ended(tmp_path: Path) -> None:
    options = ["--ft-rank-section-timeouts=load:1.5"]
    report = run_to_verdict(tmp_path, options, train(10, "load:sleep", 1, 5), OUTLIVED)
    stacks = {item["rank"]: item["stack"] for item in report["ranks"]}  # type: ignore[attr-defined]
    assert sorted(stacks) == [0, 1]
    assert all("train.py" in stack for stack in stacks.values())


def test_a_death_names_the_dead_rank_with_its_step_and_section(tmp_path: Path) -> None:
    report = run_to_verdict(tmp_path, [], train(10, "load:kill", 1, 5), OUTLIVED)
    culprit = report["culprit"]
    assert isinstance(culprit, dict)
    assert (culprit["rank"], culprit["kind"], culprit["step"]) == (1, "signal", 4)
    assert [item["name"] for item in culprit["sections"]] == ["epoch", "load"]
    survivor = next(item for item in report["ranks"] if item["rank"] == 0)  # type: ignore[attr-defined]
    assert "train.py" in survivor["stack"]


@pytest.mark.long
def test_an_exception_is_quoted(tmp_path: Path) -> None:
    report = run_to_verdict(tmp_path, [], train(100, "load:raise", 1, 5))
    culprit = report["culprit"]
    assert isinstance(culprit, dict)
    assert (culprit["rank"], culprit["kind"], culprit["message"]) == (1, "exception", "ValueError: bad batch")


@pytest.mark.long
def test_a_stopped_rank_is_the_culprit_as_it_was_when_it_was_found(tmp_path: Path) -> None:
    """It is continued to testify and moves on; the report shows where it stood still."""
    script = [str(WORKLOADS / "two_nodes.py"), "60", "stop", "20"]
    report = run_to_verdict(tmp_path, ["--ft-rank-section-timeouts=load:2,step:2"], script)
    culprit = report["culprit"]
    assert isinstance(culprit, dict)
    assert (culprit["rank"], culprit["kind"], culprit["step"]) == (1, "hang", 19)
    assert "stopped by a signal" in culprit["message"]
    assert [item["name"] for item in culprit["sections"]] == ["load"]
    assert "Somebody stopped this process" in str(report["remedy"])
