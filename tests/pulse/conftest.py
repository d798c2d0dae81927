"""A pulse without a launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from resilience.pulse import attach, client
from resilience.pulse.page import Page
from resilience.pulse.writer import Pulse
from tests.fakes import FakeClock, writer_time


@pytest.fixture
def pulse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pulse]:
    """Give this process a page, as if a trampoline had left one."""
    page = Page.create(0)
    mine = Pulse(page)
    monkeypatch.setattr(client._here, "pulse", mine)
    monkeypatch.setattr(client._here, "sections", {})
    monkeypatch.setattr(client._here, "_looked", True)
    yield mine
    os.close(page.fd)  # the mapping goes with the last section that holds it


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a process that no launcher started and that has not called us yet."""
    for name in ("RESILIENCE_SOCKET", "RESILIENCE_LATE_ATTACH", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(attach._Attached, "page", None)
    monkeypatch.setattr(client, "_here", client._Process())


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    """Have the in-loop calls read a clock that the test moves."""
    with writer_time(FakeClock()) as fake:
        yield fake
