"""Who ended a run is told from its reports, and nothing odd in them ends the one who asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("resilience.integrations", reason="not installed here: resilience.integrations")

from resilience.integrations.cause import of_run


def report(folder: Path, action: str = "stop", **culprit: Any) -> None:
    (folder / "cycles").mkdir(exist_ok=True)
    (folder / "cycles" / "0.json").write_text(json.dumps({"cycle": 0, "action": action, "culprit": culprit}))


def test_rank_that_ended_the_run_is_named_with_its_node_and_what_it_said(tmp_path: Path) -> None:
    report(tmp_path, kind="exit", rank=3, host="n2", message="ended with exit code 3", log=["CUDA error", " "])
    said = "rank 3 on n2: ended with exit code 3, after 'CUDA error'"
    assert of_run(tmp_path) == f"{said}; reports and logs: {tmp_path}"


def test_run_that_went_on_after_its_last_report_was_not_ended_by_that(tmp_path: Path) -> None:
    assert of_run(tmp_path) == ""
    report(tmp_path, action="restart", rank=3, message="ValueError: survived")
    assert of_run(tmp_path) == ""


@pytest.mark.parametrize("text", ["", "[]", "[" * 100000, '{"action": "stop", "culprit": [1]}'])
def test_odd_report_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "cycles").mkdir()
    (tmp_path / "cycles" / "0.json").write_text(text)
    assert of_run(tmp_path) == ""


def test_odd_culprit_tells_what_it_can(tmp_path: Path) -> None:
    report(tmp_path, kind="exit", rank=[1], host={}, message=7, log=5)
    assert of_run(tmp_path).startswith("rank [1]: 7; ")
