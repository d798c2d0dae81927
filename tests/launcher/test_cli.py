"""The command line and the settings behind it: typos raise, precedence holds, every value says where it came from."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilience import config, values
from resilience.__main__ import main
from resilience.config import resolve
from resilience.errors import ConfigError
from tests.jobs import held_in_import
from tests.launcher.parity_helpers import bare_environment

NVRX_SETTINGS = {
    "workload_check_interval": "5.0",
    "initial_rank_heartbeat_timeout": "3600",
    "rank_heartbeat_timeout": "2700",
    "node_health_check_interval": "5",
    "safety_factor": "5.0",
    "rank_termination_signal": "SIGKILL",
    "log_level": "DEBUG",
    "rank_out_of_section_timeout": "600",
    "rank_section_timeouts": "setup:600,step:60",
    "restart_check_interval": "60",
    "enable_nic_monitor": "false",
    "pci_topo_file": "/etc/topology",
    "link_down_path_template": "/sys/{dev_name}",
}


@pytest.fixture(autouse=True)
def no_settings_around_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have settings of their own."""
    for name in list(config.environment()):
        if name.startswith(config.ENV_PREFIX):
            monkeypatch.delenv(name)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[str, str]]:
    """What ``resilience config`` prints: value and source by name."""
    assert main(["config", *words]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines() if not line.startswith("note:")]
    return {name: (value, rest) for name, value, rest in rows}


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command says on stderr; it must end with exit code 2."""
    try:
        code = main(list(words))
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    assert code == 2
    return capsys.readouterr().err


def yaml_file(folder: Path, text: str) -> str:
    """A settings file with this text."""
    path = folder / "ft.yaml"
    path.write_text(text)
    return str(path)


# -- typos


def test_a_misspelt_flag_of_config_raises_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--ft-rank-heartbeat-timeout" in mistake(capsys, "config", "--ft-rank-hartbeat-timeout=3").splitlines()[-1]


def test_a_misspelt_key_in_the_file_raises_and_names_the_nearest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = yaml_file(tmp_path, "fault_tolerance:\n  rank_hartbeat_timeout: 3\n")
    said = mistake(capsys, "config", f"--ft-cfg-path={path}")
    assert "'rank_hartbeat_timeout'" in said
    assert "Did you mean 'rank_heartbeat_timeout'?" in said
    assert path in said


def test_a_misspelt_variable_raises_and_names_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESILIENCE_RANK_HARTBEAT_TIMEOUT", "3")
    assert "Did you mean 'RESILIENCE_RANK_HEARTBEAT_TIMEOUT'?" in mistake(capsys, "config")


def test_an_unknown_command_raises_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean 'config'?" in mistake(capsys, "confg")


_ONE_BY_ONE = """
import json, os, sys
from resilience.launcher.cli import main
for words, env in json.loads(sys.argv[1]):
    os.environ.update(env)
    try:
        code = main(words)
    except SystemExit as leaving:
        code = leaving.code
    for name in env:
        del os.environ[name]
    print(code)
    sys.stderr.write("\\0")
"""


@pytest.mark.spawns
def test_run_ends_with_2_for_every_kind_of_typo_and_starts_nothing(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "fault_tolerance:\n  safty_factor: 3\n")
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    mistakes: dict[str, tuple[list[str], dict[str, str]]] = {
        "'--nproc-per-node'": (["--nproc-per-nodes=2"], {}),
        "'--ft-capture-logs'": (["--ft-captured-logs=false"], {}),
        "'safety_factor'": ([f"--ft-cfg-path={path}"], {}),
        "'RESILIENCE_RUN_DIR'": ([], {"RESILIENCE_RUN_DIRR": "x"}),
        "greater than 0": (["--ft-rank-heartbeat-timeout=-1"], {}),
    }
    given = [([f"--ft-run-dir={tmp_path / 'run'}", *words, str(script)], env) for words, env in mistakes.values()]
    done = subprocess.run(
        [sys.executable, "-c", _ONE_BY_ONE, json.dumps(given)],
        env={**bare_environment(), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["2"] * len(mistakes), done.stderr
    for wanted, said in zip(mistakes, done.stderr.split("\0"), strict=False):
        assert wanted in said.splitlines()[-1], said
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("other: 1", "has no 'fault_tolerance:' sections"),
        ("a: {fault_tolerance: {}}\nb: {fault_tolerance: {}}", "has 2 'fault_tolerance:' sections"),
        ("fault_tolerance: [1, 2]", "must hold 'name: value' lines"),
        ("fault_tolerance: {", "is not valid YAML"),
        ("fault_tolerance: {rank_heartbeat_timeout: soon}", "seconds, 'learned', or null"),
        ("fault_tolerance: {rank_heartbeat_timeout: true}", "not a number of seconds"),
        (
            "fault_tolerance: {rank_termination_signal: SIGNOTHING}",
            "the name or number of a signal that ends a process",
        ),
        ("fault_tolerance: {capture_logs: maybe}", "true or false"),
        ("fault_tolerance: {learn_after: 1.5}", "a whole number"),
    ],
)
def test_a_file_that_can_not_be_meant_says_what_is_wanted(text: str, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, yaml_file(tmp_path, text))
    assert wanted in str(caught.value)


def test_a_missing_file_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/nowhere.yaml: No such file" in mistake(capsys, "config", "--ft-cfg-path=/nowhere.yaml")


# -- precedence and sources


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = yaml_file(tmp_path, "fault_tolerance: {safety_factor: 2, learn_after: 3, rank_heartbeat_timeout: 4}")
    monkeypatch.setenv("RESILIENCE_LEARN_AFTER", "30")
    monkeypatch.setenv("RESILIENCE_RANK_HEARTBEAT_TIMEOUT", "40")
    rows = shown(capsys, f"--ft-cfg-path={path}", "--ft-rank-heartbeat-timeout=400")
    assert rows["safety_factor"][0] == "2"
    assert rows["safety_factor"][1].startswith(f"file {path}")
    assert rows["learn_after"][0] == "30"
    assert rows["learn_after"][1].startswith("environment ")
    assert rows["rank_heartbeat_timeout"][0] == "400"
    assert rows["rank_heartbeat_timeout"][1].startswith("flag ")
    assert rows["rank_term_timeout"][1].startswith("default ")


def test_config_prints_every_setting_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(shown(capsys)) == list(config.parameters())


def test_what_config_prints_can_be_given_back_as_flags(capsys: pytest.CaptureFixture[str]) -> None:
    first = shown(capsys, "--ft-rank-section-timeouts=a:1,b:null", "--ft-rank-heartbeat-timeout=null")
    flags = [f"--ft-{name.replace('_', '-')}={value}" for name, (value, _) in first.items() if value != "-"]
    second = shown(capsys, *flags)
    assert {name: value for name, (value, _) in second.items()} == {name: value for name, (value, _) in first.items()}


def test_what_a_launcher_told_its_workers_is_no_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SOCKET", "CYCLE", "LAUNCHER_PID", "LATE_ATTACH", "RUN"):
        monkeypatch.setenv(f"RESILIENCE_{name}", "1")
    assert shown(capsys)


# -- learned, null and seconds


def test_left_out_is_learned_and_null_is_no_timeout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert shown(capsys)["rank_heartbeat_timeout"][0] == "learned"
    path = yaml_file(tmp_path, "fault_tolerance: {rank_heartbeat_timeout: null, rank_section_timeouts: {step: null}}")
    rows = shown(capsys, f"--ft-cfg-path={path}")
    assert rows["rank_heartbeat_timeout"][0] == "null"
    assert rows["rank_section_timeouts"][0] == "step:null"


@pytest.mark.parametrize("word", ["null", "None", "NONE", "~"])
def test_no_timeout_has_the_spellings_of_the_files_that_people_bring_along(word: str) -> None:
    assert resolve({"rank_heartbeat_timeout": word}, {}).timeouts.rank_heartbeat_timeout == math.inf


def test_a_flag_can_bring_learning_back(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "fault_tolerance: {rank_heartbeat_timeout: 5}")
    assert resolve({"rank_heartbeat_timeout": "learned"}, {}, path).timeouts.rank_heartbeat_timeout is None


def test_what_is_used_until_enough_was_seen_can_not_be_learned() -> None:
    with pytest.raises(ConfigError, match="unlearned_timeout='learned'"):
        resolve({"unlearned_timeout": "learned"}, {})


# -- what users of ft_launcher bring along


@pytest.mark.parametrize("name", NVRX_SETTINGS)
def test_every_setting_of_nvrx_is_accepted_as_a_flag_and_in_a_file(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    value = NVRX_SETTINGS[name]
    plain = shown(capsys, f"--ft-{name.replace('_', '-')}={value}")
    assert shown(capsys, f"--ft-{name}={value}") == plain
    path = yaml_file(tmp_path, f"deep:\n  down:\n  - fault_tolerance: {{{name}: '{value}'}}\n")
    from_file = shown(capsys, f"--ft-cfg-path={path}")
    assert {key: row[0] for key, row in from_file.items()} == {key: row[0] for key, row in plain.items()}


def test_settings_of_nvrx_are_accepted_with_their_old_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    dashed = ("enable_nic_monitor", "pci_topo_file", "link_down_path_template")  # NVRx has these with dashes only
    names = {name: name.replace("_", "-") if name in dashed else name for name in NVRX_SETTINGS}
    plain = shown(capsys, *(f"--ft-{name}={value}" for name, value in NVRX_SETTINGS.items()))
    assert shown(capsys, *(f"--ft-param-{names[name]}={value}" for name, value in NVRX_SETTINGS.items())) == plain


@pytest.mark.parametrize(
    "flag",
    [
        "--term-timeout=60",
        "--term_timeout=60",
        "--workers-stop-timeout=15",
        "--workers_stop_timeout=15",
        "--ft-restart-policy=any-failed",
        "--ft-restart_policy=any-failed",
        "--restart-policy=any-failed",
        "--restart_policy=any-failed",
        "--ignore-missing-fault-tol-cfg",
    ],
)
def test_the_other_flags_of_nvrx_are_accepted(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, flag)


@pytest.mark.parametrize("flag", ["--ft-cfg-path", "--ft-cfg_path", "--fault-tol-cfg-path"])
def test_the_file_is_found_under_all_its_names(flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "fault_tolerance: {safety_factor: 3}")
    assert shown(capsys, f"{flag}={path}")["safety_factor"][0] == "3"


@pytest.mark.parametrize(
    ("given", "wanted"), [("DEBUG", "DEBUG"), ("dbg", "DEBUG"), ("warn", "WARNING"), ("20", "INFO"), ("50", "CRITICAL")]
)
def test_log_levels_have_the_spellings_of_nvrx(given: str, wanted: str) -> None:
    assert resolve({"log_level": given}, {}).launcher.log_level == wanted


@pytest.mark.parametrize("given", ["SIGTERM", "sigterm", "TERM", "15", 15])
def test_signals_have_names_and_numbers(given: object) -> None:
    assert values.parse("rank_termination_signal", given, "signal", "test") is signal.SIGTERM


def test_a_setting_without_effect_is_accepted_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--ft-enable-nic-monitor=true"]) == 0
    assert "note: enable_nic_monitor (flag) has no effect here" in capsys.readouterr().out


# -- help


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["--version"]], ids=" ".join)
def test_help_and_version_need_no_torch(words: list[str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv[0] = 'resilience'; import resilience.__main__ as m; "
        f"sys.exit(m.main({words!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=bare_environment(), capture_output=True, check=True)
    assert b"resilience" in ended.stdout


@pytest.mark.spawns
def test_help_of_run_shows_torchruns_flags_and_ours_with_defaults() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "resilience", "run", "--help"],
        env={**bare_environment(), "COLUMNS": "200"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    text = ended.stdout.decode()
    assert "--nproc-per-node" in text
    assert "--ft-cfg-path" in text
    for name, item in config.parameters().items():
        assert f"--ft-{name.replace('_', '-')}" in text
        assert item.metadata["doc"].split()[0] in text


def test_help_of_config_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["config", "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--ft-{name.replace('_', '-')}" in text for name in config.parameters())


@pytest.mark.spawns
def test_script_arguments_are_the_scripts_even_if_they_begin_like_our_flags(tmp_path: Path) -> None:
    """argparse looks for abbreviations in the whole command line, what follows the script included."""
    from resilience.launcher.cli import Parser, add_settings

    parser = Parser()
    add_settings(parser)
    flags = [flag for action in parser.ours._group_actions for flag in action.option_strings]
    prefixes = sorted({flag[:length] for flag in flags for length in (5, 8, 12, len(flag))})
    script = tmp_path / "echo.py"
    script.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    command = [sys.executable, "-m", "resilience.run", f"--ft-run-dir={tmp_path / 'run'}", str(script), *prefixes]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.removeprefix("[c0 n0 r0] ")) == prefixes


KNOWN = ("--nnodes", "--nproc-per-node", "--nproc_per_node", "--rdzv-id", "--ft-run-dir", "--log-dir", "--help", "-m")


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("--lr 3 --nproc-per-node=2", "--nproc-per-node=2"),
        ("--nproc_per_node 2 --ft-run-dir=x", "--nproc_per_node --ft-run-dir=x"),
        ("--rdzv-id=1 data", "--rdzv-id=1"),
        ("--nproc --rdzv-idea=3 --ft-unknown=2 nnodes", ""),
        ("--log-dir=x --help -m", ""),
        ("--lr 3 -- --nnodes=2", ""),
        ("", ""),
    ],
)
def test_flags_of_the_launcher_behind_the_script_are_seen_and_those_that_scripts_have_are_not(
    words: str, ours: str
) -> None:
    from resilience.launcher.cli import behind_the_script

    assert behind_the_script(words.split(), KNOWN) == ours.split()


@pytest.mark.spawns
def test_flag_of_the_launcher_behind_the_script_goes_to_it_with_one_line_that_says_so(tmp_path: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    words = ["--nproc-per-node=2", "--max-restarts", "3"]
    command = [sys.executable, "-m", "resilience.run", f"--ft-run-dir={tmp_path / 'run'}", str(script), *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.removeprefix("[c0 n0 r0] ")) == words, "one worker, and all is its own"
    (told,) = [line for line in done.stderr.splitlines() if "warning" in line]
    assert f"behind {script} stands --nproc-per-node=2, --max-restarts: that goes to the script" in told


@pytest.mark.spawns
def test_numbers_that_can_not_be_meant_start_nothing() -> None:
    words = ["--nnodes=2:1", "--nnodes=0", "--nnodes=some", "--nproc-per-node=0", "--max-restarts=-1"]
    code = f"from resilience.__main__ import main\nfor word in {words}: print(main(['run', word, 'train.py']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["2"] * len(words), done.stderr
    assert done.stderr.count("Nothing was started") == len(words)


@pytest.mark.spawns
def test_job_that_is_refused_leaves_no_folder_of_a_run(tmp_path: Path) -> None:
    words = ["--network-check", "--accelerator=no_such_module::Chip", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "resilience.run", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=bare_environment() | {"XDG_STATE_HOME": str(tmp_path)},
    )
    assert done.returncode == 2, done.stderr
    assert "no_such_module" in done.stderr
    assert list((tmp_path / "resilience" / "runs").iterdir()) == []


def test_timeout_of_a_thousand_years_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "less than 30 years" in mistake(capsys, "config", "--ft-failover-timeout=99999999999")


@pytest.mark.spawns
@pytest.mark.parametrize("library", ["libtorch_cpu", "libtorch_python"])
def test_interrupt_in_the_imports_ends_the_launcher(library: str, tmp_path: Path) -> None:
    """torch's C++ throws away a KeyboardInterrupt that it meets while it imports: so there must be no Python handler then."""
    script = tmp_path / "waits.py"
    script.write_text("import time\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "resilience.run", f"--ft-run-dir={tmp_path / 'run'}", str(script)]
    with held_in_import(command, library) as process:
        process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (-signal.SIGINT, "")
