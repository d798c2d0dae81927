from __future__ import annotations

import dataclasses
import math
import signal
from pathlib import Path
from typing import Any

import pytest

from resilience import config, values
from resilience.config import Settings, parameters, rank_environment, resolve
from resilience.errors import ConfigError
from resilience.groups.topology import from_labels


@pytest.fixture
def yaml(tmp_path: Path) -> Any:
    """Write a YAML file and return its path."""
    pytest.importorskip("yaml")

    def write(text: str) -> str:
        path = tmp_path / "ft.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


# -- precedence -------------------------------------------------------------------------------------------------------


def test_nothing_said_gives_the_defaults() -> None:
    settings = resolve({}, {})
    assert settings == Settings()
    assert {source for _, _, source, _ in settings.rows()} == {"default"}


def test_flag_wins_over_environment_over_file_over_default(yaml: Any) -> None:
    path = yaml(
        "fault_tolerance:\n  rank_heartbeat_timeout: 1\n  rank_exit_timeout: 2\n  safety_factor: 3\n  learn_after: 4\n"
    )
    environ = {"RESILIENCE_RANK_HEARTBEAT_TIMEOUT": "10", "RESILIENCE_RANK_EXIT_TIMEOUT": "20", "HOME": "/root"}
    settings = resolve({"rank_heartbeat_timeout": "100"}, environ, path)
    assert settings.timeouts.rank_heartbeat_timeout == 100.0
    assert settings.timeouts.rank_exit_timeout == 20.0
    assert settings.timeouts.safety_factor == 3.0
    assert settings.timeouts.learn_after == 4
    where = {name: source for name, _, source, _ in settings.rows()}
    assert where["rank_heartbeat_timeout"] == "flag"
    assert where["rank_exit_timeout"] == "environment"
    assert where["safety_factor"] == f"file {path}"
    assert where["learned_timeout_floor"] == "default"


def test_learned_said_by_a_flag_takes_back_what_the_file_gave(yaml: Any) -> None:
    path = yaml("fault_tolerance:\n  rank_heartbeat_timeout: 60\n")
    settings = resolve({"rank_heartbeat_timeout": "learned"}, {}, path)
    assert settings.timeouts.rank_heartbeat_timeout is None
    assert settings.sources["rank_heartbeat_timeout"] == "flag"


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "fault_tolerance:\n  safety_factor: 7\n",
        "trainer:\n  callbacks:\n    fault_tolerance: {safety_factor: 7}\nother: 1\n",
        "jobs:\n  - name: a\n  - config:\n      fault_tolerance:\n        safety_factor: 7.0\n",
    ],
)
def test_section_is_found_at_any_depth(yaml: Any, text: str) -> None:
    assert resolve({}, {}, yaml(text)).timeouts.safety_factor == 7.0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("fault_tolerance: {}\ndeeper:\n  fault_tolerance: {}\n", "2 'fault_tolerance:' sections; exactly one"),
        ("something: 1\n", "no 'fault_tolerance:' sections; exactly one"),
        ("", "no 'fault_tolerance:' sections"),
        ("fault_tolerance: 5\n", "must hold 'name: value' lines"),
        ("fault_tolerance: [\n", "is not valid YAML"),
    ],
)
def test_file_that_can_not_be_meant_raises(yaml: Any, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        resolve({}, {}, yaml(text))


def test_file_that_is_missing_raises_and_nothing_was_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: No such file.*Nothing was started"):
        resolve({}, {}, str(tmp_path / "nowhere.yaml"))


def test_file_that_is_no_text_raises_our_error(tmp_path: Path) -> None:
    (tmp_path / "ft.yaml").write_bytes(b"fault_tolerance: {}\n\xff\xfe")
    with pytest.raises(ConfigError):
        resolve({}, {}, str(tmp_path / "ft.yaml"))


def test_file_can_not_make_objects(yaml: Any) -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        resolve({}, {}, yaml("fault_tolerance: !!python/object/apply:os.getpid []\n"))


# -- unknown names ----------------------------------------------------------------------------------------------------


def test_unknown_key_in_the_file_names_the_nearest(yaml: Any) -> None:
    path = yaml("fault_tolerance:\n  rank_hartbeat_timeout: 5\n")
    with pytest.raises(ConfigError, match=r"'rank_hartbeat_timeout' \(file .*Did you mean 'rank_heartbeat_timeout'\?"):
        resolve({}, {}, path)


def test_unknown_flag_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"\(flag\). Did you mean 'safety_factor'\?"):
        resolve({"safty_factor": "5"}, {})


def test_unknown_variable_names_the_nearest_and_others_are_left_alone() -> None:
    with pytest.raises(ConfigError, match=r"RESILIENCE_SAFTY_FACTOR. Did you mean 'RESILIENCE_SAFETY_FACTOR'\?"):
        resolve({}, {"RESILIENCE_SAFTY_FACTOR": "5"})
    assert resolve({}, {"RESILIENT": "1", "NCCL_DEBUG": "INFO"}) == Settings()


def test_what_the_launcher_tells_its_workers_is_no_setting() -> None:
    told = dict.fromkeys(config._WORKER_VARIABLES, "1")
    assert len(told) >= 4
    assert resolve({}, told) == Settings()


@pytest.mark.parametrize("name", sorted(config.ACCEPTED_WITHOUT_EFFECT))
def test_setting_without_effect_is_accepted_and_said(yaml: Any, name: str) -> None:
    settings = resolve({}, {}, yaml(f"fault_tolerance:\n  {name}: 30\n"))
    (note,) = settings.notes
    assert note.startswith(f"{name} (file ")
    assert "has no effect here" in note
    assert resolve({name: "1"}, {f"RESILIENCE_{name.upper()}": "1"}).notes != ()
    assert name not in settings.sources


@pytest.mark.parametrize("label", ["row7", "-1", "1.0", "1234567890", "٣"])
def test_group_of_a_pods_label_that_can_not_be_meant_is_no_group_and_is_said(label: str) -> None:
    settings = resolve({}, {"RESILIENCE_NODE_GROUP_INDEX": label, "RESILIENCE_NODE_GROUP": "rack-1"})
    assert (settings.failover.node_group_index, settings.failover.node_group) == (None, None)
    (note,) = settings.notes
    assert f"RESILIENCE_NODE_GROUP_INDEX={label!r}" in note
    assert "in no group" in note
    with pytest.raises(ConfigError):
        from_labels({"scheduling/rack-group": label})  # the controller sees no group either


def test_group_that_a_flag_names_holds_whatever_the_environment_says() -> None:
    settings = resolve({"node_group_index": "3", "node_group": "a"}, {"RESILIENCE_NODE_GROUP_INDEX": "row7"})
    assert (settings.failover.node_group_index, settings.failover.node_group) == (3, "a")


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", ["null", "None", "~", "", "NULL", " null "])
def test_null_in_a_flag_means_no_timeout(raw: str) -> None:
    assert resolve({"rank_heartbeat_timeout": raw}, {}).timeouts.rank_heartbeat_timeout == math.inf


def test_null_in_the_file_means_no_timeout_and_leaving_out_means_learned(yaml: Any) -> None:
    settings = resolve({}, {}, yaml("fault_tolerance:\n  rank_heartbeat_timeout: null\n  rank_exit_timeout:\n"))
    assert settings.timeouts.rank_heartbeat_timeout == math.inf
    assert settings.timeouts.rank_exit_timeout == math.inf
    assert settings.timeouts.initial_rank_heartbeat_timeout is None


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("step:30,save:1.5", {"step": 30.0, "save": 1.5}),
        (" step : 30 , ", {"step": 30.0}),
        ("train:step:30", {"train:step": 30.0}),
        ("step:null", {"step": math.inf}),
        ("", {}),
    ],
)
def test_section_timeouts_of_a_flag(raw: str, seen: dict[str, float]) -> None:
    assert resolve({"rank_section_timeouts": raw}, {}).timeouts.rank_section_timeouts == seen


def test_section_timeouts_of_a_file(yaml: Any) -> None:
    path = yaml("fault_tolerance:\n  rank_section_timeouts:\n    step: 30\n    save: null\n    1: 5\n")
    assert resolve({}, {}, path).timeouts.rank_section_timeouts == {"step": 30.0, "save": math.inf, "1": 5.0}


@pytest.mark.parametrize(
    ("name", "raw", "wanted"),
    [
        ("rank_heartbeat_timeout", "soon", "seconds, 'learned', or null for no timeout"),
        ("rank_heartbeat_timeout", "0", "seconds, 'learned', or null"),
        ("rank_heartbeat_timeout", "-5", "seconds, 'learned', or null"),
        ("rank_heartbeat_timeout", "nan", "seconds, 'learned', or null"),
        ("rank_heartbeat_timeout", True, "seconds, 'learned', or null"),
        ("rank_heartbeat_timeout", [1], "seconds, 'learned', or null"),
        ("unlearned_timeout", "learned", "seconds, or null for no timeout"),
        ("rank_section_timeouts", "step=5", "name:seconds,name:seconds"),
        ("rank_section_timeouts", ":5", "name:seconds,name:seconds"),
        ("rank_section_timeouts", "step:learned", "name:seconds,name:seconds"),
        ("rank_section_timeouts", 5, "name:seconds,name:seconds"),
        ("safety_factor", "0", "a number greater than 0"),
        ("safety_factor", None, "a number greater than 0"),
        ("learn_after", "0", "a whole number from 1 to 900"),
        ("learn_after", 2.5, "a whole number from 1 to 900"),
        ("learn_after", float("inf"), "a whole number from 1 to 900"),
        ("max_node_restarts", float("nan"), "a whole number from 0 up, or null for no limit"),
        ("rank_termination_signal", "SIGNONE", "the name or number of a signal that ends a process"),
        ("rank_termination_signal", "999", "the name or number of a signal that ends a process"),
        ("rank_termination_signal", "SIGSTOP", "the name or number of a signal that ends a process"),
        ("node_group_index", "row7", "a whole number from 0 up, or null for none"),
        ("node_group_index", "-1", "a whole number from 0 up, or null for none"),
        ("node_name", "gpu-7\nforged", "text that is one line"),
        ("node_group", "rack\x1b[2J", "text that is one line"),
        ("node_group_index", 1.5, "a whole number from 0 up, or null for none"),
        ("node_group_index", True, "a whole number from 0 up, or null for none"),
        ("max_node_restarts", "few", "a whole number from 0 up, or null for no limit"),
        ("capture_logs", "perhaps", "true or false"),
        ("capture_logs", None, "true or false"),
        ("log_level", "LOUD", "DEBUG, INFO, WARNING"),
        ("log_level", 15, "DEBUG, INFO, WARNING"),
    ],
)
def test_bad_value_names_what_is_wanted(name: str, raw: Any, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({name: raw}, {})
    message = str(caught.value)
    assert message.startswith(f"{name}={raw!r} (flag): ")
    assert f"Wanted: {wanted}" in message
    assert message.endswith("Nothing was started.")


@pytest.mark.parametrize("name", ["workload_check_interval", "rank_term_timeout", "testimony_timeout", "safety_factor"])
def test_endless_interval_or_grace_is_refused(name: str) -> None:
    # Every wait has a deadline; a monitor that is told to sleep for ever can't even start.
    with pytest.raises(ConfigError):
        resolve({name: "inf"}, {})


def test_empty_run_directory_in_the_file_is_the_default_and_not_a_folder_called_none(yaml: Any) -> None:
    assert resolve({}, {}, yaml("fault_tolerance:\n  run_dir: null\n")).launcher.run_dir is None


@pytest.mark.parametrize("raw", ["SIGKILL", "sigkill", "KILL", "9", 9, "Signals.SIGKILL", signal.SIGKILL])
def test_signal_is_named_in_any_way(raw: Any) -> None:
    assert resolve({"rank_termination_signal": raw}, {}).monitor.rank_termination_signal == signal.SIGKILL


@pytest.mark.parametrize(("raw", "on"), [("true", True), ("1", True), (True, True), ("off", False), (False, False)])
def test_switch_is_said_in_any_way(raw: Any, on: bool) -> None:
    assert resolve({"capture_logs": raw}, {}).launcher.capture_logs is on


@pytest.mark.parametrize(("raw", "level"), [("debug", "DEBUG"), (20, "INFO"), ("30", "WARNING")])
def test_level_is_a_name_or_pythons_number(raw: Any, level: str) -> None:
    assert resolve({"log_level": raw}, {}).launcher.log_level == level


# -- the settings themselves ------------------------------------------------------------------------------------------


def test_every_setting_is_documented_frozen_and_has_a_parser() -> None:
    for name, item in parameters().items():
        assert item.metadata["doc"], name
        assert item.metadata["kind"] in values._PARSERS
        assert item.metadata["kind"] in values._WANTED
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().timeouts.safety_factor = 1.0  # type: ignore[misc]


def test_page_on_migration_names_every_setting() -> None:
    page = (Path(__file__).parent.parent / "docs" / "migration.md").read_text()
    assert [name for name in parameters() if f"`{name}`" not in page] == []


def test_names_are_unique_over_the_components() -> None:
    assert len(parameters()) == sum(len(dataclasses.fields(component)) for component in config.COMPONENTS)


def test_printed_value_can_be_given_back() -> None:
    said = {
        "rank_heartbeat_timeout": "90.5",
        "rank_exit_timeout": "null",
        "initial_rank_heartbeat_timeout": "learned",
        "rank_section_timeouts": "step:30,save:null",
        "rank_termination_signal": "SIGINT",
        "capture_logs": "false",
        "log_level": "DEBUG",
        "learn_after": "3",
    }
    settings = resolve(said, {})
    printed = {name: value for name, value, source, _ in settings.rows() if source == "flag"}
    assert printed == said
    assert resolve(printed, {}) == settings


# -- what a worker is told --------------------------------------------------------------------------------------------


def test_worker_reads_what_the_launcher_told_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RESILIENCE_SOCKET": "/x/s", "RANK": "3", "RESILIENCE_CYCLE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RESILIENCE_LATE_ATTACH", raising=False)
    told = rank_environment()
    assert (told.socket, told.rank, told.cycle, told.late_attach) == ("/x/s", 3, 2, False)


def test_worker_without_a_launcher_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESILIENCE_SOCKET", "RANK", "RESILIENCE_CYCLE", "RESILIENCE_LAUNCHER_PID", "RESILIENCE_LATE_ATTACH"):
        monkeypatch.delenv(name, raising=False)
    assert rank_environment() == config.RankEnvironment(None, None, 0, 0, False)
