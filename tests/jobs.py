"""Start real jobs, watch them by condition, and leave nothing of them behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from resilience.monitor import proc
from tests.ports import free_port

WORKLOADS = Path(__file__).parent / "workloads"
DEADLINE_S = 90.0


def wait_for(condition: Callable[[], Any], what: str | Callable[[], str], timeout: float = DEADLINE_S) -> Any:
    """Poll until ``condition()`` is true and return it; fail with ``what`` when it does not become so. What a log says belongs
    into a function: it is asked at the end."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout:g} s in vain for {what if isinstance(what, str) else what()}")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a process stand still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def homes() -> set[Path]:
    """Return the folders that jobs of this test process have in the place for temporary files."""
    return set(Path(tempfile.gettempdir()).glob(f"job-{os.getpid()}-*"))


def sweep() -> None:
    """Remove the folders of test processes that were killed, or ended by a timeout, in the middle of a job."""
    for home in Path(tempfile.gettempdir()).glob("job-*-*"):
        owner = home.name.split("-")[1]
        if owner.isdecimal() and not alive(int(owner)):
            shutil.rmtree(home, ignore_errors=True)


class Job:
    """One launcher with its run directory."""

    def __init__(
        self,
        folder: Path,
        options: list[str],
        script: list[str],
        env: dict[str, str] | None = None,
        wrap: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.progress = folder / "progress"
        self.tmp = Path(tempfile.mkdtemp(prefix=f"job-{os.getpid()}-"))  # short: sockets live in it
        self.progress.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "log"
        command = [sys.executable, "-m", "resilience.run", f"--ft-run-dir={self.run_dir}", *options, *script]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RESILIENCE_")},
            "PROGRESS": str(self.progress),
            "TMPDIR": str(self.tmp),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        environment.pop("XDG_RUNTIME_DIR", None)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                wrap(command), env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder
            )
        self.pid = self.process.pid

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def notes(self, rank: int) -> list[list[str]]:
        """What a rank of the train.py workload noted: [cycle, what, time, pid] lines."""
        path = self.progress / f"rank_{rank}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def rank(self) -> int:
        """The one rank that this node has in its newest cycle; waits for it to begin."""

        def newest() -> list[tuple[int, int]]:
            found = [
                (int(note[0]), rank) for rank in range(8) for note in self.notes(rank) if note[1].startswith("world")
            ]
            return sorted(found)

        return int(wait_for(newest, lambda: f"a rank of this node\n{self.log()[-3000:]}")[-1][1])

    def steps(self, cycle: int) -> list[int]:
        """The steps that this node's ranks made in a cycle."""
        return [
            int(note[1][5:])
            for rank in range(8)
            for note in self.notes(rank)
            if note[0] == str(cycle) and re.match(r"step-\d+$", note[1])
        ]

    def await_steps(self, cycle: int, number: int = 3) -> None:
        """Wait until this node's ranks have made some steps in a cycle."""

        def enough() -> bool:
            if self.process.poll() is not None and len(self.steps(cycle)) < number:
                raise AssertionError(f"the launcher ended before cycle {cycle} trained:\n{self.log()[-5000:]}")
            return len(self.steps(cycle)) >= number

        wait_for(enough, lambda: f"steps of cycle {cycle}\n{self.log()[-5000:]}")

    def order(self, what: str, rank: int | None = None) -> None:
        """Tell a rank of the fleet.py workload what to do."""
        name = f"order_{'any' if rank is None else rank}"
        partial = self.progress / f".{name}"
        partial.write_text(what)
        partial.rename(self.progress / name)

    def await_note(self, rank: int, what: str, cycle: int = 0) -> list[str]:
        """Wait until a rank noted ``what`` in ``cycle``."""

        def found() -> list[str] | None:
            over = self.process.poll() is not None  # before the look: what it noted last must not be missed
            matching = [note for note in self.notes(rank) if note[:2] == [str(cycle), what]]
            if not matching and over:
                raise AssertionError(f"the job ended before rank {rank} noted {what!r}:\n{self.log()}")
            return matching[0] if matching else None

        note: list[str] = wait_for(
            found, lambda: f"rank {rank} to note {what!r} in cycle {cycle}\n{self.log()[-3000:]}"
        )
        return note

    def await_step(self, rank: int, what: str, step: int) -> int:
        """Wait until a rank noted ``what-N`` for a step N that is not before ``step``: single ones may be skipped."""

        def found() -> list[int]:
            over = self.process.poll() is not None
            noted = [note[1].rpartition("-") for note in self.notes(rank) if len(note) == 4]
            steps = [int(number) for words, _, number in noted if words == what and int(number) >= step]
            if not steps and over:
                raise AssertionError(f"the job ended before rank {rank} noted {what} of step {step}:\n{self.log()}")
            return [min(steps)] if steps else []

        return int(wait_for(found, lambda: f"rank {rank} to note {what} of step {step}\n{self.log()[-3000:]}")[0])

    def monitors(self) -> list[int]:
        """The pids of the monitors, in order of local rank."""
        return sorted(pid for pid in children(self.pid) if "resilience/monitor" in command_line(pid))

    def report(self, cycle: int) -> dict[str, Any]:
        """The report of a cycle; waits for it."""
        path = self.run_dir / "cycles" / f"{cycle}.json"
        wait_for(path.exists, lambda: f"{path}\n{self.log()[-3000:]}")
        data: dict[str, Any] = json.loads(path.read_text())
        return data

    def wait(self, timeout: float = DEADLINE_S) -> int:
        """Wait for the launcher's end and return its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {timeout:g} s:\n{self.log()[-4000:]}") from None

    def family(self) -> list[int]:
        """All live processes that this job started, wherever they are in the tree: they carry its run directory."""
        mark = f"PROGRESS={self.progress}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and alive(int(entry.name)):
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def close(self) -> None:
        """End whatever is left, and what is being started while we look. Only then is nobody there to write."""

        def killed() -> bool:
            family = self.family()
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not family

        wait_for(killed, lambda: f"the end of everybody: {[(p, command_line(p)) for p in self.family()]}", 20)
        self.process.wait()
        shutil.rmtree(self.tmp)

    def assert_nothing_left(self) -> None:
        """No process, socket or temporary file of the job may be left."""
        wait_for(
            lambda: not self.family(),
            lambda: f"all processes to end: {[(p, command_line(p)) for p in self.family()]}",
            20,
        )
        left = [path for path in self.tmp.rglob("*") if not path.name.startswith("torchinductor")]
        assert not left, f"left behind: {left}"


def stands(pid: int) -> bool:
    """Whether a process was stopped."""
    found = proc.state_of(pid)
    return found is not None and found.state == "T"


def has_loaded(library: str, pid: int) -> bool:
    """Whether a library is in a process."""
    return library in Path(f"/proc/{pid}/maps").read_text()


def await_unless_over(pid: int, condition: Callable[[int], bool], what: str) -> None:
    """Wait for something of a child that is not waited for; its end is the end of waiting too."""
    wait_for(lambda: condition(pid) or not alive(pid), what)


@contextmanager
def held_in_import(command: list[str], library: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command and have it stand still while it imports a library and no handler of SIGINT is set; it goes on, or ends by
    what it was sent, after the block. One that we looked at too late is started again."""
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            await_unless_over(process.pid, partial(has_loaded, library), f"{library} to be loaded")
            with stopped(process.pid):
                await_unless_over(process.pid, stands, "the command to stand still")
                if stands(process.pid) and not proc.catches(process.pid, signal.SIGINT):
                    yield process
                    return
        except BaseException:
            process.kill()
            raise
        process.kill()
        process.communicate()
    raise AssertionError(f"{library} was never seen to be imported without a handler of SIGINT")


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
            except (OSError, IndexError):
                continue
    return found


def command_line(pid: int) -> str:
    """The command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@contextmanager
def job(
    folder: Path,
    options: list[str],
    script: list[str],
    env: dict[str, str] | None = None,
    wrap: Callable[[list[str]], list[str]] = list,
) -> Iterator[Job]:
    """Start a job, ``wrap``ped in another command if need be; whatever happens, nothing of it survives the block."""
    started = Job(folder, options, script, env, wrap)
    try:
        yield started
    finally:
        started.close()


class Fleet:
    """Several launchers of one job on this machine; the first hosts the store unless ``port`` names another one.

    Where a job may begin with fewer nodes than it is to have in a test, the first ``together`` launchers join at once.
    """

    def __init__(
        self, folder: Path, nnodes: str, options: list[str], script: list[str], port: int = 0, *, together: int = 0
    ) -> None:
        self._folder = folder
        self._together = together
        self._script = script
        self._hosted_elsewhere = port > 0
        self._stack = ExitStack()
        self._options = [
            f"--nnodes={nnodes}",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port or free_port()}",
            "--rdzv-id=job",
            "--local-addr=127.0.0.1",
            *options,
        ]
        self._started = 0
        self.nodes: list[Job] = []
        self.env: dict[str, str] = {}  # of the launchers that are added from now on

    def add(
        self, *options: str, env: dict[str, str] | None = None, wrap: Callable[[list[str]], list[str]] = list
    ) -> Job:
        """Start one more launcher."""
        number, self._started = self._started, self._started + 1
        host = "true" if number == 0 and not self._hosted_elsewhere else "false"
        conf = f"--rdzv-conf=is_host={host},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        command = [*self._options, conf, f"--ft-node-name=n{number}", *options]
        start = (lambda words: wrap(self._joining(words))) if number < self._together else wrap
        started = self._stack.enter_context(
            job(self._folder / f"node{number}", command, self._script, {**self.env, **(env or {})}, start)
        )
        self.nodes.append(started)
        return started

    def _joining(self, command: list[str]) -> list[str]:
        """Have a launcher wait for the others before it joins."""
        gate = self._folder / "gate"
        gate.mkdir(exist_ok=True)
        python, *arguments = command
        assert arguments[:2] == ["-m", "resilience.run"]
        return [python, str(WORKLOADS / "together.py"), str(gate), str(self._together), *arguments[2:]]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def logs(self) -> str:
        return "\n".join(f"--- node {number}\n{node.log()[-5000:]}" for number, node in enumerate(self.nodes))


def fleet(folder: Path, count: int, nnodes: str, options: list[str], script: list[str], **env: str) -> Fleet:
    """Start ``count`` launchers of one job, which begins with all of them."""
    started = Fleet(folder, nnodes, options, script, together=count)
    started.env = env
    for _ in range(count):
        started.add()
    return started


def train(*arguments: object) -> list[str]:
    """The train.py workload with arguments."""
    return [str(WORKLOADS / "train.py"), *map(str, arguments)]
