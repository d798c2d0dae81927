"""A stand-in for Slurm's commands, where it is enough to see what they are told. What Slurm makes of it: ``tests/real``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_PROGRAM = """#!{python} -IS
import pathlib, sys
folder = pathlib.Path({folder!r})
def told(name):
    try:
        return (folder / name).read_text()
    except FileNotFoundError:
        return None
text = told("answer_" + sys.argv[1]) or ""
errors = [error for name in ("error", "error_" + sys.argv[1]) if (error := told(name)) is not None]
with (folder / "calls").open("a") as file:  # who sees the call may change the outcome of the next one, and not of this
    file.write(" ".join(sys.argv[1:]) + chr(10))
if errors:
    sys.stderr.write(errors[0])
    sys.exit(1)
forgets, requeued = (folder / name for name in ("forgets", "requeued"))
if sys.argv[1] == "requeue":
    requeued.touch()
    if forgets.exists():
        forgets.unlink()
        requeued.unlink()
sys.stdout.write(text.replace("=RUNNING", "=PENDING") if requeued.exists() else text)
"""


class StandIn:
    """``calls``: what scontrol was told. ``answer``: what it prints. ``fail``: what it, or one verb, says until ``mend``.

    A job that was requeued waits. ``forget``: the next requeue is accepted, and the job runs on, as after a killed slurmctld.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "scontrol"
        program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def requeues(self) -> int:
        """How often it was told to requeue the job, in whatever form."""
        return sum(call.startswith("requeue ") for call in self.calls)

    def answer(self, verb: str, text: str) -> None:
        self._put(f"answer_{verb}", text)

    def fail(self, text: str, verb: str = "") -> None:
        self._put(f"error_{verb}" if verb else "error", text)

    def forget(self) -> None:
        (self.folder / "forgets").touch()

    def mend(self, verb: str = "") -> None:
        (self.folder / (f"error_{verb}" if verb else "error")).unlink()

    def _put(self, name: str, text: str) -> None:
        """Write it so that nobody ever reads a part of it."""
        partial = self.folder / f".{name}"
        partial.write_text(text)
        partial.replace(self.folder / name)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    return StandIn(folder)
