"""The commands of the page do what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("resilience.integrations.slurm", reason="not installed here: resilience.integrations")

from resilience.integrations.slurm.cli import main

PAGE = (Path(__file__).parents[3] / "docs" / "slurm.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    found = []
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" > ")[0], comments=True)
            assert words[:2] == ["resilience", "slurm"]
            found.append(words[2:])
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_of_the_page_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("values.yaml").write_text("name: llm\nscript: train.py\n")
    assert main(words) == 0
    text = capsys.readouterr().out
    if words[0] == "render":
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_flags_that_the_page_names_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["render", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    others = {"--no-kill", "--no-requeue", "--patience", "--ft-error-monitor", "--ft-node-silence-timeout"}
    others.add("--ft-store-silence-timeout")
    assert named - others <= known, named - others - known
