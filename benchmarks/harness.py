"""Start jobs, end them whatever happens, and print what was measured.

Rule: every process of a job carries the job's mark in its environment. That is how a job's monitors are found, and how
whatever it leaves behind is ended: by pid, after a look at the mark.

Times that ranks tell are ``CLOCK_MONOTONIC``, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.workloads.voice import EVENTS

Row = dict[str, Any]
Event = dict[str, Any]
ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
NVRX = "BENCH_NVRX"
NOT_INSTALLED = "not installed"
_MARK = "BENCH_JOB"
_DROPPED = ("RESILIENCE_", "PET_", "TORCHELASTIC_", "TORCH_", "XDG_RUNTIME_DIR")
RENDEZVOUS = ("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1")


class Job:
    """One launcher and all that it starts. Use as a context manager: on leaving, nothing of it is left."""

    def __init__(self, command: Sequence[str], extra_env: Mapping[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self._events = self.folder / "events.jsonl"
        self._mark = uuid.uuid4().hex
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
        environ |= {
            _MARK: self._mark,
            EVENTS: str(self._events),
            "TMPDIR": str(self.folder),  # what launchers leave there goes with the folder
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **(extra_env or {}),
        }
        self.log = self.folder / "log"
        filled = [word.replace("{folder}", str(self.folder)) for word in command]
        with self.log.open("wb") as log:
            self.started_ns = time.monotonic_ns()
            self.process = subprocess.Popen(
                filled, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process.poll() is None:
                self.process.terminate()
            self.process.wait(15.0)
        deadline = time.monotonic() + 10.0
        while self.pids() and time.monotonic() < deadline:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait(5.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def pids(self) -> list[int]:
        """Return every process that carries this job's mark, zombies left out."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return sorted(found)

    def events(self, event: str) -> list[Event]:
        """Return what the ranks told so far under this name."""
        try:
            lines = self._events.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [told for told in map(json.loads, lines) if told["event"] == event]

    def await_events(
        self, event: str, count: int, timeout: float, want: Callable[[Event], bool] = lambda _: True
    ) -> list[Event]:
        """Wait for ``count`` events; raise with the end of the log when they do not come or the launcher ends first."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll()
            found = [told for told in self.events(event) if want(told)]
            if len(found) >= count:
                return found
            if ended is not None or time.monotonic() > deadline:
                why = f"the launcher ended ({ended})" if ended is not None else f"{timeout:.0f} s passed"
                raise JobError(f"{len(found)} of {count} {event!r}: {why}\n{self.tail()}")
            time.sleep(0.002)

    def tail(self) -> str:
        """Return the end of everything that the job printed."""
        return self.log.read_text(errors="replace")[-3000:]


class JobError(Exception):
    """A job did not do what a benchmark waits for."""


def nvrx() -> Path | None:
    """Return the virtual environment of NVRx, if one was given and holds it."""
    given = os.environ.get(NVRX)
    return Path(given) if given and (Path(given) / "bin" / "ft_launcher").exists() else None


def nvrx_name() -> str:
    """Return ``NVRx`` with its version, if it is there."""
    home = nvrx()
    found = sorted(home.glob("lib/*/site-packages/nvidia_resiliency_ext-*.dist-info")) if home else []
    return f"NVRx {found[0].name.split('-')[1].removesuffix('.dist')}" if found else "NVRx"


def launch(kind: str, workload: str, arguments: Sequence[str] = (), options: Sequence[str] = (), **env: str) -> Job:
    """Start a workload under ``python``, ``torchrun``, ``resilience`` or ``nvrx``, with the same rendezvous for all."""
    script = ["-m", f"benchmarks.workloads.{workload}", *arguments]
    home = nvrx()
    if kind == "python":
        return Job([sys.executable, *script], env)
    if kind == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run"]
    elif kind == "resilience":
        launcher = [sys.executable, "-m", "resilience", "run", "--ft-run-dir={folder}/run"]
    else:
        assert home is not None
        launcher = [str(home / "bin" / "ft_launcher")]
    return Job([*launcher, *RENDEZVOUS, *options, *script], env)


def machine() -> dict[str, str]:
    """Describe the machine without naming it."""
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "accelerator": "no accelerator",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "kernel": platform.system() + " " + platform.release().split("-")[0],
    }


def show(value: object) -> str:
    """Return one cell of a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table that also reads well in a terminal."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([show(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]

    def lines() -> Iterator[str]:
        for number, line in enumerate(cells):
            yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            if number == 0:
                yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"

    return "\n".join(lines())


def publish(name: str, doc: str, rows: Sequence[Row], facts: Mapping[str, str], seconds: float) -> None:
    """Print a table, and keep it in ``results/`` for people and for machines."""
    RESULTS.mkdir(exist_ok=True)
    data = {"benchmark": name, "machine": dict(facts), "seconds": round(seconds, 1), "rows": list(rows)}
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    where = ", ".join(f"{value} {key}" if key == "cores" else f"{key} {value}" for key, value in facts.items())
    where = where.replace("accelerator no accelerator", "no accelerator")
    command = f"`python -m benchmarks {name}`"
    text = f"# {name}\n\n{command}: {where}. Took {seconds:.0f} s.\n\n{table(rows)}\n\n{doc.strip()}\n"
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
