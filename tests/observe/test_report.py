from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from resilience.__main__ import main
from resilience.failover.failure import RankFailure, examine, last_exception
from resilience.observe.report import (
    Evidence,
    Report,
    as_text,
    compose,
    conclude,
    put_late_leaver,
    ranks_in_words,
    read_all,
    remedy,
    speaker,
    write,
)
from tests.fakes import witness

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
  File "train.py", line 5, in main
    raise ValueError("loss is NaN at step 7")
ValueError: loss is NaN at step 7
"""
WITH_RANKS = "".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines())


def report(evidence: Evidence) -> Report:
    return conclude(compose(evidence), "restart", "all workers are restarted (1 of 3 restarts used)")


def died(rank: int, code: int, at_ns: int, log: str = "", oom: str | None = None) -> RankFailure:
    return examine(rank, code, at_ns, log=log, oom=oom)


def hang_of_rank_3() -> Report:
    stuck = [{"name": "epoch", "age_s": 700.0}, {"name": "load_data", "age_s": 312.0}]
    waiting = [
        witness(rank, entries={"step": 9}, sections=[{"name": "backward", "age_s": 300.0}]) for rank in (0, 1, 2)
    ]
    return report(
        Evidence(
            cycle=2,
            testimonies=[
                *waiting,
                witness(3, step=6, entries={"step": 8}, sections=stuck, stack="File 'loader.py', line 3 in read"),
            ],
            hangs={0: {"message": "in section 'backward' for 300.0 s (timeout 300 s, learned)"}},
            nodes={rank: (rank, f"gpu-0{rank}") for rank in range(4)},
        )
    )


def test_hang_names_the_rank_behind_and_not_the_one_whose_clock_expired() -> None:
    culprit = hang_of_rank_3()["culprit"]
    assert (culprit["rank"], culprit["kind"], culprit["host"], culprit["pid"]) == (3, "hang", "gpu-03", 1003)
    assert culprit["message"] == (
        "furthest behind: in section 'load_data' for 312.0 s; rank 0 ran into a timeout waiting for it"
    )
    assert culprit["stack"] == "File 'loader.py', line 3 in read"
    assert "section 'load_data'" in hang_of_rank_3()["remedy"]


def test_report_has_the_promised_fields_and_is_json() -> None:
    made = json.loads(json.dumps(hang_of_rank_3()))
    assert {"cycle", "culprit", "victims", "action", "remedy"} <= set(made)
    assert {"rank", "kind", "host", "pid", "step", "sections", "message", "stack"} <= set(made["culprit"])
    assert (made["cycle"], made["victims"], made["action"], made["culprit"]["step"]) == (2, [0, 1, 2], "restart", 6)
    assert made["remedy"]


def test_hang_of_the_rank_that_is_itself_silent_says_its_verdict() -> None:
    verdict = "no heartbeat for 31.0 s (timeout 30 s, learned)"
    culprit = report(Evidence(0, [witness(0)], hangs={0: {"message": verdict}}))["culprit"]
    assert (culprit["kind"], culprit["message"]) == ("hang", verdict)


def test_stopped_rank_is_said_to_be_stopped() -> None:
    evidence = Evidence(0, [witness(0), witness(1, state="T")], hangs={0: {"message": "…"}})
    assert "stopped by a signal" in report(evidence)["culprit"]["message"]


def test_rank_ended_by_a_signal_is_named_with_the_signal() -> None:
    evidence = Evidence(1, [witness(1, state="gone")], [died(1, -9, 5)], pids={1: 77})
    culprit = report(evidence)["culprit"]
    assert (culprit["kind"], culprit["message"]) == ("signal", "ended by signal 9 (SIGKILL)")
    assert "OOM" in report(evidence)["remedy"]


@pytest.mark.parametrize(("number", "name"), [(11, "SIGSEGV"), (signal.SIGRTMIN + 3, "signal 37")])
def test_other_signals_are_named_and_advice_points_to_the_log(number: int, name: str) -> None:
    made = report(Evidence(0, failures=[died(0, -number, 1)]))
    assert name in made["culprit"]["message"]
    assert "OOM" not in made["remedy"]


def test_exit_code_without_a_traceback_is_an_exit() -> None:
    made = report(Evidence(0, failures=[died(4, 3, 1, "some words\n")], pids={4: 99}))
    culprit = made["culprit"]
    assert (culprit["rank"], culprit["kind"], culprit["message"]) == (4, "exit", "ended with exit code 3")
    assert (culprit["pid"], culprit["exit_code"], culprit["log"]) == (99, 3, ["some words"])


@pytest.mark.parametrize("log", [TRACEBACK, WITH_RANKS, "noise\n" + TRACEBACK + "W1116 after\n", WITH_RANKS + "\n"])
def test_exception_is_named_with_or_without_torchs_rank_prefix(log: str) -> None:
    culprit = report(Evidence(0, [witness(1, state="gone")], [died(1, 1, 5, log)]))["culprit"]
    assert (culprit["kind"], culprit["message"]) == ("exception", "ValueError: loss is NaN at step 7")
    assert culprit["stack"].splitlines()[0] == "Traceback (most recent call last):"
    assert culprit["stack"].splitlines()[-1] == "ValueError: loss is NaN at step 7"
    assert "[rank1]" not in culprit["stack"]


def test_of_chained_exceptions_the_last_is_the_cause_of_death() -> None:
    chained = (
        TRACEBACK
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + TRACEBACK.replace("ValueError: loss is NaN at step 7", "torch.distributed.DistBackendError")
    )
    assert last_exception(chained) == "torch.distributed.DistBackendError"


@pytest.mark.parametrize(
    "line", ["KeyError: 'x'", "KeyboardInterrupt", "my.pkg.Err_2: a: b", "__main__.f.<locals>.E: x"]
)
def test_name_of_any_exception_is_found(line: str) -> None:
    assert last_exception(TRACEBACK.replace("ValueError: loss is NaN at step 7", line)) == line


def test_log_without_a_traceback_has_no_exception() -> None:
    assert last_exception("") == last_exception("ValueError: only mentioned\n") == ""


def test_handled_exception_in_the_log_is_not_the_cause_of_a_deliberate_exit() -> None:
    # An uncaught exception ends Python with 1 and nothing else; sys.exit(3) after a logged traceback is an exit.
    made = report(Evidence(0, failures=[died(0, 3, 1, TRACEBACK + "retried, fine\n")]))
    assert made["culprit"]["kind"] == "exit"


def test_death_in_a_section_says_where_and_at_which_step() -> None:
    dead = witness(0, state="gone", step=41, sections=[{"name": "step", "age_s": 1.0}])
    culprit = report(Evidence(0, [dead, witness(1)], [died(0, 1, 5, TRACEBACK)]))["culprit"]
    assert (culprit["step"], culprit["sections"]) == (41, [{"name": "step", "age_s": 1.0}])


def test_lost_node_is_named_with_its_sentence() -> None:
    lost = {2: "node gpu-07 is silent for 61 s", 3: "node gpu-07 is silent for 61 s"}
    made = report(Evidence(0, [witness(0), witness(1)], lost=lost, nodes={2: (1, "gpu-07")}))
    assert (made["culprit"]["rank"], made["culprit"]["kind"], made["culprit"]["host"]) == (2, "node", "gpu-07")
    assert made["culprit"]["message"] == "node gpu-07 is silent for 61 s"
    assert made["victims"] == [0, 1]


def test_cycle_of_which_nothing_is_known_still_has_a_report() -> None:
    made = report(Evidence(5))
    assert made["culprit"]["rank"] is None
    assert "unknown rank" in as_text(made, "/runs/x")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([6, 0, 5, 1, 4, 2, 3, 9], "ranks 0 to 6, 9"),
        ([1, 3, 5], "ranks 1, 3, 5"),
    ],
)
def test_ranks_are_told_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


def test_text_has_the_culprit_first_and_the_victims_in_one_line() -> None:
    lines = as_text(hang_of_rank_3(), "/runs/x").splitlines()
    assert "cycle 2 failed" in lines[0]
    assert lines[1].startswith("culprit   rank 3 on gpu-03, pid 1003: hang, furthest behind")
    assert lines[2] == "where     after step 6, sections: epoch (700.0 s) > load_data (312.0 s)"
    assert [line for line in lines if "victims" in line] == ["victims   ranks 0 to 2 in 'backward'"]
    assert any("line 3 in read" in line for line in lines)
    assert lines[-2].endswith("/runs/x/cycles/2.json")


def test_text_shows_the_log_where_there_is_no_stack_and_cuts_a_long_stack() -> None:
    words = as_text(report(Evidence(0, failures=[died(0, 3, 1, "first\nlast words\n")])), "/r")
    assert "last words" in words
    deep = witness(0, stack="\n".join(f"  File 'a.py', line {n} in f" for n in range(500)))
    cut = as_text(report(Evidence(0, [deep], hangs={0: {"message": "…"}})), "/r")
    assert len(cut.splitlines()) < 40
    assert re.search(r"^ +…$", cut, re.MULTILINE)


def test_victims_in_different_places_are_grouped() -> None:
    places: list[dict[str, Any]] = [
        witness(0, sections=[{"name": "backward", "age_s": 1.0}]),
        witness(1, sections=[]),
        witness(2, sections=[{"name": "backward", "age_s": 1.0}]),
        witness(3, step=1),
    ]
    made = report(Evidence(0, places, hangs={0: {"message": "…"}}))
    assert made["waiting"] == "ranks 0, 2 in 'backward'; rank 1 in no section"


def test_report_is_written_whole_and_over_an_older_one(tmp_path: Path) -> None:
    write(hang_of_rank_3(), tmp_path)
    write(hang_of_rank_3(), tmp_path)
    assert [path.name for path in (tmp_path / "cycles").iterdir()] == ["2.json"]
    assert json.loads((tmp_path / "cycles" / "2.json").read_text()) == hang_of_rank_3()


def test_reports_are_read_in_the_order_of_their_cycles(tmp_path: Path) -> None:
    for cycle in (10, 2, 1):
        write(report(Evidence(cycle)), tmp_path)
    assert [made["cycle"] for made in read_all(tmp_path)] == [1, 2, 10]
    assert read_all(tmp_path / "nowhere") == []


def test_text_says_what_was_done_and_what_to_do() -> None:
    words = as_text(hang_of_rank_3(), "/r")
    assert "done      all workers are restarted (1 of 3 restarts used)" in words
    assert "to do     Look at section 'load_data'." in words


def test_rank_that_the_oom_killer_ended_is_said_to_have_run_out_of_memory() -> None:
    made = report(Evidence(0, failures=[died(0, -9, 1, oom="out of memory: ended by the kernel's OOM killer")]))
    assert (made["culprit"]["kind"], made["culprit"]["exit_code"]) == ("oom", -9)
    assert "loader workers" in made["remedy"]


def test_rank_that_left_early_is_told_that_the_others_needed_it() -> None:
    gloo = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:9"
    error = {"message": {"message": gloo, "extraInfo": {"py_callstack": "", "timestamp": "1"}}}
    ranks = [witness(0, state="gone", step=7), witness(1, state="gone", step=6, finishing=True)]
    made = report(Evidence(0, ranks, [examine(0, 1, 5, error=error)]))
    assert (made["culprit"]["rank"], made["culprit"]["kind"], made["culprit"]["exit_code"]) == (1, "exit", 0)
    assert "same number of steps" in made["remedy"]
    assert "rank 0 fell after it" in made["waiting"]


def test_failures_are_listed_in_the_order_of_their_times_counted_from_the_cause() -> None:
    log = TRACEBACK
    made = report(Evidence(0, failures=[died(1, 1, 2_500_000_000, log), died(0, -9, 1_000_000_000)]))
    assert [(item["rank"], item["after_s"]) for item in made["failures"]] == [(0, 0.0), (1, 1.5)]


def test_context_that_the_script_gave_is_in_the_text() -> None:
    error = {
        "message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "", "timestamp": "1"}},
        "resilience": {"type": "ValueError", "message": "x", "context": {"batch": "s3://b/7", "lr": 0.1}},
    }
    words = as_text(report(Evidence(0, failures=[examine(0, 1, 5, error=error)])), "/r")
    assert "context   batch=s3://b/7, lr=0.1" in words


def test_rank_that_never_asked_whether_to_stop_is_named_when_the_time_is_over() -> None:
    ranks = [witness(0, stop_calls=7), witness(1, stop_calls=0)]
    report = compose(Evidence(cycle=0, testimonies=ranks))
    put_late_leaver(report, 25.0)
    assert "rank 1 never called stop_requested()" in report["culprit"]["message"]
    assert "rank 1 never did" in report["remedy"]


def test_rank_that_took_too_long_to_leave_is_told_to_leave_sooner() -> None:
    report = compose(Evidence(cycle=0, testimonies=[witness(0, stop_calls=7), witness(1, stop_calls=7)]))
    put_late_leaver(report, 25.0)
    assert report["culprit"]["message"] == "it had not left 25 s after the job was asked to stop"
    assert "--ft-stop-grace" in report["remedy"]


def test_where_all_write_to_one_log_the_first_node_that_is_there_prints_the_block() -> None:
    nodes = [(0, 1), (2, 3), (4, 5)]
    assert [speaker(nodes, lost) for lost in ([], [0, 1], [1], [4, 5], [0, 1, 2, 3], range(6))] == [0, 1, 1, 0, 2, 0]


def test_folder_of_several_runs_is_no_run_and_its_runs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("0/cycles", "1/logs", "other"):
        (tmp_path / name).mkdir(parents=True)
    assert main(["report", str(tmp_path)]) == 2
    assert f"These are: {tmp_path / '0'}, {tmp_path / '1'}." in capsys.readouterr().err
    assert main(["report", str(tmp_path / "other")]) == 2
    assert "These are" not in capsys.readouterr().err


def test_all_failures_of_a_cycle_that_outlived_some_are_printed_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (3, 1, 2):
        found = compose(Evidence(cycle=0, testimonies=[witness(rank)], failures=[died(rank, 1, at_ns=1)]))
        write(conclude(found, "wait", f"rank {rank} is not waited for"), tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert [line.split()[2] for line in said.splitlines() if line.startswith("culprit")] == ["3", "1", "2"]
    assert said.endswith("1 cycle failed\n")


def test_missing_module_is_to_be_installed_where_the_ranks_find_it() -> None:
    culprit = {
        "exit_code": 1,
        "message": "ModuleNotFoundError: No module named 'lightning'",
        "log": ["x"],
        "sections": [],
    }
    assert "install it in their environment" in remedy("exception", culprit)
    assert "innermost frame" in remedy("exception", {**culprit, "message": "ValueError: x"})
