"""A batch script to start from: it is whole, a shell can read it, and nothing that a value says is run by the shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("resilience.integrations.slurm", reason="not installed here: resilience.integrations")

from resilience.integrations.slurm.cli import COMMANDS, main
from resilience.integrations.slurm.render import notes, render
from resilience.integrations.slurm.values import SlurmValues, time_limit
from resilience.integrations.values import ValuesError, documentation

ODD = ["it's", 'a "b"', "$HOME `id` $(id)", "a\\b", "line\nbreak", "# no comment", "*", "ümläut", "", "--", "a;b&c|d>e"]
FULL: dict[str, Any] = {
    "nodes": 4,
    "spares": 1,
    "min_nodes": 2,
    "gpus_per_node": 8,
    "cpus_per_task": 64,
    "memory": "500G",
    "time": "1-12:00:00",
    "partition": "gpu",
    "account": "team",
    "qos": "high",
    "constraint": "h100&ib",
    "exclude": "n[1-3]",
    "setup": ["module load cuda", "source env/bin/activate"],
    "env": {"NCCL_DEBUG": "WARN"},
    "finished_file": "/shared/done",
    "fault_dir": "/var/spool/faults",
    "network_check": True,
    "accelerator": "nvidia",
    "launcher_args": ["--exclude-straggler"],
    "srun_args": ["--mpi=none"],
    "sbatch_args": ["--exclusive"],
}


def made(**values: Any) -> str:
    return render(SlurmValues(**{"name": "llm", "script": ["train.py", "--lr", "0.1"], **values}))


def flags(text: str) -> list[str]:
    """What sbatch is told."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def run_by_a_shell(text: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Run the script with a program in the place of ``resilience``; return its arguments and its environment."""
    program = folder / "resilience"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True, check=True, env=path, cwd=folder)
    assert not done.stderr
    told, environment = json.loads(done.stdout)
    return told, environment


def test_smallest_job_is_whole(tmp_path: Path) -> None:
    text = made(nodes=2)
    assert {"--nodes=2", "--ntasks-per-node=1", "--signal=B:USR1@90", "--requeue", "--open-mode=append"} <= set(
        flags(text)
    )
    told, _ = run_by_a_shell(text, tmp_path)
    assert told[:2] == ["slurm", "follow"]
    assert told[told.index("--") + 1 :] == [
        *("--nnodes=2", "--nproc-per-node=1", "--max-restarts=10", "--ft-stop-grace=60"),
        *("--ft-shared-console=true", "train.py", "--lr", "0.1"),
    ]


def test_every_value_finds_its_place(tmp_path: Path) -> None:
    text = made(**FULL)
    assert {"--nodes=5", "--time=1-12:00:00", "--constraint=h100&ib", "--exclude=n[1-3]", "--no-kill"} <= set(
        flags(text)
    )
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "activate").write_text("export ACTIVE=1\n")
    told, environment = run_by_a_shell(text.replace("module load cuda", "true"), tmp_path)
    assert {
        "--needed=2",
        "--srun-arg=--cpus-per-task=64",
        "--srun-arg=--mpi=none",
        "--finished-file=/shared/done",
    } <= set(told)
    assert {"--nnodes=2:4", "--nproc-per-node=8", "--ft-use-infra-group-rank=false", "--network-check"} <= set(told)
    assert environment["FAULT_TOL_FINISHED_FLAG_FILE"] == "/shared/done"
    assert (environment["NCCL_DEBUG"], environment["ACTIVE"]) == ("WARN", "1")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:00:30", 3630),
        ("2-3", 183600),
        ("2-3:10", 184200),
        ("2-3:10:05", 184205),
        ("99:30", 5970),
        ("UNLIMITED", None),
        ("infinite", None),
        ("", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert time_limit(text) == seconds


def test_lost_node_ends_a_job_that_can_not_go_on_without_it() -> None:
    assert "--no-kill" not in flags(made(nodes=4))
    assert "--no-kill" not in flags(made(nodes=4, min_nodes=4))
    assert "--no-kill" in flags(made(nodes=4, min_nodes=3))
    assert "--no-kill" in flags(made(nodes=4, spares=1))


def test_settings_of_the_rendezvous_leave_the_store_where_it_is() -> None:
    assert "--rdzv-conf=join_timeout=5,is_host=false" in made(launcher_args="--rdzv-conf=join_timeout=5")


def test_signal_comes_before_the_launchers_grace_is_over() -> None:
    assert "--signal=B:USR1@330" in flags(made(stop_grace=300))


def test_request_to_stop_while_the_script_gets_ready_is_handed_on(tmp_path: Path) -> None:
    told, _ = run_by_a_shell(made(setup=["kill -USR1 $$"]), tmp_path)
    assert told[:3] == ["slurm", "follow", "--asked"]
    told, _ = run_by_a_shell(made(setup=["set -u"]), tmp_path)
    assert "--asked" not in told


def test_request_to_stop_while_python_starts_does_not_end_the_job(tmp_path: Path) -> None:
    program = tmp_path / "resilience"
    program.write_text("#!/bin/sh\nkill -USR1 $$\necho alive\n")  # before anything could take it
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=made(), capture_output=True, text=True, check=False, env=path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "alive\n")


@pytest.mark.parametrize("odd", ODD)
def test_odd_texts_reach_the_script_and_its_environment_as_they_are(odd: str, tmp_path: Path) -> None:
    text = made(script=["train.py", odd], env={"ODD": odd}, directory=f"runs {odd}", launcher_args=[f"--role={odd}"])
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    told, environment = run_by_a_shell(text, tmp_path)
    assert told[-2:] == ["train.py", odd]
    assert environment["ODD"] == odd
    assert f"--dir=runs {odd}" in told
    assert f"--role={odd}" in told


@pytest.mark.parametrize("name", ["name", "partition", "account", "qos", "constraint", "exclude", "output"])
@pytest.mark.parametrize("odd", ["a b", "a\n#SBATCH --uid=0", 'a"', "a'", "a#b", "$(id)", "a\\"])
def test_words_that_slurm_would_read_otherwise_are_refused(name: str, odd: str) -> None:
    with pytest.raises(ValuesError, match=name):
        made(**{name: odd})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": ""}, "name is missing: give --name, or the key 'name' in the file"),
        ({"script": []}, "script is missing: give it behind --, .*, or the key 'script' in the file"),
        ({"name": "a\ud800b"}, "can't be written as UTF-8"),
        ({"name": "a\0b"}, "can't stand in an #SBATCH line"),
        ({"script": ["train.py", "a\udc80"]}, "can't be written as UTF-8"),
        ({"env": {"A": "\udfff"}}, "can't be written as UTF-8"),
        ({"nodes": 1 << 20000}, "many digits: it must be a whole number"),
        ({"account": 1 << 20000}, "many digits: it must be a text"),
        ({"command": ""}, "command is empty"),
        ({"directory": " "}, "directory is empty"),
        ({"nodes": 0}, "at least 1"),
        ({"nodes": 2, "min_nodes": 3}, "above nodes"),
        ({"time": "1 day"}, "time is"),
        ({"time": "soon"}, "write minutes"),
        ({"time": "1:99:99"}, "write minutes"),
        ({"time": "99999999999999999999"}, "write minutes"),
        ({"time": "١٢٠"}, "write minutes"),
        ({"nodes": 999999999999999999999}, "so many"),
        ({"name": yaml.safe_load("0123")}, "in quotes"),
        ({"time": "2"}, "before it has begun"),
        ({"time": "00:10:00", "stop_grace": 600}, "before it has begun"),
        ({"time": yaml.safe_load("24:00:00")}, "in quotes"),
        ({"memory": "64Gi"}, "write 500M"),
        ({"accelerator": "nvidia"}, "network_check is off"),
        ({"fault_dir": "faults"}, "must be absolute"),
        ({"drain": True, "fault_dir": "/f"}, "give one of them"),
        ({"env": {"A-B": "1"}}, "no name of a variable"),
        ({"sbatch_args": ["exclusive"]}, "write --name=value"),
        ({"sbatch_args": ["--array=1-3"]}, "one by one"),
        ({"sbatch_args": ["-a1-3"]}, "one by one"),
        ({"stop_grace": 70000}, "at most"),
        ({"setup": ["a\nb"]}, "a list of lines"),
        ({"setup": ["module load cuda", "module load \\"]}, "that backslash"),
        ({"name": "a/b"}, "without a slash"),
        ({"directory": "~/runs"}, "directory .* absolute path"),
        ({"directory": "$SCRATCH/runs"}, "directory .* absolute path"),
        ({"finished_file": "~/done"}, "finished_file .* absolute path"),
        ({"finished_file": "${HOME}/done"}, "finished_file .* absolute path"),
        ({"command": "~/env/bin/resilience"}, "command .* absolute path"),
        ({"env": {"RESILIENCE_ASKED": "x"}}, "the script's own"),
        ({"script": ["a\0b"]}, "no command line can hold"),
        ({"script": "train.py 'x"}, "no shell can read"),
        ({"nodes": "2"}, "a whole number"),
        ({"launcher_args": "--ft-run-dir=/tmp"}, "give directory instead"),
        ({"launcher_args": "--nproc_per_node=2"}, "give nproc_per_node instead"),
        ({"launcher_args": "--rdzv-endpoint=h:1"}, "leave it out"),
        ({"launcher_args": "--rdzv-conf join_timeout=5"}, "as one word"),
        ({"launcher_args": "--rdzv-con=join_timeout=5"}, "as one word"),
        ({"launcher_args": "--nnode=3"}, "give nodes instead"),
        ({"launcher_args": ["--ft-testimony-timeout=6 --role=x"]}, "as one flag: give --launcher-args once for each"),
        ({"launcher_args": "--nproc_per=3"}, "give nproc_per_node instead"),
        ({"launcher_args": "--ft-param-run_dir=/tmp"}, "give directory instead"),
        ({"launcher_args": "--stand"}, "leave it out"),
        ({"launcher_args": "--node_rank=1"}, "the rank that Slurm gives it"),
        ({"launcher_args": "-h"}, "print their help"),
        ({"launcher_args": "--help"}, "print their help"),
        ({"sbatch_args": ["--arr=1-3"]}, "one by one"),
        ({"sbatch_args": ["--signal=USR2@10"]}, "stop_grace"),
        ({"sbatch_args": ["--no-requeue"]}, "max_requeues=0"),
        ({"sbatch_args": ["--open-mode=truncate"]}, "leave it out"),
        ({"sbatch_args": ["--nodes=3"]}, "give nodes"),
        ({"sbatch_args": ["-N3"]}, "give nodes"),
        ({"sbatch_args": ["--ntasks=3"]}, "give nproc_per_node"),
        ({"sbatch_args": ["-n3"]}, "give nproc_per_node"),
        ({"sbatch_args": ["--ntasks-per-node=3"]}, "give nproc_per_node"),
        ({"sbatch_args": ["--output=x"]}, "give output"),
        ({"sbatch_args": ["-ox"]}, "give output"),
        ({"sbatch_args": ["--cpus-per-task=3"]}, "give cpus_per_task"),
        ({"sbatch_args": ["--time=1"]}, "give time"),
        ({"sbatch_args": ["-Ja/b"]}, "give name"),
        ({"srun_args": "--nodes=3"}, "give nodes"),
        ({"srun_args": "-N 3"}, "give nodes"),
        ({"srun_args": "-n3"}, "give nproc_per_node"),
        ({"srun_args": "--ntasks=3"}, "give nproc_per_node"),
        ({"srun_args": "--wait=60"}, "when a launcher has ended"),
        ({"srun_args": "-W 60"}, "when a launcher has ended"),
        ({"srun_args": "--kill-on-bad-exit=1"}, "when a launcher has failed"),
        ({"srun_args": "-K"}, "when a launcher has failed"),
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValuesError, match=words):
        made(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"setup": ["module load \\", "cuda", "echo \\\\"]},
        {"sbatch_args": "--gpus-per-node=a100:8 --nodelist=n1 --time-min=30 --no-kill --export=NONE"},
        {"srun_args": "--no-kill --nodelist=n1 --export=A --mpi=none --output=x.%t -c 4 --container-image=nodes"},
        {
            "launcher_args": "--no-python --role=nodes --run-path --redirects 3 --rdzv-conf=a=1 -r 3 --ft-testimony-timeout=1"
        },
        {"launcher_args": ["--monitor-interval", "5", "--start-method", "spawn", "--log-dir", "help"]},
    ],
)
def test_what_does_no_harm_is_taken(values: dict[str, Any]) -> None:
    made(**values)


def test_unknown_value_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("name: llm\nscript: train.py\npartitoin: gpu\n")
    with pytest.raises(ValuesError, match="partition"):
        main(["render", "--values", str(path)])


def test_values_file_of_another_encoding_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_bytes(b"name: l\xe4m\n")
    with pytest.raises(ValuesError, match="can't be read"):
        main(["render", "--values", str(tmp_path / "values.yaml")])


@pytest.mark.parametrize(
    "text",
    [
        "account: 2024-02-30",
        "nodes: 0b_",
        "[" * 3000,
        "nodes: !!int ''",
        "drain: !!bool x",
        "time: !!timestamp x",
        "a: [b",
    ],
)
def test_values_file_that_yaml_stumbles_over_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "values.yaml").write_text(text)
    with pytest.raises(ValuesError, match="can't be read"):
        main(["render", "--values", str(tmp_path / "values.yaml")])


def test_half_a_character_in_a_values_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text('name: "a\\uD800b"\nscript: train.py\n')
    with pytest.raises(ValuesError, match="can't be written as UTF-8"):
        main(["render", "--values", str(tmp_path / "values.yaml")])


def test_values_file_is_whole_and_flags_go_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["values"]) == 0
    text = capsys.readouterr().out
    assert set(yaml.safe_load(text)) == set(documentation(SlurmValues))
    path = tmp_path / "values.yaml"
    path.write_text(text.replace("nodes: 1 ", "nodes: 3 ", 1))
    assert (
        main(["render", "--values", str(path), "--name=llm", "--partition=gpu", "--", "train.py", "--lr", "0.1"]) == 0
    )
    rendered = capsys.readouterr()
    assert rendered.out == made(nodes=3, partition="gpu")
    assert "faulty nodes are not drained" in rendered.err


def test_setup_is_shell_and_one_text_is_its_lines() -> None:
    text = made(setup="module load cuda\nexport A='x y'\n")
    assert "\nmodule load cuda\nexport A='x y'\n" in text


def test_flag_of_a_list_takes_one_word_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["render", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--srun-args X more flags for srun; once for each" in text
    assert "or one line" not in text


def test_job_whose_nodes_are_drained_needs_no_note() -> None:
    assert notes(SlurmValues(name="llm", script=("train.py",), drain=True)) == ()


def test_usage_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert [name for name in COMMANDS if f"resilience slurm {name}" not in usage] == []


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rendre"]) == 2
    assert "render" in capsys.readouterr().err
