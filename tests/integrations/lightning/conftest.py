"""Lightning warns of much that is meant here, and of deprecations of its own: those are not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience import config
from tests.checkpoint.conftest import saver_home

__all__ = ["saver_home"]

_THEIRS = (
    "ignore:.*:UserWarning:lightning",
    "ignore:.*:UserWarning:pytorch_lightning",
    "ignore:.*:FutureWarning:lightning",
    "ignore:.*:FutureWarning:pytorch_lightning",
    "ignore:.*:FutureWarning:lightning_fabric",
    "ignore:.*:DeprecationWarning:lightning",
    "ignore:.*:DeprecationWarning:pytorch_lightning",
    "ignore:.*does not have many workers.*",
    "ignore:.*is smaller than the logging interval.*",
    "ignore:.*Checkpoint directory .* exists and is not empty.*",
)


@pytest.fixture(autouse=True)
def nobody_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one trainer says of this process is not said to the next test."""
    monkeypatch.setattr(config, "_told", {})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(str(item.path)).parents:
            for line in _THEIRS:
                item.add_marker(pytest.mark.filterwarnings(line))
