"""Run one command line under torchrun and under ours at the same time, and bring both outcomes to a comparable form.

Both sides start from the same bare environment and the same working directory (``tests/workloads``). ``{log}``, ``{port}``,
``{python}`` and ``{here}`` in an argument stand for the side's own log directory, its own free port, this interpreter and the
workloads' directory; ``{out}`` in a variable stands for the side's directory of results.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ports import free_port

WORKLOADS = Path(__file__).parent.parent / "workloads"
ROOT = WORKLOADS.parent.parent
DEADLINE_S = 90.0
TORCHRUN = ("-m", "torch.distributed.run")
OURS = ("-m", "resilience.run")

ADDED = {"RESILIENCE_CYCLE", "RESILIENCE_LAUNCHER_PID", "RESILIENCE_RUN", "RESILIENCE_SOCKET"}
"""The documented additions to a worker's environment."""

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Case:
    """One command line, in torchrun's words.

    ``nodes``: the options that each launcher gets on top, one entry per launcher. ``ours``: options that only ours gets.
    ``code``: the exit code that both must give. ``fixed_port``: MASTER_PORT must be the given ``{port}``.
    """

    name: str
    options: Sequence[str] = ()
    script: Sequence[str] = ("parity_probe.py",)
    env: Mapping[str, str] = field(default_factory=dict)
    code: int = 0
    ours: Sequence[str] = ()
    nodes: Sequence[Sequence[str]] = ((),)
    fixed_port: bool = False

    def __str__(self) -> str:
        return self.name


class Side:
    """One of the two launchers (or several of its kind, one per node) at work."""

    def __init__(self, kind: Sequence[str], case: Case, folder: Path, tmp: Path) -> None:
        self.kind, self.case, self.folder = kind, case, folder
        self.out, self.log_dir, self.run_dir = folder / "out", folder / "log", folder / "run"
        self.out.mkdir(parents=True)
        self.port = free_port()
        self._env = {
            **bare_environment(),
            **{name: value.format(out=self.out) for name, value in case.env.items()},
            "PARITY_OUT": str(self.out),
            "TMPDIR": case.env.get("TMPDIR", str(tmp)),
        }
        self.launchers = [self._start(node, options) for node, options in enumerate(case.nodes)]

    def _start(self, node: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
        own = [f"--ft-run-dir={self.run_dir}", *self.case.ours] if self.kind is OURS else []
        words = [*own, *self.case.options, *options, *self.case.script]
        values = {"log": self.log_dir, "port": self.port, "python": sys.executable, "here": WORKLOADS}
        command = [sys.executable, *self.kind, *(word.format(**values) for word in words)]
        with (self.folder / f"{node}.out").open("wb") as out, (self.folder / f"{node}.err").open("wb") as err:
            return subprocess.Popen(
                command, env=self._env, cwd=WORKLOADS, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the first launcher."""
        self.launchers[0].send_signal(number)

    def wait(self) -> list[int]:
        """Wait for all launchers; return their exit codes."""
        deadline = time.monotonic() + DEADLINE_S
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.launchers]

    def console(self, stream: str = "out", node: int = 0) -> str:
        """What a launcher has shown."""
        return (self.folder / f"{node}.{stream}").read_text(errors="replace")

    def everything(self) -> str:
        """What all launchers have shown, for the message of a failed assertion."""
        shown = [path.read_text(errors="replace") for path in sorted(self.folder.glob("*.???"))]
        return f"--- {' '.join(self.kind)}\n" + "\n".join(shown)[-6000:]

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the workers saw, by ``<rank>.<restart>``, without what must differ between any two runs."""
        found = {path.stem: json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))}
        for item in found.values():
            item["environ"] = self._comparable(item["environ"])
        return found

    def _comparable(self, environ: dict[str, str]) -> dict[str, str]:
        hidden = {"PARITY_OUT": "OUT", "TORCHELASTIC_ERROR_FILE": "FILE", "MASTER_PORT": "PORT"}
        if self.case.fixed_port:
            assert environ["MASTER_PORT"] == str(self.port)
        shown = {name: hidden.get(name, value) for name, value in environ.items()}
        return {name: _UUID.sub("UUID", value) for name, value in shown.items()}

    def tree(self, folder: Path | None = None) -> dict[str, str]:
        """All files below the log directory, by path with the job's own directory as ``JOB``, with their text."""
        base = folder or self.log_dir
        found = {}
        for path in sorted(base.rglob("*")):
            parts = path.relative_to(base).parts
            name = "/".join((re.sub(r"_[a-z0-9_]{8}$", "", _UUID.sub("UUID", parts[0])), *parts[1:]))
            found[name] = "(directory)" if path.is_dir() else path.read_text(errors="replace")
        return found

    def close(self) -> None:
        """End whatever is left of this side; its processes carry the name of its output directory."""
        for pid in processes_with(f"PARITY_OUT={self.out}"):
            os.kill(pid, signal.SIGKILL)
        for process in self.launchers:
            process.wait()


@dataclass(frozen=True)
class Pair:
    """Both sides of a case."""

    torchrun: Side
    ours: Side

    def wait(self) -> None:
        """Wait for both, and check that both ended as the case says."""
        wanted = [self.case.code] * len(self.case.nodes)
        codes = [side.wait() for side in (self.torchrun, self.ours)]
        assert codes == [wanted, wanted], f"{codes}\n{self.torchrun.everything()}\n{self.ours.everything()}"

    @property
    def case(self) -> Case:
        return self.ours.case


@contextmanager
def both(case: Case, folder: Path) -> Iterator[Pair]:
    """Start both sides of a case; whatever happens, nothing of them survives the block."""
    with ExitStack() as stack:
        tmp = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parity-")))
        sides = []
        for name, kind in (("torchrun", TORCHRUN), ("ours", OURS)):
            sides.append(Side(kind, case, folder / name, tmp))
            stack.callback(sides[-1].close)
        yield Pair(*sides)
        ours = sides[1]
        # Python's resource tracker ends when it finds that its process has.
        wait_for(lambda: not processes_with(f"PARITY_OUT={ours.out}"), f"all of ours to end:\n{ours.everything()}")
        assert not list(tmp.glob("resilience*")), "ours left files behind"


def ran(case: Case, folder: Path) -> Pair:
    """Run both sides of a case to their end."""
    with both(case, folder) as pair:
        pair.wait()
    return pair


def bare_environment() -> dict[str, str]:
    """What every process of these tests starts from."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LC_ALL": "C.UTF-8",
    }


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Wait until ``condition()`` is true; fail with ``what`` when it does not become so."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s in vain for {what}"
        time.sleep(0.02)


def processes_with(mark: str) -> list[int]:
    """Return the live processes that have ``NAME=value`` in the environment they were started with."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not dead and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
