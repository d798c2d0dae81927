"""``resilience kubernetes podgroup``, and how the command finds what adapters bring."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip(
    "resilience.integrations.kubernetes.podgroups", reason="not installed here: resilience.integrations"
)

from resilience.integrations.kubernetes.cli import COMMANDS, main
from resilience.integrations.kubernetes.podgroups import PodGroupError

from resilience import __main__ as command
from resilience.__main__ import main as resilience
from tests.integrations.kubernetes import t9k


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[Any], str]:
    assert main(["podgroup", "render", *words]) == 0
    shown = capsys.readouterr()
    return list(yaml.safe_load_all(shown.out)), shown.err


def test_group_of_ones_own_comes_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--name=band",
        "--min-member=3",
        "--queue=night",
        "--priority=50",
        "--role=singer=1",
        "--role=drummer=2",
        "-n",
        "ns",
    ]
    (group,), said = rendered(capsys, *flags)
    assert group["spec"]["roles"] == [{"name": "singer", "minMember": 1}, {"name": "drummer", "minMember": 2}]
    assert (group["metadata"]["namespace"], group["spec"]["queue"]) == ("ns", "night")
    assert said == ""


def test_what_pods_need_is_written_above_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["podgroup", "render", "--name=g", "--min-member=2"]) == 0
    shown = capsys.readouterr().out
    assert "#       scheduler.tensorstack.dev/group-name: g" in shown
    assert "#     schedulerName: t9k-scheduler" in shown


@pytest.mark.parametrize(
    ("by", "key"),
    [("t9k", "scheduler.tensorstack.dev/role"), ("volcano", "volcano.sh/task-spec"), ("coscheduling", "")],
)
def test_pods_of_a_group_with_roles_are_said_to_need_their_role(
    by: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--name=g", "--min-member=3", "--role=master=1", "--role=worker=1", f"--scheduler={by}"]
    assert main(["podgroup", "render", *flags]) == 0
    shown = capsys.readouterr().out
    assert (f"#       {key}: master  # or worker: each Pod its own\n" in shown) == bool(key)
    assert ("master" in shown.partition("apiVersion")[0]) == bool(key)


def test_group_of_a_job_comes_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}
    file.write_text(yaml.safe_dump_all([service, t9k.job("DeepSpeedJob", "one"), t9k.job("MPIJob", "two")]))
    groups, _ = rendered(capsys, "-f", str(file))
    assert [(group["metadata"]["name"], group["spec"]["minMember"]) for group in groups] == [("one", 4), ("two", 5)]


def test_file_may_be_stdin_and_the_scheduler_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(t9k.job("GenericJob"))))
    (group,), said = rendered(capsys, "-f", "-", "--scheduler=volcano")
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert "priority 10 is left out" in said


def test_rendered_job_and_podgroup_fit_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--name=j", "--image=i", "--nodes=3", "--gang=t9k", "--controller"]
    assert main(["job", "render", *flags, "--", "train.py"]) == 0
    file = tmp_path / "job.yaml"
    file.write_text(capsys.readouterr().out)
    (group,), _ = rendered(capsys, "-f", str(file))
    assert (group["metadata"]["name"], group["spec"]["minMember"]) == ("j", 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --name and --min-member"),
        (["--name=g"], "^give --min-member, or a job"),
        (["--min-member=2"], "^give --name, or a job"),
        (["--name=g", "--min-member=2", "--role=singer"], "write NAME=N"),
        (["--name=g", "--min-member=2", "--role=singer=²"], "write NAME=N"),
        (["-f", "/nowhere/job.yaml"], "can't be read"),
        (["--name=g", "--min-member=2", "--scheduler=t9"], "Did you mean 't9k'"),
        (["--job=MPIJbo/x"], "Did you mean 'MPIJob'"),
    ],
)
def test_mistakes_are_told(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from resilience.integrations.kubernetes.podgroups import cli

    monkeypatch.setattr(cli, "_connect", lambda args: None)
    with pytest.raises(PodGroupError, match=said):
        main(["podgroup", "render", *words])


def test_file_without_a_job_that_asks_is_told_how_one_does(tmp_path: Path) -> None:
    job = t9k.job("GenericJob")
    del job["spec"]["scheduler"]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    with pytest.raises(PodGroupError, match=r"spec\.scheduler\.t9kScheduler.*resilience\.dev/gang: t9k"):
        main(["podgroup", "render", "-f", str(file)])
    file.write_text(yaml.safe_dump({"kind": "GenericJbo", "metadata": {"name": "x"}}))
    with pytest.raises(PodGroupError, match="Did you mean 'GenericJob'"):
        main(["podgroup", "render", "-f", str(file)])
    file.write_text(yaml.safe_dump(t9k.job("GenericJob")))
    with pytest.raises(PodGroupError, match="--min-member is for a group of your own"):
        main(["podgroup", "render", "-f", str(file), "--min-member=3"])


def test_definition_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["podgroup", "crd"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["kind"] == "CustomResourceDefinition"


# -- the command itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_can_be_loaded_and_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    assert f"resilience kubernetes {name}" in capsys.readouterr().out


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["podgruop"]) == 2
    assert "Did you mean 'podgroup'" in capsys.readouterr().err
    assert resilience(["kubernets"]) == 2
    assert "Did you mean 'kubernetes'" in capsys.readouterr().err


class Entry:
    """An entry point, as ``importlib.metadata`` gives it."""

    name = "kubernetes"

    def __init__(self, act: Any) -> None:
        self.load = act


def test_command_of_an_adapter_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "plugins", lambda: {"kubernetes": Entry(lambda: main)})
    assert resilience(["kubernetes", "podgroup", "render", "--name=g", "--min-member=2"]) == 0
    assert resilience(["kubernetes", "podgroup", "render", "--name=G", "--min-member=2"]) == 2
    assert "resilience kubernetes: 'G' can't be the name of a PodGroup" in capsys.readouterr().err


def test_package_that_is_not_there_is_named_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'kubernetes'", name="kubernetes")

    monkeypatch.setattr(command, "plugins", lambda: {"kubernetes": Entry(missing)})
    assert resilience(["kubernetes", "controller"]) == 2
    assert "pip install 'resilience-sdk[kubernetes]'" in capsys.readouterr().err
    monkeypatch.setattr(command, "plugins", dict)
    assert resilience(["kubernetes", "controller"]) == 2
    assert "pip install 'resilience-sdk[kubernetes]'" in capsys.readouterr().err


def test_mistake_of_ours_is_not_taken_for_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ModuleNotFoundError("No module named 'resilience.nowhere'", name="resilience.nowhere")

    monkeypatch.setattr(command, "plugins", lambda: {"kubernetes": Entry(broken)})
    with pytest.raises(ModuleNotFoundError):
        resilience(["kubernetes", "job"])
