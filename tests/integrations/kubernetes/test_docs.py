"""The commands and the code of the two pages do what the pages show."""

from __future__ import annotations

import re
import shlex
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

pytest.importorskip(
    "resilience.integrations.kubernetes.podgroups", reason="not installed here: resilience.integrations"
)

from resilience.integrations.kubernetes.cli import main
from resilience.integrations.kubernetes.podgroups import wish

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ["gang-scheduling.md", "kubernetes-job.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[list[str]]:
    """Every command of the pages that needs no cluster."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.partition(" > ")[0], comments=True)
                if words[:2] == ["resilience", "kubernetes"] and words[3] in ("render", "values", "crd"):
                    found.append(words[2:])
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_of_the_pages_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = next(block for block in blocks("gang-scheduling.md", "yaml") if "GenericJob" in block)
    Path("job.yaml").write_text(job)
    Path("values.yaml").write_text(yaml.safe_dump({"name": "llm", "image": "i", "script": ["train.py"]}))
    assert main(words) == 0
    assert list(yaml.safe_load_all(capsys.readouterr().out))


def test_group_that_is_shown_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = blocks("gang-scheduling.md", "yaml")[0]
    assert main(["podgroup", "render", "--name=dance", "--min-member=2", "--priority=50"]) == 0
    assert capsys.readouterr().out == shown


def test_jobs_that_are_shown_ask_for_a_group() -> None:
    for block in blocks("gang-scheduling.md", "yaml")[1:]:
        assert wish(yaml.safe_load(block)) is not None


def test_python_of_the_page_runs() -> None:
    """The second block needs a cluster: ``test_podgroups_cluster.py`` runs it. Here it is seen that it names what there is."""
    code, in_a_cluster = blocks("gang-scheduling.md", "python")
    names: dict[str, object] = {}
    exec(code, names)
    assert names["lost"]
    called = re.findall(r"podgroups\.([\w.]+)\(", in_a_cluster)
    assert [callable(attrgetter(name)(names["podgroups"])) for name in called] == [True]
