"""What torchrun does, ours does: the same command lines under both, side by side.

Stated differences, each asserted below: worker output is captured per cycle and rank and prefixed on the console (unless
``--ft-capture-logs=false``, or torch's own ``--log-dir``, ``--redirects``, ``--tee`` are used); four RESILIENCE_ variables are
added to the workers' environment (five without the trampoline); with a c10d rendezvous MASTER_PORT is that of a store which is
new in every round, and no longer the endpoint's; a ``--run-path`` worker leads a session of its own; when a rank fails the
others get ``--shutdown-timeout`` to end (torchrun: always 30 s).
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.parity_helpers import ADDED, WORKLOADS, Case, Pair, Side, bare_environment, both, ran, wait_for

TRAMPOLINE = str(WORKLOADS.parent.parent / "resilience" / "_worker")
C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}", "--rdzv-id=parity", "--local-addr=localhost")
FILES = ("--log-dir={log}", "--redirects=3")
TWO = "--nproc-per-node=2"


def cases(all_of_them: list[Case], *long: str) -> list[Any]:
    """Those that begin so take a launcher more of what others here prove as well."""
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.rare] if case.name.startswith(long) else [])
        for case in all_of_them
    ]


SEEN = [
    Case("a module", ["-m"], ["parity_package", "--standalone", "-r", "3"]),
    Case("an absolute path, standalone, underscores", ["--standalone", "--max_restarts=2"], ["{here}/parity_probe.py"]),
    Case(
        "names, start method, signals, timeouts, a virtual local rank, a store hosted by rank 0",
        [
            TWO,
            "--role=trainer",
            "--start-method=fork",
            "--signals_to_handle=SIGTERM,SIGUSR2",
            "--shutdown-timeout=7",
            "--monitor-interval=0.05",
            "--virtual-local-rank",
        ],
        env={"CUDA_VISIBLE_DEVICES": "4,6", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    Case(
        "static, two nodes",
        ["--nnodes=2", "--master_addr=127.0.0.1", "--master_port={port}"],
        nodes=[["--node-rank=0"], ["--node_rank=1"]],
        fixed_port=True,
    ),
    Case("c10d, one of up to two nodes", ["--nnodes=1:2", *C10D, "--rdzv-conf=last_call_timeout=1,join_timeout=60"]),
    Case("c10d, two nodes", ["--nnodes=2", *C10D], nodes=[[], []]),
    Case(
        "PET variables below a flag, and a restart",
        ["--role=flag"],
        ["parity_probe.py", "fail-once"],
        {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "1", "PET_ROLE": "pet", "PET_STANDALONE": "1"},
    ),
]


@pytest.mark.spawns
@pytest.mark.parametrize("case", cases(SEEN, "a module", "an absolute path, standalone", "c10d, one of"))
def test_workers_see_what_they_see_under_torchrun(case: Case, tmp_path: Path) -> None:
    assert_same_facts(ran(case, tmp_path), ADDED)


@pytest.mark.spawns
def test_arguments_that_look_like_options_are_the_scripts_and_output_is_captured_and_prefixed(tmp_path: Path) -> None:
    words = ["parity_probe.py", "--nnodes", "3", "--ft-run-dir", "x", "-m", "--", "--help", ""]
    pair = ran(Case("", ["--nproc_per_node=2"], words), tmp_path)
    assert_same_facts(pair, ADDED)
    assert sorted(pair.torchrun.console().splitlines()) == ["out 0 0", "out 1 0"]
    assert sorted(pair.ours.console().splitlines()) == ["[c0 n0 r0] out 0 0", "[c0 n0 r1] out 1 0"]
    assert "[c0 n0 r1] err 1 0\n" in pair.ours.console("err")


@pytest.mark.spawns
def test_output_is_raw_when_capture_is_switched_off(tmp_path: Path) -> None:
    pair = ran(Case("", [TWO], ours=["--ft-capture-logs=false"]), tmp_path)
    assert sorted(pair.ours.console().splitlines()) == sorted(pair.torchrun.console().splitlines())
    assert not (pair.ours.run_dir / "logs").exists()


@pytest.mark.long
@pytest.mark.spawns
def test_a_filter_of_ranks_also_filters_the_captured_output(tmp_path: Path) -> None:
    pair = ran(Case("", ["--local-ranks-filter=1", TWO]), tmp_path)
    assert pair.torchrun.console() == "out 1 0\n"
    assert pair.ours.console() == "[c0 n0 r1] out 1 0\n"
    kept = pair.ours.tree(pair.ours.run_dir)
    assert [kept[f"logs/cycle_0/rank_{rank}/stdout.log"] for rank in (0, 1)] == ["out 0 0\n", "out 1 0\n"]


@pytest.mark.spawns
def test_without_python_workers_see_one_more_variable(tmp_path: Path) -> None:
    pair = ran(Case("", ["--no-python", TWO], ["{python}", "parity_probe.py", "--no-python"]), tmp_path)
    assert_same_facts(pair, ADDED | {"RESILIENCE_LATE_ATTACH"})


@pytest.mark.long
@pytest.mark.spawns
def test_a_zip_file_runs_under_the_interpreter_that_python_exec_names(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(WORKLOADS / "parity_package" / "__main__.py", "__main__.py")
        archive.write(WORKLOADS / "parity_probe.py", "parity_probe.py")
    pair = ran(Case("", [], [str(tmp_path / "app.zip"), "word"], {"PYTHON_EXEC": str(other)}), tmp_path)
    assert_same_facts(pair, ADDED)
    assert pair.ours.facts()["0.0"]["executable"] == str(other)


@pytest.mark.spawns
def test_run_path_runs_in_a_session_of_its_own(tmp_path: Path) -> None:
    pair = ran(Case("", [*FILES, "--run-path"], ["{here}/parity_probe.py", "a", "--b"]), tmp_path)
    # torch gives such a worker no session; ours needs one to end its children with it. orig_argv holds descriptors.
    assert_same_facts(pair, ADDED, apart_from=("leads_session", "orig_argv"))
    assert files_in(pair.ours) == files_in(pair.torchrun)


LOGS = [
    Case("redirects of one stream per rank", ["--log-dir={log}", "-r", "0:1,1:2", TWO]),
    Case(
        "a log directory alone, static",
        ["--log-dir={log}", "--master-addr=127.0.0.1", "--master-port={port}", TWO],
        fixed_port=True,
    ),
    Case(
        "tee, a filter of ranks, and duplicates",
        [
            "--log-dir={log}",
            "--tee=3",
            "--local-ranks-filter=1",
            "--duplicate-stdout-filters=out 0",
            "--duplicate_stderr_filters=err 1,,2,err 0",
            TWO,
        ],
    ),
]


@pytest.mark.spawns
@pytest.mark.parametrize("case", cases(LOGS, "a log directory alone", "redirects of one"))
def test_the_log_directory_holds_the_same_files(case: Case, tmp_path: Path) -> None:
    pair = ran(case, tmp_path)
    assert_same_facts(pair, ADDED)
    assert files_in(pair.ours) == files_in(pair.torchrun)
    assert not (pair.ours.run_dir / "logs").exists(), "output is kept twice"
    assert sorted(pair.ours.console().splitlines()) == sorted(pair.torchrun.console().splitlines())


@pytest.mark.spawns
def test_every_way_to_fail_leaves_the_same_exit_code_and_the_same_last_words(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, signal, sys\n"
        "def deeper():\n    raise ValueError('on purpose')\n"
        "life = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "ways = [lambda: sys.exit(1), lambda: sys.exit(7), lambda: sys.exit('words'), lambda: os._exit(3), deeper,\n"
        "        lambda: os.kill(os.getpid(), signal.SIGKILL)]\n"
        "ways[life]()\n"
    )
    pair = ran(Case("", [*FILES, "--max-restarts=5"], [str(script)], code=1), tmp_path)
    ours = files_in(pair.ours)
    assert ours == files_in(pair.torchrun)
    assert [name for name in ours if name.endswith("stderr.log")] == [
        f"UUID/attempt_{life}/0/stderr.log" for life in range(6)
    ]
    assert "ValueError: on purpose" in ours["UUID/attempt_4/0/stderr.log"]
    assert "resilience" not in "".join(ours.values())
    errors = {name: json.loads(text) for name, text in pair.ours.tree().items() if name.endswith("error.json")}
    said = [errors[f"UUID/attempt_{life}/0/error.json"]["message"]["message"] for life in (0, 1, 2, 4)]
    assert said == ["SystemExit: 1", "SystemExit: 7", "SystemExit: words", "ValueError: on purpose"]


@pytest.mark.spawns
def test_a_recorded_error_is_in_the_workers_file_and_in_that_of_an_outer_launcher(tmp_path: Path) -> None:
    outer = {"TORCHELASTIC_ERROR_FILE": "{out}/outer.error"}
    pair = ran(Case("", FILES, ["parity_recorded.py"], outer, code=1), tmp_path)
    assert files_in(pair.ours) == files_in(pair.torchrun)
    reports = [without_times(json.loads((side.out / "outer.error").read_text())) for side in (pair.torchrun, pair.ours)]
    assert reports[0] == reports[1]


@pytest.mark.long
@pytest.mark.spawns
def test_a_missing_script_is_named_in_the_same_words(tmp_path: Path) -> None:
    pair = ran(Case("", FILES, ["nowhere.py"], code=1), tmp_path)
    assert files_in(pair.ours) == files_in(pair.torchrun)


@pytest.mark.spawns
def test_mistakes_end_with_the_same_code_or_with_2_where_torchrun_ends_in_a_traceback(tmp_path: Path) -> None:
    mistakes = {
        "no script": [],
        "an unknown option": ["--nprocs-per-nodes=2", "x.py"],
        "an option without its value": ["--nnodes"],
        "a wrong choice": ["--start-method=thread", "x.py"],
        "an abbreviation that fits two options": ["--nproc=1", "x.py"],
        "nodes that make no range": ["--nnodes=2:1", "x.py"],
        "nodes that are no number": ["--nnodes=two", "x.py"],
        "negative restarts": ["--max-restarts=-1", "x.py"],
        "negative timeout": ["--shutdown-timeout=-1", "x.py"],
        "an unknown kind of device": ["--nproc-per-node=abacus", "x.py"],
        "a module without python": ["--no-python", "-m", "x"],
        "an unknown rendezvous": ["--rdzv-backend=smoke", "--rdzv-endpoint=localhost:1", "x.py"],
        "a filter that is no list": ["--local-ranks-filter=a", "x.py"],
        "help": ["--help"],
    }
    ended = subprocess.run(
        [sys.executable, "parity_usage.py", str(tmp_path / "run")],
        input=json.dumps(mistakes).encode(),
        env={**bare_environment(), "TMPDIR": str(tmp_path)},
        cwd=WORKLOADS,
        capture_output=True,
        check=True,
        timeout=120,
    )
    codes = json.loads(ended.stdout.splitlines()[-1])
    pairs = {name: (codes["torchrun"][name], code) for name, code in codes["ours"].items()}
    assert not {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and pair != (1, 2)}
    assert codes["ours"]["no script"] == codes["ours"]["an unknown option"] == 2
    assert codes["ours"]["help"] == 0
    assert codes["ours"]["negative restarts"] == codes["ours"]["nodes that make no range"] == 2
    assert not list(tmp_path.glob("resilience*")), "ours left files behind"


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (["--shutdown-timeout=4"], signal.SIGTERM),
        pytest.param(["--signals-to-handle=SIGUSR1"], signal.SIGUSR1, marks=pytest.mark.rare),
    ],
    ids=["SIGTERM, which rank 1 ignores", "SIGUSR1, when asked for"],
)
def test_a_signal_to_the_launcher_reaches_the_workers(options: list[str], sent: signal.Signals, tmp_path: Path) -> None:
    with both(Case("", [*options, TWO], ["parity_stop.py"], code=1), tmp_path) as pair:
        sides = (pair.torchrun, pair.ours)
        wait_for(lambda: all(len(list(side.out.glob("*.ready"))) == 2 for side in sides), "the workers")
        for side in sides:
            side.send(sent)
        pair.wait()
        for side in sides:
            assert (side.out / "0.signal").read_text() == sent.name, side.everything()


@pytest.mark.spawns
def test_classes_of_main_can_be_pickled_to_spawned_processes(tmp_path: Path) -> None:
    pair = ran(Case("", [*FILES, TWO], ["parity_family.py"]), tmp_path)
    ours = files_in(pair.ours)
    assert ours == files_in(pair.torchrun)
    assert "spawn [Work(value=42)]" in ours["UUID/attempt_0/1/stdout.log"]


@pytest.mark.long
@pytest.mark.spawns
def test_filters_for_duplicates_without_a_log_directory_do_no_harm(tmp_path: Path) -> None:
    pair = ran(Case("", ["--duplicate-stdout-filters=out", TWO]), tmp_path)
    assert_same_facts(pair, ADDED)


@pytest.mark.spawns
def test_a_long_temporary_directory_does_no_harm(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    pair = ran(Case("", [], env={"TMPDIR": str(deep)}), tmp_path)
    assert_same_facts(pair, ADDED)
    assert not list(deep.glob("resilience*")), "ours left files behind"


# -- the trampoline alone: `python -u script` beside `python -u resilience/_worker script`; no torch, so many cases are cheap

SCRIPTS = {
    "returns": "print('fine')",
    "exits with a number": "import sys; sys.exit(7)",
    "exits with none": "raise SystemExit",
    "exits with words": "raise SystemExit('words')",
    "exits with true": "raise SystemExit(True)",
    "exits in an atexit handler": "import atexit, os; atexit.register(os._exit, 6)",
    "ends itself": "import os; os._exit(3)",
    "raises": "def f():\n    raise ValueError('bad')\nf()",
    "raises at the top": "raise ValueError('bad')",
    "raises in a library": "import json\njson.loads('{')",
    "raises from another": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "raises while handling": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('k')",
    "raises a group": "raise ExceptionGroup('g', [ValueError('a'), KeyError('b')])",
    "raises what is no Exception": "class Odd(BaseException): pass\nraise Odd('odd')",
    "raises its own class": "class Own(Exception): pass\nraise Own('own')",
    "is interrupted": "raise KeyboardInterrupt",
    "interrupts itself": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)",
    "is killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "is terminated": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "has a syntax error": "def f(:\n  pass",
    "is indented wrongly": "if True:\npass",
    "has an encoding": "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))",
    "is empty": "",
    "has its own excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0",
    "looks at the last error": (
        "import atexit, sys\natexit.register(lambda: print(repr(getattr(sys, 'last_value', 'none'))))\n1 / 0"
    ),
    "has a thread that goes on": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()"
    ),
    "has annotations": "x: int = 3\nprint(__annotations__)",
    "looks at its names": "print(sorted(globals()))",
    "looks at its builtins": "print(type(__builtins__), __builtins__.__name__)",
    "uses a future": "from __future__ import annotations\nx: nowhere = 1\nprint(__annotations__)",
    "looks for our frames": "import traceback\ntraceback.print_exc()\nprint(__name__)",
    "imports itself": "import sys\nimport __main__\nprint(__main__.__file__, __main__ is sys.modules['__main__'])",
    "looks at its path": "import sys\nprint(sys.path, sys.argv, sys.orig_argv[1:])",
    "reads its source": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))",
    "reads its input": "import sys\nprint(sys.stdin.read())",
    "warns": "import warnings\nwarnings.warn('careful')\ndef f():\n    warnings.warn('above', stacklevel=2)\nf()",
    "deletes objects at its end": "class D:\n    def __del__(self): print('gone')\nd = D()",
    "logs where it is": "import logging\nlogging.basicConfig(format='%(module)s %(lineno)d %(pathname)s')\nlogging.error('')",
    "prints what can't be encoded": "print('\\udc80')",
    "closes its output": "import sys\nsys.stdout.close()",
}


@pytest.mark.spawns
@pytest.mark.parametrize("source", SCRIPTS.values(), ids=list(SCRIPTS))
def test_the_trampoline_does_not_show(source: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_bytes(source.encode("latin-1"))
    expect_same(["script.py", "--argument"], tmp_path)


@pytest.mark.spawns
def test_script_that_crashes_leaves_its_stack_and_the_same_exit_code(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import ctypes\ndef deeper():\n    ctypes.string_at(0)\ndeeper()\n")
    command = [sys.executable, "-u", TRAMPOLINE, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert 'script.py", line 3 in deeper' in done.stderr


@pytest.mark.spawns
@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONSAFEPATH": "1"},
        {"PYTHONWARNINGS": "error"},
        {"PYTHONOPTIMIZE": "1"},
        {"PYTHONFAULTHANDLER": "1"},
        {"PYTHONPATH": "/somewhere:/else:"},
        {"PYTHONUTF8": "1", "PYTHONHASHSEED": "3"},
        {"PYTHONDEVMODE": "1"},
    ],
    ids=lambda item: next(iter(item)),
)
def test_the_trampoline_does_not_show_in_other_interpreters(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys\nprint(__file__, sys.path, sys.flags, sys.warnoptions)\nassert False, 'is shown unless optimised'"
    )
    expect_same(["script.py"], tmp_path, variables)


@pytest.mark.spawns
@pytest.mark.parametrize(
    "words",
    [
        ["folder"],
        ["folder/", "a"],
        ["app.zip"],
        ["app.par", "a"],
        ["linked.py"],
        ["./deep/../script.py"],
        ["deep"],
        ["script.txt"],
        ["nowhere.py"],
        ["/dev/null"],
        ["-m", "package", "a", "-m"],
        ["-m", "package.part"],
        ["-m", "script"],
        ["-m", "nowhere"],
        ["-m", "package.nowhere"],
        ["-m", "json.tool", "--help"],
        ["-m", "broken"],
    ],
    ids=" ".join,
)
def test_the_trampoline_finds_what_python_finds(words: list[str], tmp_path: Path) -> None:
    tell = (
        "import sys\nspec = __spec__\nprint(__name__, __file__, __package__, spec and (spec.name, spec.origin), "
        "type(__loader__), __loader__.name, sorted(globals()), sys.path, sys.argv, sys.orig_argv[1:])\n"
    )
    fail = "def f():\n    raise ValueError('bad')\nf()\n"
    for folder in ("folder", "package", "deep"):
        (tmp_path / folder).mkdir()
    for name in ("folder/__main__.py", "package/__main__.py", "package/part.py", "script.py", "script.txt"):
        (tmp_path / name).write_text(tell + fail)
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "linked.py").symlink_to("folder/__main__.py")
    for name in ("app.zip", "app.par"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("__main__.py", tell + fail)
    expect_same(words, tmp_path)


@pytest.mark.spawns
def test_the_trampoline_runs_a_compiled_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print(__file__, __name__)")
    subprocess.run([sys.executable, "-m", "compileall", "-b", "-q", "script.py"], cwd=tmp_path, check=True)
    expect_same(["script.pyc"], tmp_path)


@pytest.mark.spawns
def test_the_trampoline_lets_main_be_spawned(tmp_path: Path) -> None:
    shutil.copy(WORKLOADS / "parity_family.py", tmp_path / "family.py")
    expect_same(["family.py"], tmp_path)
    expect_same(["-m", "family"], tmp_path)


def expect_same(words: list[str], folder: Path, variables: dict[str, str] | None = None) -> None:
    """Run ``python -u words`` with and without the trampoline: same exit code, stdout and stderr."""
    outcomes = []
    environment = {**bare_environment(), **(variables or {})}
    if variables is None or "PYTHONPATH" not in variables:
        del environment["PYTHONPATH"]
    for command in ([sys.executable, "-u"], [sys.executable, "-u", TRAMPOLINE]):
        ended = subprocess.run(
            [*command, *words],
            cwd=folder,
            env=environment,
            input=b"input",
            capture_output=True,
            timeout=60,
            check=False,
        )
        outcomes.append(
            (ended.returncode, ended.stdout.decode(errors="replace"), ended.stderr.decode(errors="replace"))
        )
    assert outcomes[1] == outcomes[0]


def assert_same_facts(pair: Pair, added: set[str], apart_from: tuple[str, ...] = ()) -> None:
    """Every life of every rank saw the same under both, but for the documented additions."""
    theirs, ours = pair.torchrun.facts(), pair.ours.facts()
    assert theirs, pair.torchrun.everything()
    for name, facts in ours.items():
        environ = facts["environ"]
        assert {key for key in environ if key.startswith("RESILIENCE_")} == added
        assert environ["RESILIENCE_RUN"] == str(pair.ours.run_dir)
        assert environ["RESILIENCE_CYCLE"] == name.partition(".")[2]
        facts["environ"] = {key: value for key, value in environ.items() if key not in added}
    assert list(ours) == list(theirs)
    differences = [
        f"{life}: {what} is {ours[life].get(what)!r} and not {value!r}"
        for life, facts in theirs.items()
        for what, value in {**facts, **dict.fromkeys(ours[life].keys() - facts.keys())}.items()
        if ours[life].get(what) != value and what not in apart_from
    ]
    assert not differences, "\n".join(differences)


def files_in(side: Side) -> dict[str, str]:
    """What is in a side's log directory; error reports without their times."""
    found = {}
    for name, text in side.tree().items():
        if not name.endswith("error.json"):
            found[name] = text
        elif "torch.distributed.elastic" in text:
            # Ours is there for undecorated scripts too; torch's @record is in its stack.
            found[name] = json.dumps(without_times(json.loads(text)), sort_keys=True)
    return found


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    """An error report without what must differ between any two runs."""
    report["message"]["extraInfo"].pop("timestamp")
    report.pop("resilience", None)  # what we add to torch's report
    return report
