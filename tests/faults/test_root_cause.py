"""Of everything that went wrong in a cycle, the first cause is named, in its own words; the others are victims in a line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_strategies import training
from tests.jobs import WORKLOADS, job, wait_for

pytestmark = pytest.mark.spawns
OPTIONS = ["--nproc-per-node=2", "--max-restarts=2"]


def collective(folder: Path, fault: str, *options: str) -> tuple[int, dict[str, Any], str]:
    """Run the two gloo ranks; return the exit code, the report of cycle 0 and the log."""
    with job(folder, [*OPTIONS, *options], [str(WORKLOADS / "collective.py"), fault]) as it:
        code = it.wait()
        report = it.report(0)
        it.assert_nothing_left()
        return code, report, it.log()


def test_rank_that_raised_is_the_cause_and_the_one_in_the_collective_its_victim(tmp_path: Path) -> None:
    code, report, log = collective(tmp_path, "raise")
    culprit = report["culprit"]
    assert code == 0, log
    assert (culprit["rank"], culprit["kind"]) == (1, "exception")
    assert culprit["message"] == "ValueError: bad sample 4711"
    assert culprit["step"] == 5
    assert [item["name"] for item in culprit["sections"]] == ["step", "sample"]
    assert [item["type"] for item in culprit["chain"]] == ["ValueError", "KeyError"]
    assert culprit["context"] == {"batch": "shard-7", "attempt": 0}
    assert culprit["versions"]["torch"]
    assert "raise ValueError" in culprit["stack"]
    assert "KeyError: 'label'" in culprit["stack"], "the full chain of causes"
    assert report["victims"] == [0]
    block = log[log.index("cycle 0 failed") :]
    assert block.index("culprit   rank 1") < block.index("victims   rank 0")
    assert "context   batch=shard-7" in block


@pytest.mark.long
def test_of_two_that_raise_one_after_the_other_the_first_is_named(tmp_path: Path) -> None:
    code, report, log = collective(tmp_path, "both")
    assert code == 0, log
    assert report["culprit"]["rank"] == 1
    assert report["culprit"]["message"] == "RuntimeError: rank 1 is sure of itself"
    told = {item["rank"]: item["after_s"] for item in report["failures"]}
    assert told[1] == 0.0
    assert 0 not in told or 0 < told[0] < 60


def test_crash_leaves_the_stack_of_the_innermost_frame(tmp_path: Path) -> None:
    code, report, log = collective(tmp_path, "crash")
    culprit = report["culprit"]
    assert code == 0, log
    assert (culprit["rank"], culprit["kind"], culprit["exit_code"]) == (1, "signal", -signal.SIGSEGV)
    assert "SIGSEGV" in culprit["message"]
    assert "Fatal Python error: Segmentation fault" in culprit["stack"]
    assert "in fail" in culprit["stack"]
    assert [item["name"] for item in culprit["sections"]] == ["step", "sample"]


@pytest.mark.long
def test_kill_from_outside_is_told_apart_from_the_oom_killer(tmp_path: Path) -> None:
    code, report, log = collective(tmp_path, "kill")
    assert code == 0, log
    assert (report["culprit"]["rank"], report["culprit"]["kind"]) == (1, "signal")
    assert report["culprit"]["message"] == "ended by signal 9 (SIGKILL)"
    assert "Neither this launcher nor the OOM killer" in report["remedy"]


@pytest.mark.long
def test_hardware_code_on_a_single_node_ends_the_launcher_with_it(tmp_path: Path) -> None:
    code, report, log = collective(tmp_path, "exit201")
    assert code == 201, log
    assert (report["culprit"]["rank"], report["culprit"]["kind"]) == (1, "exit")
    assert report["culprit"]["message"] == "ended with exit code 201, driver error"
    assert (report["action"], report["strategy"]) == ("node", "NODE_FAILOVER")


def test_rank_that_leaves_early_in_peace_is_named_and_not_the_one_that_misses_it(tmp_path: Path) -> None:
    code, report, log = collective(tmp_path, "leave")
    culprit = report["culprit"]
    assert code == 0, log
    assert (culprit["rank"], culprit["kind"], culprit["exit_code"]) == (1, "exit", 0)
    assert "still needed it" in culprit["message"]
    assert report["victims"] == [0]


def test_undecorated_script_is_captured_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("def deeper():\n    raise LookupError('nothing there')\n\ndeeper()\n")
    with job(tmp_path, ["--nproc-per-node=1"], [str(script)]) as it:
        assert it.wait() == 1
        culprit = it.report(0)["culprit"]
        assert (culprit["kind"], culprit["message"]) == ("exception", "LookupError: nothing there")
        assert "in deeper" in culprit["stack"]
        assert "resilience/_worker" not in culprit["stack"]


def test_torchs_own_record_is_understood(tmp_path: Path) -> None:
    with job(tmp_path, ["--nproc-per-node=1"], [str(WORKLOADS / "parity_recorded.py")]) as it:
        assert it.wait() == 1
        assert it.report(0)["culprit"]["message"] == "RuntimeError: recorded on purpose"


def test_without_a_trampoline_the_log_tells_what_happened(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("raise LookupError('nothing there')\n")
    with job(tmp_path, ["--nproc-per-node=1", "--no-python"], ["python3", str(script)]) as it:
        assert it.wait() == 1
        assert it.report(0)["culprit"]["message"] == "LookupError: nothing there"


def test_rank_that_runs_out_of_memory_in_python_is_said_to_have(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import torch\ntorch.empty(1 << 60)\n")
    with job(tmp_path, ["--nproc-per-node=1"], [str(script)]) as it:
        assert it.wait() == 1
        culprit = it.report(0)["culprit"]
        assert culprit["kind"] == "oom"
        assert "out of memory" in culprit["message"]


def test_last_lines_of_the_culprits_log_are_in_the_report(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import os, sys\nprint('the last straw', file=sys.stderr, flush=True)\nos._exit(9)\n")
    with job(tmp_path, ["--nproc-per-node=1"], [str(script)]) as it:
        assert it.wait() == 1
        assert it.report(0)["culprit"]["log"] == ["the last straw"]
        assert "the last straw" in it.log()[it.log().index("cycle 0 failed") :]


def test_report_in_json_is_the_same_that_the_command_prints(tmp_path: Path) -> None:
    with job(tmp_path, OPTIONS, [str(WORKLOADS / "fleet.py"), "100000"]) as it:
        pid = int(it.await_note(0, "step-3")[3])
        os.kill(pid, signal.SIGKILL)
        it.await_steps(1)
        (it.progress / "finish").touch()
        assert it.wait() == 0, it.log()
        data = json.loads((it.run_dir / "cycles" / "0.json").read_text())
        wait_for(lambda: "culprit   rank 0" in it.log(), "the block in the log")
        assert data["culprit"]["pid"] == pid


def test_message_that_is_no_text_does_no_harm(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import os\nraise ValueError('bad file ' + os.fsdecode(b'caf\\xe9.bin'))\n")
    with job(tmp_path, ["--nproc-per-node=1"], [str(script)]) as it:
        assert it.wait() == 1
        assert it.report(0)["culprit"]["message"] == "ValueError: bad file caf\udce9.bin"
        assert "bad file caf\\udce9.bin" in it.log()[it.log().index("cycle 0 failed") :]


WRONG = [
    '{"message": [1, 2',
    '{"resilience": {"mono_ns": "abc"}}',
    '{"resilience": {"mono_ns": NaN, "pid": null}}',
    '{"message": {"message": "ValueError: x"}, "resilience": {"pid": PID, "sections": [{"name": "a"}]}}',
    '{"message": {"message": "E"}, "resilience": {"pid": PID, "chain": [{"type": 2, "message": 5}, {"type": 3}]}}',
]


def test_error_files_with_the_wrong_things_in_them_do_no_harm(tmp_path: Path) -> None:
    """One in each cycle."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import os\n"
        "cycle = int(os.environ['RESILIENCE_CYCLE'])\n"
        f"words = {WRONG!r}[cycle].replace('PID', str(os.getpid()))\n"
        "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(words)\n"
        "os._exit(3 + cycle)\n"
    )
    with job(tmp_path, ["--nproc-per-node=1", f"--max-restarts={len(WRONG) - 1}"], [str(script)]) as it:
        assert it.wait() == 1, it.log()
        culprits = [it.report(cycle)["culprit"] for cycle in range(len(WRONG))]
        assert [culprit["exit_code"] for culprit in culprits] == [3, 4, 5, 6, 7]
        assert culprits[0]["message"] == "ended with exit code 3"
        assert f"cycle {len(WRONG) - 1} failed" in it.log()
        assert "Traceback" not in it.log(), "the launcher's own: the script raises nothing"
        assert "exit code 1: failed" in it.log()


def test_rank_that_got_over_an_error_is_not_blamed_for_another_ones(tmp_path: Path) -> None:
    with job(tmp_path, ["--nproc-per-node=2"], [str(WORKLOADS / "fleet.py"), "100000"]) as it:
        it.await_note(1, "step-3")
        it.order("overcome", 0)
        it.await_note(0, "obeys-overcome")
        after = len(it.notes(0))
        wait_for(lambda: len(it.notes(0)) > after + 10, "rank 0 to go on")
        it.order("exit 3", 1)
        assert it.wait() == 1
        report = it.report(0)
        assert (report["culprit"]["rank"], report["culprit"]["exit_code"]) == (1, 3)
        assert [item["rank"] for item in report["failures"]] == [1]


@pytest.mark.parametrize("ending", ["kill SIGKILL", pytest.param("raise the real cause", marks=pytest.mark.rare)])
def test_exception_that_was_caught_is_not_blamed_for_what_ends_another_rank(tmp_path: Path, ending: str) -> None:
    with training(tmp_path, 1, "1", "--nproc-per-node=2") as it:
        node = it.nodes[0]
        node.order("recover 30", 1)
        wait_for(lambda: any("obeys-recover" in note for note in node.notes(1)), "rank 1 to go on after its exception")
        wait_for((node.run_dir / "logs/cycle_0/rank_1/error.json").exists, "the record of it")
        node.order(ending, 0)
        assert node.wait() == 1, it.logs()
        report = node.report(0)
        assert report["culprit"]["rank"] == 0
        assert [item["rank"] for item in report["failures"]] == [0]


def test_rank_that_raised_first_is_the_cause_although_it_is_long_in_its_clean_up(tmp_path: Path) -> None:
    with training(tmp_path, 1, "1", "--nproc-per-node=2", "--ft-rank-term-timeout=1") as it:
        node = it.nodes[0]
        node.order("clean-up 600", 1)
        wait_for((node.run_dir / "logs/cycle_0/rank_1/error.json").exists, "rank 1 to record its exception")
        node.await_steps(0, len(node.steps(0)) + 40)  # the other one goes on for a while
        node.order("raise because of the other one", 0)
        assert node.wait() == 1, it.logs()
        report = node.report(0)
        assert report["culprit"]["message"] == "ValueError: the first cause"
        assert [item["rank"] for item in report["failures"]] == [1, 0]


REFUSES = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"


@pytest.mark.parametrize(
    ("script", "said", "to_do"),
    [
        (None, "it can't be run: FileNotFoundError: ", "Nothing of the script has run: look at its name"),
        (REFUSES, "it refused its arguments", "The script can't take these arguments"),
        pytest.param(
            "x = = 1\n", "SyntaxError: invalid syntax", "Nothing of the script has run", marks=pytest.mark.rare
        ),
    ],
)
def test_script_that_can_not_begin_is_tried_twice_and_not_until_all_restarts_are_used(
    tmp_path: Path, script: str | None, said: str, to_do: str
) -> None:
    path = tmp_path / "train.py"
    if script is not None:
        path.write_text(script)
    with job(tmp_path, ["--nproc-per-node=2", "--max-restarts=9"], [str(path), "--lrr=1"]) as it:
        assert it.wait() == 77, it.log()
        report = it.report(1)
        assert said in report["culprit"]["message"]
        assert to_do in report["remedy"]
        assert not (it.run_dir / "cycles" / "2.json").exists()
        it.assert_nothing_left()
