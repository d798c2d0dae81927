"""Worker output: kept per cycle and rank in the run's directory, and shown on the console with a prefix.

Workers write to files and nothing else, so a stopped or dead launcher can't block them: a pipe would fill up. One thread
follows the files. Where the user asks torch for redirects, tees or a log directory, torch's own handling is used as it is.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from resilience import config

_LOG = logging.getLogger("resilience.launcher")
_CHUNK = 1 << 20
_CHUNKS = 8  # read in one go, so that one rank's flood does not silence the others
_TAIL_BYTES = 64 * 1024
_EVERY_S = 0.05
_PATIENCE_S = 5.0


class CycleLogs(LogsSpecs):  # type: ignore[misc]  # torch is untyped here
    """``logs/cycle_<n>/rank_<r>/{stdout,stderr}.log`` and ``error.json``, in the run's directory."""

    def __init__(self, run_dir: Path, console: Console, shown: set[int] | None) -> None:
        super().__init__(log_dir=str(run_dir / "logs"))
        self._folder = run_dir / "logs"
        self._console = console
        self._shown = shown

    @property
    def root_log_dir(self) -> str:
        """See base class."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See base class."""
        cycle = config.rank_environment().cycle
        destination = LogsDest()
        filtered = self._folder / f"cycle_{cycle}" / f"node_{envs[0]['GROUP_RANK']}"
        destination.filtered_stdout = f"{filtered}_filtered_stdout.log"  # opened only with --duplicate-stdout-filters
        destination.filtered_stderr = f"{filtered}_filtered_stderr.log"
        self._console.forget()
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            folder = self._folder / f"cycle_{cycle}" / f"rank_{rank}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:  # a full or read-only disk must not end the job
                _LOG.error("no logs for rank %s in this cycle, it writes to the console: %s.", rank, error)
                destination.stdouts[local_rank] = destination.stderrs[local_rank] = ""
                destination.error_files[local_rank] = os.devnull
                env["TORCHELASTIC_ERROR_FILE"] = ""
                continue
            destination.stdouts[local_rank] = str(folder / "stdout.log")
            destination.stderrs[local_rank] = str(folder / "stderr.log")
            destination.error_files[local_rank] = str(folder / "error.json")
            env["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
            if self._shown is None or local_rank in self._shown:
                prefix = f"[c{cycle} n{env['GROUP_RANK']} r{rank}] ".encode()
                self._console.follow(folder / "stdout.log", 1, prefix)
                self._console.follow(folder / "stderr.log", 2, prefix)
        return destination


def tail_of(path: Path) -> str:
    """Return the last 64 KiB of a file, or an empty string."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


class _Followed:
    def __init__(self, path: Path, stream: int, prefix: bytes) -> None:
        self.path, self.stream, self.prefix = path, stream, prefix
        self.file: BinaryIO | None = None
        self.rest = b""
        self.over = False
        self.more = False

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def lines(self, last: bool) -> bytes:
        """Return what was written since the last call, as whole prefixed lines; the unfinished one too if ``last``.

        Of a progress bar that redraws itself with \\r only the newest state is worth a line, or worth keeping.
        """
        if self.file is None:
            try:
                self.file = self.path.open("rb")
            except OSError:
                return b""
        shown = []
        for _ in range(_CHUNKS):
            chunk = self.file.read(_CHUNK)
            self.more = bool(chunk)
            whole, newline, rest = (self.rest + chunk).rpartition(b"\n")
            shown.append(self._prefixed(whole + newline))
            self.rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
            if not chunk:
                break
        if self.rest and (last or len(self.rest) > _CHUNK):
            shown.append(self._prefixed(self.rest + b"\n"))
            self.rest = b""
        return b"".join(shown)

    def _prefixed(self, text: bytes) -> bytes:
        newest = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in text.split(b"\n")[:-1])
        return b"".join(self.prefix + line + b"\n" for line in newest)


class Console:
    """Follows log files and writes their lines, and the launcher's own, to our stdout and stderr.

    Only its thread writes. A terminal that is paused or a pipe that nobody reads then blocks that thread and nothing else.
    """

    def __init__(self) -> None:
        self._followed: list[_Followed] = []
        self._said: collections.deque[bytes] = collections.deque()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resilience-console", daemon=True)
        self._thread.start()

    def follow(self, path: Path, stream: int, prefix: bytes) -> None:
        """Show a file's lines from now on."""
        with self._lock:
            self._followed.append(_Followed(path, stream, prefix))

    def say(self, text: str) -> None:
        """Show a text of the launcher's own on stderr, after the workers' lines that are there already."""
        self._said.append(text.encode(errors="backslashreplace"))  # a message may hold half a character

    def forget(self) -> None:
        """Let go of the files of a cycle that is over, once everything in them has been shown."""
        with self._lock:
            for item in self._followed:
                item.over = True

    def close(self) -> None:
        """Show everything that has been written, unfinished lines too, and end the thread; give up if nobody reads."""
        self.forget()
        self._stop.set()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self._turn()
        self._turn()

    def _turn(self) -> None:
        """Show what is new. A file whose cycle is over is read to its end and closed."""
        with self._lock:
            items = list(self._followed)
        over = [item for item in items if item.over]
        while self._pass(items, last=False):
            pass
        self._pass(over, last=True)
        for item in over:
            item.close()
        with self._lock:
            self._followed = [item for item in self._followed if item not in over]
        while self._said:
            self._write(2, self._said.popleft())

    def _pass(self, items: list[_Followed], last: bool) -> bool:
        for item in items:
            self._write(item.stream, item.lines(last))
        return any(item.more for item in items)

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        with contextlib.suppress(OSError):  # nobody reads our output any more; the files have it
            while view:
                view = view[os.write(fd, view) :]
